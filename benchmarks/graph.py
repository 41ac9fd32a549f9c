"""Going over a ``tf.data.Dataset`` without Python for each batch."""

from __future__ import annotations

from typing import Any

from benchmarks.ceiling import Pass


def in_graph(dataset: Any) -> Pass:
    """Counts the samples of all batches: ``dataset.reduce``, which goes on in the thread that calls it.

    Others than the thread that reads have then nothing to do between two batches. ``Dataset.reduce`` hands each of them
    to a thread of TensorFlow's pool, and takes three times as long for it: 17 us instead of 7, whoever reads.
    """
    import tensorflow as tf

    def counted(total: Any, *tensors: Any) -> Any:
        return total + tf.shape(tensors[0], tf.int64)[0]

    specs = tf.TensorSpec((), tf.int64), *tf.nest.flatten(dataset.element_spec)
    with_this_device = {"experimental_ints_on_device": True}  # or TensorFlow would place the function in every pass
    function = tf.function(
        counted, input_signature=specs, autograph=False, experimental_attributes=with_this_device
    ).get_concrete_function()

    def run() -> int:
        (total,) = tf.raw_ops.ReduceDataset(
            input_dataset=tf.data.experimental.to_variant(dataset),
            initial_state=[tf.constant(0, tf.int64)],
            other_arguments=[],
            f=function,
            output_types=[tf.int64],
            output_shapes=[()],
            use_inter_op_parallelism=False,
        )
        return int(total)

    return run
