"""This rank's rows of a global batch."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from matex_data.training.step import batch_size


def part(rows: int, rank: int, size: int) -> slice:
    """Return the rows of a batch that belong to a rank: neighbouring ones; the first ranks may have one row more."""
    start = rank * (rows // size) + min(rank, rows % size)
    return slice(start, start + rows // size + int(rank < rows % size))


def my_rows(element: Any, rank: int, size: int) -> Any:
    """Return the rows of a batch that belong to a rank: neighbouring ones; the first ranks may have one row more.

    Parameters
    ----------
    element : nested tensors with one first axis; scalars stay as they are.
    """
    count = batch_size(element)
    if count is None:
        return element
    static = _static_rows(element)
    if static is not None:
        mine = part(static, rank, size)
        start, stop = mine.start, mine.stop
    else:
        each, more = count // size, count % size
        start = rank * each + tf.minimum(tf.cast(rank, count.dtype), more)
        stop = start + each + tf.cast(rank < more, count.dtype)
    return tf.nest.map_structure(lambda leaf: _cut(leaf, start, stop), element)


def _static_rows(element: Any) -> int | None:
    shape = tf.nest.flatten(element)[0].shape
    return None if shape.rank is None else shape[0]


def _cut(leaf: Any, start: Any, stop: Any) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        begin = tf.concat([[start], tf.zeros_like(leaf.dense_shape[1:])], 0)
        return tf.sparse.slice(leaf, begin, tf.concat([[stop - start], leaf.dense_shape[1:]], 0))
    if getattr(leaf, "shape", None) is None or leaf.shape.rank == 0:
        return leaf
    return leaf[start:stop]


def share_rows(dataset: tf.data.Dataset, rank: int, size: int) -> tf.data.Dataset:
    """The data set with this rank's rows of every batch. The order must be the same on all ranks."""

    def cut(*parts: Any) -> Any:
        return my_rows(whole_element(dataset, parts), rank, size)

    options = tf.data.Options()
    options.deterministic = True
    return dataset.with_options(options).map(cut)


def whole_element(dataset: tf.data.Dataset, parts: tuple[Any, ...]) -> Any:
    """The element of which ``Dataset.map`` gives the parts as arguments."""
    return parts if isinstance(dataset.element_spec, tuple) else parts[0]


def is_local(x: Any) -> bool:
    """Whether data is this rank's part already: a data set of this package, or arrays that say so."""
    if isinstance(x, tf.data.Dataset):
        return getattr(x, "matex_share", False) or any(is_local(source) for source in x._inputs())
    return any(getattr(leaf, "matex_share", False) for leaf in tf.nest.flatten(x))


def is_batched(dataset: tf.data.Dataset) -> bool:
    """Whether elements are batches rather than samples, as far as the pipeline tells."""
    shapes: list[Any] = [getattr(spec, "shape", None) for spec in tf.nest.flatten(dataset.element_spec)]
    if any(shape is None or shape.rank == 0 for shape in shapes):
        return False
    if any(shape.rank and shape[0] is None for shape in shapes):
        return True
    name = type(dataset).__name__
    return "Batch" in name or any(is_batched(source) for source in dataset._inputs() if "Unbatch" not in name)
