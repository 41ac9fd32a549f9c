"""Layouts of uncompressed rows whose parts lie apart: those of an axis that is not the first, and chosen entries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.index.cache import ChunkCache
from matex_data.index.model import Layout, ReadRequest, RowSelection
from matex_data.index.runs import runs_where
from matex_data.index.scatter import Convert, scatter
from matex_data.index.strided import SCATTER_BYTES
from matex_data.locks import cached_property

RANGE_BYTES = 64 * 1024  # of one byte range of a block: the block size aims at it,
BLOCK_BYTES = 4 * 1024 * 1024  # unless a block would exceed this

Numbers = range | tuple[int, ...]
"""Numbers of entries along an axis, of 0 or more."""


def c_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides in bytes of an array in C order.

    >>> c_strides((3, 2), 4)
    (8, 4)
    """
    return tuple(itemsize * prod(shape[axis + 1 :]) for axis in range(len(shape)))


@declared
@dataclass(frozen=True)
class Segments(Layout):
    """Entries of uncompressed rows that consist of segments of equal length, which lie apart in the file.

    Parameters
    ----------
    rows : number of rows.
    offset : byte position of the first segment of row 0, as far as ``outer`` does not move it.
    stride : bytes from one row to the next.
    outer : bytes from one entry to the next, and the entries, of the axes along which segments lie.
    run : size of a segment, in bytes.
    dtype : as stored, of either byte order.
    shape : of a row, in the order in which it is stored.
    order : for each axis of the field, its position in ``shape``.
    convert : writes the field's values for the stored rows; None: they are equal.
    """

    rows: int
    offset: int
    stride: int
    outer: tuple[tuple[int, Numbers], ...]
    run: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    order: tuple[int, ...]
    convert: Convert | None = None

    @property
    def _row_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def _rows_inside(self) -> bool:
        """Return whether the segments of one row lie around other rows."""
        return any(stride > self.stride for stride, _ in self.outer)

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        if not self._rows_inside:
            return 1
        preferred = min(RANGE_BYTES // max(1, self.stride), BLOCK_BYTES // max(1, self._row_bytes))
        return max(1, min(preferred, self.rows))

    def stored_bytes(self) -> int:
        return self.rows * self._row_bytes

    def end(self) -> int:
        if not self.stored_bytes():
            return 0
        return self.offset + int(self._segments()[-1]) + (self.rows - 1) * self.stride + self.run

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        if not self._row_bytes or not len(rows.destination):
            return
        segments = self.offset + self._segments()
        for tile in rows.tiles(max(1, (BLOCK_BYTES if self._rows_inside else SCATTER_BYTES) // self._row_bytes)):
            numbers = tile.numbers
            if self._rows_inside:
                joined = np.diff(numbers) == 1 if self.run == self.stride else np.zeros(len(numbers) - 1, bool)
                first, count = runs_where(joined)
                offset = (segments[:, None] + numbers[first] * self.stride).reshape(-1)
                nbytes = np.tile(count * self.run, len(segments))
            else:
                offset = (numbers[:, None] * self.stride + segments).reshape(-1)
                nbytes = np.full(len(offset), self.run)
            yield ReadRequest(offset, nbytes, on_complete=partial(self._scatter, tile.destination, out))

    def _segments(self) -> Integers:
        """Return where the segments of row 0 begin, in bytes from ``offset``."""
        begin = np.zeros(1, np.int64)
        for stride, numbers in self.outer:
            begin = (begin[:, None] + np.array(numbers, np.int64) * stride).reshape(-1)
        return begin

    def _scatter(self, destination: Integers, out: Array, data: Bytes) -> None:
        count, depth = len(destination), len(self.outer)
        stored = data.view(self.dtype)
        if self._rows_inside:
            stored = np.moveaxis(stored.reshape(*self.shape[:depth], count, *self.shape[depth:]), depth, 0)
        else:
            stored = stored.reshape(count, *self.shape)
        scatter(out, destination, stored.transpose(0, *(axis + 1 for axis in self.order)), self.convert)


@declared
@dataclass(frozen=True)
class Transposed(Layout):
    """Rows of an array in C order along an axis that is not its first.

    A row consists of ``prod(before)`` segments of ``prod(after)`` elements each, which lie far apart in the file.

    Parameters
    ----------
    rows : length of the sample axis.
    offset : byte position of the array in the file.
    before, after : lengths of the axes before and after the sample axis; one at least is before it.
    step : bytes from one entry of the first axis to the next.
    dtype : as stored, of either byte order.
    order : for each axis of a row, its position among the axes ``before + after``.
    convert : writes the field's values for the stored rows; None: they are equal.

    Examples
    --------
    An array of shape (2, 5), of which the samples are the second axis: a sample is a column.

    >>> layout = Transposed(5, offset=0, before=(2,), after=(), step=20, dtype=np.dtype("f4"), order=(0,))
    >>> selection = RowSelection(np.array([1]), np.array([2]), np.array([0]))
    >>> [request.offset.tolist() for request in layout.requests(selection, np.empty((1, 2), "f4"), ChunkCache(0))]
    [[4, 24]]
    """

    rows: int
    offset: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    step: int
    dtype: np.dtype[Any]
    order: tuple[int, ...]
    convert: Convert | None = None

    @cached_property
    def segments(self) -> Segments:
        """The same rows as segments."""
        run = prod(self.after) * self.dtype.itemsize
        strides = (self.step, *(self.rows * stride for stride in c_strides(self.before, run)[1:]))
        return Segments(
            rows=self.rows,
            offset=self.offset,
            stride=run,
            outer=tuple((stride, range(length)) for stride, length in zip(strides, self.before, strict=True)),
            run=run,
            dtype=self.dtype,
            shape=(*self.before, *self.after),
            order=self.order,
            convert=self.convert,
        )

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return self.segments.block_rows

    def stored_bytes(self) -> int:
        return self.segments.stored_bytes()

    def end(self) -> int:
        return self.segments.end()

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        return self.segments.requests(rows, out, cache)
