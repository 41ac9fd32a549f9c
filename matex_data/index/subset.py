"""Layouts of some elements of each row, and of some rows: only the bytes of these are read, where rows lie as such."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import numpy as np

from matex_data._types import Array, Integers
from matex_data.declared import declared
from matex_data.index.blocks import apart
from matex_data.index.cache import ChunkCache
from matex_data.index.chunked import Chunked
from matex_data.index.combined import Converted
from matex_data.index.layout import Layout, ReadRequest, call_after_last
from matex_data.index.runs import RowSelection, compress
from matex_data.index.scatter import scatter
from matex_data.index.strided import BLOCK_BYTES, Indices, Segments, Strided, Transposed, c_strides

Axis = Indices | int | None
"""Entries to take along an axis; int: a single one, without its axis; None: all."""
SEGMENT_BYTES = 256  # shorter ranges that lie apart are read as one, with what is between them


def taken_shape(shape: Sequence[int], axes: Sequence[Axis]) -> tuple[int, ...]:
    """Return the shape of an array after `take`.

    >>> taken_shape((4, 5, 6), (range(2), 3, None))
    (2, 6)
    """
    pairs = zip(shape, axes, strict=True)
    return tuple(length if axis is None else len(axis) for length, axis in pairs if not isinstance(axis, int))


def take(array: Array, axes: Sequence[Axis]) -> Array:
    """Return the entries of an array along each of its axes.

    >>> take(np.arange(6).reshape(2, 3), ((1, 0), 2)).tolist()
    [5, 2]
    """
    for number, axis in reversed(list(enumerate(axes))):
        if isinstance(axis, range) and axis.step > 0:
            array = array[(slice(None),) * number + (slice(axis.start, axis.stop, axis.step),)]
        elif axis is not None:
            array = np.take(array, axis if isinstance(axis, int) else np.array(axis, np.int64), axis=number)
    return array


def subset(layout: Layout, shape: tuple[int, ...], axes: Sequence[Axis]) -> Layout:
    """Return the layout of the entries of each row along its axes.

    Parameters
    ----------
    layout : of whole rows.
    shape : of a row.
    axes : entries along each axis of a row.
    """
    if all(axis is None for axis in axes):
        return layout
    if isinstance(layout, Strided):
        strides = c_strides(layout.shape, layout.dtype.itemsize)
        return _segments(layout, layout.shape, strides, layout.stride, axes, tuple(range(len(shape))))
    if isinstance(layout, Transposed):
        whole = layout.segments
        strides = (*(stride for stride, _ in whole.outer), *c_strides(layout.after, layout.dtype.itemsize))
        return _segments(layout, whole.shape, strides, whole.stride, axes, layout.order)
    if isinstance(layout, Chunked):
        read = tuple(None if axis is None else _ascending(axis) for axis in axes)
        chosen = replace(layout, chosen=read)
        return _picked(chosen, taken_shape(shape, read), axes, read)
    return Picked(layout, shape, tuple(axes))


def _ascending(axis: Indices | int) -> Indices:
    """Return the entries in ascending order, each once."""
    if isinstance(axis, int):
        return range(axis, axis + 1)
    numbers = sorted(set(axis))
    if not numbers:
        return range(0)
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    regular = range(numbers[0], numbers[-1] + 1, step)
    return regular if list(regular) == numbers else tuple(numbers)


def _picked(layout: Layout, shape: tuple[int, ...], axes: Sequence[Axis], read: Sequence[Indices | None]) -> Layout:
    """Return the layout of the entries ``axes``, given that of the entries ``read``, which are ascending."""
    picks = tuple(None if a is None or r is None else _positions(a, r) for a, r in zip(axes, read, strict=True))
    if all(pick is None for pick in picks):
        return layout
    if all(pick is None or pick == 0 for pick in picks):
        return Squeezed(layout, tuple(number + 1 for number, pick in enumerate(picks) if pick is not None))
    return Picked(layout, shape, picks)


def _positions(axis: Indices | int, read: Indices) -> Axis:
    if isinstance(axis, int):
        return read.index(axis)
    if list(axis) == list(read):
        return None
    position = {number: at for at, number in enumerate(read)}
    return tuple(position[number] for number in axis)


@declared
@dataclass(frozen=True)
class Squeezed(Converted):
    """Rows without axes of length 1.

    Parameters
    ----------
    layout : with these axes.
    axes : their numbers in an array of rows.
    """

    axes: tuple[int, ...]

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        return self.layout.requests(rows, np.expand_dims(out, self.axes), cache)


@declared
@dataclass(frozen=True)
class Picked(Converted):
    """Entries of rows that are read as a whole.

    Parameters
    ----------
    layout : of whole rows.
    shape : of a whole row.
    axes : entries along each of its axes.
    """

    shape: tuple[int, ...]
    axes: tuple[Axis, ...]

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        most = max(1, BLOCK_BYTES // max(1, prod(self.shape) * out.dtype.itemsize))
        for tile in rows.tiles(max(most, self.block_rows)):
            whole = np.empty((len(tile.destination), *self.shape), out.dtype)
            requests = self.layout.requests(apart(tile), whole, cache)
            yield from call_after_last(requests, partial(self._finish, whole, out, tile.destination))

    def _finish(self, whole: Array, out: Array, destination: Integers) -> None:
        scatter(out, destination, take(whole, (None, *self.axes)))


def _segments(
    layout: Strided | Transposed,
    stored: Sequence[int],
    strides: Sequence[int],
    row_stride: int,
    axes: Sequence[Axis],
    order: tuple[int, ...],
) -> Layout:
    """Return the layout of the entries of rows that lie uncompressed.

    Parameters
    ----------
    layout : of whole rows.
    stored : lengths of the axes of a row as they are stored.
    strides : bytes from one entry to the next along each of them.
    row_stride : bytes from one row to the next.
    axes : entries along each axis of the field.
    order : for each axis of the field, the axis as it is stored.
    """
    of_stored: list[Axis] = [None] * len(stored)
    for axis, at in zip(axes, order, strict=True):
        of_stored[at] = axis
    pairs = zip(of_stored, stored, strict=True)
    read = [range(length) if axis is None else _ascending(axis) for axis, length in pairs]
    inner, run, within = len(stored), layout.dtype.itemsize, True
    while inner and within and strides[inner - 1] <= run:  # axes that are contiguous with those behind them
        inner -= 1
        numbers = read[inner]
        consecutive = isinstance(numbers, range) and numbers.step == 1
        if not consecutive and (run >= SEGMENT_BYTES or strides[inner] > run):
            inner += 1
            break
        if not consecutive:
            numbers = read[inner] = range(numbers[0], numbers[-1] + 1) if len(numbers) else range(0)
        within = len(numbers) == stored[inner]
        run = len(numbers) * strides[inner]
    segments = Segments(
        rows=layout.rows,
        offset=layout.offset + sum(read[at][0] * strides[at] for at in range(inner, len(stored)) if len(read[at])),
        stride=row_stride,
        outer=tuple((strides[at], read[at]) for at in range(inner)),
        run=run,
        dtype=layout.dtype,
        shape=tuple(map(len, read)),
        order=order,
        convert=layout.convert,
    )
    in_order = [read[at] for at in order]
    wanted = [numbers if axis is None else axis for axis, numbers in zip(axes, in_order, strict=True)]
    return _picked(segments, tuple(map(len, in_order)), wanted, in_order)


def subset_rows(layout: Layout, numbers: Indices) -> Layout:
    """Return the layout of some rows, which ascend."""
    if isinstance(numbers, range) and numbers.step == 1:
        if len(numbers) == layout.rows:
            return layout
        if isinstance(layout, Strided | Segments) and layout.block_rows == 1:
            return replace(layout, rows=len(numbers), offset=layout.offset + numbers.start * layout.stride)
    return SomeRows(layout, numbers)


@declared
@dataclass(frozen=True)
class SomeRows(Converted):
    """Some rows of another layout.

    Parameters
    ----------
    layout : of all rows.
    numbers : of the rows among them, ascending.
    """

    numbers: Indices

    @property
    def rows(self) -> int:  # type: ignore[override]
        return len(self.numbers)

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return max(1, min(self.layout.block_rows, self.rows))

    def borders(self) -> Integers | None:
        if self.layout.block_rows <= 1 and self.layout.borders() is None:
            return None
        first = np.searchsorted(np.array(self.numbers, np.int64), self.layout.first_rows())
        return np.unique(first[first < self.rows]).astype(np.int64)

    def stored_bytes(self) -> int:
        return self.layout.stored_bytes() * self.rows // max(1, self.layout.rows)

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        runs = compress(np.array(self.numbers, np.int64)[rows.numbers])
        return self.layout.requests(runs.selection(rows.destination), out, cache)
