"""Numbers that a step returns beside its metrics: how those of the ranks combine, as far as the graph tells.

A mean over the rows of each rank has a mean over all rows; a sum, a count and a maximum combine otherwise; and of a
number that is computed in another way each rank has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from matex_data.training.reduction.graphs import is_fixed

LogReduction = Literal["mean", "sum", "max", "min"]

KINDS: tuple[LogReduction, ...] = ("mean", "sum", "max", "min")

_DIRECT: dict[str, LogReduction] = {"Mean": "mean", "Sum": "sum", "Max": "max", "Min": "min"}
_UNCHANGED = ("Identity", "Cast", "Squeeze", "Reshape", "ExpandDims", "StopGradient", "EnsureShape", "PreventGradient")
_LINEAR = ("Mul", "RealDiv", "Div", "DivNoNan", "AddV2", "Add", "Sub", "Neg")


def reductions(logs: Any) -> dict[str, LogReduction | None]:
    """Return for each number of traced logs how the values of the ranks combine; None if the graph does not tell.

    Parameters
    ----------
    logs : what a step returns, while TensorFlow traces it. Keys of nested dicts count by themselves, as in Keras.
    """
    return {key: _reduction(value) for key, value in flat(logs).items()}


def flat(logs: Any) -> dict[str, Any]:
    """Return the values of logs that are no dicts, by the innermost key."""
    found: dict[str, Any] = {}
    for key, value in logs.items() if isinstance(logs, dict) else ():
        found.update(flat(value) if isinstance(value, dict) else {key: value})
    return found


def possible_reductions(values: Sequence[tuple[float, int]], whole: float) -> set[LogReduction]:
    """Return the reductions by which the numbers of shards give that of the batch, up to rounding; without rows, all.

    Parameters
    ----------
    values : number of each shard, and its rows.
    whole : number of the batch.

    Examples
    --------
    >>> possible_reductions([(1.0, 2), (4.0, 1)], 2.0)
    {'mean'}
    >>> sorted(possible_reductions([(0.0, 0), (0.0, 0)], float("nan")))
    ['max', 'mean', 'min', 'sum']
    """
    if not any(rows for _, rows in values):
        return set(KINDS)
    arrays = [(np.asarray(value, np.float64), rows) for value, rows in values]
    tolerance = 1e-6 * max(abs(value) for value, _ in values)
    combined = {kind: combined_numbers(arrays, kind)[0] for kind in KINDS}
    return {
        kind for kind, value in combined.items() if np.isclose(value, whole, rtol=1e-5, atol=tolerance, equal_nan=True)
    }


def combined_numbers(values: Sequence[tuple[Any, int | None]], kind: LogReduction | None) -> tuple[Any, bool]:
    """Return a number over all ranks, and whether it is that of rank 0 alone.

    Parameters
    ----------
    values : number or array of each rank, and its rows; None: all ranks have equal numbers.
    """
    arrays = [value for value, _ in values]
    if not all(isinstance(array, np.ndarray) and array.shape == arrays[0].shape for array in arrays):
        return arrays[0], False
    if kind == "mean":
        weights = [1 if rows is None else rows for _, rows in values]
        return np.average([array.astype(np.float64) for array in arrays], axis=0, weights=weights), False
    if kind is not None:
        stacked = np.stack(arrays)
        return stacked.sum(0) if kind == "sum" else stacked.max(0) if kind == "max" else stacked.min(0), False
    return arrays[0], not all(np.allclose(array, arrays[0], rtol=1e-6, atol=0, equal_nan=True) for array in arrays)


def _reduction(value: Any) -> LogReduction | None:
    if not isinstance(value, tf.Tensor) or not hasattr(value, "graph"):  # eager tensors have none
        return None
    return "mean" if is_fixed(value) else _of(value, {})


def _of(tensor: Any, known: dict[int, LogReduction | None]) -> LogReduction | None:
    """Return the reduction that ends in a tensor of one number, which depends on rows."""
    if id(tensor) not in known:
        op = tensor.op
        found: LogReduction | None = None
        if _is_row_count(tensor):
            found = "sum"
        elif op.type in _DIRECT:
            inner = _of(op.inputs[0], known) if op.inputs[0].shape.rank == 0 else None
            found = inner or _DIRECT[op.type]
        elif op.type in _UNCHANGED:
            found = _of(op.inputs[0], known)
        elif op.type in _LINEAR:
            found = _of_linear(op, known)
        known[id(tensor)] = found
    return known[id(tensor)]


def _of_linear(op: Any, known: dict[int, LogReduction | None]) -> LogReduction | None:
    """Return the reduction of a sum, or of a product with something that no sample changes."""
    varying = [tensor for tensor in op.inputs if not is_fixed(tensor)]
    divides, adds = "Div" in op.type, op.type in ("AddV2", "Add", "Sub")
    if divides and len(varying) == 2 and _is_row_count(varying[1]):
        return "mean" if _of(varying[0], known) == "sum" else None
    inner = {_of(tensor, known) for tensor in varying}
    if len(inner) != 1 or (not adds and len(varying) != 1) or (divides and varying[0] is not op.inputs[0]):
        return None
    (only,) = inner
    offset = adds and len(varying) < len(op.inputs)
    if only in ("max", "min"):  # a factor may be negative
        return only if offset and op.type != "Sub" else None
    return None if only == "sum" and offset else only


def _is_row_count(tensor: Any) -> bool:
    """Return whether a tensor is a number of rows: an element of the shape of something, or all of its elements."""
    op = tensor.op
    if op.type == "Cast":
        return _is_row_count(op.inputs[0])
    if op.type == "StridedSlice":
        begin = tf.get_static_value(op.inputs[1])
        return op.inputs[0].op.type == "Shape" and begin is not None and list(begin) == [0] and tensor.shape.rank == 0
    return bool(op.type == "Size")
