"""Batches that a check takes from an iterator and gives back, and the spec of those of all ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf


def until_out_of_range(iterator: Any) -> Iterator[Any]:
    """Yield elements until the iterator raises ``OutOfRangeError``."""
    with contextlib.suppress(tf.errors.OutOfRangeError):
        yield from iterator


def iterator_over(batches: list[Any], spec: Any) -> Any:
    """Return an iterator of TensorFlow over batches, with the element spec of their dataset, so that a step is traced
    once.
    """
    data = functools.reduce(tf.data.Dataset.concatenate, map(tf.data.Dataset.from_tensors, batches))
    return iter(tf.data.experimental.from_variant(tf.data.experimental.to_variant(data), spec))


def without_optionals(leaf: Any) -> Any:
    """Return None for the optional that stands for None in Keras's datasets."""
    return None if isinstance(leaf, tf.experimental.Optional) else leaf


def union_spec(spec: Any, rows: int | None = None) -> Any:
    """Return the spec of the batches of all ranks.

    Parameters
    ----------
    spec : element spec of this rank's batches.
    rows : of the batches of all ranks; None: not known.
    """
    return tf.nest.map_structure(
        lambda leaf: (
            tf.TensorSpec([rows, *leaf.shape[1:]], leaf.dtype)
            if isinstance(leaf, tf.TensorSpec) and leaf.shape.rank
            else leaf
        ),
        spec,
    )
