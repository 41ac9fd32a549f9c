"""The axis of the samples, followed through a graph and the functions that it calls, as sharding propagation does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from matex_data.training.keras_api import NAME_OF_GRADIENT, gradient_registry
from matex_data.training.proof import contractions, effects, elementwise, lists, reductions, selection, shapes, windows
from matex_data.training.proof.axes import (
    Independent,
    Listed,
    Mixed,
    PerSample,
    Reason,
    RowCount,
    Shape,
    State,
    Total,
    join,
)
from matex_data.training.proof.rules import RULES, VALUES, Node, static_values
from matex_data.training.proof.sizes import ROWS, Size, name_size
from matex_data.training.proof.values import SECTIONS, evaluate, sections

WITH_RULES = (contractions, effects, elementwise, lists, reductions, selection, shapes, windows)
"""Modules that register rules when they are imported."""
STATISTICS = "matex_batch_statistics"
"""Name of the operations that mark statistics of the batch, which all shards are taken to have in common."""
NORMALIZED = "matex_normalized"
"""Name of the operations that mark the values of which these are statistics."""
MOST_PASSES = 32
"""Passes over the body of a loop after which it is not proven; each pass but the last weakens what is known."""

CALLS = ("PartitionedCall", "StatefulPartitionedCall")
CHOICES = ("If", "StatelessIf", "Case", "StatelessCase")
LOOPS = ("While", "StatelessWhile")
CALLS_OF_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")


@dataclass
class Followed:
    """Dependences of the outputs of a graph, and of its effects.

    Parameters
    ----------
    outputs : dependence of each output.
    effects : why effects of the graph, such as writes to variables, or its gradients, are not proven.
    statistics : scopes of layers that use statistics of the batch, which are taken to be those of the whole batch.
    draws : random numbers are drawn for each row.
    """

    outputs: tuple[State, ...] = ()
    effects: list[Reason] = field(default_factory=list)
    statistics: list[str] = field(default_factory=list)
    draws: bool = False


def follow(graph: Any, inputs: Sequence[int | None]) -> Followed:
    """Return what the outputs of a graph depend on.

    Parameters
    ----------
    graph : ``FuncGraph``, as of a concrete function, traced with an unknown number of rows.
    inputs : axis of the samples, from 0, for each of the first inputs; None for one that all shards have in common, as
        variables and constants are, which the graph has captured.

    Examples
    --------
    >>> import tensorflow as tf
    >>> function = tf.function(lambda x: (x + 1, x - tf.reduce_mean(x, 0)))
    >>> graph = function.get_concrete_function(tf.TensorSpec([None, 3])).graph
    >>> [type(output).__name__ for output in follow(graph, [0]).outputs]
    ['PerSample', 'Mixed']
    """
    found = Followed()
    states = [_input_state(tensor, axis) for tensor, axis in zip(graph.inputs, inputs, strict=False)]
    captured = {id(inner): outer for outer, inner in graph.captures}
    states += [_captured_state(tensor, captured.get(id(tensor))) for tensor in graph.inputs[len(states) :]]
    found.outputs = tuple(_follow(graph, states, (), found))
    return found


def _input_state(tensor: Any, axis: int | None) -> State:
    rank = tensor.shape.rank
    if axis is None:
        return _captured_state(tensor, None)
    if rank is None or rank <= axis or tensor.shape[axis] is not None:
        return Mixed((Reason("model", "input", f"{tensor.name} was traced without an axis of any number of rows"),))
    shape = _named_sizes(tensor)
    return PerSample(axis, (*shape[:axis], ROWS, *shape[axis + 1 :]))


def _named_sizes(tensor: Any) -> Shape:
    """Return the sizes of an input, with names for those that are not known."""
    sizes = enumerate(tensor.shape.as_list())
    return tuple(name_size(f"{tensor.name}[{i}]") if n is None else Size(n) for i, n in sizes)


def _captured_state(tensor: Any, outer: Any) -> State:
    """Return the dependence of an input that all shards have in common, with its elements if they are known."""
    known = tensor.dtype.is_integer and hasattr(outer, "numpy")
    return Independent(
        None if tensor.shape.rank is None else _named_sizes(tensor), static_values(outer.numpy()) if known else None
    )


def _follow(graph: Any, inputs: Sequence[State], path: tuple[str, ...], found: Followed) -> list[State]:
    """Return what the outputs of a graph depend on, and add what was found on the way."""
    states: dict[Any, State] = {tensor.ref(): state for tensor, state in zip(graph.inputs, inputs, strict=True)}
    for op in graph.get_operations():
        if op.outputs and op.outputs[0].ref() in states:
            continue
        node = Node(op, [states[tensor.ref()] for tensor in op.inputs], path)
        reason = _changed_gradient(node)
        if reason is not None:
            found.effects.append(reason)
        outputs = _outputs(graph, node, found)
        states.update({tensor.ref(): state for tensor, state in zip(op.outputs, outputs, strict=True)})
    return [states[tensor.ref()] for tensor in graph.outputs]


def _outputs(graph: Any, node: Node, found: Followed) -> list[State]:
    kind = node.op.type
    if kind in CALLS:
        return _call(graph, node, node.attribute("f").name, node.inputs, len(node.op.outputs), found)
    if kind in CHOICES:
        return _choice(graph, node, found)
    if kind in LOOPS:
        return _loop(graph, node, found)
    if kind == "Identity" and _has_name(node, NORMALIZED):
        found.effects += _reasons_of_statistics(node)
    if kind == "Identity" and _has_name(node, STATISTICS):
        found.statistics.append(node.reason("").layer)
        return [node.independent()]
    outputs = apply(node)
    found.draws |= node.draws
    if node.reason_of_effect is not None:
        found.effects.append(node.reason_of_effect)
    return outputs


def _has_name(node: Node, name: str) -> bool:
    return bool(re.fullmatch(name + r"(_\d+)?", node.op.name.rpartition("/")[2]))


def _reasons_of_statistics(node: Node) -> tuple[Reason, ...]:
    """Return why statistics of a tensor over the ranks are not those of the batch: it is not per sample."""
    state = node.inputs[0]
    if isinstance(state, Mixed):
        return state.reasons
    return () if isinstance(state, PerSample) else (node.reason("marks values to normalize that have no axis of rows"),)


def apply(node: Node) -> list[State]:
    """Return what the outputs of an operation depend on, by its rule."""
    kind = node.op.type
    if kind in effects.SILENT and not node.op.outputs:
        return []
    if kind == "Placeholder":
        return node.mixed("is an input that is not known")
    if kind in effects.ASSIGNMENTS:
        return effects.write(node)
    entry = RULES.get(kind)
    if kind in CALLS_OF_PYTHON:
        return node.effect("calls Python, which the graph does not show")
    if entry is None and node.op.op_def.is_stateful:
        return node.effect("has effects that are not known")
    mixed = [state for state in node.inputs if isinstance(state, Mixed)]
    if mixed:
        return [mixed[0] for _ in node.op.outputs]
    kinds = {type(state) for state in node.inputs}
    if kinds & {PerSample, Total} and any(t.shape.rank is None and _is_plain(t) for t in node.op.outputs):
        return node.mixed("has a result of unknown rank")
    if not kinds - {Independent, RowCount, PerSample, Total} and kind in VALUES:
        values = VALUES[kind](node)
        if values is not None and (kind in ("Shape", "Size", "Rank") or not kinds & {PerSample, Total}):
            return [evaluate(node, values)]
    if kind in SECTIONS and not kinds - {Independent, RowCount}:
        parts = sections(node)
        if parts is not None:
            return [evaluate(node, values, i) for i, values in enumerate(parts)]
    if entry is not None and entry.accepts(node):
        try:
            return entry.rule(node)
        except (
            AssertionError,
            IndexError,
            TypeError,
            ValueError,
        ):  # a form of the operation that its rule does not know
            return node.mixed("has a form that is not known")
    return _without_rule(node, kinds)


def _is_plain(tensor: Any) -> bool:
    return tensor.dtype.name not in ("variant", "resource")


def _without_rule(node: Node, kinds: set[type]) -> list[State]:
    if not kinds - {Independent}:
        return [node.independent(i) for i in range(len(node.op.outputs))]
    if not kinds - {Independent, RowCount}:
        return [RowCount() for _ in node.op.outputs]
    totals = [state for state in node.inputs if isinstance(state, Total)]
    if totals:
        return node.uses(totals[0])
    if RowCount in kinds and node.op.type in RULES:
        return node.mixed("lets the number of rows, or positions in the batch, enter the values")
    return node.mixed("is an operation without a rule" if Listed not in kinds else "reads a list in an unknown way")


def _call(graph: Any, node: Node, name: str, inputs: Sequence[State], count: int, found: Followed) -> list[State]:
    """Return what the outputs of a function, of which there are ``count``, depend on."""
    body = getattr(graph._get_function(name), "graph", None)  # functions of TensorFlow 1 have none
    if body is None or len(body.inputs) != len(inputs) or len(body.outputs) != count:
        reason = node.reason("calls a function whose graph is not known")
        found.effects.append(reason)
        return [Mixed((reason,))] * count
    return _follow(body, inputs, (*node.path, node.op.name), found)


def _choice(graph: Any, node: Node, found: Followed) -> list[State]:
    """Return what the results of a choice between branches depend on."""
    kind = node.op.type
    names = [f.name for f in node.attribute("branches")] if kind.endswith("Case") else [
        node.attribute("then_branch").name, node.attribute("else_branch").name]  # fmt: skip
    condition, *inputs = node.inputs
    branches = [_call(graph, node, name, inputs, len(node.op.outputs), found) for name in names]
    if not isinstance(condition, Independent):
        return _undecided(node, condition, found)
    reason = node.reason("has branches of which only some are per sample")
    outputs = branches[0]
    for branch in branches[1:]:
        outputs = [_joined(node, i, pair, reason) for i, pair in enumerate(zip(outputs, branch, strict=True))]
    return outputs


def _joined(node: Node, output: int, pair: tuple[State, State], reason: Reason) -> State:
    return join(*pair, lambda axis: node.new_axis(axis, output), reason)


def _loop(graph: Any, node: Node, found: Followed) -> list[State]:
    """Return what the results of a loop depend on: what its variables may be before and after any number of steps."""
    states = list(node.inputs)
    reason = node.reason("has a variable that is per sample in some of its steps alone")
    for _ in range(MOST_PASSES):
        (condition,) = _call(graph, node, node.attribute("cond").name, states, 1, found)
        if not isinstance(condition, Independent):
            return _undecided(node, condition, found)
        after = _call(graph, node, node.attribute("body").name, states, len(states), found)
        joined = [_joined(node, i, pair, reason) for i, pair in enumerate(zip(states, after, strict=True))]
        if joined == states:
            return states
        states = joined
    reason = node.reason("is a loop about which nothing was proven")
    found.effects.append(reason)
    return [Mixed((reason,))] * len(states)


def _undecided(node: Node, condition: State, found: Followed) -> list[State]:
    """Return mixed outputs of a choice or a loop whose condition depends on the batch."""
    reason = node.reason("has a condition that depends on the batch")
    reasons = condition.reasons if isinstance(condition, Mixed) else (reason,)
    found.effects += [reason, *reasons]
    return [Mixed(reasons)] * len(node.op.outputs)


def _changed_gradient(node: Node) -> Reason | None:
    """Return the reason if the operation has a gradient that neither TensorFlow nor Keras defines."""
    if NAME_OF_GRADIENT not in node.op.node_def.attr:
        return None
    name = node.attribute(NAME_OF_GRADIENT)
    try:
        function = gradient_registry.lookup(name)
    except LookupError:
        return node.reason(f"has a gradient {name} that is not registered")
    owners = {str(getattr(inner, "__module__", None)) for inner in _wrapped(function)}
    foreign = sorted(owner for owner in owners if owner.partition(".")[0] not in ("tensorflow", "keras"))
    return node.reason(f"has a gradient that {foreign[0]} defines") if foreign else None


def _wrapped(function: Any) -> list[Any]:
    """Return a function of the registry of gradients, and those that ``tf.custom_gradient`` has wrapped in it."""
    code = getattr(function, "__code__", None)
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True)) if code else {}
    inner = [cells[name].cell_contents for name in ("tape_grad_fn", "grad_fn") if name in cells]
    return [function, *(one for value in inner for one in _wrapped(value))]
