"""Several fields out of one decoding: columns of a table, and columns side by side as one matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import FormatError
from matex_data.fields import Field
from matex_data.index.cache import ChunkCache
from matex_data.index.model import Index, Layout, ReadRequest, RowSelection

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


def stack_fields(index: Index, names: Sequence[str], name: str, kept: Sequence[str]) -> Index:
    """The index with fields ``names`` side by side as one field ``name``, and of the others those that are ``kept``.

    Raises
    ------
    FormatError : the fields differ in shape, or are not all numbers, or there is already a field of that name.
    """
    if not names:
        raise FormatError("there is nothing to stack", expected="a list of fields", remedy="name them with inputs=")
    strange = next((n for n in names if n not in index.fields), None)
    if strange is not None:
        raise FormatError(
            "the field cannot be part of a matrix",
            field=strange,
            expected="fields of the files",
            remedy=f"leave it out; the mask of the matrix is the field {name + '_mask'!r}, which targets= may name",
        )
    fields = [index.fields[n] for n in names]
    odd = next((f for f in fields if f.shape != fields[0].shape or f.ragged or f.dtype.kind not in "biuf"), None)
    if odd is not None:
        raise FormatError(
            "the field does not fit into a matrix with the others",
            field=odd.name,
            expected=f"numbers of shape {fields[0].shape}, as in {fields[0].name!r}",
            found=f"{odd.dtype} of shape {odd.shape}",
            remedy="stack numeric fields of one shape, or leave out stack=True",
        )
    if name in kept:
        raise FormatError(f"a field that is kept beside the matrix is named {name!r} already", field=name)
    dtype = np.result_type(*(f.dtype for f in fields))
    matrix = Field(name, (len(fields), *fields[0].shape), dtype, attributes={"columns": list(names)})
    schema = {name: matrix, **{n: index.fields[n] for n in kept}}
    files = []
    for file in index.files:
        parts: dict[str, Layout] = {name: Matrix(tuple(file.layouts[n] for n in names))}
        files.append(replace(file, layouts={**parts, **{n: file.layouts[n] for n in kept}}))
    return Index(schema, files, index.static)
