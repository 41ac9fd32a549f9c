"""Buckets: tensors that are reduced in one call, and their layout in one flat buffer. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from matex_data._types import Array

ALIGNMENT = 64
"""Alignment of every tensor in a buffer, in bytes; TensorFlow adopts aligned arrays without a copy."""
BUCKET_BYTES = 4 << 20
"""Size from which a bucket is closed, in bytes; larger tensors fill a bucket of their own."""


@dataclass(frozen=True)
class Bucket:
    """Tensors that are reduced in one call.

    Parameters
    ----------
    positions : indices of the tensors in the caller's list, in the order of the buffer.
    dtype : dtype of the sum.
    """

    positions: tuple[int, ...]
    dtype: np.dtype[Any]


def sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which values of ``dtype`` are summed: float32 for floats of 16 bits and less."""
    if dtype.itemsize < 4 and (dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))):
        return np.dtype(np.float32)
    return np.dtype(dtype)


def plan_buckets(
    sizes: Sequence[int], dtypes: Sequence[np.dtype[Any]], bucket_bytes: int = BUCKET_BYTES
) -> list[Bucket]:
    """Assign tensors to buckets, the last tensors first.

    Back-propagation computes the gradients of the last layers first; their reduction overlaps with the rest of it.

    Parameters
    ----------
    sizes : number of elements of each tensor.
    dtypes : dtype of each tensor.
    bucket_bytes : size from which a bucket is closed.
    """
    buckets: list[Bucket] = []
    open_buckets: dict[np.dtype[Any], tuple[list[int], int]] = {}
    for position in reversed(range(len(sizes))):
        dtype = sum_dtype(dtypes[position])
        positions, filled = open_buckets.pop(dtype, ([], 0))
        positions.append(position)
        filled += sizes[position] * dtype.itemsize
        if filled >= bucket_bytes:
            buckets.append(Bucket(tuple(positions), dtype))
        else:
            open_buckets[dtype] = (positions, filled)
    return buckets + [Bucket(tuple(positions), dtype) for dtype, (positions, _) in open_buckets.items()]


def pack(arrays: Sequence[Array], dtype: np.dtype[Any], weight: float | None = None) -> tuple[Array, list[Array]]:
    """Copy arrays into one flat buffer, multiplied by ``weight``.

    Parameters
    ----------
    dtype : dtype of the buffer.
    weight : factor; None: 1. With 0 the copies are exact zeros, also of infinities and NaN.

    Returns
    -------
    flat : buffer of one dimension; zeros fill the gaps of its alignment.
    views : view of the buffer for each array, in its shape.
    """
    step = max(1, ALIGNMENT // dtype.itemsize)
    starts = np.cumsum([0] + [-(-array.size // step) * step for array in arrays])
    flat = _aligned(int(starts[-1]), dtype)
    views = []
    for array, start, end in zip(arrays, starts[:-1], starts[1:], strict=True):
        view = flat[start : start + array.size]
        flat[start + array.size : end] = 0
        _scale(array.reshape(-1), weight, view)
        views.append(view.reshape(array.shape))
    return flat, views


def _scale(array: Array, weight: float | None, out: Array) -> None:
    if weight == 0:
        out[:] = 0
    elif weight is None or weight == 1:
        out[:] = array
    else:
        np.multiply(array.astype(out.dtype, copy=False), weight, out=out)


def _aligned(size: int, dtype: np.dtype[Any]) -> Array:
    raw = np.empty(size * dtype.itemsize + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size * dtype.itemsize].view(dtype)
