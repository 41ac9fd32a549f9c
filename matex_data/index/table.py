"""Fields that share one read: columns of a table."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from matex_data._types import Array
from matex_data.declared import declared
from matex_data.index.blocks import apart
from matex_data.index.cache import ChunkCache
from matex_data.index.combined import UnitedRows
from matex_data.index.layout import Composed, Layout, Limits, ReadRequest, StoredRows, call_after_last
from matex_data.index.runs import RowSelection

Outputs = Sequence[tuple[str, Array]]
"""Pairs of a column's name and the array that receives its rows."""


class Table(StoredRows):
    """Rows of several fields of one file that are read and decoded in one go.

    A subclass is immutable, compared by identity (``eq=False`` of a dataclass), can be pickled, and is small enough to
    broadcast. Each field has the layout `Column`; the engine calls the table once for all selected columns.

    Attributes
    ----------
    width : number of columns.

    Examples
    --------
    `jagged_columns` and `group_interleaved` make tables; `Column` is the layout of one of their fields:

    >>> from matex_data.abc import Strided, group_interleaved
    >>> id, x = (Strided(5, offset, stride=8, dtype=np.dtype("i4"), shape=()) for offset in (0, 4))
    >>> columns = group_interleaved({"id": id, "x": x})
    >>> columns["id"].table is columns["x"].table, columns["x"].table.width
    (True, 2)
    """

    width: int

    @abstractmethod
    def requests(self, rows: RowSelection, outs: Outputs, cache: ChunkCache) -> Iterator[ReadRequest]:
        """Yield the reads after which ``out[rows.destination[i]]`` holds row ``rows.numbers[i]``, for each column."""

    def inner_bytes(self, name: str) -> int:
        """Return the size of the elements of all samples of a ragged column in memory, in bytes; 0 if it is unknown."""
        return 0

    def limits(self, name: str) -> Limits | None:
        """Return bounds of the numbers of a column, which may read metadata of the file; None if there are none."""
        return None


@declared
@dataclass(frozen=True, eq=False)
class Column(Composed, Layout):
    """One column of a table.

    Parameters
    ----------
    table : the table.
    name : of the column.

    Examples
    --------
    >>> from matex_data.abc import Strided, group_interleaved
    >>> id, x = (Strided(5, offset, stride=8, dtype=np.dtype("i4"), shape=()) for offset in (0, 4))
    >>> column = group_interleaved({"id": id, "x": x})["x"]
    >>> column.name, column.rows
    ('x', 5)
    """

    table: Table
    name: str

    @property
    def origins(self) -> tuple[Table]:
        return (self.table,)

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.table.rows

    @property
    def notice(self) -> str:  # type: ignore[override]
        return self.table.notice

    def stored_bytes(self) -> int:
        """Return the table's size divided by its number of columns."""
        return self.table.stored_bytes() // max(1, self.table.width)

    def inner_bytes(self) -> int:
        return self.table.inner_bytes(self.name)

    def limits(self) -> Limits | None:
        return self.table.limits(self.name)

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        return self.table.requests(rows, [(self.name, out)], cache)


def plan_reads(
    layouts: Mapping[str, Layout], rows: RowSelection, arrays: Mapping[str, Array], cache: ChunkCache
) -> Iterator[tuple[str | None, ReadRequest]]:
    """Yield the reads of several fields of one file, each with the name of its field; None: of several fields.

    Parameters
    ----------
    layouts : of the file's fields, by name.
    arrays : the output array of each field to read, by name.
    """
    tables: dict[Table, list[tuple[str, Array]]] = {}  # compared by identity
    names: dict[Table, str] = {}
    converted: dict[Table, list[tuple[UnitedRows, str, Array]]] = {}
    for name, out in arrays.items():
        layout = layouts[name]
        if isinstance(layout, Column):
            tables.setdefault(layout.table, []).append((layout.name, out))
            names[layout.table] = name
        elif isinstance(layout, UnitedRows) and isinstance(column := layout.layout, Column):
            converted.setdefault(column.table, []).append((layout, column.name, out))
        else:
            yield from ((name, request) for request in layout.requests(rows, out, cache))
    for table, outs in tables.items():
        single = names[table] if len(outs) == 1 else None
        yield from ((single, request) for request in table.requests(rows, outs, cache))
    for table, columns in converted.items():
        yield from ((None, request) for request in _converted(table, columns, rows, cache))


def _converted(
    table: Table, columns: Sequence[tuple[UnitedRows, str, Array]], rows: RowSelection, cache: ChunkCache
) -> Iterator[ReadRequest]:
    """Return the reads of columns that are converted once all of them are read."""
    read = [united.empty(len(rows.destination)) for united, _, _ in columns]
    outs = [(name, array) for (_, name, _), array in zip(columns, read, strict=True)]

    def convert() -> None:
        for (united, _, out), array in zip(columns, read, strict=True):
            united.convert(rows, array, out)

    return iter(call_after_last(table.requests(apart(rows), outs, cache), convert))
