"""Averages in graphs of TensorFlow 1: the session that runs them feeds the weight of this rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from matex_data.training.reduction.payloads import WHOLE

STEPS = "matex_steps"
"""Graph collection of the averaged gradients, which only a training step computes."""
WEIGHT = "matex_weight"
"""Graph collection of the placeholder for this rank's weight."""


def session_weight(graph: Any) -> Any:
    """Return the placeholder for this rank's weight in a graph; without a value, batches are whole."""
    if not graph.get_collection(WEIGHT):
        whole = tf.constant(WHOLE, tf.float64)
        graph.add_to_collection(WEIGHT, tf.compat.v1.placeholder_with_default(whole, ()))
    return graph.get_collection(WEIGHT)[0]


def note_steps(averages: Iterable[Any]) -> None:
    """Note averaged gradients of the default graph, for ``trains``."""
    graph = tf.compat.v1.get_default_graph()
    for tensor in averages:
        graph.add_to_collection(STEPS, tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor)


def trains(graph: Any, fetches: Any) -> bool:
    """Return whether the fetches of a session depend on averaged gradients."""
    steps = {tensor.op for tensor in graph.get_collection(STEPS)}
    pending = [getattr(f, "op", f) for f in tf.nest.flatten(fetches)] if steps else []
    pending = [graph.as_graph_element(f) if isinstance(f, str) else f for f in pending]
    seen: set[Any] = set()
    while pending:
        operation = pending.pop()
        operation = getattr(operation, "op", operation)
        if operation in steps:
            return True
        if operation in seen or not isinstance(operation, tf.Operation):
            continue
        seen.add(operation)
        pending += [*operation.inputs, *operation.control_inputs]
    return False
