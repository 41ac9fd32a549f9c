"""Numbers that a step returns beside its metrics: how those of the ranks combine, as far as the graph tells.

A mean over the rows of each rank has a mean over all rows; a sum, a count and a maximum combine otherwise; and of a
number that is computed in another way each rank has its own. Checks measure which of these it may be; the graph chooses
among them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from matex_data.training.reduction.graphs import is_count, is_fixed

LogReduction = Literal["mean", "sum", "max", "min"]

KINDS: tuple[LogReduction, ...] = ("mean", "sum", "max", "min")

_DIRECT: dict[str, LogReduction] = {"Mean": "mean", "Sum": "sum", "Max": "max", "Min": "min"}
_UNCHANGED = ("Identity", "Cast", "Squeeze", "Reshape", "ExpandDims", "StopGradient", "EnsureShape", "PreventGradient")
_LINEAR = ("Mul", "RealDiv", "Div", "DivNoNan", "AddV2", "Add", "Sub", "Neg")


def reductions(logs: Any, counts: Collection[int] = ()) -> dict[str, LogReduction | None]:
    """Return for each number of traced logs how the values of the ranks combine; None if the graph does not tell.

    Parameters
    ----------
    logs : what a step returns, while TensorFlow traces it. Keys of nested dicts count by themselves, as in Keras.
    counts : of rows, and of elements of inputs, where they are static: graphs have constants in their place.
    """
    return {key: _reduction(value, counts) for key, value in flat(logs).items()}


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
    tolerance = 1e-6 * max((abs(value) for value, _ in values if np.isfinite(value)), default=0.0)
    combined = {kind: _combined(arrays, kind) for kind in KINDS}
    return {
        kind for kind, value in combined.items() if np.isclose(value, whole, rtol=1e-5, atol=tolerance, equal_nan=True)
    }


def remaining_reductions(
    found: Sequence[tuple[LogReduction | None, Collection[LogReduction] | None]],
) -> set[LogReduction]:
    """Return the reductions that a number may have; none if nothing tells.

    Parameters
    ----------
    found : by rank, what the graph tells, and what is possible after checks; None: not checked.

    Examples
    --------
    >>> remaining_reductions([("sum", {"mean"}), ("sum", {"mean", "max", "min"})])
    {'mean'}
    >>> remaining_reductions([("sum", None), ("sum", {"sum", "max"})])
    {'sum'}
    """
    checked = [possible for _, possible in found if possible is not None]
    possible = set(KINDS).intersection(*checked)
    told = {kind for kind, _ in found}
    return possible & told if len(told) == 1 and possible & told else possible if checked else set()


def combined_numbers(values: Sequence[tuple[Any, int | None]], kinds: Collection[LogReduction]) -> tuple[Any, bool]:
    """Return a number over all ranks, and whether it is that of rank 0 alone, since the kinds do not tell one number.

    Parameters
    ----------
    values : number or array of each rank, and its rows; None: all ranks have equal numbers.
    kinds : reductions that it may have.
    """
    first, _ = values[0]
    if not all(isinstance(value, np.ndarray) and value.shape == np.shape(first) for value, _ in values):
        return first, not all(np.array_equal(value, first) for value, _ in values)
    found = [_combined(values, kind) for kind in kinds]
    if found and all(np.allclose(value, found[0], rtol=1e-6, atol=0, equal_nan=True) for value in found):
        return found[0], False
    return first, True


def _combined(values: Sequence[tuple[Any, int | None]], kind: LogReduction) -> Any:
    stacked = np.stack([value for value, _ in values])
    if kind == "mean":
        weights = [1 if rows is None else rows for _, rows in values]
        return np.average(stacked.astype(np.float64), axis=0, weights=weights)
    return stacked.sum(0) if kind == "sum" else stacked.max(0) if kind == "max" else stacked.min(0)


def _reduction(value: Any, counts: Collection[int]) -> LogReduction | None:
    if isinstance(value, keras.Variable):
        return "mean"
    if isinstance(value, int | float | np.number):
        return "sum" if value in counts else "mean"
    if not isinstance(value, tf.Tensor) or not hasattr(value, "graph"):  # eager tensors have none
        return None
    return "mean" if is_fixed(value, counts) else _Reader(counts).of(value)


class _Reader:
    """Reader of the reductions that end in tensors of one graph."""

    def __init__(self, counts: Collection[int]) -> None:
        self._counts = counts
        self._known: dict[int, LogReduction | None] = {}

    def of(self, tensor: Any) -> LogReduction | None:
        """Return the reduction that ends in a tensor of one number, which depends on rows."""
        if id(tensor) not in self._known:
            op = tensor.op
            found: LogReduction | None = None
            if self._is_row_count(tensor):
                found = "sum"
            elif op.type in _DIRECT and (tensor.shape.rank == 0 or _is_over_rows(op)):
                inner = self.of(op.inputs[0]) if op.inputs[0].shape.rank == 0 else None
                found = inner or _DIRECT[op.type]
            elif op.type in _UNCHANGED:
                found = self.of(op.inputs[0])
            elif op.type in _LINEAR:
                found = self._of_linear(op)
            self._known[id(tensor)] = found
        return self._known[id(tensor)]

    def _of_linear(self, op: Any) -> LogReduction | None:
        """Return the reduction of a sum, or of a product with something that no sample changes."""
        varying = [tensor for tensor in op.inputs if not is_fixed(tensor, self._counts)]
        divides, adds = "Div" in op.type, op.type in ("AddV2", "Add", "Sub")
        if divides and len(varying) == 2 and self._is_row_count(varying[1]):
            return "mean" if self.of(varying[0]) == "sum" else None
        inner = {self.of(tensor) for tensor in varying}
        if len(inner) != 1 or (not adds and len(varying) != 1) or (divides and varying[0] is not op.inputs[0]):
            return None
        (only,) = inner
        offset = adds and len(varying) < len(op.inputs)
        if only in ("max", "min"):  # a factor may be negative
            return only if offset and op.type != "Sub" else None
        return None if only == "sum" and (offset or self._may_average(op, divides)) else only

    def _may_average(self, op: Any, divides: bool) -> bool:
        """Return whether a constant factor of a product may have the number of rows as divisor."""
        constants = [v for v in map(tf.get_static_value, op.inputs) if v is not None and np.size(v) == 1 and np.all(v)]
        quotients = [(value if divides else 1 / value) / rows for value in constants for rows in self._counts]
        return any(np.isclose(quotient, max(1, np.round(quotient))) for quotient in quotients)

    def _is_row_count(self, tensor: Any) -> bool:
        """Return whether a tensor is a number of rows, or of rows times that of the elements of each."""
        op = tensor.op
        if op.type == "Cast":
            return self._is_row_count(op.inputs[0])
        if op.type == "Prod":
            return self._is_shape(op.inputs[0])
        if op.type == "StridedSlice":
            begin = tf.get_static_value(op.inputs[1])
            return begin is not None and list(begin) == [0] and tensor.shape.rank == 0 and self._is_shape(op.inputs[0])
        return bool(op.type == "Size" or (tensor.shape.rank == 0 and is_count(tensor, self._counts)))

    def _is_shape(self, vector: Any) -> bool:
        """Return whether a vector is the shape of something with rows."""
        packed = vector.op.type == "Pack" and self._is_row_count(vector.op.inputs[0])
        return packed or vector.op.type == "Shape" or is_count(vector, self._counts)


def _is_over_rows(reduction: Any) -> bool:
    axes, rank = tf.get_static_value(reduction.inputs[1]), reduction.inputs[0].shape.rank
    return axes is not None and bool(rank) and bool(np.any(np.mod(axes, rank) == 0))
