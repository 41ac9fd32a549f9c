"""Batches as a ``tf.data.Dataset``: the only room on the data path that knows TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from matex_data.batches import Batches
from matex_data.errors import FormatError
from matex_data.fields import Field, Schema


def as_tf_dataset(batches: Batches, schema: Schema) -> tf.data.Dataset:
    """The batches as tensors that share their memory; one pass is one epoch.

    Raises
    ------
    FormatError : a field has a dtype that TensorFlow does not have.
    """
    schedule = batches.schedule
    rows = None if schedule.remainder == "keep" else schedule.batch_size // batches.supply.channel.comm.size
    specs = {name: _spec(field, rows) for name, field in schema.items()}
    weight = tf.TensorSpec((rows,), tf.float32) if schedule.remainder == "pad" else None
    ragged = {name for name, field in schema.items() if field.ragged}

    def passes() -> Iterator[Any]:
        for element in batches:
            yield tf.nest.map_structure(_tensor, element) if ragged else element

    dataset = tf.data.Dataset.from_generator(passes, output_signature=batches.elements.assemble(specs, weight))
    if not batches.resumed:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(schedule.steps))
    return dataset


def _spec(field: Field, rows: int | None) -> Any:
    if field.ragged:
        return tf.RaggedTensorSpec((rows, None), _dtype(field), ragged_rank=1)
    return tf.TensorSpec((rows, *field.shape), _dtype(field))


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


def _tensor(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype != object or not len(array) or isinstance(array[0], bytes):
        return array
    lengths = np.array([len(row) for row in array], np.int64)
    return tf.RaggedTensor.from_row_lengths(np.concatenate(array), lengths, validate=False)
