"""``matex doctor``: in one process, in a job, and where MPI does not connect the processes of a launcher."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from matex_data.doctor import limits, storage
from matex_data.doctor.report import Section
from matex_data.launching import start
from matex_data.launching.launchers import choose, find_launchers
from matex_data.launching.library import mpi_library
from matex_data.launching.start import mpiexec_command
from tests.cli.test_commands import CALL
from tests.support.launch import Completed, mpiexec, run_script


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    (folder / "small.bin").write_bytes(bytes(1000))
    (folder / "large.bin").write_bytes(os.urandom(5 << 20))
    return folder


def _facts(done: Completed) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.openmpi
def test_one_process(folder: Path) -> None:
    done = run_script(0, CALL, "doctor", str(folder), "--json", timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = _facts(done)
    told = subprocess.run([mpiexec(), "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert found["mpi"]["library"].split()[-1] in told and found["mpi"]["threads"] == "MPI_THREAD_MULTIPLE"
    fitting = {os.path.realpath(each["path"]) for each in found["launchers"]["mpiexec"] if each["fits"]}
    assert os.path.realpath(mpiexec()) in fitting
    (rank,) = found["nodes"]["ranks"]
    assert rank["affinity"] == psutil.Process().cpu_affinity()
    assert 0 < rank["memory"] <= psutil.virtual_memory().total
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    (seen,) = found["storage"]["path"]["nodes"].values()
    assert mounts[seen["mount"]["point"]] == seen["mount"]["type"]
    assert seen["speed"]["file"] == str(folder / "large.bin")
    assert 0 < found["storage"]["speed"]["latency"] < 1 and found["storage"]["speed"]["bandwidth"] > 1e6
    assert found["limits"]["open files"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@pytest.mark.openmpi
def test_in_a_job_rank_0_tells_about_all(folder: Path) -> None:
    done = run_script(2, CALL, "doctor", str(folder / "large.bin"), timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("What to change") == 1 and "1 with 2 ranks each" in done.stdout
    assert "its launcher connects the ranks" in done.stdout
    shown = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)  # Open MPI gives its ranks a terminal, which has colours
    assert max(map(len, shown.splitlines())) <= 80
    assert sorted(path.name for path in folder.iterdir()) == ["large.bin", "small.bin"]


NOT_CONNECTED = {"PMI_RANK": "0", "PMI_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}


def test_ranks_that_are_not_connected() -> None:
    """The environment is that of a launcher of another MPI: each process is rank 0 of 1."""
    done = run_script(0, CALL, "doctor", "--json", env=NOT_CONNECTED, timeout=120)
    assert done.returncode == 1, done.stderr
    found = _facts(done)
    (error,) = [each for each in found["findings"] if each["error"]]
    assert "MPI connects none of them" in error["problem"]
    assert any(each["fits"] for each in found["launchers"]["mpiexec"])  # the launcher to use is named
    other = run_script(0, CALL, "doctor", env=NOT_CONNECTED | {"PMI_RANK": "1", "OMPI_COMM_WORLD_RANK": "1"})
    assert other.returncode == 1 and other.stdout == ""


def test_without_an_mpi_library() -> None:
    done = run_script(0, CALL, "doctor", env={"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}, timeout=120)
    assert done.returncode == 1
    assert "mpi4py loads no MPI library" in done.stdout and "pip install mpich" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.openmpi
def test_trials_of_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    launcher = choose(find_launchers(mpi_library()), mpi_library())
    assert launcher is not None
    assert start.start_ranks(mpiexec_command(launcher, 2), 2).connected
    assert start.start_alone().connected and start.start_alone().level == 3
    apart = start.start_ranks(["env"], 2)
    assert not apart.connected and apart.text == "does not fit: each of 1 processes is rank 0 of 1"
    broken = start.start_ranks(["sh", "-c", "echo loading; echo 'error: no slots'>&2; exit 4"], 2)
    assert broken.text == "fails: error: no slots" and broken.level is None
    monkeypatch.setattr(start, "SECONDS", 0.3)
    assert start.start_ranks(["sh", "-c", "sleep 60"], 2).text.startswith("hangs")


def _file(digest: str, inode: int = 1, size: int = 10) -> dict[str, Any]:
    return {"shared": None, "same": {"size": size, "inode": inode, "modified": 5, "digest": digest}}


@pytest.mark.parametrize(
    ("seen", "nodes", "marked", "shared", "errors"),
    [
        ([_file("a"), _file("a")], 2, True, True, 0),
        ([_file("a"), _file("a")], 2, None, True, 0),  # nothing can be written there
        ([_file("a"), _file("a", inode=2)], 2, False, False, 0),
        ([_file("a"), _file("b", inode=2)], 2, False, False, 1),
        ([_file("a"), _file("a", inode=2, size=9)], 2, False, False, 1),
        ([_file("a")], 2, False, False, 0),  # the other node's error is told beside it
        ([_file("a")], 1, True, None, 0),
    ],
)
def test_nodes_that_share_a_file(
    seen: list[dict[str, Any]], nodes: int, marked: bool | None, shared: bool | None, errors: int
) -> None:
    section = Section("Storage")
    assert storage._sharing(section, "x.h5", seen, nodes, marked)[1] is shared
    assert len(section.findings) == errors


def test_shared_memory_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(storage, "SHM", str(tmp_path / "absent"))
    section = storage.examine(None, None)
    assert section is not None
    (finding,) = section.findings
    assert finding.is_error and "cannot be written to" in finding.problem


def test_objects_are_not_measured() -> None:
    section = storage.examine("https://example.org/a.h5", None)
    assert section is not None and not section.findings
    assert dict(section.rows)["https://example.org/a.h5"].startswith("an object of a store: not measured")


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        (finding,) = [each for each in limits.examine().findings if "ulimit -n" in each.problem]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not finding.is_error and "512" in finding.problem
