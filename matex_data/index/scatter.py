"""Copy rows to their destinations in an output array, with conversion where the stored values differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from matex_data._types import Array, Bytes, Integers

CONVERT_ITEMS = 1 << 15  # converted in one go: their temporary arrays stay in the processor's cache
LARGE_ROW = 4096  # bytes

RowIndices = Integers | slice
"""Row numbers; a slice has both a start and a stop."""

Convert = Callable[[Array, Array], None]
"""Callable that writes the field's values for stored rows (first array) to rows of a second array; can be pickled."""


def scatter(out: Array, destination: RowIndices, rows: Array, convert: Convert | None = None) -> None:
    """Assign ``out[destination] = rows``, in a single copy if the destinations are consecutive.

    Parameters
    ----------
    out : [n, ...], output array.
    destination : indices of ``out``, one for each row.
    rows : [k, ...], rows as they are stored.
    convert : writes the values of stored rows to rows of ``out``; None: assign them.

    Examples
    --------
    >>> out = np.zeros(4, int)
    >>> scatter(out, np.array([3, 0]), np.array([30, 10]))
    >>> out.tolist()
    [10, 0, 0, 30]
    """
    if isinstance(destination, slice):
        _assign(rows, out[destination], convert)
    elif are_consecutive(destination):
        start = int(destination[0]) if len(destination) else 0
        _assign(rows, out[start : start + len(destination)], convert)
    elif convert is None:
        _assign_indexed(out, destination, rows)
    else:
        _convert_indexed(out, destination, rows, convert)


def _assign(rows: Array, out: Array, convert: Convert | None) -> None:
    if convert is None:
        out[...] = rows
    else:
        convert(rows, out)


def _assign_indexed(out: Array, destination: Integers, rows: Array) -> None:
    """Assign by index. Small rows are copied as single void items, which is two to eight times as fast in NumPy."""
    row_bytes = out.dtype.itemsize * prod(out.shape[1:])
    has_items = out.ndim > 1 or out.dtype.names is not None
    if has_items and 0 < row_bytes <= LARGE_ROW and out.flags.c_contiguous and not out.dtype.hasobject:
        item = np.dtype((np.void, row_bytes))
        out.reshape(-1).view(item)[destination] = np.ascontiguousarray(rows, out.dtype).reshape(-1).view(item)
    else:
        out[destination] = rows


def _convert_indexed(out: Array, destination: Integers, rows: Array, convert: Convert) -> None:
    """Convert large rows in place, and small ones in groups by way of a small temporary array."""
    step = CONVERT_ITEMS // max(1, prod(out.shape[1:]))
    if step <= 1:
        for i, to in enumerate(destination.tolist()):
            convert(rows[i : i + 1], out[to : to + 1])
        return
    for i in range(0, len(destination), step):
        group = destination[i : i + step]
        converted = np.empty((len(group), *out.shape[1:]), out.dtype)
        convert(rows[i : i + step], converted)
        _assign_indexed(out, group, converted)


def matrix_view(columns: Sequence[Array]) -> Array | None:
    """Return a view of the matrix whose adjacent columns these 1-D arrays are; None if they are not adjacent."""
    first, step = columns[0], columns[0].dtype.itemsize
    if len(columns) < 2 or first.ndim != 1 or first.dtype.hasobject:
        return None
    begin = first.ctypes.data
    equal = (c.strides == first.strides and c.dtype == first.dtype and c.shape == first.shape for c in columns)
    adjacent = (c.ctypes.data == begin + i * step for i, c in enumerate(columns))
    if not all(equal) or not all(adjacent) or first.strides[0] < len(columns) * step:
        return None
    return np.lib.stride_tricks.as_strided(first, (len(first), len(columns)), (first.strides[0], step))


def are_consecutive(numbers: Integers) -> bool:
    """Return whether each number is its predecessor plus one."""
    if len(numbers) == 0 or numbers[-1] - numbers[0] != len(numbers) - 1:
        return len(numbers) == 0
    return bool((numbers[1:] - numbers[:-1] == 1).all())


def as_bytes(array: Array) -> Bytes:
    """Return the memory of a contiguous array as uint8."""
    return array.reshape(-1).view(np.uint8)
