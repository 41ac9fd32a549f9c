"""Several fields out of one decoding: columns of a table, and columns side by side as one matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from matex_data._types import Array, Integers
from matex_data.index.cache import ChunkCache
from matex_data.index.model import Layout, ReadRequest, RowSelection

Outputs = Sequence[tuple[str, Array]]
"""Name of a column, and the array that receives it; one pair for each column that is read."""


class Table(ABC):
    """How the rows of several fields lie in one file together: one read and one decoding serve all that are wanted.

    Immutable, and small enough to broadcast. The engine asks each table once for all its columns.

    Attributes
    ----------
    rows : number of rows.
    block_rows : the longest block, in rows.
    width : number of columns.
    """

    rows: int
    block_rows: int
    width: int

    @abstractmethod
    def requests(self, rows: RowSelection, outs: Outputs, cache: ChunkCache) -> Iterator[ReadRequest]:
        """Yield reads that fill ``out[rows.destination[i]]`` with row ``rows.numbers[i]``, for each column."""

    @abstractmethod
    def borders(self) -> Integers | None:
        """First row of every block; None: every ``block_rows`` rows."""

    def stored_bytes(self) -> int:
        """Bytes that the rows take in the file; 0 if that is not known."""
        return 0

    def end(self) -> int:
        """First byte after the last one that the table may read; 0 if it reads no byte ranges."""
        return 0


@dataclass(frozen=True, eq=False)
class Column(Layout):
    """One column of a table."""

    table: Table
    name: str

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.table.rows

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return self.table.block_rows

    def borders(self) -> Integers | None:
        return self.table.borders()

    def stored_bytes(self) -> int:
        """An equal share of the table."""
        return self.table.stored_bytes() // max(1, self.table.width)

    def end(self) -> int:
        return self.table.end()

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        return self.table.requests(rows, [(self.name, out)], cache)


@dataclass(frozen=True, eq=False)
class Matrix(Layout):
    """Fields of equal shape side by side: element i along the first axis of a row is that of part i."""

    parts: tuple[Layout, ...]

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.parts[0].rows

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return max(part.block_rows for part in self.parts)

    def borders(self) -> Integers | None:
        return self.parts[0].borders()

    def stored_bytes(self) -> int:
        return sum(part.stored_bytes() for part in self.parts)

    def end(self) -> int:
        return max(part.end() for part in self.parts)

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        named = {str(i): part for i, part in enumerate(self.parts)}
        arrays = {str(i): out[:, i] for i in range(len(self.parts))}
        return (request for _, request in plan_reads(named, rows, arrays, cache))


def plan_reads(
    parts: Mapping[str, Layout], rows: RowSelection, arrays: Mapping[str, Array], cache: ChunkCache
) -> Iterator[tuple[str | None, ReadRequest]]:
    """What to read for several fields of one file, and the field that each request is for; None: for several."""
    tables: dict[int, tuple[Table, list[tuple[str, Array]]]] = {}
    for name, array in arrays.items():
        for part, out in _leaves(parts[name], array):
            if isinstance(part, Column):
                tables.setdefault(id(part.table), (part.table, []))[1].append((part.name, out))
            else:
                yield from ((name, request) for request in part.requests(rows, out, cache))
    for table, outs in tables.values():
        yield from ((None, request) for request in table.requests(rows, outs, cache))


def _leaves(part: Layout, out: Array) -> Iterator[tuple[Layout, Array]]:
    if isinstance(part, Matrix):
        for i, inner in enumerate(part.parts):
            yield from _leaves(inner, out[:, i])
    else:
        yield part, out
