"""Exact sums of integers: in 64 bits, by halves where these may be too few; an error where the dtype is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import tensorflow as tf

HALF = 32
LOW_HALF = (1 << HALF) - 1


def exact_sums(add: Callable[[list[Any]], list[Any]], tensors: Sequence[Any]) -> list[Any]:
    """Return sums over the ranks of integers and other tensors. *Collective*.

    Parameters
    ----------
    add : sums each of several tensors over the ranks, in its dtype; None stays None.
    tensors : of up to 2**31 ranks.

    Raises
    ------
    tf.errors.InvalidArgumentError : a sum of integers does not fit into their dtype; in a graph, when it runs.
    """
    split = [_addends(tensor) for tensor in tensors]
    sums = iter(add([addend for addends in split for addend in addends]))
    return [
        _joined(tensor.dtype, totals) if _is_integer(tensor) else totals[0]
        for tensor, addends in zip(tensors, split, strict=True)
        for totals in [list(islice(sums, len(addends)))]
    ]


def _is_integer(tensor: Any) -> bool:
    return isinstance(tensor, tf.Tensor) and tensor.dtype.is_integer


def _addends(tensor: Any) -> list[Any]:
    """Return what is to be summed of a tensor: of 64-bit integers the lower and the upper half, as int64."""
    if not _is_integer(tensor):
        return [tensor]
    if tensor.dtype.size < 8:
        return [tf.cast(tensor, tf.int64)]
    half = tf.constant(HALF, tensor.dtype)
    low = tf.bitwise.bitwise_and(tensor, tf.constant(LOW_HALF, tensor.dtype))
    return [tf.cast(low, tf.int64), tf.cast(tf.bitwise.right_shift(tensor, half), tf.int64)]


def _joined(dtype: tf.DType, totals: list[Any]) -> Any:
    """Return the sum in a dtype."""
    if len(totals) == 1:
        (total,) = totals
        with tf.control_dependencies(_checks(total, dtype.min, dtype.max, dtype)):
            return tf.cast(tf.identity(total), dtype)
    low, high = totals
    high += tf.bitwise.right_shift(low, tf.constant(HALF, tf.int64))
    with tf.control_dependencies(_checks(high, dtype.min >> HALF, dtype.max >> HALF, dtype)):
        upper = tf.bitwise.left_shift(high, tf.constant(HALF, tf.int64))
    total = tf.bitwise.bitwise_or(upper, tf.bitwise.bitwise_and(low, tf.constant(LOW_HALF, tf.int64)))
    return tf.bitcast(total, dtype)


def _checks(values: Any, least: int, most: int, dtype: tf.DType) -> list[Any]:
    """Return assertions that values are within limits; eagerly, raise the error."""
    text = f"a sum over the ranks does not fit into {dtype.name}: cast the tensors first (tf.cast), to int64 or a float"
    limits = tf.constant(least, tf.int64), tf.constant(most, tf.int64)
    checks = [
        tf.debugging.assert_greater_equal(values, limits[0], text, summarize=1),
        tf.debugging.assert_less_equal(values, limits[1], text, summarize=1),
    ]
    return [check for check in checks if check is not None]
