"""Going over a ``tf.data.Dataset`` as ``fit`` does: within a graph, without Python for each batch."""

from __future__ import annotations

from typing import Any

from benchmarks.ceiling import Pass


def in_graph(dataset: Any) -> Pass:
    """Counts the samples of all batches, which are (inputs, targets)."""
    import tensorflow as tf

    @tf.function
    def count(batches: Any) -> Any:
        return batches.reduce(tf.constant(0, tf.int64), lambda total, batch: total + tf.shape(batch[0], tf.int64)[0])

    return lambda: int(count(dataset))
