"""Probes of files on a remote storage: seconds to open, seconds of epochs, and what was requested of the storage."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import matex_data as md
from benchmarks.harness.data import Task
from benchmarks.harness.slow_files import counts
from benchmarks.readers.ours import SEED

Probe = Callable[[], dict[str, float]]


def table(folder: Path, quick: bool = False) -> Task:
    """Write 20 columns of numbers as text: 72 MB."""
    rows = 400_000 // (4 if quick else 1)
    path = folder / f"table-{rows}.csv"
    if not path.exists():
        values = np.random.default_rng(0).random((rows, 20))
        np.savetxt(path, values, "%.6f", ",", header=",".join(f"c{n}" for n in range(20)), comments="")
    return Task(str(path), "", "", 256, rows, 160, rows)


def ours(task: Task, mount: str) -> Probe:
    """Open the files and read two shuffled epochs; the figures are those of the second time, without imports."""

    def run() -> dict[str, float]:
        md.open_dataset(task.path, inputs=task.inputs or None, targets=task.targets or None)
        before, begin = counts(Path(mount)), time.perf_counter()
        data = md.open_dataset(task.path, inputs=task.inputs or None, targets=task.targets or None)
        opened, end = counts(Path(mount)), time.perf_counter()
        batches = data.batches(task.batch_size, shuffle=True, seed=SEED)
        _pass(batches)
        after, start = counts(Path(mount)), time.perf_counter()
        _pass(batches)
        seconds, last = time.perf_counter() - start, counts(Path(mount))
        figures = {name: float(last[name] - after[name]) for name in last}
        return figures | {
            "open": end - begin,
            "seconds": seconds,
            "opening_bytes": float(opened["bytes"] - before["bytes"]),
        }

    return run


def ceiling(task: Task, read_bytes: int, threads: int = 16) -> Probe:
    """Read the file in as many threads, in reads of this size at random places."""

    def run() -> dict[str, float]:
        descriptor = os.open(task.path, os.O_RDONLY)
        offsets = np.arange(0, os.fstat(descriptor).st_size, read_bytes)
        np.random.default_rng(0).shuffle(offsets)
        begin = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            read = sum(pool.map(lambda offset: len(os.pread(descriptor, read_bytes, offset)), offsets.tolist()))
        seconds = time.perf_counter() - begin
        os.close(descriptor)
        return {"bytes": float(read), "seconds": seconds}

    return run


def _pass(batches: Any) -> None:
    for _ in batches:
        pass
