"""Scripts in the manner of TensorFlow 1: optimizers of ``tf.compat.v1`` and sessions that feed batches."""

from __future__ import annotations

import functools
import logging
from typing import Any

import tensorflow as tf
from tensorflow.python.client.session import BaseSession

from matex_data.training.channel import Channel
from matex_data.training.loops import Loops
from matex_data.training.marks import averaged_once
from matex_data.training.order import in_session_graph
from matex_data.training.reduction import from_root
from matex_data.training.rows import is_local

log = logging.getLogger("matex_data.training")

STEPS = "matex_steps"
"""Collection of a graph: tensors that only a training step computes."""
WEIGHT = "matex_weight"
"""Collection of a graph: the placeholder of the weight of this rank's rows."""


class SessionPatches:
    """Patches optimizers, initializers and sessions. *Collective*."""

    def __init__(self, opened: Channel, loops: Loops) -> None:
        self._channel = opened
        self._loops = loops
        self._told = False
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
        return list(zip(self.average([g for g, _ in pairs]), [v for _, v in pairs], strict=True))

    def _apply_gradients(self, original: Any, optimizer: Any, pairs: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(pairs)
        if not getattr(optimizer, "_matex_averaged", False):  # they come from tf.gradients
            pairs = list(zip(averaged_once([g for g, _ in pairs], self.average), [v for _, v in pairs], strict=True))
        return original(optimizer, pairs, *args, **kwargs)

    def average(self, gradients: list[Any]) -> list[Any]:
        """The average over the ranks, in a session or outside. *Collective*."""
        if not in_session_graph():
            return self._loops.average(gradients)
        graph = tf.compat.v1.get_default_graph()
        if not graph.get_collection(WEIGHT):
            equal = tf.constant(1 / self._channel.size, tf.float64)
            graph.add_to_collection(WEIGHT, tf.compat.v1.placeholder_with_default(equal, ()))
        averages = self._loops.reducer(gradients, graph.get_collection(WEIGHT)[0])
        for tensor in averages:
            if tensor is not None:
                graph.add_to_collection(STEPS, tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor)
        return averages

    def _initializer(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Initialize, then take the values of rank 0. *Collective* when it runs."""
        done = original(*args, **kwargs)
        variables = tf.compat.v1.global_variables()
        if not in_session_graph() or not variables:
            return done

        with tf.control_dependencies([done]):
            values = [tf.identity(v.read_value()) for v in variables]
        received = from_root(self._channel, values)
        return tf.group(*[tf.compat.v1.assign(v, new) for v, new in zip(variables, received, strict=True)])

    def _run(self, original: Any, session: Any, fetches: Any, feed_dict: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self._trains(session.graph, fetches):
            feed_dict = self._shared(session.graph, dict(feed_dict or {}))
        return original(session, fetches, feed_dict, *args, **kwargs)

    @staticmethod
    def _trains(graph: Any, fetches: Any) -> bool:
        """Whether what is fetched needs an average of gradients."""
        steps = {tensor.op for tensor in graph.get_collection(STEPS)}
        waiting = [getattr(f, "op", f) for f in tf.nest.flatten(fetches)] if steps else []
        waiting = [graph.as_graph_element(f) if isinstance(f, str) else f for f in waiting]
        seen: set[Any] = set()
        while waiting:
            operation = waiting.pop()
            operation = getattr(operation, "op", operation)
            if operation in steps:
                return True
            if operation in seen or not isinstance(operation, tf.Operation):
                continue
            seen.add(operation)
            waiting += [*operation.inputs, *operation.control_inputs]
        return False

    def _shared(self, graph: Any, feeds: dict[Any, Any]) -> dict[Any, Any]:
        """This rank's rows of the batches that are fed."""
        if any(is_local(value) for value in feeds.values()):
            return feeds
        batches = {key: value for key, value in feeds.items() if _is_batch(key)}
        rows = max((len(value) for value in batches.values()), default=0)
        if not rows:
            if self._channel.rank == 0 and not self._told:
                log.warning("this session trains on the same data on every rank: feed batches through placeholders")
            self._told = True
            return feeds
        rank, size = self._channel.rank, self._channel.size
        mine = slice(rows * rank // size, rows * (rank + 1) // size)
        cut = {key: value[mine] for key, value in batches.items() if len(value) == rows}
        weight = graph.get_collection(WEIGHT)[0]
        return {**feeds, **cut, weight: (mine.stop - mine.start) / rows}


def _is_batch(placeholder: Any) -> bool:
    shape = placeholder.shape if isinstance(placeholder, tf.Tensor) else None
    return shape is not None and (shape.rank is None or (shape.rank > 0 and shape[0] is None))
