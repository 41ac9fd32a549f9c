"""Costs of data sets of many files: memory of their index, seconds to plan a window, opens and look-ups of a file."""

from __future__ import annotations

import gc
import io
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil

from benchmarks.cases.reading import Goal, Measured, Setup
from matex_data.dataset import Dataset
from matex_data.fields import ElementSpec, Field
from matex_data.index.cache import ChunkCache
from matex_data.index.files import FileColumns, FileColumnsBuilder, FileIndex
from matex_data.index.model import Index
from matex_data.index.runs import Runs
from matex_data.index.stamps import Stamp
from matex_data.index.stored import to_bytes
from matex_data.index.strided import Strided
from matex_data.io.sessions import read_sessions
from matex_data.mpi.library import MPI
from matex_data.opening.open import open_dataset
from matex_data.reading.buffers import BufferPool
from matex_data.reading.plan import plan_reads
from matex_data.reading.source import ReadOptions, open_source
from matex_data.sampling.split import Ties
from matex_data.transforms.chained import Selected

FILES = (10_000, 100_000, 1_000_000)
ROWS, WIDTH, BATCH = 10, 25, 256
MOST_BYTES = 500  # of memory for a file of one field
SLOWER = 3.0  # times that a window of a million files may take in comparison with one of ten thousand
REAL_FILES = 300
MOST_OPERATIONS = 2  # a look-up before a file is opened, and the open


def indexed(setup: Setup) -> Measured:
    """Plan windows of files that do not exist, up to a million."""
    columns = ["files", "bytes of a file", "seconds to collect", "ms to schedule", "ms for a window", "files of it"]
    rows: list[list[str]] = []
    windows: list[float] = []
    nbytes = 0.0
    for count in FILES[: 2 if setup.quick else 3]:
        gc.collect()
        before, begin = psutil.Process().memory_info().rss, time.perf_counter()
        table = _table(count)
        collected = time.perf_counter() - begin
        index = Index({"x": Field("x", (WIDTH,), np.dtype("f4"))}, table)
        gc.collect()
        nbytes = max((psutil.Process().memory_info().rss - before) / count, len(to_bytes(index)) / count)
        source = open_source(read_sessions(MPI.COMM_SELF), index, ReadOptions("independent"))
        dataset = Dataset(Selected(source, ElementSpec(), Runs.between(0, len(index)), Ties()))
        begin = time.perf_counter()
        schedule = dataset._schedule(BATCH, 1, "drop")
        epoch = schedule.epoch(0)
        scheduled = time.perf_counter() - begin
        seconds, touched = [], 0
        for number in range(min(3, -(-schedule.steps // schedule.window_steps))):
            window = epoch.window(number * schedule.window_steps, (number + 1) * schedule.window_steps, 0, 64)
            arrays = {"x": np.empty((window.rows, WIDTH), "f4")}
            begin = time.perf_counter()
            plan = plan_reads(index, window.runs, window.destination, arrays, ChunkCache(1 << 20), BufferPool())
            seconds.append((time.perf_counter() - begin) / max(1, len(plan.tasks)))
            touched = len(plan.tasks)
        windows.append(min(seconds))
        figures = (f"{nbytes:.0f}", f"{collected:.1f}", f"{scheduled * 1e3:.0f}")
        rows.append([f"{count:,}", *figures, f"{min(seconds) * touched * 1e3:.1f}", f"{touched:,}"])
    goals = [
        Goal("bytes of a file of one field", nbytes, MOST_BYTES, most=True),
        Goal("time of a file in a window, most / fewest files", windows[-1] / windows[0], SLOWER, most=True),
    ]
    return Measured("Many files: index and windows of one rank", [], goals, columns, rows)


def _table(count: int) -> FileColumns:
    """Return the table of files of one field, with sizes, times and inodes as real ones have."""
    rng = np.random.default_rng(0)
    builder, dtype = FileColumnsBuilder(), np.dtype("f4")
    times, inodes = rng.integers(0, 10**15, count), rng.permutation(count)
    for number, (later, inode) in enumerate(zip(times.tolist(), inodes.tolist(), strict=True)):
        stamp = Stamp(1128, 1_700_000_000_000_000_000 + later, inode)
        layout = Strided(ROWS, 128, 4 * WIDTH, dtype, (WIDTH,))
        builder.add(FileIndex(f"/scratch/project/run/events_{number:07d}.npy", ROWS, {"x": layout}, stamp))
    return builder.build()


def opened(setup: Setup) -> Measured:
    """Count the opens and look-ups of real files by this package: when they are opened, and in an epoch."""
    columns = ["format", "of a file when opened", "of a file in an epoch", "ms of a file when opened"]
    rows: list[list[str]] = []
    goals: list[Goal] = []
    for suffix in ("npy", "h5"):
        folder = setup.folder / f"many_{suffix}"
        _write(folder, suffix)
        with _counted(folder) as counts:
            begin = time.perf_counter()
            dataset = open_dataset(folder, comm=MPI.COMM_SELF)
            seconds = time.perf_counter() - begin
            opening = counts.total() / REAL_FILES
            batches = dataset.batches(30, shuffle=True, seed=1)
            list(batches)
            counts.clear()
            list(batches)
        rows.append(
            [suffix, f"{opening:.2f}", f"{counts.total() / REAL_FILES:.2f}", f"{seconds / REAL_FILES * 1e3:.2f}"]
        )
        goals.append(Goal(f"opens and look-ups of a .{suffix} file", opening, MOST_OPERATIONS + 0.1, most=True))
    return Measured("Many files: opens and look-ups", [], goals, columns, rows)


def _write(folder: Path, suffix: str) -> None:
    folder.mkdir(exist_ok=True)
    for number in range(REAL_FILES):
        path, rows = folder / f"{number:04d}.{suffix}", np.full((ROWS, WIDTH), number, "f4")
        if suffix == "npy":
            np.save(path, rows)
        else:
            with h5py.File(path, "w") as file:
                file["x"] = rows


@contextmanager
def _counted(folder: Path) -> Iterator[Counter[str]]:
    """Context manager: opens and look-ups of the files of a folder, by path."""
    counts: Counter[str] = Counter()
    originals: dict[tuple[Any, str], Callable[..., Any]] = {
        (module, name): getattr(module, name) for module, name in ((os, "stat"), (os, "open"), (io, "open"))
    }
    hdf5 = h5py.File

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def function(path: Any, *arguments: Any, **options: Any) -> Any:
            counts[str(path)] += Path(str(path)).parent == folder
            return original(path, *arguments, **options)

        return function

    class Counting(hdf5):  # type: ignore[misc]
        def __init__(self, path: Any, *arguments: Any, **options: Any) -> None:
            counts[str(path)] += 1
            super().__init__(path, *arguments, **options)

    for (module, name), original in originals.items():
        setattr(module, name, counting(original))
    h5py.File = Counting
    try:
        yield counts
    finally:
        h5py.File = hdf5
        for (module, name), original in originals.items():
            setattr(module, name, original)


CASES: dict[str, list[Callable[[Setup], Measured]]] = {"files": [indexed, opened]}
