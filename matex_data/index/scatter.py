"""Rows to their places, converted on the way if they are stored as something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from matex_data._types import Array, Integers

CONVERT_ITEMS = 1 << 15  # numbers; what is converted in one go stays in the processor's cache
LARGE_ROW = 4096  # bytes

RowIndices = Integers | slice
"""Numbers of rows; a slice has a begin and an end."""

Convert = Callable[[Array, Array], None]
"""Writes what stored rows stand for into the second array, rows of the field's dtype. Can be pickled."""


def scatter(out: Array, destination: RowIndices, rows: Array, convert: Convert | None = None) -> None:
    """``out[destination] = rows``; one copy if the places are neighbours."""
    if isinstance(destination, slice):
        _put(rows, out[destination], convert)
    elif are_consecutive(destination):
        start = int(destination[0]) if len(destination) else 0
        _put(rows, out[start : start + len(destination)], convert)
    elif convert is None:
        _to_places(out, destination, rows)
    else:
        _scatter_converted(out, destination, rows, convert)


def _to_places(out: Array, destination: Integers, rows: Array) -> None:
    """Small rows go as items of one void dtype: NumPy moves those two to eight times as fast as along axes."""
    row_bytes = out.dtype.itemsize * prod(out.shape[1:])
    several = out.ndim > 1 or out.dtype.names is not None
    if several and 0 < row_bytes <= LARGE_ROW and out.flags.c_contiguous and not out.dtype.hasobject:
        item = np.dtype((np.void, row_bytes))
        out.reshape(-1).view(item)[destination] = np.ascontiguousarray(rows, out.dtype).reshape(-1).view(item)
    else:
        out[destination] = rows


def _put(rows: Array, out: Array, convert: Convert | None) -> None:
    if convert is None:
        out[...] = rows
    else:
        convert(rows, out)


def _scatter_converted(out: Array, destination: Integers, rows: Array, convert: Convert) -> None:
    """Large rows straight to their places, small ones some at a time by way of a small array."""
    step = CONVERT_ITEMS // max(1, prod(out.shape[1:]))
    if step <= 1:
        for i, to in enumerate(destination.tolist()):
            convert(rows[i : i + 1], out[to : to + 1])
        return
    for i in range(0, len(destination), step):
        some = destination[i : i + step]
        converted = np.empty((len(some), *out.shape[1:]), out.dtype)
        convert(rows[i : i + step], converted)
        _to_places(out, some, converted)


def matrix_view(columns: Sequence[Array]) -> Array | None:
    """The matrix whose columns these are, one of which is next to the other, as a view; None if there is none."""
    first, step = columns[0], columns[0].dtype.itemsize
    if len(columns) < 2 or first.ndim != 1 or first.dtype.hasobject:
        return None
    begin = first.ctypes.data
    alike = (c.strides == first.strides and c.dtype == first.dtype and c.shape == first.shape for c in columns)
    beside = (c.ctypes.data == begin + i * step for i, c in enumerate(columns))
    if not all(alike) or not all(beside) or first.strides[0] < len(columns) * step:
        return None
    return np.lib.stride_tricks.as_strided(first, (len(first), len(columns)), (first.strides[0], step))


def are_consecutive(numbers: Integers) -> bool:
    """Whether each number is the one before and one."""
    if len(numbers) == 0 or numbers[-1] - numbers[0] != len(numbers) - 1:
        return len(numbers) == 0
    return bool((numbers[1:] - numbers[:-1] == 1).all())
