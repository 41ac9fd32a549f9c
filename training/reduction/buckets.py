"""Buckets: tensors that are reduced in one call. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from matex_data._types import Array

BUCKET_BYTES = 4 << 20
"""Size from which a bucket of small tensors is closed, in bytes."""
ALONE_BYTES = 512 << 10
"""Size from which a tensor has a bucket of its own: packing copies it twice, another operation takes some 0.1 ms."""


@dataclass(frozen=True)
class Bucket:
    """Tensors that are reduced in one call.

    Parameters
    ----------
    positions : indices of the tensors in the caller's list, in the order in which they are packed.
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
    sizes: Sequence[int],
    dtypes: Sequence[np.dtype[Any]],
    bucket_bytes: int = BUCKET_BYTES,
    alone_bytes: int = ALONE_BYTES,
) -> list[Bucket]:
    """Assign tensors to buckets, the last tensors first.

    Back-propagation computes the gradients of the last layers first; their reduction overlaps with the rest of it.

    Parameters
    ----------
    sizes : number of elements of each tensor.
    dtypes : dtype of each tensor.
    """
    buckets: list[Bucket] = []
    open_buckets: dict[np.dtype[Any], tuple[list[int], int]] = {}
    for position in reversed(range(len(sizes))):
        dtype = sum_dtype(dtypes[position])
        nbytes = sizes[position] * dtype.itemsize
        if nbytes >= alone_bytes:
            buckets.append(Bucket((position,), dtype))
            continue
        positions, filled = open_buckets.pop(dtype, ([], 0))
        positions.append(position)
        filled += nbytes
        if filled >= bucket_bytes:
            buckets.append(Bucket(tuple(positions), dtype))
        else:
            open_buckets[dtype] = (positions, filled)
    return buckets + [Bucket(tuple(positions), dtype) for dtype, (positions, _) in open_buckets.items()]


def scaled(array: Array, weight: float | None, out: Array) -> None:
    """Write ``weight * array`` to ``out``, in its dtype.

    Parameters
    ----------
    weight : factor; None: 1. With 0 the result is exact zeros, also of infinities and NaN.
    """
    if weight == 0:
        out[...] = 0
    elif weight is None or weight == 1:
        out[...] = array
    else:
        np.multiply(array.astype(out.dtype, copy=False), weight, out=out)
