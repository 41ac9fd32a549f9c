"""A rank that runs out of memory: every rank raises ``OutOfMemory`` at once."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from matex_data import DataError, PartitionError, open_dataset
from matex_data.errors import OutOfMemory
from matex_data.index.chunked import Chunked
from matex_data.machine import out_of_memory
from matex_data.reading import pool
from matex_data.reading.buffers import BufferPool
from tests.support.launch import run_script
from tests.support.ranks import Pools

ROWS = 2000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write chunks across the borders of windows, so that windows wait for chunks of others."""
    path = tmp_path_factory.mktemp("scarce") / "a.h5"
    with h5py.File(path, "w") as file:
        x = np.random.default_rng(1).integers(0, 99, (ROWS, 500))
        for name in ("x", "y"):
            file.create_dataset(name, data=x, chunks=(47, 500), compression="gzip")
    return str(path)


@contextmanager
def _replaced(owner: Any, name: str, substitute: Callable[..., Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, lambda *arguments: substitute(original, *arguments))
    try:
        yield
    finally:
        setattr(owner, name, original)


class _Failing:
    """Substitute of a function that raises an error in its n-th call."""

    def __init__(self, error: Exception, call: int) -> None:
        self.error, self.left = error, call

    def __call__(self, original: Callable[..., Any], *arguments: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return original(*arguments)


FAILURES: dict[str, tuple[Any, str, Exception]] = {
    "memory": (BufferPool, "bytes", OSError(errno.ENOMEM, "Cannot allocate memory")),
    "a chunk that is decoded": (Chunked, "_decode", MemoryError()),
    "a thread": (ThreadPoolExecutor, "submit", RuntimeError("can't start new thread")),
}


def _epoch(comm: MPI.Intracomm, path: str, where: str, call: int, io: str, threads: int) -> None:
    owner, name, error = FAILURES[where]
    os.environ["MATEX_THREADS"] = str(threads)
    pool.decoders.cache_clear()
    failing = _Failing(error, call if comm.rank == comm.size - 1 else 0)
    try:
        batches = open_dataset(path, comm=comm, io=io, window_bytes=1 << 20).batches(40, shuffle=True, seed=1)
        with _replaced(owner, name, failing), suppress(OutOfMemory):
            for _ in batches:
                pass
            raise AssertionError("nothing has failed")
        assert len(list(batches)) == ROWS // 40  # no window waits for a failed chunk
        failing.left = call if comm.rank == comm.size - 1 else 0
        with _replaced(owner, name, failing):
            for _ in batches:
                pass
    finally:
        del os.environ["MATEX_THREADS"]
        pool.decoders.cache_clear()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("io", ["collective", "independent"])
@pytest.mark.parametrize("where", FAILURES)
def test_every_rank_names_the_one_at_fault(ranks: Pools, path: str, where: str, io: str, threads: int) -> None:
    for size, call in ((1, 2), (2, 1), (2, 4)) if where == "memory" else ((2, 2),):
        outcomes = ranks(size).outcomes(_epoch, path, where, call, io, threads, timeout=60)
        assert all(isinstance(error, OutOfMemory) for error in outcomes), outcomes
        assert len({str(error) for error in outcomes}) == 1
        text = str(outcomes[0])
        assert f"memory ran out on rank {size - 1}" in text and "remedy" in text and "are left for it" in text


_LIMITED = """
import resource, sys
from mpi4py import MPI
import matex_data as md
small, large, what = sys.argv[1:]
rank = MPI.COMM_WORLD.rank


def read(path):
    data = md.open_dataset(path, inputs="x")
    if what == "load":
        data.load()
    elif what == "statistics":
        data.statistics("x")
    else:
        for _ in data.batches(40, shuffle=True, seed=1):
            pass


read(small)  # imports all modules and starts the threads
if rank == 1:
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), resource.RLIM_INFINITY))
try:
    read(large)
except md.DataError as error:
    print(str(error), type(error).__name__, flush=True)
"""


@pytest.mark.parametrize("what", ["load", "statistics", "batches"])
def test_a_limit_of_the_address_space(path: str, tmp_path: Path, what: str) -> None:
    large = str(tmp_path / "large.h5")
    with h5py.File(large, "w") as file:
        file.create_dataset("x", (20_000, 8000), "f4", chunks=(50, 8000), compression="gzip")
        file["x"][0] = 1
    done = run_script(2, _LIMITED, path, large, what, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("memory ran out on rank 1") == 2 and done.stdout.count("OutOfMemory") == 2, done.stdout
    assert "nable to allocate" in done.stdout


def test_the_error_has_the_amount() -> None:
    with pytest.raises(MemoryError) as caught:
        np.empty(1 << 60, np.uint8)
    error = out_of_memory(caught.value, 3, "an array")
    assert isinstance(error, DataError) and isinstance(error, MemoryError)
    assert "Unable to allocate 1.00 EiB" in str(error) and "rank 3" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert type(pickle.loads(pickle.dumps(error))) is OutOfMemory


def test_a_library_that_cannot_be_mapped_is_out_of_memory() -> None:
    error = out_of_memory(ImportError("mtrand.so: failed to map segment from shared object"), None, "a module")
    assert isinstance(error, OutOfMemory) and f"in process {os.getpid()}" in str(error)


def test_other_errors_are_not_explained() -> None:
    for error in (OSError(errno.EIO, "Input/output error"), RuntimeError("boom"), ImportError("x"), OutOfMemory("x")):
        assert out_of_memory(error, 0, "anything") is None


def test_a_pool_that_has_shut_down_is_not_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = ThreadPoolExecutor(1)
    ended.shutdown()
    monkeypatch.setattr(pool, "decoders", lambda: ended)
    with pytest.raises(PartitionError, match="the program of a rank has ended"):
        pool.submit(print).result()
