"""Probe of collective reading, and MPI calls that do not return."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from matex_data import open_dataset
from matex_data.io import probe
from matex_data.io.files import Files
from matex_data.io.sessions import read_sessions
from tests.support.launch import run_script
from tests.support.machine_speed import scaled
from tests.support.ranks import Pools

pytestmark = pytest.mark.openmpi


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("probe") / "x.npy"
    np.save(path, np.arange(6000.0).reshape(1000, 6))
    return path


def _obstacle(comm: MPI.Intracomm, paths: list[list[str]]) -> str | None:
    """Return what is known against the files of this rank."""
    return probe.obstacle(read_sessions(comm).comm, paths[comm.rank])


def test_copies_are_not_read_collectively(path: Path, ranks: Pools) -> None:
    copy = path.with_name("copy.npy")
    shutil.copy2(path, copy)  # with the time of change
    assert ranks(2).run(_obstacle, [[str(path)] * 2] * 2) == [None, None]
    found = ranks(2).run(_obstacle, [[str(path)] * 2, [str(path), str(copy)]])
    assert all("the ranks see different files" in text for text in found)
    assert str(path) in found[0] and str(copy) in found[1]
    assert ranks(2).run(_obstacle, [[str(path)], ["absent"]])[0] is not None


def _on_two_machines(comm: MPI.Intracomm, path: str) -> tuple[str | None, str | None]:
    """Return the obstacle when the machines have two names; and when the type of the file system is unknown, too."""
    boot, local = probe._boot, probe.LOCAL
    try:
        probe._boot = lambda: str(comm.rank)  # type: ignore[assignment]
        both = [_obstacle(comm, [[path]] * comm.size)]
        probe.LOCAL = frozenset()
        both.append(_obstacle(comm, [[path]] * comm.size))
    finally:
        probe._boot, probe.LOCAL = boot, local
    return both[0], both[1]


def test_disks_of_several_machines(path: Path, ranks: Pools) -> None:
    """Equal disks give copies equal inodes: the type of the file system decides."""
    for alone, shared in ranks(2).run(_on_two_machines, str(path)):
        assert alone is not None and "file system of one machine" in alone
        assert shared is None


@contextmanager
def _records() -> Iterator[list[str]]:
    """Context manager: the messages of this package."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("matex_data")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def _read(comm: MPI.Intracomm, path: str, fault: str) -> tuple[bool, float, int]:
    """Return whether files are read collectively, the sum of all samples, and the number of messages."""
    identity, pattern = probe._identity, probe.pattern

    def other(path: str, rank: int) -> Any:
        task, memory, expected = pattern(path, rank) or (None, None, b"")
        return task, memory, expected[::-1] if comm.rank == 1 else expected

    probe.tell.cache_clear()
    try:
        if fault == "another file":
            probe._identity = lambda path: comm.rank
        if fault == "other bytes":
            probe.pattern = other
        with _records() as messages:
            batches = open_dataset(path, comm=comm, io="collective").batches(100, shuffle=True, seed=1)
            total = sum(float(batch.sum()) for _ in range(2) for batch in _arrays(batches))
            collective = Files(read_sessions(comm).comm, [path], "collective")
            together = collective.collective is not None
            collective.close()
    finally:
        probe._identity, probe.pattern = identity, pattern
    return together, comm.allreduce(total), len([text for text in messages if "reads on its own" in text])


def _arrays(batches: Any) -> Iterator[Any]:
    for batch in batches:
        yield from batch.values() if isinstance(batch, dict) else [batch]


@pytest.mark.parametrize("fault", ["none", "another file", "other bytes"])
def test_ranks_read_independently_where_mpi_does_not_read_well(path: Path, ranks: Pools, fault: str) -> None:
    expected = 2 * float(np.load(path).sum())
    sound = fault == "none"
    assert ranks(2).run(_read, str(path), fault) == [
        (sound, expected, 0 if sound else 1),
        (sound, expected, 0),
    ]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 127, 128, 129, 1000])
@pytest.mark.parametrize("rank", [0, 1, 9999])
def test_pattern(size: int, rank: int, tmp_path: Path) -> None:
    content = np.random.default_rng(size).integers(1, 256, size, np.uint8).tobytes()
    (tmp_path / "x").write_bytes(content)
    found = probe.pattern(str(tmp_path / "x"), rank)
    assert (found is None) == (size < 2)
    if found is not None:
        task, memory, expected = found
        begin, block = int(task.offset[0]), int(task.nbytes[0])
        assert content[begin : begin + 2 * block] == expected and task.count == 1
        memory[:block] = np.frombuffer(expected[:block], np.uint8)
        assert not probe.is_as_expected(memory, expected)
        memory[-block:] = np.frombuffer(expected[block:], np.uint8)
        assert probe.is_as_expected(memory, expected)


STUCK = """
from mpi4py import MPI
from matex_data.mpi.deadlines import reading, waiting_for
if MPI.COMM_WORLD.rank == 0:
    with CALL:
        MPI.COMM_WORLD.recv(source=1)  # never sent
MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.parametrize(
    "call", ["waiting_for(None, \"File.Open of '/data/x.h5'\")", "reading(\"File.Read_at_all of '/data/x.h5'\")"]
)
def test_a_call_that_does_not_return_is_named(call: str) -> None:
    done = run_script(2, STUCK.replace("CALL", call), env={"MATEX_TIMEOUT": "2"})
    assert done.returncode != 0 and done.seconds < scaled(40)
    name = call.split('"')[1]
    assert f"MPI does not return from {name}" in done.stderr and "script.py, line 6" in done.stderr
