"""Scripts in the style of TensorFlow 1: optimizers of ``tf.compat.v1``, and sessions that feed batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from matex_data.training.average.sessions import session_weight, trains
from matex_data.training.comm.channel import Channel
from matex_data.training.keras_api import BaseSession
from matex_data.training.launcher.loops import LoopPatches
from matex_data.training.reduction.graphs import in_session_graph
from matex_data.training.reduction.ops import broadcast_from_root


class SessionPatches:
    """Patches of optimizers, initializers and sessions. *Collective*."""

    def __init__(self, channel: Channel, loop_patches: LoopPatches) -> None:
        self._channel = channel
        self._loop_patches = loop_patches
        self._average = loop_patches.average
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
        return _with_gradients(pairs, self._average.computed) if self._loop_patches.is_active() else pairs

    def _apply_gradients(self, original: Any, optimizer: Any, pairs: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = _with_gradients(pairs, self._average.applied) if self._loop_patches.is_active() else pairs
        return original(optimizer, pairs, *args, **kwargs)

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
        if trains(session.graph, fetches):
            feed_dict = self._weighted(session.graph, dict(feed_dict or {}))
        return original(session, fetches, feed_dict, *args, **kwargs)

    def _weighted(self, graph: Any, feeds: dict[Any, Any]) -> dict[Any, Any]:
        """Return the feeds with the weight of this rank's batch. *Collective* if the data is sharded."""
        if not self._channel.communicator.sharded_data:
            self._loop_patches.warn_of_whole_batches()
            return feeds
        rows = max((len(value) for key, value in feeds.items() if _is_batch(key)), default=1)
        by_rank = self._channel.host.allgather_object(rows)
        return {**feeds, session_weight(graph): rows / max(sum(by_rank), 1)}


def _with_gradients(pairs: Any, average: Callable[[list[Any]], list[Any]]) -> list[tuple[Any, Any]]:
    """Return pairs of the averages of gradients, and their variables. *Collective*."""
    gradients, variables = zip(*pairs, strict=True)
    return list(zip(average(list(gradients)), variables, strict=True))


def _is_batch(placeholder: Any) -> bool:
    shape = placeholder.shape if isinstance(placeholder, tf.Tensor) else None
    return shape is not None and (shape.rank is None or (shape.rank > 0 and shape[0] is None))
