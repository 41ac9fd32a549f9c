"""Sums over all ranks: of integers exactly; of float32 that are sent in 16 bits whole, or a section on each rank."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import tensorflow as tf

from matex_data._types import Array
from matex_data.timeline import timeline
from matex_data.training.comm.collectives import CALL_BYTES, Collectives, segments

WireDtype = Literal["float16", "bfloat16"]

WIRE_DTYPES = {name: np.dtype(tf.as_dtype(name).as_numpy_dtype) for name in ("float16", "bfloat16")}
"""NumPy's dtype of each wire dtype."""
CONVERTED = 1 << 20
"""Values that are converted and added at a time, 4 MB, which fit into a cache.

One conversion takes 50 us in TensorFlow, whatever its size: one for each rank was 0.2 s a bucket on 4,096 ranks.
"""


class IntegerOverflow(tf.errors.InvalidArgumentError, ValueError):  # type: ignore[misc]  # TensorFlow has no types
    """Sum that its dtype does not hold. In graphs TensorFlow takes a ``ValueError`` for its own error."""


def sum_integers(collectives: Collectives, flat: Array) -> None:
    """Sum integers over up to 2**31 ranks, in place. *Collective*; all ranks have just met.

    Parameters
    ----------
    flat : array of one dimension, of the same size and dtype on every rank.

    Raises
    ------
    IntegerOverflow : on all ranks, if a sum does not fit into the dtype.
    """
    limits, bits = np.iinfo(flat.dtype), 4 * flat.itemsize
    low = (1 << bits) - 1
    halves = np.stack([flat & low, flat >> bits]).astype(np.int64)
    collectives.reduce(halves.reshape(-1), met=True)
    upper = halves[1] + (halves[0] >> bits)
    if flat.size and not limits.min >> bits <= upper.min() <= upper.max() <= limits.max >> bits:
        raise IntegerOverflow(
            *(None, None, f"a sum over the ranks does not fit into {flat.dtype}: cast the tensors first (tf.cast)")
        )
    flat[:] = (upper << bits | halves[0] & low).astype(flat.dtype)


def sum_rounded(collectives: Collectives, flat: Array, wire_dtype: np.dtype[Any]) -> None:
    """Sum an array over all ranks, in place; send its values and their sums as ``wire_dtype``. *Collective*.

    Each rank adds a section of the array in float32. So values are rounded once before and once after the addition,
    whatever the number of ranks, and all ranks have the same bits.

    Parameters
    ----------
    flat : float32 array of one dimension, of the same size on every rank. Values beyond the range of ``wire_dtype``
        become infinite.
    """
    span = timeline.span(f"sum of {flat.nbytes:,} bytes as {wire_dtype.name}", "communication")
    with span, np.errstate(over="ignore", invalid="ignore"):
        for segment in segments(flat, collectives.slice_bytes):
            total = _sum_of_rows(collectives.exchange(_cast(segment, wire_dtype)))
            segment[...] = _cast(collectives.gather(_cast(total, wire_dtype)), np.float32)


def scattered_rounded(collectives: Collectives, rows: Array, wire_dtype: np.dtype[Any]) -> Array:
    """Return row r of the sum of the arrays of all ranks on rank r, sent as ``wire_dtype``. *Collective*.

    The sum is rounded, too, though it is not sent: it has the bits that ``sum_rounded`` would give it.

    Parameters
    ----------
    rows : float32 array of shape (ranks, elements), of the same shape on every rank.
    """
    out = np.empty(rows.shape[1], np.float32)
    step = max(1, CALL_BYTES // (len(rows) * wire_dtype.itemsize))
    for start in range(0, len(out), step):
        section = np.ascontiguousarray(rows[:, start : start + step])
        span = timeline.span(f"sum of {section.nbytes:,} bytes as {wire_dtype.name}, scattered", "communication")
        with span, np.errstate(over="ignore", invalid="ignore"):
            total = _sum_of_rows(collectives.exchange(_cast(section.reshape(-1), wire_dtype)))
            out[start : start + step] = _cast(_cast(total, wire_dtype), np.float32)
    return out


def _sum_of_rows(sections: Array) -> Array:
    """Return the sum over the first axis, float32[elements], of 16-bit values of shape (ranks, elements)."""
    total = np.empty(sections.shape[1], np.float32)
    step = max(1, CONVERTED // len(sections))
    for start in range(0, len(total), step):
        columns = _cast(sections[:, start : start + step], np.float32)
        np.add.reduce(columns, axis=0, out=total[start : start + step], initial=-0.0)  # 0.0 would turn -0.0 into 0.0
    return total


def _cast(array: Array, dtype: Any) -> Array:
    # NumPy takes 4 to 7 ns to convert a value from or to float16, TensorFlow 1 ns, and NumPy 0.5 ns for bfloat16.
    if np.float16 in (array.dtype, dtype) and tf.executing_eagerly():  # not in a session of TensorFlow 1
        with tf.device("CPU:0"):
            return np.asarray(tf.cast(array, dtype))
    return array.astype(dtype)
