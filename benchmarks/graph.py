"""Going over a ``tf.data.Dataset`` as ``fit`` does: within a graph, without Python for each batch."""

from __future__ import annotations

from typing import Any

from benchmarks.ceiling import Pass


def in_graph(dataset: Any) -> Pass:
    """Counts the samples of all batches."""
    import tensorflow as tf

    def rows(batch: Any) -> Any:
        return tf.shape(tf.nest.flatten(batch)[0], tf.int64)[0]

    @tf.function
    def count(batches: Any) -> Any:
        return batches.reduce(tf.constant(0, tf.int64), lambda total, batch: total + rows(batch))

    return lambda: int(count(dataset))
