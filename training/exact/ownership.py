"""Graph of a traced step: what depends on this rank's rows.

All ranks hold one model only if what they write is equal on all of them. So the graph is followed from the batch on:
whatever is computed from it is the rank's own, until a reduction over the ranks replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from matex_data.training.reduction.ops import REDUCED

STAND_IN_GUARD = "matex_stand_in_guard"
"""Name of the condition by which a rank without rows puts back what its stand-in row has changed."""
_WRITES = ("Assign", "ResourceApply", "ResourceScatter", "ScatterNdUpdate")
"""Types of operations that write a variable, or beginnings of them."""


class Own(NamedTuple):
    """Sources of a tensor.

    Attributes
    ----------
    rows : it is computed from this rank's rows.
    averages : it is computed from an average over the ranks.
    """

    rows: bool
    averages: bool


class Ownership:
    """Dependence of each tensor of a graph on this rank's rows."""

    def __init__(self, graph: Any, batch: Iterable[Any]) -> None:
        self._own: dict[int, Own] = {id(tensor): Own(True, False) for tensor in batch}
        self._operations = list(graph.get_operations())
        for op in self._operations:
            if op.type != "Placeholder":
                self._follow(op)

    def _follow(self, op: Any) -> None:
        inputs = [self.of(tensor) for tensor in op.inputs]
        if op.type == "IdentityN":
            self._own.update(zip(map(id, op.outputs), inputs, strict=True))
            return
        reduced = REDUCED in op.name and op.type in ("PyFunc", "EagerPyFunc")
        union = Own(not reduced and any(own.rows for own in inputs), reduced or any(own.averages for own in inputs))
        self._own.update((id(output), union) for output in op.outputs)

    def of(self, tensor: Any) -> Own:
        """Return what a tensor of the graph is computed from."""
        return self._own.get(id(tensor), Own(False, False))

    def writes(self) -> Iterator[tuple[Any, Own]]:
        """Yield handles of variables that the graph writes, and what the values are computed from."""
        for op in self._operations:
            if STAND_IN_GUARD not in op.name:
                values = _union(self.of(tensor) for tensor in op.inputs if tensor.dtype.name != "resource")
                yield from ((op.inputs[i], values) for i in _written(op))

    def guarded(self) -> Iterator[Any]:
        """Yield handles of variables that a rank without rows puts back."""
        for op in self._operations:
            if STAND_IN_GUARD in op.name:
                yield from (op.inputs[i] for i in _written(op))


def _written(op: Any) -> set[int]:
    """Return the positions of the inputs of an operation that are variables that it writes."""
    handles = {i for i, tensor in enumerate(op.inputs) if tensor.dtype.name == "resource"}
    if not handles or op.type.startswith(_WRITES):
        return handles
    bodies = [op.graph._get_function(name) for name in _functions(op)]
    if any(not hasattr(body, "graph") for body in bodies):
        return handles  # what the function does is not known
    first = len(op.inputs) - len(bodies[0].graph.inputs) if bodies else 0  # a condition comes before the arguments
    inner = [(body.graph, {id(tensor): i for i, tensor in enumerate(body.graph.inputs)}) for body in bodies]
    return {
        first + positions[id(inside.inputs[i])]
        for graph, positions in inner
        for inside in graph.get_operations()
        for i in _written(inside)
        if id(inside.inputs[i]) in positions
    }


def _functions(op: Any) -> list[str]:
    """Return the names of the functions that an operation calls."""
    attributes = op.node_def.attr.values()
    return [a.func.name for a in attributes if a.HasField("func")] + [f.name for a in attributes for f in a.list.func]


def _union(owns: Iterable[Own]) -> Own:
    owns = list(owns)
    return Own(any(own.rows for own in owns), any(own.averages for own in owns))


def written_alike(batch: Any, variables: Sequence[Any]) -> set[int]:
    """Return the identities of Keras variables to which the graph that is traced writes nothing of a batch's rows.

    None of them in eager code, which has no graph.
    """
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or not variables:
        return set()
    outside = {id(inner): outer for outer, inner in graph.captures}
    rows = [leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if tf.is_tensor(leaf)]
    writes = [(id(outside.get(id(handle))), source.rows) for handle, source in Ownership(graph, rows).writes()]
    alike = {handle for handle, _ in writes} - {handle for handle, of_rows in writes if of_rows}
    return {id(v) for v in variables if id(v.value.handle) in alike}
