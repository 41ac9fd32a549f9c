"""Shuffled batches of an HDF5 file by h5py, for one rank: sample by sample, or in blocks of whole chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import h5py
import numpy as np

from benchmarks.harness.data import Array, Task

WINDOW = 128  # chunks whose samples are shuffled together
SEED = 1
PREFETCHED = 4  # batches

Batches = Iterator[tuple[Array, Array]]


def by_sample(task: Task, rank: int = 0, size: int = 1, batch_size: int = 0) -> Batches:
    """Yield the batches of a permutation of all samples; each is one sorted selection of h5py.

    Parameters
    ----------
    rank, size : which share of the samples, of how many.
    batch_size : samples of a batch; 0: those of the task, divided by ``size``.
    """
    batch_size = batch_size or task.batch_size // size
    with h5py.File(task.path) as file:
        images, labels = file[task.inputs], file[task.targets][...]
        numbers = np.random.default_rng(SEED).permutation(task.samples)[rank::size]
        for selected in np.sort(numbers.reshape(-1, batch_size)):
            yield images[selected], labels[selected]


def by_block(task: Task, rank: int = 0, size: int = 1, batch_size: int = 0) -> Batches:
    """Yield the batches of windows of chunks, in a random order: each chunk is read once, and its samples shuffled.

    Parameters
    ----------
    rank, size, batch_size : as those of ``by_sample``.
    """
    batch_size = batch_size or task.batch_size // size
    rng = np.random.default_rng(SEED)
    with h5py.File(task.path) as file:
        images, labels = file[task.inputs], file[task.targets][...]
        depth = images.chunks[0]
        chunks = rng.permutation(task.samples // depth)[rank::size]
        for first in range(0, len(chunks), WINDOW):
            numbers = chunks[first : first + WINDOW, None] * depth + np.arange(depth)
            window = np.empty((numbers.size, *images.shape[1:]), images.dtype)
            for place, begin in zip(range(0, numbers.size, depth), numbers[:, 0].tolist(), strict=True):
                images.read_direct(window, np.s_[begin : begin + depth], np.s_[place : place + depth])
            for selected in rng.permutation(numbers.size).reshape(-1, batch_size):
                yield window[selected], labels[numbers.reshape(-1)[selected]]


ORDERS: dict[str, Callable[..., Batches]] = {"samples": by_sample, "blocks": by_block}


def as_dataset(task: Task, order: str, rank: int = 0, size: int = 1) -> Any:
    """Return the batches of an order through ``tf.data.Dataset.from_generator``.

    There is nothing that automatic tuning could tune; it may delay the end of an epoch by seconds.
    """
    import tensorflow as tf

    with h5py.File(task.path) as file:
        images, labels = file[task.inputs], file[task.targets]
        rows = task.batch_size // size
        signature = (
            tf.TensorSpec((rows, *images.shape[1:]), images.dtype),
            tf.TensorSpec((rows,), labels.dtype),
        )
    dataset = tf.data.Dataset.from_generator(lambda: ORDERS[order](task, rank, size), output_signature=signature)
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.prefetch(PREFETCHED).with_options(options)
