"""Decisions of a step: truth values and branches that variables alone determine.

A term that acts in every tenth step would be missed by checks of other steps. Whether it acts is known before the step,
since a variable tells it: a counter of steps, a flag. So a step that decides in a new way is checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from matex_data.training.exact.attributes import kept_variables
from matex_data.training.exact.ownership import Ownership

_READS = ("ReadVariableOp", "Const", "Placeholder", "VarHandleOp")
_ASSIGNS = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
_CHOICES = ("Case", "StatelessCase")


class Decisions:
    """Truth values, and numbers that choose a branch, that a step computes from variables which all ranks have alike.

    Parameters
    ----------
    graph : function graph of a step without communication.
    own : its inputs that may differ between the ranks: the batch, and the handles of such variables.
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
