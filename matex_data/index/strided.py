"""Layouts of uncompressed rows: at a constant stride, or of segments that lie apart."""

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
from matex_data.index.layout import Composed, Layout, ReadRequest
from matex_data.index.runs import RowSelection, runs_where
from matex_data.index.scatter import Convert, are_consecutive, as_bytes, scatter
from matex_data.locks import cached_property

DIRECT_BYTES = 16 * 1024  # rows of this size are read one by one to their destinations; smaller ones are scattered
SCATTER_BYTES = 1 << 20  # of rows that are read to scratch memory and scattered in one go


@declared
@dataclass(frozen=True)
class Strided(Layout):
    """Fixed-size rows at a constant stride: contiguous HDF5, classic netCDF, npy, IDX, CIFAR.

    Row i occupies the bytes from ``offset + i * stride``. The rows are decoded by viewing their bytes as ``dtype``.

    Parameters
    ----------
    rows : number of rows.
    offset : byte position of row 0 in the file.
    stride : bytes from one row to the next; more than ``row_bytes`` where rows of other fields lie between.
    dtype : as stored, of either byte order.
    shape : of one row.
    block_rows : rows of a block, see `Layout`.
    convert : writes the field's values for the stored rows; None: they are equal.

    Examples
    --------
    A file of a 16-byte header and five rows of three big-endian 2-byte integers each, 6 bytes a row:

    >>> from matex_data.index.model import RowSelection
    >>> layout = Strided(rows=5, offset=16, stride=6, dtype=np.dtype(">i2"), shape=(3,))
    >>> layout.row_bytes, layout.end()
    (6, 46)

    The reads of rows 1 and 2 are one byte range. Its bytes become rows 0 and 1 of the output:

    >>> out = np.zeros((2, 3), "i2")
    >>> selection = RowSelection(np.array([1]), np.array([3]), np.array([0, 1]))
    >>> (request,) = layout.requests(selection, out, ChunkCache(0))
    >>> request.offset.tolist(), request.nbytes.tolist()
    ([22], [12])
    >>> request.on_complete(np.arange(6, dtype=">i2").view("u1"))
    >>> out.tolist()
    [[0, 1, 2], [3, 4, 5]]
    """

    rows: int
    offset: int
    stride: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    block_rows: int = 1
    convert: Convert | None = None

    @property
    def row_bytes(self) -> int:
        """Size of one row in the file, in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def stored_bytes(self) -> int:
        return self.rows * self.row_bytes

    def end(self) -> int:
        return self.offset + (self.rows - 1) * self.stride + self.row_bytes if self.rows else 0

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        same_bytes = self.convert is None and self.dtype == out.dtype and out.flags.c_contiguous
        if self.row_bytes == 0 or not len(rows.destination):
            return
        if same_bytes and (self.row_bytes >= DIRECT_BYTES or are_consecutive(rows.destination)):
            yield self._read_in_place(rows, out)
            return
        for tile in rows.tiles(max(1, SCATTER_BYTES // self.row_bytes)):
            offset, nbytes = self._byte_ranges(tile)
            yield ReadRequest(offset, nbytes, on_complete=partial(self._scatter, tile.destination, out))

    def _byte_ranges(self, rows: RowSelection) -> tuple[Integers, Integers]:
        """Return offsets and lengths of the rows' bytes; contiguous rows share one range."""
        if self.stride == self.row_bytes:
            return self.offset + rows.start * self.stride, (rows.stop - rows.start) * self.row_bytes
        offset = self.offset + rows.numbers * self.stride
        return offset, np.full(len(offset), self.row_bytes)

    def _read_in_place(self, rows: RowSelection, out: Array) -> ReadRequest:
        """Return a request that reads straight into ``out``, one range per run that is contiguous on both sides."""
        if self.stride == self.row_bytes and are_consecutive(rows.destination):
            count = rows.stop - rows.start
            at = int(rows.destination[0]) + np.cumsum(count) - count
            return ReadRequest(*self._byte_ranges(rows), target=as_bytes(out), at=at * self.row_bytes)
        numbers, destination = rows.numbers, rows.destination
        contiguous = (np.diff(numbers) == 1) & (np.diff(destination) == 1) & (self.stride == self.row_bytes)
        first, count = runs_where(contiguous)
        return ReadRequest(
            offset=self.offset + numbers[first] * self.stride,
            nbytes=count * self.row_bytes,
            target=as_bytes(out),
            at=destination[first] * self.row_bytes,
        )

    def _scatter(self, destination: Integers, out: Array, data: Bytes) -> None:
        scatter(out, destination, data.view(self.dtype).reshape(-1, *self.shape), self.convert)


RANGE_BYTES = 64 * 1024  # of one byte range of a block: the block size aims at it,
BLOCK_BYTES = 4 * 1024 * 1024  # unless a block would exceed this

Indices = range | tuple[int, ...]
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
    outer: tuple[tuple[int, Indices], ...]
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
class Transposed(Composed, Layout):
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
        """Rows as segments."""
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
    def origins(self) -> tuple[Segments]:
        return (self.segments,)

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        return self.segments.requests(rows, out, cache)


def along_axis(
    shape: tuple[int, ...],
    axis: int,
    offset: int,
    step: int,
    dtype: np.dtype[Any],
    item: tuple[int, ...] = (),
    convert: Convert | None = None,
) -> Strided | Transposed:
    """Return the layout of the rows of an array in C order along one of its axes.

    Parameters
    ----------
    shape : of the array.
    axis : position of the sample axis, 0 or more.
    offset : byte position of the array in the file.
    step : bytes from one entry of the first axis to the next.
    dtype, convert : see `Strided`.
    item : shape of an element.

    Examples
    --------
    >>> along_axis((2, 5), 1, 0, 20, np.dtype("f4")).rows
    5
    """
    before, after = shape[:axis], (*shape[axis + 1 :], *item)
    if not axis:
        return Strided(shape[0], offset, step, dtype, after, convert=convert)
    order = tuple(range(len(before) + len(after)))
    return Transposed(shape[axis], offset, before, after, step, dtype, order, convert)
