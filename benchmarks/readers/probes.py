"""Probes, each run once in a new process: memory, threads, and the first batch of a huge file."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import psutil
import tensorflow as tf

from benchmarks.harness.data import Task
from benchmarks.readers import ours

Figures = dict[str, float]
MB = 1e6
SETTLED = 20  # epochs after which memory has its size
LOOKS = 3  # at the threads
NAP = 0.01
GRACE = 10.0  # seconds until a thread should have ended


def first_batch(task: Task) -> Callable[[], Figures]:
    """Measure the seconds to open a huge file and to its first shuffled batch, and the peak of the memory.

    Memory counts from the moment after TensorFlow has run a dataset of its own.
    """

    def run() -> Figures:
        _warm_tensorflow()
        before = _resident()
        peak = _Peak()
        begin = time.perf_counter()
        data = ours.opened(task)
        opened = time.perf_counter()
        batches = iter(data.tf_dataset(task.batch_size, shuffle=True, seed=ours.SEED))
        next(batches)
        first = time.perf_counter()
        for _ in range(task.limit // task.batch_size):
            next(batches)
        return {"open": opened - begin, "first": first - opened, "memory": (peak.end() - before) / MB}

    return run


def many_epochs(task: Task, epochs: int) -> Callable[[], Figures]:
    """Measure the growth of memory, file descriptors and threads, and whether an abandoned pass ends its thread."""

    def run() -> Figures:
        this = psutil.Process()
        batches = ours.opened(task).tf_dataset(task.batch_size, shuffle=True, seed=ours.SEED)
        resident, descriptors, threads = [], [], []
        for epoch in range(epochs):
            for _ in batches:
                pass
            if epoch >= SETTLED:
                resident.append(_resident())
                descriptors.append(this.num_fds())
                threads.append(_threads(this))
        iterator = iter(batches)
        next(iterator)
        del iterator
        return {
            "memory": (max(resident) - min(resident)) / MB,
            "drift": (resident[-1] - resident[0]) / MB,
            "descriptors": max(descriptors) - min(descriptors),
            "threads": max(threads) - min(threads),
            "left": _readers_left(),
        }

    return run


def _threads(process: psutil.Process) -> int:
    """Return the smallest of a few counts of threads: one that has ended its work may still exist for a moment."""
    looks = []
    for _ in range(LOOKS):
        looks.append(process.num_threads())
        time.sleep(NAP)
    return min(looks)


def _readers_left() -> int:
    """Return the number of threads that still read after ``GRACE`` seconds."""
    gc.collect()
    deadline = time.monotonic() + GRACE
    while left := sum(thread.name == "matex-read" for thread in threading.enumerate()):
        if time.monotonic() > deadline:
            break
        time.sleep(NAP)
    return left


def _warm_tensorflow() -> None:
    dataset = tf.data.Dataset.from_generator(lambda: iter([0.0]), output_signature=tf.TensorSpec((), tf.float32))
    for _ in dataset:
        pass


def _resident() -> int:
    """Return the resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)


class _Peak:
    """Peak of the resident memory since the start, sampled by a thread."""

    def __init__(self) -> None:
        self._most = _resident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(NAP):
            self._most = max(self._most, _resident())

    def end(self) -> int:
        """Stop sampling and return the peak, in bytes."""
        self._ended.set()
        self._thread.join()
        return max(self._most, _resident())
