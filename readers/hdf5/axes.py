"""Rows along another axis of a dataset than its first one."""

from __future__ import annotations

from dataclasses import replace

import h5py
import numpy as np

from matex_data._types import Integers
from matex_data.index.chunked import Chunked
from matex_data.index.library import MemoryRows
from matex_data.index.model import Layout
from matex_data.index.strided import Strided, Transposed
from matex_data.readers.hdf5.rows import Hdf5Rows


def along(layout: Layout, axis: int, dataset: h5py.Dataset) -> Layout:
    """Return the layout of the rows of a dataset along an axis, given that of its rows along the first one.

    The other axes of a row keep their order.
    """
    if axis == 0:
        return layout
    shape = dataset.shape
    if isinstance(layout, MemoryRows):
        return MemoryRows(np.ascontiguousarray(np.moveaxis(layout.values, axis, 0)))
    if isinstance(layout, Strided):
        inner = layout.shape[len(shape) - 1 :]
        before, after = shape[:axis], (*shape[axis + 1 :], *inner)
        order = tuple(range(len(before) + len(after)))
        return Transposed(shape[axis], layout.offset, before, after, layout.stride, layout.dtype, order)
    if isinstance(layout, Hdf5Rows):
        return replace(layout, rows=shape[axis], block_rows=(dataset.chunks or shape)[axis], axis=axis)
    return _chunks_along(layout, axis) if isinstance(layout, Chunked) else layout


def _chunks_along(layout: Chunked, axis: int) -> Chunked:
    """Return the layout with the chunks renumbered so that ``axis`` comes first."""
    grid = [-(-n // c) for n, c in zip(layout.shape, layout.chunk_shape, strict=True)]
    order = (axis, *(a for a in range(len(grid)) if a != axis))
    count = len(layout.number)
    coordinates = np.unravel_index(layout.number, grid) if count else tuple(layout.number for _ in grid)
    number: Integers = np.zeros(count, np.int64)
    for a in order:
        number = number * grid[a] + coordinates[a]
    ascending = np.argsort(number, kind="stable")
    return replace(
        layout,
        shape=tuple(layout.shape[a] for a in order),
        chunk_shape=tuple(layout.chunk_shape[a] for a in order),
        number=number[ascending],
        offset=layout.offset[ascending],
        nbytes=layout.nbytes[ascending],
        mask=layout.mask[ascending],
        axis=axis,
    )
