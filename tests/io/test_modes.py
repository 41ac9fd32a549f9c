"""Whether ranks read files as one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from matex_data import DataError, PartitionError, open_dataset
from matex_data.io import modes
from matex_data.io.files import Files
from matex_data.io.modes import MOST_SHARED_FILES, choose
from matex_data.io.sessions import read_sessions
from tests.io.test_mounts import TABLE
from tests.support.ranks import Pool


@pytest.mark.parametrize(
    ("io", "paths", "ranks", "collective", "reason"),
    [
        ("auto", ["/scratch/x.h5", "/scratch/y.h5"], 2, True, "lustre"),
        ("auto", ["/scratch/x.h5", "/home/y.h5"], 2, False, "ext4, lustre"),
        ("auto", ["/data/x.h5"], 2, False, "fuse.sshfs"),
        ("auto", ["/scratch/x.h5"] * (MOST_SHARED_FILES + 1), 2, False, "more than 64 files"),
        ("auto", ["/scratch/x.h5"], 1, False, "there is one"),
        ("auto", ["s3://bucket/x.h5"], 2, False, "store of objects"),
        ("auto", [], 2, False, "no files"),
        ("collective", ["/home/x.h5"], 2, True, "as io= says"),
        ("independent", ["/scratch/x.h5"], 2, False, "as io= says"),
    ],
)
def test_mode(
    monkeypatch: pytest.MonkeyPatch, io: str, paths: list[str], ranks: int, collective: bool, reason: str
) -> None:
    monkeypatch.delenv("MATEX_IO_HINTS", raising=False)
    monkeypatch.setattr(modes, "mount_table", TABLE.strip)
    found = choose(io, paths, ranks)
    assert found.collective is collective and reason in found.reason


def test_hints_choose_collective_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MATEX_IO_HINTS", "romio_cb_read=enable")
    assert choose("auto", ["/home/x.h5"]).collective
    with pytest.raises(PartitionError, match="takes no io= of this kind"):
        open_dataset({"x": np.ones(3)}, io="parallel")  # type: ignore[arg-type]


@pytest.mark.rank_counts(2)
def test_hints_without_a_value(pool: Pool, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(6.0))
    for found in pool.run(_refused, str(tmp_path / "x.npy")):
        assert "MATEX_IO_HINTS has a hint without a value" in found and "'romio_cb_read'" in found


def _refused(comm: MPI.Intracomm, path: str) -> str:
    """Return the error of ranks of which the last one has such a hint."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MATEX_IO_HINTS", "romio_cb_read" if comm.rank else "romio_cb_read=disable")
        with pytest.raises(DataError) as caught:
            open_dataset(path, comm=comm, io="collective").load()
    return str(caught.value)


def _arrays(batch: Any) -> list[Any]:
    return list(batch.values()) if isinstance(batch, dict) else [batch]


def _chosen(comm: MPI.Intracomm, path: str, hints: list[bool]) -> tuple[bool, float]:
    """Return whether the ranks read as one with ``io="auto"``, and the sum of all samples of an epoch."""
    before = os.environ.pop("MATEX_IO_HINTS", None)
    try:
        if hints[comm.rank]:
            os.environ["MATEX_IO_HINTS"] = "romio_cb_read=disable"
        files = Files(read_sessions(comm).comm, [path], "auto")
        collective = files.collective is not None
        files.close()
        batches = open_dataset(path, comm=comm).batches(60, shuffle=True, seed=1, remainder="keep")
        return collective, comm.allreduce(sum(float(np.sum(array)) for batch in batches for array in _arrays(batch)))
    finally:
        os.environ.pop("MATEX_IO_HINTS", None)
        if before is not None:
            os.environ["MATEX_IO_HINTS"] = before


@pytest.mark.openmpi
@pytest.mark.rank_counts(3)
@pytest.mark.parametrize("hints", ["none", "one", "all"])
def test_ranks_choose_as_one(pool: Pool, tmp_path: Path, hints: str) -> None:
    np.save(tmp_path / "x.npy", np.arange(3000.0).reshape(1000, 3))
    given = [hints == "all" or (hints == "one" and rank == 1) for rank in range(3)]
    found = pool.run(_chosen, str(tmp_path / "x.npy"), given)
    assert found == [(hints == "all", float(np.arange(3000).sum()))] * 3
