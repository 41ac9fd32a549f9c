"""Training loops that scripts write themselves: gradients are averaged, and batches shared out."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.data.ops.iterator_ops import OwnedIterator

from matex_data.training.channel import Channel
from matex_data.training.marks import averaged_once
from matex_data.training.optimizer import averaged, averaging, batch_weight, in_step
from matex_data.training.reduction import Reducer, from_root
from matex_data.training.rows import is_batched, is_local, my_rows

log = logging.getLogger("matex_data.training")

PATIENCE = 3
"""Steps on batches that are not shared out after which the user is told."""

in_keras: ContextVar[bool] = ContextVar("in_keras", default=False)
"""Whether Keras iterates, whose data is shared out elsewhere."""


class Loops:
    """What the patched optimizers and data sets of one job know together. Making one is *collective*.

    A data set is shared out once its batches are seen to be trained on: from the second batch of its first
    epoch on. So loops that evaluate see all data, and their results are those of one process.
    """

    def __init__(self, opened: Channel, reducer: Reducer) -> None:
        self.channel = opened
        self.reducer = reducer
        self._equal = 1 / opened.size
        self._steps_alike = 0
        self._sharing = False
        self._started: dict[int, Any] = {}

    @functools.cached_property
    def weight(self) -> Any:
        """Weight of this rank's rows; made late, since a script may configure TensorFlow before its first variable."""
        with tf.init_scope():
            return tf.Variable(self._equal, trainable=False, dtype=tf.float64, name="matex_weight")

    def apply(self, original: Callable[..., Any], optimizer: Any, grads: Any, variables: Any) -> Any:
        """An optimizer's ``apply`` after the average. *Collective*."""
        if variables is not None:
            self._start(optimizer, list(variables))
        if not in_step():
            tf.numpy_function(self._count, [], [])
        with averaging():
            return original(optimizer, averaged_once(list(grads), self.average), variables)

    def average(self, gradients: list[Any]) -> list[Any]:
        """The average over the ranks, in a training step of Keras or in a loop. *Collective*."""
        weight = batch_weight(self.channel.size) if in_step() else self.weight.read_value()
        return self.reducer(gradients, weight)

    def _start(self, optimizer: Any, variables: list[Any]) -> None:
        """In the first step all ranks take the variables of rank 0; before it they may not be initialized."""
        if in_step():
            return
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

    def _count(self) -> None:
        """Runs with every step of a loop."""
        self.channel.steps += 1
        self._steps_alike = 0 if self._sharing else self._steps_alike + 1
        if self._steps_alike == PATIENCE and self.channel.rank == 0:
            log.warning(
                "this training loop sees the same batches on every rank: right, but no faster than one process\n"
                "  remedy: loop over a batched tf.data.Dataset outside of tf.function, or take a part of each "
                "batch by matex_data.training.world()"
            )

    def end(self) -> None:
        """A loop over a data set ended: what comes next has batches of one size."""
        with tf.init_scope():
            self.weight.assign(self._equal)

    def take(self, dataset: Any, element: Any) -> Any:
        """This rank's rows of an element, and their weight."""
        if is_local(dataset):
            self._sharing = True
            self.weight.assign(self._equal)
            return element
        if not dataset.matex_trains:  # the whole batch on every rank: that of one is the gradient of one process
            self._sharing = False
            self.weight.assign(float(self.channel.rank == 0))
            return element
        self._sharing = True
        mine = my_rows(element, self.channel.rank, self.channel.size)
        part, whole = (int(tf.shape(tf.nest.flatten(e)[0])[0]) for e in (mine, element))
        self.weight.assign(part / max(whole, 1))
        return mine


class LoopIterator(OwnedIterator):  # type: ignore[misc]  # TensorFlow has no types
    """An iterator over a data set in Python, that shares batches out once they are trained on."""

    def watch(self, dataset: Any, loops: Loops) -> None:
        """Begin to watch what becomes of the elements."""
        self._matex = (dataset, loops)
        self._matex_steps = -1
        self._matex_inside = False

    def __del__(self) -> None:
        """A loop was left, or looked at one batch only."""
        if self._matex_inside:
            with contextlib.suppress(Exception):  # Python itself may be ending
                self._matex[1].end()

    def __next__(self) -> Any:
        dataset, loops = self._matex
        if 0 <= self._matex_steps < loops.channel.steps:
            dataset.matex_trains = True
        try:
            element = super().__next__()
        except StopIteration:
            self._matex_inside = False
            loops.end()
            raise
        self._matex_steps = loops.channel.steps
        self._matex_inside = True
        return loops.take(dataset, element) if tf.executing_eagerly() else element


@contextlib.contextmanager
def keras_iterates() -> Iterator[None]:
    """Within this context data sets are iterated over by Keras."""
    token = in_keras.set(True)
    try:
        yield
    finally:
        in_keras.reset(token)


def patch_loops(loops: Loops) -> None:
    """Have all optimizers average, and all data sets share out their batches."""
    for kind in _with_own("apply", keras.optimizers.Optimizer):
        kind.apply = _averaging_apply(kind.apply, loops)
    original = tf.data.Dataset.__iter__

    @functools.wraps(original)
    def iterate(dataset: Any) -> Any:
        iterator = original(dataset)
        shared = tf.executing_eagerly() and not in_keras.get() and (is_local(dataset) or is_batched(dataset))
        if shared and type(iterator) is OwnedIterator:
            dataset.matex_trains = getattr(dataset, "matex_trains", False)
            iterator.__class__ = LoopIterator
            iterator.watch(dataset, loops)
        return iterator

    tf.data.Dataset.__iter__ = iterate


def _averaging_apply(original: Callable[..., Any], loops: Loops) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if averaged():
            return original(optimizer, grads, trainable_variables)
        return loops.apply(original, optimizer, grads, trainable_variables)

    return apply


def _with_own(name: str, base: Any) -> list[Any]:
    """The class that defines a method, above ``base``, and all classes below that define their own."""
    kinds = [kind for kind in base.__mro__ if name in vars(kind)][:1]
    waiting = [base]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if name in vars(kind) and kind not in kinds:
            kinds.append(kind)
    return kinds
