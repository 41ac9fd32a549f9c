"""Sequence of the collective operations of all graphs and of eager code, in program order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf


class Cursor:
    """Number of the next collective operation.

    Attributes
    ----------
    number : scalar int64 tensor; each operation takes it as an input and replaces it by an output of its own.
    """

    def __init__(self, number: Any) -> None:
        self.number = number


class SequenceCounter:
    """Variable that every collective operation reads and writes, which puts them in one order on all ranks.

    TensorFlow keeps the reads and writes of one variable in program order, through loops, branches and nested
    functions. Communication threads need the numbers, since operations are submitted to them at the same time.
    """

    def __init__(self) -> None:
        self._counter: Any = None

    @contextlib.contextmanager
    def advance(self) -> Iterator[Cursor]:
        """Context manager: order the operations of this block after those of earlier blocks."""
        if in_session_graph():  # the session of the user would have to initialize a variable
            yield Cursor(tf.constant(0, tf.int64))
            return
        if self._counter is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._counter = tf.Variable(0, trainable=False, dtype=tf.int64, name="matex_sequence")
        cursor = Cursor(self._counter.read_value())
        yield cursor
        self._counter.assign(cursor.number)


def in_session_graph() -> bool:
    """Return whether new operations go to a graph of TensorFlow 1, which a session runs."""
    with tf.init_scope():
        return not tf.executing_eagerly()
