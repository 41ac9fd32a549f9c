"""Variables beside the graph that is being traced."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf


def in_session_graph() -> bool:
    """Return whether new operations go to a graph of TensorFlow 1, which a session runs."""
    with tf.init_scope():
        return not tf.executing_eagerly()


def eager_variable(value: Any, dtype: tf.DType) -> Any:
    """Return a new variable on the CPU that is not trained, created outside of all functions that are being traced.

    ``tf.function`` traces a function twice if it sees that variables are created. It looks at the thread that traces.
    """

    def create() -> Any:
        with tf.device("CPU:0"):
            return tf.Variable(value, trainable=False, dtype=dtype)

    if in_session_graph():
        with tf.init_scope():
            return create()
    if tf.executing_eagerly():
        return create()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(create).result()
