"""Batches as a ``tf.data.Dataset``: the only room on the data path that knows TensorFlow.

Python hands over windows of many batches; TensorFlow cuts them, without copying. The operations behind
``Dataset.from_generator`` and ``flat_map`` are used as they are: with functions that run on one device, as they all do,
a pass begins in a quarter of the time. TensorFlow would optimize and destination each function anew for every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import numpy as np
import tensorflow as tf

from matex_data._types import Array, Integers
from matex_data.errors import FormatError
from matex_data.fields import Field, Schema
from matex_data.pipeline import data_parallel
from matex_data.pipeline.batches import Batches, Share

ON_ONE_DEVICE = {"experimental_ints_on_device": True}


def as_tf_dataset(batches: Batches, schema: Schema) -> tf.data.Dataset:
    """The batches as tensors that share their memory; one pass is one epoch.

    Raises
    ------
    FormatError : a field has a dtype that TensorFlow does not have.
    """
    schedule = batches.schedule
    rows = None if schedule.remainder == "keep" else batches.rows
    columns = [_Column(field, _dtype(field), rows) for field in schema.values()]
    weight = tf.TensorSpec((rows,), tf.float32) if schedule.remainder == "pad" else None
    element = batches.elements.assemble({column.field.name: column.batch for column in columns}, weight)

    def windows() -> Iterator[list[Array]]:
        for share in batches.windows():
            for same in _of_equal_size(share):
                arrays = [column.arrays(same.arrays[column.field.name], same.sizes) for column in columns]
                weights = [] if same.weight is None else [same.weight.reshape(len(same.sizes), -1)]
                yield [*chain.from_iterable(arrays), *weights]

    def cut(*tensors: Any) -> Any:
        given = iter(tensors)
        values = {column.field.name: column.batches(given) for column in columns}
        return tf.data.Dataset.from_tensor_slices(batches.elements.assemble(values, next(given, None)))

    specs = [*chain.from_iterable(column.window for column in columns)]
    if weight is not None:
        specs.append(tf.TensorSpec((None, rows), tf.float32))
    dataset = _in_pieces(windows, specs, cut, element)
    options = tf.data.Options()
    options.autotune.enabled = False  # nothing to tune; its thread may hold up the end of an epoch
    options.experimental_optimization.apply_default_optimizations = False  # nothing to gain; takes some ms an epoch
    dataset = dataset.with_options(options)
    if not batches.resumed:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(schedule.steps))
    dataset.matex_batches = batches  # where training finds what to save of it
    dataset.matex_sharded = batches.comm  # this rank's part already: the launcher must not share it out again
    data_parallel.enable()
    return dataset


def _of_equal_size(share: Share) -> Iterator[Share]:
    """Parts whose batches all have the same size: only the last one of an epoch may differ."""
    last = len(share.sizes) - (len(share.sizes) > 1 and share.sizes[-1] != share.sizes[0])
    cut = int(share.sizes[:last].sum())
    for rows, steps in ((slice(0, cut), slice(0, last)), (slice(cut, None), slice(last, None))):
        if len(share.sizes[steps]):
            weight = None if share.weight is None else share.weight[rows]
            yield Share({name: array[rows] for name, array in share.arrays.items()}, share.sizes[steps], weight)


@dataclass(frozen=True)
class _Column:
    """A field as tensors.

    Parameters
    ----------
    field : of the data set.
    dtype : of its tensors.
    rows : samples of a batch, if all have the same number.
    """

    field: Field
    dtype: tf.DType
    rows: int | None

    @property
    def batch(self) -> Any:
        """What a batch of it is."""
        if self.field.ragged:
            return tf.RaggedTensorSpec((self.rows, None), self.dtype, ragged_rank=1)
        return tf.TensorSpec((self.rows, *self.field.shape), self.dtype)

    @property
    def window(self) -> list[Any]:
        """What the arrays of some batches are."""
        if self.field.ragged:
            return [tf.TensorSpec((None,), dtype) for dtype in (self.dtype, tf.int64, tf.int64)]
        return [tf.TensorSpec((None, self.rows, *self.field.shape), self.dtype)]

    def arrays(self, samples: Array, sizes: Integers) -> list[Array]:
        """The samples as (batches, samples of one, ...); ragged ones as values, lengths, and samples of each batch."""
        if self.field.ragged:
            lengths = np.array([len(row) for row in samples], np.int64)
            return [np.concatenate([*samples, np.empty(0, self.field.dtype)]), lengths, sizes]
        return [samples.reshape(len(sizes), len(samples) // len(sizes), *self.field.shape)]

    def batches(self, given: Iterator[Any]) -> Any:
        """The batches of the next tensors, which are those of ``arrays``."""
        values = next(given)
        if not self.field.ragged:
            return values
        rows = tf.RaggedTensor.from_row_lengths(values, next(given), validate=False)
        return tf.RaggedTensor.from_row_lengths(rows, next(given), validate=False)


class _Begun:
    """Passes that TensorFlow has begun; it knows them by their numbers.

    Parameters
    ----------
    windows : begins a pass.
    """

    def __init__(self, windows: Callable[[], Iterator[list[Array]]]) -> None:
        self._windows = windows
        self._passes: dict[int, Iterator[list[Array]]] = {}
        self._numbers = count()

    def begin(self) -> np.int64:
        """The number of a new pass."""
        number = next(self._numbers)
        self._passes[number] = self._windows()
        return np.int64(number)

    def take(self, number: np.int64) -> list[Array]:
        """The next window; ``StopIteration`` after the last one tells TensorFlow that the pass has ended."""
        return next(self._passes[int(number)])

    def end(self, number: np.int64) -> np.int64:
        """Nobody takes more of it."""
        self._passes.pop(int(number), None)
        return number


def _in_pieces(
    windows: Callable[[], Iterator[list[Array]]], specs: Sequence[Any], cut: Callable[..., Any], element: Any
) -> tf.data.Dataset:
    """What ``windows`` yields, cut into elements.

    Parameters
    ----------
    windows : begins a pass.
    specs : of the arrays that it yields.
    cut : makes a data set of such arrays.
    element : what its elements are.
    """
    begun, number, dtypes = _Begun(windows), tf.TensorSpec((), tf.int64), [spec.dtype for spec in specs]
    functions = [
        _function(lambda: tf.numpy_function(begun.begin, [], tf.int64)),
        _function(lambda of: tf.numpy_function(begun.take, [of], dtypes), number),
        _function(lambda of: tf.numpy_function(begun.end, [of], tf.int64), number),
        _function(lambda *tensors: tf.data.experimental.to_variant(cut(*tensors)), *specs),
    ]
    generated = tf.raw_ops.GeneratorDataset(
        **dict(zip(("init_func", "next_func", "finalize_func"), functions, strict=False)),
        **dict.fromkeys(("init_func_other_args", "next_func_other_args", "finalize_func_other_args"), ()),
        **_types(specs),
    )
    pieces = tf.raw_ops.FlatMapDataset(
        input_dataset=generated, other_arguments=(), f=functions[-1], **_types(tf.nest.flatten(element))
    )
    dataset = tf.data.experimental.from_variant(pieces, element)
    dataset.matex_functions = functions  # they live as long as the data set
    return dataset


def _types(specs: Sequence[Any]) -> dict[str, list[Any]]:
    """As data sets have them: a ragged tensor lies in a scalar of type variant."""
    variant = tf.TensorSpec(None, tf.variant)
    flat = [variant if isinstance(spec, tf.RaggedTensorSpec) else spec for spec in specs]
    return {"output_types": [spec.dtype for spec in flat], "output_shapes": [spec.shape for spec in flat]}


def _function(function: Callable[..., Any], *specs: Any) -> Any:
    return tf.function(
        function, input_signature=specs, autograph=False, experimental_attributes=ON_ONE_DEVICE
    ).get_concrete_function()


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


def normalization(axis: tuple[int, ...] | None, mean: Array, variance: Array) -> Any:
    """The Keras layer that subtracts the mean and divides by the root of the variance, along the axes that are kept."""
    return tf.keras.layers.Normalization(axis=axis, mean=mean, variance=variance)
