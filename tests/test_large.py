"""Large amounts: a file of a terabyte, hundreds of batches in memory, hundreds of epochs."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil
import pytest
from mpi4py import MPI

from matex_data import open_dataset
from tests.support.ranks import Pools

TERABYTE_ROWS = 20_500_000  # of 48 KiB


@pytest.fixture(scope="module")
def terabyte(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a sparse file: a terabyte of zeros, except for its last row."""
    path = tmp_path_factory.mktemp("large") / "terabyte.h5"
    try:
        with h5py.File(path, "w") as file:
            made = file.create_dataset("x", shape=(TERABYTE_ROWS, 3, 64, 64), dtype="f4")
            made[-1] = 7
    except OSError as error:
        pytest.skip(f"this file system has no sparse files of that size: {error}")
    assert path.stat().st_size > 1e12
    return str(path)


def _first_batch(comm: MPI.Intracomm, path: str) -> dict[str, Any]:
    import tensorflow as tf

    assert tf.constant(1) == 1  # starts TensorFlow before the measurement
    process = psutil.Process(os.getpid())
    memory, begin = process.memory_info().rss, time.perf_counter()
    data = open_dataset(path, inputs="x", comm=comm)
    opened = time.perf_counter() - begin
    batch = next(iter(data.tf_dataset(64, shuffle=True, seed=1)))
    first = time.perf_counter() - begin
    assert not np.any(batch)
    return {"open": opened, "first": first, "memory": process.memory_info().rss - memory, "rows": len(data)}


@pytest.mark.parametrize("size", [1, 2])
def test_a_terabyte_opens_at_once(terabyte: str, ranks: Pools, size: int) -> None:
    ranks(size).run(_first_batch, terabyte, timeout=120)  # imports
    for found in ranks(size).run(_first_batch, terabyte):
        assert found["rows"] == TERABYTE_ROWS
        assert found["open"] < 30  # seconds: far more than it takes on a machine that is busy, or pauses
        assert found["first"] < 60
        assert found["memory"] < 1 << 30


def _last_rows(comm: MPI.Intracomm, path: str) -> float:
    _, last = open_dataset(path, inputs="x", comm=comm).split(1 - 1e-6, 1e-6)
    rows = last.load()["x"]
    return float(rows[-1].min()) if comm.rank == comm.size - 1 else 7.0


@pytest.mark.parametrize("size", [1, 3])
def test_the_last_rows_of_a_terabyte(terabyte: str, ranks: Pools, size: int) -> None:
    assert ranks(size).run(_last_rows, terabyte) == [7.0] * size


def _keep_batches(comm: MPI.Intracomm, path: str) -> int:
    data = open_dataset(path, comm=comm)
    tensors = data.tf_dataset(16, shuffle=True, seed=1)
    kept: list[Any] = []
    while len(kept) < 500:
        kept += list(tensors)
    with h5py.File(path) as file:
        x = file["x"][:]
    for batch in kept:
        np.testing.assert_array_equal(batch["x"].numpy(), x[batch["id"].numpy()])
    return len(kept)


@pytest.mark.parametrize("size", [1, 2])
def test_five_hundred_batches_in_memory(ranks: Pools, tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        x = np.random.default_rng(0).random((4000, 1000), "f4")
        file.create_dataset("x", data=x, chunks=(10, 1000), compression="gzip", compression_opts=1, shuffle=True)
        file["id"] = np.arange(4000)
    assert min(ranks(size).run(_keep_batches, str(path), timeout=120)) >= 500


def _resources(comm: MPI.Intracomm, path: str) -> list[tuple[int, int, int]]:
    process = psutil.Process(os.getpid())
    tensors = open_dataset(path, comm=comm).tf_dataset(32, shuffle=True, seed=1)
    found = []
    for epoch in range(201):
        for number, _ in enumerate(tensors):
            if epoch % 10 == 9 and number == 2:
                break
        if epoch % 50 == 0 and epoch:
            found.append((process.memory_info().rss, process.num_fds(), threading.active_count()))
    return found


@pytest.mark.slow
def test_two_hundred_epochs_leak_nothing(ranks: Pools, tmp_path: Path) -> None:
    path = tmp_path / "small.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros((1000, 100), "f4")
    for found in ranks(2).run(_resources, str(path), timeout=180):
        memory, files, threads = (np.ptp([row[i] for row in found]) for i in range(3))
        assert memory < 20e6
        assert files <= 1 and threads <= 1
