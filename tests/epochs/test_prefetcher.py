"""Prefetch thread: ranks agree while they read, and all stop at the same batch."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from matex_data import DecodeError, open_dataset
from matex_data.mpi.activity import READ_AHEAD
from matex_data.mpi.communicator import Communicator
from matex_data.readers.hdf5.rows import Hdf5Rows
from tests.support.ranks import Pool

BATCH = 48
TIMEOUT = 20.0  # seconds


def _late_rank(comm: MPI.Intracomm) -> list[Any]:
    """Return whether a round ended before rank 0 began it, and its result, twice."""
    ranks = Communicator(comm.Dup())
    if comm.rank == 0 and comm.size > 1:
        comm.barrier()
    round_ = ranks.start_maximum([comm.rank == comm.size - 1, comm.rank, 7 - comm.rank])
    early = round_.done(0.05) if comm.rank or comm.size == 1 else False
    if comm.rank and comm.size > 1:
        comm.barrier()
    assert round_.done(TIMEOUT)
    return [early, *(round_.wait().tolist() for _ in range(2))]


def test_a_round_ends_when_all_ranks_have_begun_it(pool: Pool) -> None:
    for early, *results in pool.run(_late_rank):
        assert early == (pool.size == 1)
        assert results == [[1, pool.size - 1, 7]] * 2


def _threads_by_rank(comm: MPI.Intracomm, path: str, io: str) -> list[int]:
    before = {name: os.environ.get(name) for name in ("MATEX_THREADS", "MATEX_TIMEOUT")}
    os.environ |= {"MATEX_THREADS": str(1 + comm.rank % 2), "MATEX_TIMEOUT": str(TIMEOUT)}
    try:
        batches = open_dataset(path, comm=comm, io=io, window_bytes=1).batches(BATCH, shuffle=True, seed=1)
        return [sum(len(batch["x"]) for batch in batches) for _ in range(3)]
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ |= {} if value is None else {name: value}


@pytest.mark.parametrize("io", ["independent", "collective"])
@pytest.mark.parametrize("windows", [1, 2, 3])
def test_ranks_with_different_numbers_of_threads(pool: Pool, tmp_path: Path, windows: int, io: str) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.zeros((windows * BATCH, 64), "f4")
    counts = pool.run(_threads_by_rank, str(tmp_path / "x.h5"), io, timeout=3 * TIMEOUT)
    assert counts == [[windows * BATCH // pool.size] * 3] * pool.size


def _batches_before_the_error(comm: MPI.Intracomm, path: str, io: str) -> tuple[int, str]:
    """Return the batches before the error, and the error. Higher ranks consume more slowly."""
    taken, data = 0, open_dataset(path, comm=comm, io=io, window_bytes=1)
    try:
        for _ in data.batches(BATCH):
            taken += 1
            time.sleep(0.02 * comm.rank)
    except DecodeError as error:
        return taken, str(error)
    return taken, ""


@pytest.mark.openmpi
@pytest.mark.parametrize("io", ["independent", "collective"])
def test_slow_and_fast_ranks_stop_at_the_same_batch(pool: Pool, tmp_path: Path, io: str) -> None:
    path, rows = str(tmp_path / "x.h5"), 20 * BATCH
    with h5py.File(path, "w") as file:
        made = file.create_dataset("x", data=np.zeros((rows, 64), "f4"), chunks=(BATCH // 4, 64), compression="gzip")
        broken = made.id.get_chunk_info_by_coord((rows // 2, 0))
    with Path(path).open("r+b") as raw:
        raw.seek(broken.byte_offset)
        raw.write(b"\xff" * broken.size)
    outcomes = pool.run(_batches_before_the_error, path, io, timeout=60)
    assert len(set(outcomes)) == 1
    taken, error = outcomes[0]
    assert taken == 9 and f"row {rows // 2}" in error  # the tenth batch is read with two others


def test_a_rank_alone_waits_for_its_own_reads_as_long_as_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = ["a", "b", "c"]
    take = Hdf5Rows.take

    def slow(rows: Hdf5Rows, start: int, stop: int) -> Any:
        time.sleep(1.0)
        return take(rows, start, stop)

    monkeypatch.setenv("MATEX_TIMEOUT", "0.2")
    monkeypatch.setattr(Hdf5Rows, "take", slow)
    batches = open_dataset(tmp_path / "x.h5", comm=MPI.COMM_SELF).batches(3)
    assert [batch["x"].tolist() for batch in batches] == [[b"a", b"b", b"c"]]


def test_an_interrupt_of_the_start_of_an_epoch_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(thread: threading.Thread, start: Any = threading.Thread.start) -> None:
        start(thread)
        if thread.name == READ_AHEAD:
            own.append(thread)
            raise KeyboardInterrupt

    own: list[threading.Thread] = []
    np.save(tmp_path / "x.npy", np.arange(10 * BATCH))
    batches = open_dataset(tmp_path / "x.npy", comm=MPI.COMM_SELF, window_bytes=1).batches(BATCH)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threading.Thread, "start", interrupted)
        next(iter(batches))
    own[0].join(TIMEOUT)
    assert not own[0].is_alive()
    assert np.concatenate([x for batch in batches for x in batch.values()]).tolist() == list(range(10 * BATCH))
