"""Scripts in the style of TensorFlow 1: optimizers of ``tf.compat.v1``, and sessions that feed batches and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from matex_data.training.keras_api import BaseSession
from matex_data.training.replacements import patch

STEPS = "matex_steps"
"""Graph collection of the averaged gradients, which only a training step computes."""
WEIGHT = "matex_weight"
"""Graph collection of the placeholder for this rank's weight."""


def in_session_graph() -> bool:
    """Return whether new operations go to a graph of TensorFlow 1, which a session runs."""
    with tf.init_scope():
        return not tf.executing_eagerly()


def session_weight(default: float) -> Any:
    """Return the placeholder for this rank's weight in the default graph, with the value that it has otherwise."""
    graph = tf.compat.v1.get_default_graph()
    if not graph.get_collection(WEIGHT):
        value = tf.constant(default, tf.float64)
        graph.add_to_collection(WEIGHT, tf.compat.v1.placeholder_with_default(value, ()))
    return graph.get_collection(WEIGHT)[0]


def note_steps(averages: Iterable[Any]) -> None:
    """Note averaged gradients of the default graph, for ``trains``."""
    graph = tf.compat.v1.get_default_graph()
    for tensor in averages:
        graph.add_to_collection(STEPS, tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor)


def trains(graph: Any, fetches: Any) -> bool:
    """Return whether the fetches of a session depend on averaged gradients."""
    steps = {tensor.op for tensor in graph.get_collection(STEPS)}
    given = tf.nest.flatten(fetches) if steps else []
    pending = [graph.as_graph_element(f) if isinstance(f, str) else f for f in given]
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


def patch_sessions(
    average: Any,
    broadcast: Callable[[list[Any]], list[Any]],
    is_active: Callable[[], bool],
    warn: Callable[[], None],
) -> None:
    """Patch optimizers, initializers and sessions, which are *collective* from then on.

    Parameters
    ----------
    average : of the gradients of a shard over the ranks.
    broadcast : returns the tensors of rank 0.
    is_active : returns whether gradients are those of a shard now.
    warn : warns once that a loop runs on whole batches.
    """

    def compute_gradients(original: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = original(*args, **kwargs)
        return _with_gradients(pairs, average.computed) if is_active() else pairs

    def apply_gradients(original: Any, optimizer: Any, pairs: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = _with_gradients(pairs, average.applied) if is_active() else pairs
        return original(optimizer, pairs, *args, **kwargs)

    def initializer(original: Any, *args: Any, **kwargs: Any) -> Any:
        """Return an operation that initializes variables and broadcasts those of rank 0. *Collective* when it runs."""
        done = original(*args, **kwargs)
        variables = tf.compat.v1.global_variables()
        if not in_session_graph() or not variables:
            return done
        with tf.control_dependencies([done]):
            values = [tf.identity(v.read_value()) for v in variables]
        received = broadcast(values)
        return tf.group(*[tf.compat.v1.assign(v, new) for v, new in zip(variables, received, strict=True)])

    def run(original: Any, session: Any, fetches: Any, feed_dict: Any = None, *args: Any, **kwargs: Any) -> Any:
        if trains(session.graph, fetches):
            if average.channel.communicator.sharded_data:
                feed_dict = _weighted(average.channel, session.graph, feed_dict or {})
            else:
                warn()
        return original(session, fetches, feed_dict, *args, **kwargs)

    patch(tf.compat.v1.train.Optimizer, compute_gradients, "compute_gradients")
    patch(tf.compat.v1.train.Optimizer, apply_gradients, "apply_gradients")
    patch(tf.compat.v1, initializer, "global_variables_initializer", "initialize_all_variables")
    patch(BaseSession, run, "run")


def _weighted(channel: Any, graph: Any, feeds: dict[Any, Any]) -> dict[Any, Any]:
    """Return feeds of a session with the weight of this rank's batch. *Collective*."""
    rows = max((len(value) for key, value in feeds.items() if _is_batch(key)), default=1)
    by_rank = channel.host.allgather_object(rows)
    return {**feeds, graph.get_collection(WEIGHT)[0]: rows / max(sum(by_rank), 1)}


def _with_gradients(pairs: Any, average: Callable[[list[Any]], list[Any]]) -> list[tuple[Any, Any]]:
    """Return pairs of the averages of gradients, and their variables. *Collective*."""
    gradients, variables = zip(*pairs, strict=True)
    return list(zip(average(list(gradients)), variables, strict=True))


def _is_batch(placeholder: Any) -> bool:
    shape = placeholder.shape if isinstance(placeholder, tf.Tensor) else None
    return shape is not None and (shape.rank is None or (shape.rank > 0 and shape[0] is None))
