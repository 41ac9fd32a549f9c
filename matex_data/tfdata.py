"""Batches as a ``tf.data.Dataset``: the only room on the data path that knows TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from matex_data.batches import Batches, Share
from matex_data.errors import FormatError
from matex_data.fields import Field, Schema
from matex_data.index import Integers


def as_tf_dataset(batches: Batches, schema: Schema) -> tf.data.Dataset:
    """The batches as tensors that share their memory; one pass is one epoch.

    Python hands over windows of many batches; TensorFlow cuts them, without copying.

    Raises
    ------
    FormatError : a field has a dtype that TensorFlow does not have.
    """
    schedule = batches.schedule
    rows = None if schedule.remainder == "keep" else batches.rows
    specs = {name: _spec(field, rows) for name, field in schema.items()}
    weight = tf.TensorSpec((None, rows), tf.float32) if schedule.remainder == "pad" else None

    def windows() -> Iterator[Any]:
        for share in batches.windows():
            for same in _of_equal_size(share):
                values = {name: _tensor(schema[name], array, same.sizes) for name, array in same.arrays.items()}
                weights = None if same.weight is None else same.weight.reshape(len(same.sizes), -1)
                yield batches.elements.assemble(values, weights)

    dataset = tf.data.Dataset.from_generator(windows, output_signature=batches.elements.assemble(specs, weight))
    dataset = dataset.flat_map(lambda *window: tf.data.Dataset.from_tensor_slices(window if window[1:] else window[0]))
    options = tf.data.Options()
    options.autotune.enabled = False  # nothing to tune; its thread may hold up the end of an epoch
    options.experimental_optimization.apply_default_optimizations = False  # nothing to gain; takes some ms an epoch
    dataset = dataset.with_options(options)
    if not batches.resumed:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(schedule.steps))
    dataset.matex_share = True  # this rank's part already: the launcher must not share it out again
    return dataset


def _of_equal_size(share: Share) -> Iterator[Share]:
    """Parts whose batches all have the same size: only the last one of an epoch may differ."""
    last = len(share.sizes) - (len(share.sizes) > 1 and share.sizes[-1] != share.sizes[0])
    cut = int(share.sizes[:last].sum())
    for rows, steps in ((slice(0, cut), slice(0, last)), (slice(cut, None), slice(last, None))):
        if len(share.sizes[steps]):
            weight = None if share.weight is None else share.weight[rows]
            yield Share({name: array[rows] for name, array in share.arrays.items()}, share.sizes[steps], weight)


def _spec(field: Field, rows: int | None) -> Any:
    if field.ragged:
        return tf.RaggedTensorSpec((None, rows, None), _dtype(field), ragged_rank=2)
    return tf.TensorSpec((None, rows, *field.shape), _dtype(field))


def _dtype(field: Field) -> tf.DType:
    if field.dtype.kind in "OSU":
        return tf.string
    try:
        return tf.as_dtype(field.dtype)
    except TypeError as error:
        raise FormatError(
            "TensorFlow has no such dtype",
            field=field.name,
            expected="numbers, booleans or strings",
            found=str(field.dtype),
            remedy="take the field from batches() or load(), or choose other fields with inputs= and targets=",
        ) from error


def _tensor(field: Field, array: np.ndarray[Any, Any], sizes: Integers) -> Any:
    """The samples as (batches, samples of one, ...)."""
    if not field.ragged:
        return array.reshape(len(sizes), -1, *field.shape) if array.size else array.reshape(len(sizes), 0, *field.shape)
    lengths = np.array([len(row) for row in array], np.int64)
    values = np.concatenate([*array, np.empty(0, field.dtype)])
    rows = tf.RaggedTensor.from_row_lengths(values, lengths, validate=False)
    return tf.RaggedTensor.from_row_lengths(rows, sizes, validate=False)


def normalization(axis: tuple[int, ...] | None, mean: np.ndarray[Any, Any], variance: np.ndarray[Any, Any]) -> Any:
    """The Keras layer that subtracts the mean and divides by the root of the variance, along the axes that are kept."""
    return tf.keras.layers.Normalization(axis=axis, mean=mean, variance=variance)
