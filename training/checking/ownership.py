"""Graph of a traced step: what depends on this rank's rows, and what is decided by variables alone.

All ranks hold one model only if what they write is equal on all of them. So the graph is followed from the batch on:
whatever is computed from it is the rank's own, until a reduction over the ranks replaces it.

A term that acts in every tenth step would be missed by checks of other steps. Whether it acts is known before the step,
since a variable tells it: a counter of steps, a flag. So a step that decides in a new way is checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from matex_data.training.exact.attributes import kept_variables
from matex_data.training.exact.step import STAND_IN_GUARD
from matex_data.training.reduction.ops import REDUCED

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
    """Dependence of each tensor of a graph on this rank's rows.

    Parameters
    ----------
    graph : function graph of a step.
    batch : its inputs that hold the batch.
    """

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


_READS = ("ReadVariableOp", "Const", "Placeholder", "VarHandleOp")
_ASSIGNS = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
_CHOICES = ("Case", "StatelessCase")


class Decisions:
    """Truth values, and numbers that choose a branch, that a step computes from variables which all ranks have alike.

    Parameters
    ----------
    graph : function graph of a step without communication.
    own : its inputs that may differ between the ranks: the batch, and the handles of such variables.
    variables : those of TensorFlow that the step uses.

    Attributes
    ----------
    any_known : there are such values.
    """

    def __init__(self, graph: Any, own: Iterable[Any], variables: Sequence[Any]) -> None:
        ownership = Ownership(graph, own)
        found = [tensor for op in graph.get_operations() for tensor in _decided(op) if not ownership.of(tensor).rows]
        sources = {tensor.name: _sources(tensor) for tensor in found}
        known = {name: of_tensor for name, of_tensor in sources.items() if of_tensor is not None}
        self._seen: set[tuple[int, int]] = set()
        self._written: list[Any] = []
        self._evaluate: Any = None
        self.any_known = bool(known)
        if known:
            ops = {op.name: op for of_tensor in known.values() for op in of_tensor}
            outside = {inner.name: outer for outer, inner in graph.captures}
            handles = {id(outside.get(op.inputs[0].name)) for op in ops.values() if op.type in _ASSIGNS}
            self._written = [v for v in variables if id(v.handle) in handles]
            self._variables = variables  # whose handles the function has
            self._evaluate = _function(graph, ops, outside, list(known))

    def new(self) -> bool:
        """Return whether the next step decides in a way in which no checked step did."""
        return not self._values() <= self._seen

    def note(self) -> None:
        """Note that a step which decides so is checked."""
        self._seen |= self._values()

    def _values(self) -> set[tuple[int, int]]:
        if self._evaluate is None:
            return set()
        with kept_variables(self._written):
            return {(i, int(value)) for i, value in enumerate(self._evaluate())}


def _decided(op: Any) -> list[Any]:
    """Return the tensors of an operation by which a step may decide."""
    chosen = [op.inputs[0]] if op.type in _CHOICES else []
    return chosen + [x for x in op.outputs if x.dtype == tf.bool and x.shape.rank == 0 and op.type not in _READS]


def _sources(tensor: Any) -> list[Any] | None:
    """Return the operations that compute a tensor; None if one of them has effects, or other sources than variables."""
    pending, found = [tensor.op], dict[str, Any]()
    while pending:
        op = pending.pop()
        if op.name in found:
            continue
        if op.op_def.is_stateful and op.type not in (*_READS, *_ASSIGNS):
            return None
        found[op.name] = op
        pending += [x.op for x in op.inputs] + _writes_before(op)
    return list(found.values()) if any(op.type == "ReadVariableOp" for op in found.values()) else None


def _writes_before(op: Any) -> list[Any]:
    """Return the writes of a variable that come before an operation reads or writes it."""
    return [other for other in op.control_inputs if other.type in _ASSIGNS and other.inputs[0] is op.inputs[0]]


def _function(graph: Any, ops: dict[str, Any], outside: dict[str, Any], names: list[str]) -> Any:
    """Return a function that computes tensors of a graph from the present values of variables."""
    whole = graph.as_graph_def(add_shapes=False)
    definition = tf.compat.v1.GraphDef(versions=whole.versions, library=whole.library)
    for node in whole.node:
        if node.name in ops:
            kept = {f"^{other.name}" for other in _writes_before(ops[node.name])}
            inputs = [name for name in node.input if not name.startswith("^") or name in kept]
            copy = definition.node.add()
            copy.CopyFrom(node)
            copy.ClearField("input")
            copy.input.extend(inputs)
    given = {name: tensor for name, tensor in outside.items() if name.partition(":")[0] in ops}

    def evaluate() -> Any:
        inside = {name: tf.identity(tensor) for name, tensor in given.items()}
        return tf.graph_util.import_graph_def(definition, input_map=inside, return_elements=names)

    return tf.function(evaluate, autograph=False)
