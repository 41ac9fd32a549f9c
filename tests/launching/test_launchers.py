"""Launchers, and the MPI library that they have to fit."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from matex_data.launching.launchers import MPIEXEC, Launcher, choose, find_launchers, plugin_for, srun_command
from matex_data.launching.library import MpiLibrary, mpi_library
from tests.support.launch import mpiexec

MPICH = MpiLibrary("mpich", "MPICH 5.0.2", "5.0", "mpich", "/opt/mpich/lib/libmpi.so.12", "4.1.2")
OPEN_MPI_4 = MpiLibrary("openmpi", "Open MPI 4.1.4", "3.1", "openmpi", "/usr/lib/libmpi.so.40", "4.1.2")
OPEN_MPI_5 = MpiLibrary("openmpi", "Open MPI 5.0.8", "3.1", "openmpi", "/usr/lib/libmpi.so.40", "4.1.2")
CRAY = MpiLibrary("cray", "CRAY MPICH 8.1.29", "3.1", "mpich", "/opt/cray/lib/libmpi.so.12", "4.1.2")
ALL = ("none", "pmi2", "pmix", "pmix_v4", "cray_shasta")


@pytest.mark.openmpi
def test_the_library_and_its_launcher_tell_the_same_version() -> None:
    told = subprocess.run([mpiexec(), "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    library = mpi_library()
    assert re.search(rf"\b{re.escape('.'.join(map(str, library.number)))}\b", told)
    assert library.kind == library.abi and Path(library.file).is_file()


@pytest.mark.openmpi
def test_the_launcher_beside_the_library_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever is on the path of programs: the launcher of another MPI would connect no ranks."""
    for name in (MPIEXEC, "SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    other = tmp_path / "mpiexec"
    other.write_text("#!/bin/sh\necho 'Intel(R) MPI Library for Linux* OS, Version 2021.8'\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    library = mpi_library()
    found = find_launchers(library)
    beside = Path(library.file).parents[1] / "bin"
    assert Path(found[0].path).parent == beside and found[0].kind == library.kind
    assert Launcher(str(other), "intel", "Intel(R) MPI Library for Linux* OS, Version 2021.8") in found
    assert choose(found, library) == found[0]
    monkeypatch.setenv("PBS_JOBID", "1.site")
    assert find_launchers(library)[0].path == str(other)
    monkeypatch.setenv(MPIEXEC, found[0].path)
    assert find_launchers(library)[0] == found[0]


@pytest.mark.parametrize(
    ("library", "kinds", "job", "chosen"),
    [
        (MPICH, ["openmpi", "mpich"], False, 1),
        (MPICH, ["openmpi", "intel"], False, 1),
        (OPEN_MPI_5, ["mpich", "openmpi"], False, 1),
        (OPEN_MPI_5, ["mpich", ""], False, None),
        (MPICH, ["openmpi", ""], True, 1),  # of the site, as PALS
        (CRAY, ["openmpi", "mpich"], False, 1),
    ],
)
def test_choice_of_a_launcher(
    library: MpiLibrary, kinds: list[str], job: bool, chosen: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (MPIEXEC, "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_URI"):
        monkeypatch.delenv(name, raising=False)
    if job:
        monkeypatch.setenv("PBS_JOBID", "1.site")
    launchers = [Launcher(f"/{number}/mpiexec", kind, "") for number, kind in enumerate(kinds)]
    assert choose(launchers, library) == (None if chosen is None else launchers[chosen])


@pytest.mark.parametrize(
    ("library", "available", "plugin"),
    [
        (MPICH, ALL, "pmi2"),
        (MPICH, ("none", "pmix"), "pmix"),
        (MPICH, ("none",), None),
        (OPEN_MPI_5, ALL, "pmix"),
        (OPEN_MPI_5, ("none", "pmi2", "pmix_v3", "pmix_v4"), "pmix_v4"),
        (OPEN_MPI_5, ("none", "pmi2"), None),
        (OPEN_MPI_4, ("none", "pmi2"), "pmi2"),
        (CRAY, ALL, "cray_shasta"),
    ],
)
def test_plugin_of_slurm(library: MpiLibrary, available: tuple[str, ...], plugin: str | None) -> None:
    assert plugin_for(library, available) == plugin


def test_srun_is_told_the_cores_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    command = ["srun", "-n", "4", "--mpi=pmi2", "--kill-on-bad-exit=1"]
    assert srun_command("srun", 4, "pmi2") == command
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    assert srun_command("srun", 4, "pmi2") == [*command, "--cpus-per-task=8"]
