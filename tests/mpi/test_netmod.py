"""MPICH's network module under Slurm's PMI; that it is needed and works, ``tests/cluster`` shows."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from matex_data.mpi.library import NETMOD, short_addresses

STEP = {"PMI_FD": "11", "SLURM_STEP_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("variables", "installed", "expected"),
    [
        (STEP, True, "ofi"),
        (STEP, False, None),
        ({**STEP, "SLURM_STEP_NUM_NODES": "1"}, True, None),
        ({"SLURM_STEP_NUM_NODES": "2"}, True, None),  # another plugin, or Hydra within a job
        ({**STEP, "MPI4PY_LIBMPI": "/opt/mpich/lib/libmpi.so"}, True, None),
        ({**STEP, NETMOD: "ucx"}, True, "ucx"),
    ],
)
def test_libfabric_where_addresses_of_ucx_are_too_long(
    variables: dict[str, str], installed: bool, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*STEP, NETMOD, "MPI4PY_LIBMPI", "MPI4PY_MPIABI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    if installed:
        (tmp_path / "lib").mkdir()
        (tmp_path / "lib" / "libmpi.so.12").touch()
    before = dict(os.environ)
    with short_addresses():
        assert os.environ.get(NETMOD) == expected
    assert dict(os.environ) == before
