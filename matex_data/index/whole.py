"""A file, or a group of its arrays, as one sample: all rows of a field as one array, dense if the shapes agree."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from matex_data.declared import declared
from matex_data.errors import FormatError
from matex_data.fields import ALL_ROWS, LISTED, SAMPLE_COORDINATE, Field, Schema
from matex_data.index.cache import ChunkCache
from matex_data.index.files import FileIndex
from matex_data.index.layout import Composed, Layout, ReadRequest
from matex_data.index.model import Index
from matex_data.index.runs import RowSelection, Runs
from matex_data.index.table import Column, Outputs, Table, plan_reads
from matex_data.index.united import concatenate

SAMPLE, FILE, GROUP = "sample", "file", "group"
"""Option that says what a sample is, and its values for a file, and for a group of one."""


@declared
@dataclass(frozen=True)
class Rows:
    """Rows that become one array.

    Parameters
    ----------
    shape : of one of them.
    dtype : of their elements as they are delivered; object for texts and for rows of variable length.
    """

    layout: Layout
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def bytes(self) -> int:
        """Size of the array in memory, with what its elements refer to as far as that is known, in bytes."""
        return self.layout.rows * prod(self.shape) * self.dtype.itemsize + self.layout.inner_bytes()

    def array(self, out: Any, to: int) -> Any:
        """Return the array to fill, which is sample ``to`` of an output array."""
        if out.ndim == 1:  # of samples of their own shapes
            out[to] = np.empty((self.layout.rows, *self.shape), self.dtype)
        return out[to]


@declared
@dataclass(frozen=True, eq=False)
class Whole(Composed, Table):
    """All rows of fields as a single row each, so that what columns of a table share is read once.

    Parameters
    ----------
    columns : the rows of each column, by the name of its field.

    Examples
    --------
    >>> from matex_data.index.library import MemoryRows
    >>> layout = whole(Rows(MemoryRows(np.array([[1, 2], [3, 4]])), (2,), np.dtype(int)))
    >>> out, row = np.empty(1, object), RowSelection(np.array([0]), np.array([1]), np.array([0]))
    >>> for request in layout.requests(row, out, ChunkCache(0)):
    ...     request.on_complete(np.empty(0, np.uint8))
    >>> out[0].tolist()
    [[1, 2], [3, 4]]
    """

    columns: Mapping[str, Rows]
    rows = 1
    block_rows = 1

    @property
    def origins(self) -> list[Layout]:
        return [rows.layout for rows in self.columns.values()]

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.columns)

    def borders(self) -> None:
        return None

    def inner_bytes(self, name: str) -> int:
        return self.columns[name].bytes

    def requests(self, rows: RowSelection, outs: Outputs, cache: ChunkCache) -> Iterator[ReadRequest]:
        layouts = {name: self.columns[name].layout for name, _ in outs}
        for to in rows.destination.tolist():
            arrays = {name: self.columns[name].array(out, to) for name, out in outs}
            every = Runs.between(0, layouts[outs[0][0]].rows)
            if every.total:
                yield from (request for _, request in plan_reads(layouts, every.selection(), arrays, cache))


def whole(rows: Rows, name: str = "") -> Layout:
    """Return the layout of all rows of a field as a single one."""
    return Column(Whole({name: rows}), name)


def whole_layouts(fields: Schema, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Return the layouts of one row that all rows are, of a file or of an array in it.

    Parameters
    ----------
    fields, layouts : of the rows, by name.
    """
    tables: dict[Table, dict[str, Rows]] = {}
    made: dict[str, Layout] = {}
    for name, layout in layouts.items():
        rows = Rows(layout, fields[name].shape, fields[name].array_dtype)
        if isinstance(layout, Column):
            tables.setdefault(layout.table, {})[name] = rows
        else:
            made[name] = whole(rows, name)
    for columns in tables.values():
        table = Whole(columns)
        made |= {name: Column(table, name) for name in columns}
    return {name: made[name] for name in layouts}


def whole_field(field: Field, rows: int) -> Field:
    """Return the field of which all rows of a file are one sample.

    Parameters
    ----------
    field : of the rows.

    Examples
    --------
    >>> whole_field(Field("x", (3,), np.dtype("f4")), 10).shape
    (10, 3)
    """
    attributes = {name: value for name, value in field.attributes.items() if name != SAMPLE_COORDINATE}
    attributes[ALL_ROWS] = True
    if field.ragged:
        return replace(field, shape=(), inner=(None,), attributes={**attributes, "nested": True})
    return replace(field, shape=(rows, *field.shape), attributes=attributes)


def whole_file(
    path: str,
    fields: Schema,
    layouts: Mapping[str, Layout],
    single: Collection[str] = (),
    facts: Mapping[str, str] | None = None,
) -> Index:
    """Return the index of a file that is one sample.

    Parameters
    ----------
    fields, layouts : of its rows, by name; fields may differ in their numbers of rows.
    single : names of fields of one row that are numbers without an axis, and stay such.
    facts : of the index of its rows.
    """
    joined = whole_layouts(fields, {name: layout for name, layout in layouts.items() if name not in single})
    made = {name: joined.get(name, layout) for name, layout in layouts.items()}
    found = {n: field if n in single else whole_field(field, layouts[n].rows) for n, field in fields.items()}
    kept = {name: fact for name, fact in (facts or {}).items() if name != LISTED}
    return Index(found, [FileIndex(path, 1, made)], facts=kept)


def files_as_samples(index: Index) -> Index:
    """Return the index of the rows of files with each file as one sample.

    Examples
    --------
    >>> from matex_data.index.library import MemoryRows
    >>> files = [FileIndex(f"{n}.bin", n, {"x": MemoryRows(np.zeros(n))}) for n in (2, 3)]
    >>> index = files_as_samples(Index({"x": Field("x", (), np.dtype(float))}, files))
    >>> len(index), index.fields["x"].sample_shape
    (2, (None,))
    """
    if not len(index.files):  # of a rank that has indexed none, whose index nobody uses
        return index
    made = [whole_file(file.path, index.fields, file.layouts, facts=index.facts) for file in index.files]
    whole = concatenate(made)
    stamped = [replace(one, stamp=file.stamp) for one, file in zip(whole.files, index.files, strict=True)]
    return Index(whole.fields, stamped, index.static, whole.facts)


def check_sample(sample: str | None, own: tuple[str, ...], format: str) -> None:
    """Raise ``FormatError`` unless a format has samples of this kind.

    Parameters
    ----------
    sample : argument of ``open_dataset``; None: what the format has without it.
    own : kinds that the reader makes itself.
    format : name of the format.
    """
    known = tuple(dict.fromkeys((*own, FILE)))
    if sample is not None and sample not in known:
        raise FormatError(
            f"files of the format {format!r} have no such samples",
            expected=f"sample= one of {known}, or none: a row is a sample",
            found=repr(sample),
        )
