"""Scripts in the style of TensorFlow 1: optimizers of ``tf.compat.v1``, and sessions that feed batches."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from matex_data.pipeline import data_parallel
from matex_data.training.comm.channel import Channel
from matex_data.training.keras_api import BaseSession
from matex_data.training.launcher.loops import LoopPatches
from matex_data.training.reduction.graphs import in_session_graph
from matex_data.training.reduction.ops import broadcast_from_root
from matex_data.training.reduction.payloads import WHOLE
from matex_data.training.reduction.tape import average_untagged

STEPS = "matex_steps"
"""Graph collection of the averaged gradients, which only a training step computes."""
WEIGHT = "matex_weight"
"""Graph collection of the placeholder for this rank's weight."""


class SessionPatches:
    """Patches of optimizers, initializers and sessions. *Collective*."""

    def __init__(self, channel: Channel, loop_patches: LoopPatches) -> None:
        self._channel = channel
        self._loop_patches = loop_patches
        v1 = tf.compat.v1
        self._wrap(v1.train.Optimizer, "compute_gradients", self._compute_gradients)
        self._wrap(v1.train.Optimizer, "apply_gradients", self._apply_gradients)
        for name in ("global_variables_initializer", "initialize_all_variables"):
            self._wrap(v1, name, self._initializer)
        self._wrap(BaseSession, "run", self._run)

    @staticmethod
    def _wrap(owner: Any, name: str, method: Any) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return method(original, *args, **kwargs)

        setattr(owner, name, patched)

    def _compute_gradients(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = original(optimizer, *args, **kwargs)
        optimizer._matex_averaged = True
        return self._average_pairs(pairs)

    def _apply_gradients(self, original: Any, optimizer: Any, pairs: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(pairs)
        if not getattr(optimizer, "_matex_averaged", False):  # gradients of tf.gradients
            pairs = self._average_pairs(pairs)
        return original(optimizer, pairs, *args, **kwargs)

    def _average_pairs(self, pairs: Any) -> list[Any]:
        if not self._loop_patches.is_active():
            return list(pairs)
        average = self._average if in_session_graph() else self._loop_patches.average
        gradients = average_untagged([gradient for gradient, _ in pairs], average)
        return list(zip(gradients, [variable for _, variable in pairs], strict=True))

    def _average(self, gradients: list[Any]) -> list[Any]:
        """Return averages over the ranks; the session feeds the weight of this rank. *Collective* when it runs."""
        graph = tf.compat.v1.get_default_graph()
        if not graph.get_collection(WEIGHT):
            whole = tf.constant(WHOLE, tf.float64)
            graph.add_to_collection(WEIGHT, tf.compat.v1.placeholder_with_default(whole, ()))
        averages = self._loop_patches.reducer.average(gradients, graph.get_collection(WEIGHT)[0])
        for tensor in averages:
            if tensor is not None:
                graph.add_to_collection(STEPS, tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor)
        return averages

    def _initializer(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Return an operation that initializes variables and broadcasts those of rank 0. *Collective* when it runs."""
        done = original(*args, **kwargs)
        variables = tf.compat.v1.global_variables()
        if not in_session_graph() or not variables:
            return done

        with tf.control_dependencies([done]):
            values = [tf.identity(v.read_value()) for v in variables]
        received = broadcast_from_root(self._channel, values)
        return tf.group(*[tf.compat.v1.assign(v, new) for v, new in zip(variables, received, strict=True)])

    def _run(self, original: Any, session: Any, fetches: Any, feed_dict: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self._trains(session.graph, fetches):
            feed_dict = self._weighted(session.graph, dict(feed_dict or {}))
        return original(session, fetches, feed_dict, *args, **kwargs)

    @staticmethod
    def _trains(graph: Any, fetches: Any) -> bool:
        """Return whether the fetches depend on averaged gradients."""
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

    def _weighted(self, graph: Any, feeds: dict[Any, Any]) -> dict[Any, Any]:
        """Return the feeds with the weight of this rank's batch. *Collective* if the data is sharded."""
        if not data_parallel.enabled():
            self._loop_patches.warn_of_whole_batches()
            return feeds
        rows = max((len(value) for key, value in feeds.items() if _is_batch(key)), default=1)
        by_rank = self._channel.host.allgather_object(rows)
        return {**feeds, graph.get_collection(WEIGHT)[0]: rows / max(sum(by_rank), 1)}


def _is_batch(placeholder: Any) -> bool:
    shape = placeholder.shape if isinstance(placeholder, tf.Tensor) else None
    return shape is not None and (shape.rank is None or (shape.rank > 0 and shape[0] is None))
