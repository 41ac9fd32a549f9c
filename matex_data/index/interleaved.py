"""Read interleaved fields, which alternate in every record of a file, with shared byte ranges."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.index.cache import ChunkCache
from matex_data.index.layout import Layout, ReadRequest
from matex_data.index.runs import RowSelection
from matex_data.index.scatter import Convert, matrix_view, scatter
from matex_data.index.strided import SCATTER_BYTES, Strided, c_strides
from matex_data.index.table import Column, Outputs, Table

WASTE = 0.04  # fraction of the bytes read that may belong to fields that are not selected


@declared
@dataclass(frozen=True)
class RecordField:
    """Elements of one field in a record.

    Parameters
    ----------
    offset : first byte, counted from the begin of the record.
    dtype : as stored, of either byte order.
    shape : of the field in one record.
    strides : bytes from one element to the next, for each axis of ``shape``.
    convert : writes the field's values for the stored ones; None: they are equal.
    """

    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    convert: Convert | None = None

    @property
    def span(self) -> int:
        """Bytes from the first to the last one of the field in a record; 0 if it has no elements."""
        if 0 in self.shape:
            return 0
        return sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)) + self.dtype.itemsize


_Output = tuple[RecordField, Array]


@declared
@dataclass(frozen=True, eq=False)
class InterleavedRecords(Table):
    """Records of several fields, of equal size.

    Parameters
    ----------
    offset : byte position of record 0 in the file.
    stride : bytes from one record to the next.
    fields : the fields in a record, by name.
    gap : bytes between two fields, or two records, that are read rather than skipped.
    """

    rows: int
    offset: int
    stride: int
    fields: Mapping[str, RecordField]
    gap: int = 0

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return 1

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.fields)

    def stored_bytes(self) -> int:
        """Return the bytes that are read for all rows of all fields."""
        groups = self._groups([(field, np.empty(0)) for field in self.fields.values() if field.span])
        return self.rows * sum(self._pitch(_bounds(group)[1]) for group in groups)

    def end(self) -> int:
        last = max(field.offset + field.span for field in self.fields.values())
        return self.offset + (self.rows - 1) * self.stride + last if self.rows else 0

    def requests(self, rows: RowSelection, outs: Outputs, cache: ChunkCache) -> Iterator[ReadRequest]:
        outputs = [(self.fields[name], out) for name, out in outs if self.fields[name].span]
        if len(rows.destination):
            for group in self._groups(outputs):
                yield from self._read(rows, group)

    def _groups(self, outputs: list[_Output]) -> list[list[_Output]]:
        """Group the fields that are close enough in a record to be read in one range."""
        groups: list[list[_Output]] = []
        used = end = 0
        for field, out in sorted(outputs, key=lambda pair: pair[0].offset):
            if groups:
                span = max(end, field.offset + field.span) - groups[-1][0][0].offset
                if field.offset - end <= self.gap or span - used - field.span <= WASTE * span:
                    groups[-1].append((field, out))
                    used += field.span
                    end = max(end, field.offset + field.span)
                    continue
            groups.append([(field, out)])
            used, end = field.span, field.offset + field.span
        return groups

    def _pitch(self, span: int) -> int:
        """Return the bytes that are read for each of several neighbouring records."""
        return self.stride if self.stride - span <= max(self.gap, WASTE * self.stride) else span

    def _read(self, rows: RowSelection, group: list[_Output]) -> Iterator[ReadRequest]:
        """Yield reads of the group's span in each record, or of whole runs of records if the span covers nearly all."""
        begin, span = _bounds(group)
        pitch = self._pitch(span)
        for tile in rows.tiles(max(1, SCATTER_BYTES // pitch)):
            if pitch == self.stride:
                first, count = tile.start, tile.stop - tile.start
            else:
                first, count = tile.numbers, np.ones(len(tile.destination), np.int64)
            nbytes = count * pitch
            nbytes[-1] -= pitch - span  # the file may end after the last record's span
            on_complete = partial(_scatter, group, begin, pitch, tile.destination)
            yield ReadRequest(self.offset + begin + first * self.stride, nbytes, on_complete=on_complete)


def _bounds(group: list[_Output]) -> tuple[int, int]:
    """Return the first byte of a group in a record, and the number of bytes to its last one."""
    begin = group[0][0].offset
    return begin, max(field.offset + field.span for field, _ in group) - begin


def _scatter(group: list[_Output], begin: int, pitch: int, destination: Integers, data: Bytes) -> None:
    matrix = matrix_view([out for _, out in group]) if _are_columns([field for field, _ in group]) else None
    if matrix is not None:
        first = group[0][0]
        group = [(replace(first, shape=(len(group),), strides=(first.dtype.itemsize,)), matrix)]
    for field, out in group:
        row = np.ndarray(field.shape, field.dtype, data, field.offset - begin, field.strides)
        stored = np.lib.stride_tricks.as_strided(row, (len(destination), *field.shape), (pitch, *row.strides))
        scatter(out, destination, stored, field.convert)


def _are_columns(fields: Sequence[RecordField]) -> bool:
    """Return whether the fields are neighbouring numbers of one type, in this order."""
    first = fields[0]
    return all(
        field.shape == () and field.convert is None and field.dtype == first.dtype and field.offset == begin
        for field, begin in zip(fields, itertools.count(first.offset, first.dtype.itemsize), strict=False)
    )


def group_interleaved(layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Return the layouts of one file with the interleaved fields among them as columns of one table.

    Examples
    --------
    Records of 8 bytes, with two numbers each:

    >>> id, x = (Strided(5, offset, stride=8, dtype=np.dtype("i4"), shape=()) for offset in (0, 4))
    >>> [type(layout).__name__ for layout in group_interleaved({"id": id, "x": x}).values()]
    ['Column', 'Column']
    """
    records = {
        name: layout
        for name, layout in layouts.items()
        if isinstance(layout, Strided) and layout.stride > layout.row_bytes
    }
    if len(records) < 2 or len({layout.stride for layout in records.values()}) > 1:
        return dict(layouts)
    first = min(records.values(), key=lambda layout: layout.offset)
    fields = {name: _record_field(layout, first.offset) for name, layout in records.items()}
    table = InterleavedRecords(first.rows, first.offset, first.stride, fields)
    return {name: Column(table, name) if name in records else layout for name, layout in layouts.items()}


def _record_field(layout: Strided, begin: int) -> RecordField:
    strides = c_strides(layout.shape, layout.dtype.itemsize)
    return RecordField(layout.offset - begin, layout.dtype, layout.shape, strides, layout.convert)
