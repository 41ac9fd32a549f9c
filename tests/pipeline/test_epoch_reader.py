"""The end of a pass begins the next one: in the right order, little in vain, errors in their own pass."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from matex_data import DecodeError, open_dataset
from matex_data.io.counters import process_profile
from tests.support.ranks import Pool

ROWS, BATCH = 4801, 48
PATIENCE = 20.0  # seconds


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("course") / "x.h5"
    with h5py.File(path, "w") as file:
        x = np.random.default_rng(0).normal(size=(ROWS, 64)).astype("f4")
        file.create_dataset("x", data=x, chunks=(10, 64), compression="gzip", shuffle=True)
    return str(path)


@contextmanager
def _two_threads() -> Iterator[None]:
    """A rank with one thread reads in the thread that waits for the data, and so not ahead of a pass."""
    before = os.environ.get("MATEX_THREADS")
    os.environ["MATEX_THREADS"] = "2"
    try:
        yield
    finally:
        os.environ.pop("MATEX_THREADS")
        if before is not None:
            os.environ["MATEX_THREADS"] = before


def _batches(comm: MPI.Intracomm, path: str, step: int = 0, io: str = "independent") -> Any:
    data = open_dataset(path, comm=comm, io=io, window_bytes=64 * 1024)
    return data.batches(BATCH, shuffle=True, seed=1, start=data.state(step))


def _passes(comm: MPI.Intracomm, path: str, io: str) -> list[bool]:
    """Whether each pass equals that of a data set that was opened for it alone; the fourth is left half-way."""
    with _two_threads():
        batches, same = _batches(comm, path, io=io), []
        steps = len(batches)
        for epoch, count in enumerate((steps, steps, steps, steps // 2, steps, steps)):
            own = [batch["x"].copy() for batch, _ in zip(batches, range(count), strict=False)]
            alone = _batches(comm, path, epoch * steps)
            same.append(all(np.array_equal(a, b["x"]) for a, b in zip(own, alone, strict=False)) and len(own) == count)
        return same


@pytest.mark.parametrize("io", ["independent", "collective"])
def test_every_pass_has_its_own_order_whatever_was_begun_ahead(path: str, pool: Pool, io: str) -> None:
    assert pool.run(_passes, path, io) == [[True] * 6] * pool.size


def _read_in_vain(comm: MPI.Intracomm, path: str) -> list[float]:
    """Bytes that were read after each of three passes, as parts of what the first one needed."""
    with _two_threads():
        batches, profile = _batches(comm, path), process_profile()
        begin, needed, found = profile.bytes, 0, []
        for number in range(1, 4):
            for _ in batches:
                pass
            needed = needed or profile.bytes - begin
            deadline = time.monotonic() + (PATIENCE if number > 1 else 0.2)
            while profile.bytes - begin <= number * needed and time.monotonic() < deadline:
                time.sleep(0.01)
            found.append((profile.bytes - begin) / needed)
        return found


def test_from_the_second_pass_on_a_window_is_read_ahead(path: str, pool: Pool) -> None:
    for first, second, third in pool.run(_read_in_vain, path):
        assert first == 1
        assert 2 < second < 2.2 and 3 < third < 3.2


def _begun_ahead(comm: MPI.Intracomm, path: str, io: str) -> tuple[int, bool]:
    """The next pass's number, as it has been begun at the end of the second one, and whether anything was read."""
    with _two_threads():
        batches = _batches(comm, path, io=io)
        for _ in range(2):
            for _ in batches:
                pass
        stream = batches._passes._stream
        stream.join()
        filling = next(stream.following.plans()).result(PATIENCE)
        return stream.following.number, filling.work is not None


@pytest.mark.parametrize("io", ["independent", "collective"])
def test_ranks_that_read_together_only_plan_ahead(path: str, pool: Pool, io: str) -> None:
    alone = io == "independent" or pool.size == 1  # a rank alone has none to read with
    assert pool.run(_begun_ahead, path, io) == [(2, alone)] * pool.size


def _shortened(comm: MPI.Intracomm, path: str) -> int:
    """Batches of a pass over a file that was cut off when the pass had been begun ahead."""
    with _two_threads():
        batches = _batches(comm, path)
        for _ in range(2):
            for _ in batches:
                pass
        comm.barrier()
        if comm.rank == 0:
            os.truncate(path, 4096)
        comm.barrier()
        return sum(1 for _ in batches)


def test_what_goes_wrong_is_heard_of_in_the_next_pass_by_all(path: str, pool: Pool, tmp_path: Path) -> None:
    copy = tmp_path / "x.h5"
    copy.write_bytes(Path(path).read_bytes())
    outcomes = pool.outcomes(_shortened, str(copy), timeout=60)
    assert all(isinstance(error, DecodeError) for error in outcomes), outcomes
    assert len({str(error) for error in outcomes}) == 1
