"""One order of the collective operations of all graphs and of eager code: that in which the program names them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf


class Cursor:
    """The number of the next operation, a scalar int64 tensor; whoever uses it leaves the number after."""

    def __init__(self, number: Any) -> None:
        self.number = number


class SequenceCounter:
    """A counter that every collective operation reads and writes.

    TensorFlow keeps reads and writes of one variable in program order, through loops, branches and
    functions that call each other. Nothing else orders stateful operations of a graph.
    """

    def __init__(self) -> None:
        self._counter: Any = None

    @contextlib.contextmanager
    def advance(self) -> Iterator[Cursor]:
        """The operations made in this context come after those of the context before."""
        if in_session_graph():  # a variable would need the user's session to initialise it
            yield Cursor(tf.constant(0, tf.int64))
            return
        if self._counter is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._counter = tf.Variable(0, trainable=False, dtype=tf.int64, name="matex_order")
        cursor = Cursor(self._counter.read_value())
        yield cursor
        self._counter.assign(cursor.number)


def in_session_graph() -> bool:
    """Whether operations go to a graph of TensorFlow 1, run by a Session."""
    with tf.init_scope():
        return not tf.executing_eagerly()
