"""Probes of ranks without TensorFlow, whose import would take minutes on 16 of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import psutil

import matex_data as md
from benchmarks.harness.data import Task
from benchmarks.readers.ours import SEED
from matex_data.index.stored import to_bytes
from matex_data.mpi.library import MPI


def bytes_of_epoch(task: Task, batch_size: int) -> Callable[[], dict[str, float]]:
    """Count the bytes that this rank reads in the first epoch."""

    def run() -> dict[str, float]:
        data = md.open_dataset(task.path, inputs=task.inputs)
        for _ in data.batches(batch_size, shuffle=True, seed=SEED):
            pass
        return {"bytes": data.profile.bytes, "seconds": 0.0}

    return run


def opening(task: Task) -> Callable[[], dict[str, float]]:
    """Open many files; count the seconds, the bytes of the index, and the memory that this rank has got."""

    def run() -> dict[str, float]:
        md.open_dataset(f"{task.path}/0/*.npy")  # imports, communicators and pools
        before, begin = _memory(), time.perf_counter()
        data = md.open_dataset(f"{task.path}/*/*.npy")
        seconds = time.perf_counter() - begin
        index = len(to_bytes(data._source.index)) if MPI.COMM_WORLD.rank == 0 else 0
        return {"seconds": seconds, "memory": _memory() - before, "index": index}

    return run


def _memory() -> float:
    """Return the bytes in memory of this rank; of what several ranks map, its share."""
    gc.collect()
    MPI.COMM_WORLD.Barrier()
    nbytes = float(psutil.Process().memory_full_info().pss)
    MPI.COMM_WORLD.Barrier()
    return nbytes
