"""Other readers of the same files, each used as its documentation recommends.

Targets are small, and peers keep them in memory. Each pass takes ``task.limit`` samples, drawn at random anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import h5py
import numpy as np

from benchmarks.harness.counting import counting
from benchmarks.harness.data import Task
from benchmarks.readers.ceiling import Pass

Array = np.ndarray[Any, Any]


def _drawn(task: Task, rng: np.random.Generator) -> Array:
    """Draw whole batches of distinct samples in random order."""
    count = min(task.limit, task.samples) // task.batch_size * task.batch_size
    return rng.choice(task.samples, count, replace=False)


def from_generator_samples(task: Task) -> Pass:
    """Read sample by sample with h5py through ``tf.data.Dataset.from_generator``; TensorFlow makes the batches."""
    import tensorflow as tf

    file = h5py.File(task.path)
    x, y = file[task.inputs], file[task.targets][...]
    rng = np.random.default_rng(0)

    def samples() -> Iterator[tuple[Array, Any]]:
        for number in _drawn(task, rng).tolist():
            yield x[number], y[number]

    signature = tf.TensorSpec(x.shape[1:], x.dtype), tf.TensorSpec((), y.dtype)
    dataset = tf.data.Dataset.from_generator(samples, output_signature=signature)
    dataset = dataset.batch(task.batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    return counting(dataset)


def from_generator_batches(task: Task) -> Pass:
    """Read each batch by one sorted selection with h5py, through ``tf.data.Dataset.from_generator``."""
    import tensorflow as tf

    file = h5py.File(task.path)
    x, y = file[task.inputs], file[task.targets][...]
    rng = np.random.default_rng(0)

    def batches() -> Iterator[tuple[Array, Array]]:
        for numbers in _drawn(task, rng).reshape(-1, task.batch_size):
            numbers.sort()
            yield x[numbers], y[numbers]

    signature = tf.TensorSpec((task.batch_size, *x.shape[1:]), x.dtype), tf.TensorSpec((task.batch_size,), y.dtype)
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature).prefetch(tf.data.AUTOTUNE)
    return counting(dataset)


class _Samples:
    """Map-style dataset; the first process or thread that reads opens the file."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._opened: tuple[h5py.Dataset, Array] | None = None

    @property
    def fields(self) -> tuple[h5py.Dataset, Array]:
        """Return inputs and targets."""
        if self._opened is None:
            file = h5py.File(self.task.path)
            self._opened = file[self.task.inputs], file[self.task.targets][...]
        return self._opened

    def __len__(self) -> int:
        return self.task.samples

    def __getitem__(self, number: int) -> tuple[Array, Any]:
        x, y = self.fields
        return x[number], y[number]


class Batches(_Samples):
    """Like ``_Samples``, with the batched access that PyTorch's fetcher looks for."""

    def __getitems__(self, numbers: list[int]) -> tuple[Array, Array]:
        x, y = self.fields
        order = np.sort(numbers)
        return x[order], y[order]


def as_tensors(batch: tuple[Array, Array]) -> tuple[Any, Any]:
    """Convert arrays to tensors without a copy."""
    import torch

    return torch.from_numpy(batch[0]), torch.from_numpy(batch[1])


def torch_loader(task: Task, batched: bool, workers: int) -> Pass:
    """Read with ``torch.utils.data.DataLoader`` and persistent workers, as its tuning guide recommends."""
    import torch
    from torch.utils.data import DataLoader, SubsetRandomSampler

    torch.manual_seed(0)
    collate: Callable[[Any], Any] | None = as_tensors if batched else None
    chosen = _drawn(task, np.random.default_rng(0)).tolist()
    samples: Any = Batches(task) if batched else _Samples(task)
    loader: DataLoader[Any] = DataLoader(
        samples,
        task.batch_size,
        sampler=SubsetRandomSampler(chosen),
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=collate,
        drop_last=True,
    )
    return lambda: sum(len(x) for x, _ in loader)


def grain_dataset(task: Task, threads: int) -> Pass:
    """Read with Grain's ``MapDataset``: shuffled, in threads, batched."""
    grain: Any = import_module("grain.python")  # it has no types
    source: Any = _Samples(task)
    count = min(task.limit, task.samples) // task.batch_size * task.batch_size
    dataset = grain.MapDataset.source(source).shuffle(seed=0)[:count]
    batches = dataset.to_iter_dataset(grain.ReadOptions(num_threads=threads)).batch(task.batch_size)
    return lambda: sum(len(x) for x, _ in batches)


def blocks_in_order(task: Task) -> Pass:
    """Read whole batches with h5py in the order of the file, each chunk once: nothing is shuffled."""
    x = h5py.File(task.path)[task.inputs]

    def run() -> int:
        return sum(len(x[start : start + task.batch_size]) for start in range(0, task.samples, task.batch_size))

    return run
