"""Batches that a check takes from an iterator and gives back, and the spec of those of all ranks."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from matex_data.training.comm.channel import Channel
from matex_data.training.exact.rows import leaves_per_sample
from matex_data.training.exact.step import empty_batch


def until_out_of_range(iterator: Any) -> Iterator[Any]:
    """Yield elements until the iterator raises ``OutOfRangeError``."""
    with contextlib.suppress(tf.errors.OutOfRangeError):
        yield from iterator


def taken(
    iterator: Any, count: int, spec: Any, replace: Callable[[list[Any]], list[Any]] = lambda batches: batches
) -> tuple[list[Any], Any]:
    """Return the next batches of an iterator, with None for optionals, and an iterator that begins with them.

    It is one of TensorFlow, with the element spec of their dataset, so that a step is traced once; at the end of the
    data, the one that was given.

    Parameters
    ----------
    replace : returns the batches to begin with in place of those of the iterator.
    """
    batches = replace(list(itertools.islice(until_out_of_range(iterator), count)))
    if not batches:
        return [], iterator
    data = functools.reduce(tf.data.Dataset.concatenate, map(tf.data.Dataset.from_tensors, batches))
    again = iter(tf.data.experimental.from_variant(tf.data.experimental.to_variant(data), spec))
    return [tf.nest.map_structure(without_optionals, batch) for batch in batches], again


def of_all_ranks(channel: Channel, iterator: Any, count: int) -> Any:
    """Return an iterator over the next batches, to which empty ones are added: as many as on any rank. *Collective*.

    Raises
    ------
    OutOfRangeError : no rank has another batch.
    """
    spec = iterator.element_spec
    spec = union_spec(spec, has_rows=leaves_per_sample(spec))

    def padded(batches: list[Any]) -> list[Any]:
        (number,) = channel.communicator.maximum(len(batches))
        return [*batches, *[empty_batch(spec)] * (number - len(batches))]

    batches, iterator = taken(iterator, count, spec, padded)
    if not batches:
        raise tf.errors.OutOfRangeError(None, None, "End of sequence")
    return iterator


def without_optionals(leaf: Any) -> Any:
    """Return None for the optional that stands for None in Keras's datasets."""
    return None if isinstance(leaf, tf.experimental.Optional) else leaf


def union_spec(spec: Any, rows: int | None = None, has_rows: Sequence[bool | None] | None = None) -> Any:
    """Return the spec of the batches of several ranks.

    Parameters
    ----------
    rows : of the batches of these ranks; None: not known.
    has_rows : for each leaf whether its first axis is that of the samples; None: if it has an axis.
    """
    leaves = tf.nest.flatten(spec)
    flags = [True] * len(leaves) if has_rows is None else has_rows
    leaves = [
        tf.TensorSpec([rows, *leaf.shape[1:]], leaf.dtype)
        if flag and isinstance(leaf, tf.TensorSpec) and leaf.shape.rank
        else leaf
        for leaf, flag in zip(leaves, flags, strict=True)
    ]
    return tf.nest.pack_sequence_as(spec, leaves)
