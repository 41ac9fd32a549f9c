"""Sequence of the collective operations of all graphs and of eager code, in program order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from matex_data.training.compat import in_session_graph
from matex_data.training.reduction.graphs import eager_variable


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

    Attributes
    ----------
    variable : the variable; None before its first use.
    """

    def __init__(self) -> None:
        self.variable: Any = None

    @contextlib.contextmanager
    def advance(self) -> Iterator[Cursor]:
        """Context manager: order the operations of this block after those of earlier blocks."""
        if in_session_graph():  # the session of the user would have to initialize a variable
            yield Cursor(tf.constant(0, tf.int64))
            return
        if self.variable is None:
            self.variable = eager_variable(0, tf.int64)
        cursor = Cursor(self.variable.read_value())
        yield cursor
        self.variable.assign(cursor.number)
