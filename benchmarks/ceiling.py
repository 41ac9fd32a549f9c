"""What the machine can do at best: moving bytes, or decoding them, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import local
from typing import Any

import h5py
import imagecodecs
import numpy as np

from benchmarks.data import Task
from matex_data.unshuffle import unshuffle

BUFFER_BYTES = 8 << 20

Pass = Callable[[], int]
"""Goes once over the samples, or over some of them, and returns how many these were."""


def moving(task: Task, rank: int = 0, size: int = 1, buffers: int = 1) -> Pass:
    """The file's bytes into buffers that are used again, by ``preadv``; each rank its part of the file.

    One buffer stays in the processor's cache. Batches that are waiting for the training do not.
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


def decoding(task: Task, rank: int = 0, size: int = 1) -> Pass:
    """Inflate and unshuffle the chunks of the inputs, which are in memory, with the threads a rank may use.

    libdeflate inflates, and our own loop unshuffles, in a tenth of the time that numcodecs takes. What comes out is
    overwritten by the next chunk.
    """
    with h5py.File(task.path) as file:
        dataset = file[task.inputs]
        depth, itemsize = int(dataset.chunks[0]), int(dataset.dtype.itemsize)
        nbytes = int(np.prod(dataset.chunks)) * itemsize
        corners = [(row, 0, 0) for row in range(0, task.samples, depth)]
        corners = corners[len(corners) * rank // size : len(corners) * (rank + 1) // size]
        stored = [dataset.id.read_direct_chunk(corner)[1] for corner in corners]
    scratch = _Scratch(nbytes)
    pool = ThreadPoolExecutor(int(os.environ["MATEX_THREADS"]))

    def decode(chunk: bytes) -> None:
        imagecodecs.deflate_decode(chunk, out=scratch.planes)
        unshuffle(scratch.planes, itemsize, scratch.items)

    def run() -> int:
        for _ in pool.map(decode, stored):
            pass
        return len(stored) * depth

    return run


class _Scratch(local):
    """Each thread's own memory."""

    def __init__(self, nbytes: int) -> None:
        self.planes = np.empty(nbytes, np.uint8)
        self.items = np.empty(nbytes, np.uint8)
