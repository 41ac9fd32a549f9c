"""Ceilings of the machine: moving bytes, or decoding chunks, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import local
from typing import Any

import h5py
import imagecodecs
import numpy as np

from benchmarks.harness.data import Task
from matex_data.codecs.pipeline import unshuffle

BUFFER_BYTES = 8 << 20
DECODED_BYTES = 8 << 20  # by a thread in one go

Pass = Callable[[], int]
"""Goes once over the samples, or over some of them, and returns how many these were."""


def moving(task: Task, rank: int = 0, size: int = 1, buffers: int = 1) -> Pass:
    """Return a pass that reads the file by ``preadv`` into reused buffers; each rank reads its range of the file.

    A single buffer stays in the processor's cache; batches that wait for the training do not.
    """
    descriptor = os.open(task.path, os.O_RDONLY)
    length = os.fstat(descriptor).st_size
    begin, end = length * rank // size, length * (rank + 1) // size
    memory: Any = [np.zeros(BUFFER_BYTES, np.uint8) for _ in range(buffers)]

    def run() -> int:
        place, turn = begin, 0
        while place < end:
            place += os.preadv(descriptor, [memory[turn % buffers][: end - place]], place)
            turn += 1
        return task.samples * (rank + 1) // size - task.samples * rank // size

    return run


def decoding(task: Task, rank: int = 0, size: int = 1, together: int = DECODED_BYTES) -> Pass:
    """Return a pass that inflates and unshuffles the chunks of the inputs, which are in memory, in the rank's threads.

    libdeflate and Blosc by way of imagecodecs, as matex_data calls them. A task of a thread decodes ``together`` bytes;
    0: one chunk. The next chunk overwrites the decoded bytes.
    """
    with h5py.File(task.path) as file:
        dataset = file[task.inputs]
        depth, dtype, shape = int(dataset.chunks[0]), dataset.dtype, dataset.chunks
        corners = [(row, 0, 0) for row in range(0, task.samples, depth)]
        corners = corners[len(corners) * rank // size : len(corners) * (rank + 1) // size]
        stored = [dataset.id.read_direct_chunk(corner)[1] for corner in corners]
    nbytes = int(np.prod(shape)) * dtype.itemsize
    several = max(1, together // nbytes)
    groups = [stored[i : i + several] for i in range(0, len(stored), several)]
    pool = ThreadPoolExecutor(int(os.environ["MATEX_THREADS"]))
    scratch = _Scratch(nbytes)

    def decode(chunks: list[bytes]) -> None:
        for chunk in chunks:
            imagecodecs.deflate_decode(chunk, out=scratch.planes)
            unshuffle(scratch.planes, dtype.itemsize, scratch.items)

    def run() -> int:
        for _ in pool.map(decode, groups):
            pass
        return len(corners) * depth

    return run


class _Scratch(local):
    """Each thread's own memory."""

    def __init__(self, nbytes: int) -> None:
        self.items, self.planes = np.empty(nbytes, np.uint8), np.empty(nbytes, np.uint8)
