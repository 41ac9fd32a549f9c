"""Cut of a model into consecutive stages, by the estimated costs of its calls or after given layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from matex_data._types import Array
from matex_data.errors import PartitionError
from matex_data.training.model_parallel.graph import LayerCall, ModelGraph

UNKNOWN_LENGTH = 32
"""Length that is assumed of an axis of any length, such as that of a text."""
COST_OF_ELEMENT = 32
"""Multiplications in whose time an element of a result is written and read again, forward and back."""
NORMALIZED = 4
"""Results in whose time a normalization reads and writes one: it takes moments, applies them, and the same back.

Both are those of ResNet-20, -29 (bottlenecks), -50, MobileNetV2, InceptionV3 and DenseNet121 on one core. Of ResNet-20,
convolutions, normalizations and activations are 0.52, 0.35 and 0.08 of the time, and 0.58, 0.31 and 0.07 of the cost.
"""
NORMALIZATIONS = (keras.layers.BatchNormalization, keras.layers.GroupNormalization, keras.layers.LayerNormalization)


def estimated_costs(graph: ModelGraph) -> list[float]:
    """Return the cost of each call for a sample, in multiplications.

    Examples
    --------
    >>> import keras
    >>> from matex_data.training.model_parallel.graph import model_graph
    >>> layers = [keras.Input((8,)), keras.layers.Dense(4, use_bias=False), keras.layers.ReLU()]
    >>> estimated_costs(model_graph(keras.Sequential(layers)))
    [160.0, 128.0]
    """
    return [
        _cost(call, [graph.tensors[i] for i in call.inputs], [graph.tensors[i] for i in call.outputs])
        for call in graph.calls
    ]


def elements(tensor: Any) -> int:
    """Return the number of elements of a tensor for a sample."""
    return math.prod(UNKNOWN_LENGTH if size is None else size for size in tensor.shape[1:])


def _cost(call: LayerCall, inputs: list[Any], outputs: list[Any]) -> float:
    operation = call.operation
    written = COST_OF_ELEMENT * sum(map(elements, outputs))
    if not isinstance(operation, keras.layers.Layer) or isinstance(operation, keras.layers.Embedding):
        return float(written)
    if isinstance(operation, NORMALIZATIONS):
        return float(NORMALIZED * written)
    matrices = sum(math.prod(weight.shape) for weight in operation.weights if len(weight.shape) > 1)
    positions = max(map(_positions, inputs if isinstance(operation, keras.layers.RNN) else outputs), default=1)
    products = 0
    if isinstance(operation, keras.layers.MultiHeadAttention | keras.layers.Attention):
        products = 2 * positions * max(map(elements, outputs), default=0)
    return float(written + matrices * positions + products)


def _positions(tensor: Any) -> int:
    """Return the number of vectors of a sample to which a kernel is applied: all elements over the channels."""
    return elements(tensor) // max(1, tensor.shape[-1] or UNKNOWN_LENGTH) if len(tensor.shape) > 2 else 1


TOLERANCE = 0.05
"""Share of the largest cost by which a stage may exceed it, if the cut then sends less."""


@dataclass(frozen=True)
class StagePlan:
    """Calls of a stage, and the tensors that it exchanges with its neighbours.

    Attributes
    ----------
    number : of the stage, from 0.
    inputs : numbers of the inputs of the model that it takes; the first stage takes those that are outputs, too.
    receives, sends : numbers of the tensors from the stage before it, and for the stage behind it.
    """

    number: int
    calls: tuple[LayerCall, ...]
    inputs: tuple[int, ...]
    receives: tuple[int, ...]
    sends: tuple[int, ...]


def cut_by_cost(graph: ModelGraph, costs: Sequence[float], stages: int) -> list[int]:
    """Return the ends of the stages, in calls, that make the costs of the largest stage small.

    Among cuts of nearly the same cost, those across which little is sent are chosen.

    Parameters
    ----------
    costs : of each call, not negative.

    Raises
    ------
    PartitionError : the model has fewer calls than stages.
    """
    if len(graph.calls) < stages:
        raise PartitionError(
            "the model has fewer layers than there are stages",
            expected=f"at least {stages} layers",
            found=f"{len(graph.calls)}",
            remedy="choose fewer stages",
        )
    sums = np.cumsum([0.0, *costs])
    sent = np.array([sum(elements(graph.tensors[i]) for i in tensors) for tensors in _crossing(graph)], np.float64)
    least, _ = _best_ends(stages, len(costs), lambda begin: sums[begin + 1 :] - sums[begin], np.maximum)
    limit = least * (1 + TOLERANCE)

    def sent_within_limit(begin: int) -> Array:
        return np.where(sums[begin + 1 :] - sums[begin] <= limit, sent[begin + 1 :], np.inf)

    return _best_ends(stages, len(costs), sent_within_limit, np.add)[1]


def _best_ends(
    stages: int, calls: int, price: Callable[[int], Array], combined: Callable[[Any, Any], Array]
) -> tuple[float, list[int]]:
    """Return the least combined price of stages, and their ends; of equal ones the latest.

    Parameters
    ----------
    price : returns the prices of a stage from a call on, for each end behind it.
    combined : combines that of a stage with that of the stages behind it.
    """
    rest = np.append(np.full(calls, np.inf), 0.0)  # by the first call that is left
    chosen: list[list[int]] = []  # by stage from the last one on: its end, by the call that it begins with
    for _ in range(stages):
        best, ends = np.full(calls + 1, np.inf), []
        for begin in range(calls):
            totals = combined(price(begin), rest[begin + 1 :])[::-1]
            ends.append(calls - int(np.argmin(totals)))
            best[begin] = totals.min()
        chosen.append(ends)
        rest = best
    found = [0]
    for ends in reversed(chosen):
        found.append(ends[found[-1]])
    return float(rest[0]), found[1:]


def cut_after(graph: ModelGraph, names: Sequence[str], stages: int) -> list[int]:
    """Return the ends of the stages, in calls, after the last call of each of these layers or nested models.

    Raises
    ------
    PartitionError : a name is unknown or given twice, or their number is not that of the cuts.
    """
    last = {name: i + 1 for i, call in enumerate(graph.calls) for name in call.names}
    unknown = [name for name in names if name not in last]
    if unknown or len(names) != stages - 1:
        raise PartitionError(
            "split_after does not name the layers after which the model is cut",
            expected=f"{stages - 1} names of layers for {stages} stages, such as {list(last)[:4]}",
            found=f"{list(names)}" + (f", of which the model has no {unknown}" if unknown else ""),
            remedy="name a layer of the model for each cut, or leave split_after out",
        )
    ends = sorted(last[name] for name in names)
    if len({0, *ends, len(graph.calls)}) != stages + 1:
        raise PartitionError(
            "a stage would be empty",
            expected="layers at which something of the model ends, and something follows",
            found=f"split_after={list(names)}, which cuts after calls {ends} of {len(graph.calls)}",
            remedy="name other layers",
        )
    return [*ends, len(graph.calls)]


def stage_plans(graph: ModelGraph, ends: Sequence[int]) -> list[StagePlan]:
    """Return the stages of a model that end after these calls.

    Examples
    --------
    >>> import keras
    >>> from matex_data.training.model_parallel.graph import model_graph
    >>> x = keras.Input((4,))
    >>> y = keras.layers.Dense(4, name="first")(x)
    >>> model = keras.Model(x, keras.layers.Add(name="second")([x, y]))
    >>> [(plan.receives, plan.sends) for plan in stage_plans(model_graph(model), [1, 2])]
    [((), (1,)), ((1,), ())]
    """
    crossing = _crossing(graph)
    plans = []
    for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        calls = graph.calls[begin:end]
        last = number == len(ends) - 1
        taken = {tensor for call in calls for tensor in call.inputs} | set(graph.outputs if last else ())
        inputs = tuple(tensor for tensor in graph.inputs if tensor in taken)
        plans.append(StagePlan(number, calls, inputs, crossing[begin] if begin else (), () if last else crossing[end]))
    return plans


def _crossing(graph: ModelGraph) -> list[tuple[int, ...]]:
    """Return for each position between calls the tensors that are computed before and needed behind it.

    Inputs of the model are not among them: each stage has them.
    """
    made = {tensor: i for i, call in enumerate(graph.calls) for tensor in call.outputs}
    used = {tensor: i for i, call in enumerate(graph.calls) for tensor in call.inputs}
    used |= dict.fromkeys(graph.outputs, len(graph.calls))
    begins: list[list[int]] = [[] for _ in range(len(graph.calls) + 1)]
    for tensor, i in made.items():
        begins[i + 1].append(tensor)
    alive: dict[int, None] = {}
    found = []
    for position, new in enumerate(begins):
        alive |= dict.fromkeys(new)
        alive = {tensor: None for tensor in alive if used.get(tensor, -1) >= position}
        found.append(tuple(alive))
    return found
