"""Batches are told from samples by the steps of their pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from matex_data.training.exact.rows import is_batched, shard_rows
from matex_data.training.exact.step import append_empty_batches


def _batches(**options: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(tf.zeros([20, 4])).batch(4, drop_remainder=True, **options)


BATCHES: dict[str, Callable[[], tf.data.Dataset]] = {
    "batch": _batches,
    "parallel": lambda: _batches(num_parallel_calls=2),
    "mapped": lambda: _batches().map(lambda x: (x, x)).prefetch(2),
    "padded": lambda: _batches().unbatch().padded_batch(4, drop_remainder=True).repeat(2),
    "zipped": lambda: tf.data.Dataset.zip((_batches(), _batches())),
    "rebatched": lambda: _batches().rebatch(2, drop_remainder=True),
    "unknown size": lambda: _batches().unbatch().batch(4),
}
SAMPLES: dict[str, Callable[[], tf.data.Dataset]] = {
    "slices": lambda: tf.data.Dataset.from_tensor_slices(tf.zeros([20, 4])),
    "unbatched": lambda: _batches().unbatch(),
    "split": lambda: _batches().flat_map(tf.data.Dataset.from_tensor_slices),
    "interleaved": lambda: _batches().interleave(tf.data.Dataset.from_tensor_slices, cycle_length=2),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_batches(kind: str) -> None:
    assert is_batched(BATCHES[kind]())


@pytest.mark.parametrize("kind", SAMPLES)
def test_samples_are_no_batches(kind: str) -> None:
    assert not is_batched(SAMPLES[kind]())


def test_names_of_classes_tell_nothing() -> None:
    dataset = tf.data.Dataset.from_tensor_slices(tf.zeros([20, 4]))
    dataset.__class__ = type("MyBatchLoader", (type(dataset),), {})
    assert not is_batched(dataset)


def test_empty_batches_of_any_kind_of_tensor() -> None:
    lists = tf.ragged.constant([[1.0, 2.0], [], [3.0]])
    sparse = tf.sparse.from_dense([[0, 1], [2, 0], [0, 0]])
    dataset = tf.data.Dataset.from_tensor_slices((lists, sparse, tf.zeros([3, 2, 4]))).batch(2)
    varied = tf.data.Dataset.range(3).map(lambda n: tf.ones([n])).padded_batch(2)  # of unknown length
    _, _, (inputs, empty) = list(append_empty_batches(tf.data.Dataset.zip((dataset, varied)), 1))
    shapes = [tuple(leaf.shape) for leaf in (*inputs, empty)]
    assert shapes == [(0, None), (0, 2), (0, 2, 4), (0, 0)]


@pytest.mark.parametrize(("rows", "static"), [(12, 6), (11, None)])
def test_a_static_number_of_rows_is_that_of_every_rank(rows: int, static: int | None) -> None:
    numbers = tf.data.Dataset.range(2 * rows).batch(rows, drop_remainder=True)
    batches = numbers.map(lambda x: (x, tf.stack([x, x], 1), tf.zeros([3])))  # the last one is a table
    shards = [shard_rows(batches, rank, 2) for rank in range(2)]
    for shard in shards:
        assert [spec.shape.as_list() for spec in shard.element_spec] == [[static], [static, 2], [3]]
    for whole, *parts in zip(batches, *shards, strict=True):
        for i in range(2):
            np.testing.assert_array_equal(np.concatenate([part[i] for part in parts]), whole[i])
