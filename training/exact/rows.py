"""Select this rank's rows of a global batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from matex_data.epochs.tfdata import sharding_ranks
from matex_data.training.keras_api import BATCHING, REGROUPING


def rank_row_counts(rows: int, size: int) -> tuple[int, ...]:
    """Return the number of rows of a batch that belong to each rank."""
    return tuple(rows // size + (rank < rows % size) for rank in range(size))


def rank_bounds(rows: Any, rank: int, size: int) -> tuple[Any, Any]:
    """Return the first row of a rank and the one after its last; the first ranks have one more.

    Parameters
    ----------
    rows : number of rows of the batch; the results are tensors if it is a scalar tensor.

    Examples
    --------
    >>> [rank_bounds(10, rank, 4) for rank in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    share, rest = rows // size, rows % size
    least = min if isinstance(rows, int) else tf.minimum
    return rank * share + least(rest, rank), (rank + 1) * share + least(rest, rank + 1)


def rows_between(element: Any, start: Any, stop: Any, per_sample: Sequence[bool | None]) -> Any:
    """Return rows of a batch; leaves that have no row per sample stay whole.

    Parameters
    ----------
    start, stop : first row, and the one after the last; numbers or scalar tensors.
    per_sample : result of ``leaves_per_sample`` for the dataset.
    """
    rows = batch_size(element)
    known = zip(tf.nest.flatten(element), per_sample, strict=False)
    selected = [None if leaf is None else _slice_leaf(leaf, rows, start, stop, flag) for leaf, flag in known]
    return tf.nest.pack_sequence_as(element, selected)


def leaves_per_sample(spec: Any) -> list[bool | None]:
    """Return for each leaf of an element spec whether it has one row per sample; None if it depends on the data.

    Other leaves, such as constant tables, are whole on every rank. If the spec leaves the batch size open, a leaf of
    known length is such a table.
    """
    reference = _reference(spec)
    return [_is_per_sample(leaf, reference) for leaf in tf.nest.flatten(spec)]


def _is_per_sample(leaf: Any, reference: Any) -> bool | None:
    if leaf is None:  # such as sample weights, which other batches may have
        return None
    shape = getattr(leaf, "shape", None)
    if reference is None or shape is None or shape.rank == 0:
        return False
    if leaf is reference:
        return True
    if shape.rank is None or shape[0] is None:
        return None
    return bool(shape[0] == reference.shape[0])


def static_rows(spec: Any, per_sample: Sequence[bool | None] | None = None) -> int | None:
    """Return the number of rows of every batch; None if the element spec leaves it open.

    Parameters
    ----------
    per_sample : result of ``leaves_per_sample``; None: compute it.
    """
    per_sample = leaves_per_sample(spec) if per_sample is None else per_sample
    leaves = [leaf for leaf, known in zip(tf.nest.flatten(spec), per_sample, strict=True) if known]
    return leaves[0].shape[0] if leaves and leaves[0].shape.rank else None


def static_counts(batch: Any) -> set[int]:
    """Return the number of rows of a batch, and of the elements of leaves with rows, where they are static."""
    leaves = zip(tf.nest.flatten(batch), leaves_per_sample(batch), strict=True)
    counts = [count for leaf, known in leaves if known for count in (leaf.shape[0], leaf.shape.num_elements())]
    return {count for count in counts if count}


def rank_rows(
    element: Any, rank: int, size: int, per_sample: Sequence[bool | None] | None = None, stand_in: bool = False
) -> Any:
    """Return the rows of a batch that belong to a rank; see ``rank_bounds``.

    Parameters
    ----------
    element : nested tensors; leaves with one row per sample are sliced, others stay whole.
    per_sample : result of ``leaves_per_sample`` for the dataset; None: compute it for ``element``.
    stand_in : give a rank without rows the first row of the batch.
    """
    leaves = tf.nest.flatten(element)
    if per_sample is None or len(per_sample) != len(leaves):  # Keras adds sample weights to a batch, or None
        per_sample = leaves_per_sample(element)
    reference = next((leaf for leaf, known in zip(leaves, per_sample, strict=True) if known), None)
    if reference is None:
        return element
    known = None if reference.shape.rank is None else reference.shape[0]
    rows = leaf_rows(reference) if known is None else int(known)
    start, stop = rank_bounds(rows, rank, size)
    if stand_in:
        start, stop = tf.cast(start, tf.int64), tf.cast(stop, tf.int64)
        empty = start == stop
        start, stop = tf.where(empty, tf.zeros_like(start), start), tf.where(empty, tf.ones_like(stop), stop)
    own = rows_between(element, start, stop, per_sample)
    return _with_open_rows(own, per_sample) if isinstance(rows, int) and rows % size else own


def _with_open_rows(element: Any, per_sample: Sequence[bool | None]) -> Any:
    """Return a batch whose number of rows is not static: a static one stands for that of all ranks."""
    leaves = [
        tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=[None, *leaf.shape[1:]])
        if known and isinstance(leaf, tf.Tensor)
        else leaf
        for leaf, known in zip(tf.nest.flatten(element), per_sample, strict=True)
    ]
    return tf.nest.pack_sequence_as(element, leaves)


def _slice_leaf(leaf: Any, rows: Any, start: Any, stop: Any, per_sample: bool | None) -> Any:
    if per_sample is False or leaf is None:
        return leaf
    if per_sample is None:  # slice the leaf if it is as long as this batch
        length = leaf_rows(leaf)
        matches = length == tf.cast(rows, tf.int64)
        start = tf.where(matches, tf.cast(start, tf.int64), tf.zeros_like(length))
        stop = tf.where(matches, tf.cast(stop, tf.int64), length)
    if isinstance(leaf, tf.SparseTensor):
        start, stop = tf.cast(start, tf.int64), tf.cast(stop, tf.int64)
        begin = tf.concat([[start], tf.zeros_like(leaf.dense_shape[1:])], 0)
        return tf.sparse.slice(leaf, begin, tf.concat([[stop - start], leaf.dense_shape[1:]], 0))
    return leaf[start:stop]


def batch_size(data: Any) -> Any:
    """Return the number of samples in a batch, a scalar int64 tensor; None if the data has no sample axis."""
    reference = _reference(data)
    return None if reference is None else leaf_rows(reference)


def leaf_rows(leaf: Any) -> Any:
    """Return the length of the first axis of a dense, ragged or sparse tensor, a scalar int64 tensor."""
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int64)
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return tf.shape(leaf, tf.int64)[0]


def _reference(data: Any) -> Any:
    """Return the leaf whose rows are the samples: the first target, since inputs may be tables; else the first input.

    Among several inputs, prefer one whose length the spec leaves open: the length of a table is known.
    """
    x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
    for leaves in (tf.nest.flatten(y), tf.nest.flatten(x)):
        found = [leaf for leaf in leaves if getattr(leaf, "shape", None) is not None and leaf.shape.rank != 0]
        if found:
            return next((leaf for leaf in found if leaf.shape.rank is None or leaf.shape[0] is None), found[0])
    return None


def shard_rows(dataset: tf.data.Dataset, rank: int, size: int) -> tf.data.Dataset:
    """Shard the dataset: keep this rank's rows of each batch. All ranks need the same batches in the same order."""
    per_sample = leaves_per_sample(dataset.element_spec)

    def select(*args: Any) -> Any:
        return rank_rows(dataset_element(dataset, args), rank, size, per_sample)

    return deterministic(dataset).map(select)


def deterministic(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return the dataset with its elements in the same order on all ranks.

    Autotuning is off unless the script asks for it: with one core for a rank, its thread took up to two seconds to end
    an epoch.
    """
    options = tf.data.Options()
    options.deterministic = True
    if dataset.options().autotune.enabled is None:
        options.autotune.enabled = False
    return dataset.with_options(options)


def dataset_element(dataset: tf.data.Dataset, args: tuple[Any, ...]) -> Any:
    """Return the element that ``Dataset.map`` has unpacked into arguments."""
    return args if isinstance(dataset.element_spec, tuple) else args[0]


def recording_sizes(dataset: tf.data.Dataset, sizes: list[int]) -> tf.data.Dataset:
    """Return the dataset, which adds the number of rows of each batch to a list, also of those that are prefetched."""

    def record(*args: Any) -> Any:
        element = dataset_element(dataset, args)
        with tf.control_dependencies([tf.numpy_function(sizes.append, [batch_size(element)], [])]):
            return tf.nest.map_structure(tf.identity, element)

    return dataset.map(record)


def is_sharded(x: Any) -> bool:
    """Return whether data holds this rank's rows alone: a dataset of this package, or arrays that are marked so."""
    if isinstance(x, tf.data.Dataset):
        return sharding_ranks(x) is not None
    return any(getattr(leaf, "matex_sharded", False) for leaf in tf.nest.flatten(x))


def batch_count(dataset: tf.data.Dataset) -> int:
    """Return the number of batches; infinite if ``shard`` has made an unknown one, which is equal on all ranks, too."""
    count = int(dataset.cardinality())
    equal = count == tf.data.UNKNOWN_CARDINALITY and hasattr(dataset, "matex_row_counts")
    return tf.data.INFINITE_CARDINALITY if equal else count


def is_batched(dataset: tf.data.Dataset) -> bool:
    """Return whether elements are batches rather than samples, as far as the pipeline shows."""
    shapes: list[Any] = [getattr(spec, "shape", None) for spec in tf.nest.flatten(dataset.element_spec)]
    if any(shape is None or shape.rank == 0 for shape in shapes):
        return False
    if any(shape.rank and shape[0] is None for shape in shapes):
        return True
    return isinstance(dataset, BATCHING) or (
        not isinstance(dataset, REGROUPING) and any(is_batched(source) for source in dataset._inputs())
    )
