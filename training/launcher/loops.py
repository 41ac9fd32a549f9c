"""Training loops that scripts write themselves, under the launcher.

Over the script's own data every rank sees every batch, as one process does, and nothing is averaged: which data a
loop trains on, and what its loss divides by, nobody can tell. Gradients of data of which each rank has its part are
averaged.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from matex_data.pipeline import data_parallel
from matex_data.training.comm.channel import Channel
from matex_data.training.optimizer import averaged, averaging, batch_weight, in_step
from matex_data.training.reduction.ops import Reducer, from_root
from matex_data.training.reduction.sequence import in_session_graph
from matex_data.training.reduction.tape import GradientPatches, averaged_once
from matex_data.training.sharding.batch_weights import batch_weights, in_keras, watch_loops

log = logging.getLogger("matex_data.training")


class Loops:
    """Patches of tapes and of all optimizers, for loops of the script's own. Making one is *collective*."""

    def __init__(self, opened: Channel, reducer: Reducer) -> None:
        self.channel = opened
        self.reducer = reducer
        self._told = False
        self._guard: Any = None
        self._started: dict[int, Any] = {}
        GradientPatches(self.average, self.shares).__enter__()
        for kind in _with_own("apply", keras.optimizers.Optimizer):
            kind.apply = _patched(kind.apply, self)
        watch_loops()
        data_parallel.on_enable(self._close)

    def shares(self) -> bool:
        """Tell whether a gradient of now is that of a rank's part; warn once of a loop over whole batches."""
        if in_session_graph():
            return True  # which is decided when the session runs
        if in_step() or in_keras.get():
            return False
        if not data_parallel.enabled():
            self.tell()
            self._guard_graph()
        return data_parallel.enabled()

    def average(self, gradients: list[Any]) -> list[Any]:
        """Return the averages over the ranks, in a training step of Keras or in a loop. *Collective*."""
        weight = batch_weight(self.channel.size) if in_step() else batch_weights(self.channel.ranks).of_step()
        return self.reducer(gradients, weight)

    def apply(self, original: Callable[..., Any], optimizer: Any, grads: Any, variables: Any) -> Any:
        """Apply gradients after the average, as far as they are of parts. *Collective* then."""
        if averaged() or not (in_step() or self.shares()):
            return original(optimizer, grads, variables)
        if variables is not None and not in_step():
            self._start(optimizer, list(variables))
        with averaging():
            return original(optimizer, averaged_once(list(grads), self.average), variables)

    def tell(self) -> None:
        """Warn once of a loop over whole batches."""
        if self.channel.rank == 0 and not self._told:
            log.warning(
                "a training loop of this script runs with the whole batch on every rank: right, but no faster than "
                "one process\n"
                "  remedy: for batch in matex_data.training.shard(dataset): shares out the rows of each batch"
            )
        self._told = True

    def _guard_graph(self) -> None:
        """Have a graph that averages nothing fail once there is data of which each rank has a part."""
        if tf.executing_eagerly():
            return
        with tf.init_scope():
            self._guard = self._guard or tf.Variable(True, trainable=False, name="matex_whole_batches")
        tf.debugging.Assert(
            self._guard,
            [
                "this training step was made when all ranks had the same data: it averages nothing over parts of it\n"
                "  remedy: call matex_data.training.shard, open_dataset or tf_dataset before the first training step"
            ],
        )

    def _close(self) -> None:
        if self._guard is not None:
            self._guard.assign(False)

    def _start(self, optimizer: Any, variables: list[Any]) -> None:
        """Take the variables of rank 0 in the first step; before it they may not be initialized. *Collective*."""
        if id(optimizer) not in self._started:
            with tf.init_scope():
                self._started[id(optimizer)] = tf.Variable(False, trainable=False, name="matex_started")
        started = self._started[id(optimizer)]

        def take_over() -> Any:
            received = from_root(self.channel, [tf.convert_to_tensor(v) for v in variables])
            for variable, value in zip(variables, received, strict=True):
                variable.assign(value)
            return started.assign(True)

        tf.cond(started, lambda: started.read_value(), take_over)


def _patched(original: Callable[..., Any], loops: Loops) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        return loops.apply(original, optimizer, grads, trainable_variables)

    return apply


def _with_own(name: str, base: Any) -> list[Any]:
    """Return the class that defines a method, above ``base``, and all classes below that define their own."""
    kinds = [kind for kind in base.__mro__ if name in vars(kind)][:1]
    waiting = [base]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if name in vars(kind) and kind not in kinds:
            kinds.append(kind)
    return kinds
