"""Batches as a ``tf.data.Dataset``. No other module of the data path imports TensorFlow.

Python passes windows of many batches to TensorFlow, which slices them without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from typing import Any
from weakref import ref

import numpy as np
import tensorflow as tf

from matex_data._types import Array, Integers
from matex_data.epochs.adapting import refuse_own_rows
from matex_data.epochs.batches import Batches, BatchWindow
from matex_data.errors import FormatError, PartitionError
from matex_data.fields import ElementSpec, Field, Schema
from matex_data.index.ragged import RaggedArray
from matex_data.index.runs import Samples
from matex_data.mpi.communicator import Communicator
from matex_data.reading.source import Source


def as_tf_dataset(batches: Batches, schema: Schema) -> tf.data.Dataset:
    """Return a data set whose tensors share the memory of the batches. Each iteration is one epoch.

    Raises
    ------
    FormatError : a field has a dtype that TensorFlow does not have.
    """
    schedule, elements = batches.schedule, batches.elements
    rows = batches.fixed_rows
    columns = _columns(schema, elements, rows)
    weighted = schedule.remainder == "pad" or elements.weights is not None
    # TensorFlow never frees a generator: the batches, and what they keep in memory, belong to the data set.
    # Not in a graph, which outlives it.
    owned: Callable[[], Batches | None] = ref(batches) if tf.executing_eagerly() else (lambda: batches)

    def windows() -> Iterator[tuple[Array, ...]]:
        kept = owned()
        if kept is None:
            raise _orphaned()
        for window in kept.windows():
            for even in _of_equal_size(window):
                arrays = [column.arrays(even.arrays[column.field.name], even.sizes) for column in columns]
                weights = [] if even.weight is None else [even.weight.reshape(len(even.sizes), -1)]
                yield (*chain.from_iterable(arrays), *weights)

    def slices(*tensors: Any) -> tf.data.Dataset:
        remaining = iter(tensors)
        values = {column.field.name: column.batches(remaining) for column in columns}
        return tf.data.Dataset.from_tensor_slices(elements.assemble(values, next(remaining, None)))

    specs = [*chain.from_iterable(column.specs for column in columns)]
    if weighted:
        specs.append(tf.TensorSpec((None, rows), tf.float32))
    unconverted = tf.autograph.experimental.do_not_convert(slices)  # AutoGraph would take 0.3 s, for nothing
    dataset = tf.data.Dataset.from_generator(windows, output_signature=tuple(specs)).flat_map(unconverted)
    options = tf.data.Options()
    options.autotune.enabled = False  # there is nothing to tune, and its thread may delay the end of an epoch
    options.experimental_optimization.apply_default_optimizations = False  # cost some ms per epoch, gain nothing
    dataset = dataset.with_options(options)
    if not batches.resumed:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(schedule.steps))
    dataset.matex_batches = batches  # for checkpoints of the training
    batches.comm.note_sharded_data()
    return marked_as_sharded(dataset, batches.comm)


def _orphaned() -> PartitionError:
    return PartitionError(
        "the data set of tf_dataset() is gone, and a tensor of TensorFlow alone is left of it",
        remedy="keep a reference to the data set, or to one made of it, as long as it is read",
    )


def marked_as_sharded(dataset: tf.data.Dataset, ranks: Communicator) -> tf.data.Dataset:
    """Mark a dataset as rows of this rank alone: nothing shards it again, and no layer is adapted to it."""
    dataset.matex_sharded = ranks
    if ranks.size > 1:
        refuse_own_rows()
    return dataset


def has_other_rows_elsewhere(data: Any) -> bool:
    """Return whether data for a layer is a rank's share of a dataset."""
    ranks = sharding_ranks(data) if isinstance(data, tf.data.Dataset) else None
    return ranks is not None and ranks.size > 1


def sharding_ranks(dataset: tf.data.Dataset) -> Any:
    """Return the communicator of the ranks that a dataset is sharded over; None if it is whole on every rank."""
    source = sharded_source(dataset)
    return None if source is None else source.matex_sharded


def sharded_source(dataset: tf.data.Dataset) -> tf.data.Dataset | None:
    """Return the sharded dataset at the beginning of a pipeline; None if there is none."""
    if getattr(dataset, "matex_sharded", None) is not None:
        return dataset
    found = (sharded_source(source) for source in dataset._inputs())
    return next((source for source in found if source is not None), None)


def _columns(schema: Schema, elements: ElementSpec, rows: int | None) -> list[_Column]:
    names = elements.names
    return [_Column(f, _dtype(f), rows) for f in schema.values() if names is None or f.name in names]


def window_as_tf_dataset(window: BatchWindow, elements: ElementSpec, schema: Schema) -> tf.data.Dataset:
    """Return the batches of one window, copied, as a data set.

    Parameters
    ----------
    window : at least one batch.
    elements : structure of a batch; weights are left out.

    Raises
    ------
    FormatError : a field has a dtype that TensorFlow does not have.
    """
    columns, parts = _columns(schema, elements, None), []
    for even in _of_equal_size(window):
        tensors = chain.from_iterable(column.arrays(even.arrays[column.field.name], even.sizes) for column in columns)
        remaining = map(tf.constant, tensors)
        values = {column.field.name: column.batches(remaining) for column in columns}
        parts.append(tf.data.Dataset.from_tensor_slices(elements.assemble(values)))
    return reduce(tf.data.Dataset.concatenate, parts)


def input_batches(
    source: Source, elements: ElementSpec, samples: Samples, rows: int
) -> Iterator[tuple[tf.data.Dataset, int]]:
    """Yield the inputs of this rank's block of the samples, in order, a window at a time. *Collective*.

    The samples are those of ``Dataset.load``. Fields other than the inputs are not read, unless samples that cannot be
    read are left out, which any field may decide.

    Parameters
    ----------
    source : the opened files.
    elements : structure of a batch.
    samples : of all ranks, ascending.
    rows : samples of a batch.

    Yields
    ------
    batches, samples : of a window. If this rank has no samples, one batch of a blank sample, which counts 0.
    """
    profile, total = source.profile, 0
    elements = replace(elements, weights=None, targets=None if elements.inputs is not None else elements.targets)
    if elements.names is not None and source.skipped is None:
        selected = source.of_index(source.index.select(elements.names), source.transforms)
        source = replace(selected, profile=profile)
    fields = source.index.fields
    for arrays in source.windows(source.block(samples)):
        count = len(next(iter(arrays.values())))
        total += count
        if count:
            sizes = np.diff([*range(0, count, rows), count])
            yield window_as_tf_dataset(BatchWindow(arrays, sizes, None), elements, fields), count
    if not total:
        blank = {name: field.empty(1) for name, field in fields.items()}
        for name, array in blank.items():
            fields[name].blank(array)
        yield window_as_tf_dataset(BatchWindow(blank, np.array([1]), None), elements, fields), 0


def _of_equal_size(window: BatchWindow) -> Iterator[BatchWindow]:
    """Split a window into windows whose batches have equal sizes.

    The last batch of an epoch may differ from the others, and so do those from which samples were skipped.
    """
    end = 0
    for sizes in np.split(window.sizes, np.flatnonzero(np.diff(window.sizes)) + 1):
        begin, end = end, end + int(sizes.sum())
        if len(sizes):
            yield window.part(begin, end, sizes)


@dataclass(frozen=True)
class _Column:
    """Field of a data set as tensors.

    Parameters
    ----------
    field : the field.
    dtype : dtype of the tensors.
    rows : samples of a batch; None if batches may differ in size.
    """

    field: Field
    dtype: tf.DType
    rows: int | None

    @property
    def _ragged_axes(self) -> int:
        """Axes of a ragged sample in front of those of its elements."""
        return len(self.field.inner) - len(self.field.element_shape)

    @property
    def specs(self) -> list[tf.TensorSpec]:
        """Specs of the arrays of a window."""
        if self.field.ragged:
            splits = [tf.TensorSpec((None,), tf.int64)] * (self._ragged_axes + 1)
            return [tf.TensorSpec((None, *self.field.element_shape), self.dtype), *splits]
        return [tf.TensorSpec((None, self.rows, *self.field.shape), self.dtype)]

    def arrays(self, samples: Array | RaggedArray, sizes: Integers) -> list[Array]:
        """Return the samples as one array (batches, samples, ...).

        Ragged samples become arrays of their elements, of the row splits of each axis, from the first axis on, and of
        the samples of each batch.
        """
        if isinstance(samples, RaggedArray):
            return [samples.values, samples.offsets, sizes]
        if self.field.ragged:
            axes = self._ragged_axes
            shapes = np.array([sample.shape[:axes] for sample in samples], np.int64).reshape(-1, axes)
            lengths = [np.repeat(shapes[:, axis], shapes[:, :axis].prod(1)) for axis in range(axes)]
            return [self.field.join(samples), *map(_splits, lengths), sizes]
        return [samples.reshape(len(sizes), len(samples) // len(sizes), *self.field.shape)]

    def batches(self, tensors: Iterator[Any]) -> Any:
        """Return the batches, from the next tensors of those that ``arrays`` has returned."""
        values = next(tensors)
        if not self.field.ragged:
            return values
        *splits, sizes = [next(tensors) for _ in range(self._ragged_axes + 1)]
        samples = values
        for of_axis in reversed(splits):
            samples = tf.RaggedTensor.from_row_splits(samples, of_axis, validate=False)
        if self.rows is None:
            return tf.RaggedTensor.from_row_lengths(samples, sizes, validate=False)
        return tf.RaggedTensor.from_uniform_row_length(samples, self.rows, tf.size(sizes, tf.int64), validate=False)


def _splits(lengths: Integers) -> Integers:
    """Return the row splits of rows of these lengths, as ``tf.RaggedTensor`` has them."""
    return np.concatenate([[0], np.cumsum(lengths)])


def _dtype(field: Field) -> tf.DType:
    if field.nested:
        raise FormatError(
            "such samples are no tensors",
            field=field.name,
            expected="numbers, strings, or lists of these",
            found=field.attributes.get("type", "lists of lists"),
            remedy="read the field with batches() or load(), or select other fields with inputs= and targets=",
        )
    if field.dtype.kind in "OSU":
        return tf.string
    try:
        return tf.as_dtype(field.dtype)
    except TypeError as error:
        raise FormatError(
            "TensorFlow has no such dtype",
            field=field.name,
            expected="numbers, booleans or strings",
            found=field.dtype_name,
            remedy=_remedy(field),
        ) from error


def _remedy(field: Field) -> str:
    members = [str(name) for name in field.attributes.get("members", ())]
    if members:
        shown = ", ".join(f'"{name}"' for name in members[:2])
        return f"select members of the table: inputs=[{shown}]; or read it whole with batches() or load()"
    return "read the field with batches() or load(), or select other fields with inputs= and targets="


def normalization(
    axis: tuple[int, ...] | None, mean: Array, variance: Array, shape: tuple[int, ...] | None = None
) -> Any:
    """Return the Keras layer that subtracts ``mean`` and divides by the square root of ``variance``.

    Parameters
    ----------
    axis : axes of a batch with a mean and a variance of their own; None: none.
    mean, variance : float64 of the shape of these axes.
    shape : shape of a sample; None or (): the layer is built by its first batch, which may have more axes.
    """
    layer = tf.keras.layers.Normalization(axis=axis, mean=mean, variance=variance)
    if shape:  # built within the graph of a step, Keras's layer keeps tensors that no other graph can use
        layer.build((None, *shape))
    return layer


def is_normalization(layer: Any) -> bool:
    """Return whether a layer is one of Keras that normalizes."""
    return isinstance(layer, tf.keras.layers.Normalization)


def is_feature_space(layer: Any) -> bool:
    """Return whether this is a ``FeatureSpace``, which adapts to a dict of fields."""
    return isinstance(layer, tf.keras.utils.FeatureSpace)


def of_generator(batches: Callable[[], Iterator[dict[str, Array]]], schema: Schema) -> tf.data.Dataset:
    """Return a dataset of the batches that a function yields, each a dict of field name to array."""
    specs = {name: tf.TensorSpec((None, *field.sample_shape), _dtype(field)) for name, field in schema.items()}
    return tf.data.Dataset.from_generator(batches, output_signature=specs)
