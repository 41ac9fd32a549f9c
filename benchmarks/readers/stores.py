"""Probes of files in a store of objects: seconds of an epoch, requests, and bytes that were sent."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from mpi4py import MPI

import matex_data as md
from benchmarks.harness.data import Task
from benchmarks.harness.object_server import counts
from benchmarks.readers.ours import SEED
from matex_data.storage import objects

SLOW = 256  # samples that a shuffling peer reads

Probe = Callable[[], dict[str, float]]


def ours(task: Task) -> Probe:
    """Read a shuffled epoch, the second one of the program. *Collective*."""

    def run() -> dict[str, float]:
        data = md.open_dataset(task.path, inputs=task.inputs or None, targets=task.targets or None)
        batches = data.batches(task.batch_size, shuffle=True, seed=SEED, remainder="keep")
        for _ in batches:
            pass
        MPI.COMM_WORLD.Barrier()
        before, begin = counts(task.path), time.perf_counter()
        samples = sum(len(batch[0]) for batch in batches)
        MPI.COMM_WORLD.Barrier()
        seconds, after = time.perf_counter() - begin, counts(task.path)
        assert MPI.COMM_WORLD.allreduce(samples) == task.samples
        is_first = MPI.COMM_WORLD.rank == 0  # the figures of all ranks are added, and the server counts for all
        return {"seconds": seconds, **{name: float(after[name] - before[name]) * is_first for name in after}}

    return run


def h5py_fsspec(task: Task, shuffled: bool) -> Probe:
    """Read batches by h5py over fsspec's HTTP file; shuffled: each is one sorted selection, and some are an epoch's.

    fsspec reads ahead by 5 MiB, its default, for what is read in order, and what h5py asks for alone for what is not.
    """
    import fsspec
    import h5py

    limit = SLOW if shuffled else task.samples

    def run() -> dict[str, float]:
        with fsspec.open(task.path, cache_type="none" if shuffled else "readahead") as file, h5py.File(file) as data:
            images, labels = data[task.inputs], data[task.targets][...]
            numbers = np.random.default_rng(SEED).permutation(task.samples) if shuffled else np.arange(task.samples)
            before, begin = counts(task.path), time.perf_counter()
            for start in range(0, limit, task.batch_size):
                chosen = np.sort(numbers[start : start + task.batch_size])
                batch = (images[chosen], labels[chosen]) if shuffled else (images[chosen[0] : chosen[-1] + 1], chosen)
                assert len(batch[0])
            seconds, after = time.perf_counter() - begin, counts(task.path)
        epoch = task.samples / limit
        return {"seconds": seconds * epoch, **{name: (after[name] - before[name]) * epoch for name in after}}

    return run


def ceiling(task: Task, read_bytes: int, threads: int = 64, rank: int = 0, size: int = 1) -> Probe:
    """Request all byte ranges of this size, in random order, in as many threads: obstore alone."""

    def run() -> dict[str, float]:
        total = objects.state(task.path).size
        offsets = np.random.default_rng(0).permutation(np.arange(0, total, read_bytes)).tolist()

        def request(offset: int) -> int:
            (data,) = objects.read_ranges(task.path, [offset], [min(read_bytes, total - offset)])
            return len(data)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(request, offsets[:threads]))  # connections are open from here on
            begin = time.perf_counter()
            read = sum(pool.map(request, offsets))
            return {"seconds": time.perf_counter() - begin, "bytes": float(read)}

    return run
