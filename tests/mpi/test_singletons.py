"""Processes of one launcher that MPI does not connect: an error in every entry, not as many complete trainings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from matex_data.machine import without_rank
from tests.support.launch import ROOT, environment, mpiexec, run_script

OPENMPI = ROOT / "build" / "openmpi"
FIT = "import keras, matex_data as md; print('alone', md.training.fit(keras.Sequential(), None))"
ENTRIES = {
    "open_dataset": ["-c", "import sys, matex_data as md; print('alone', md.open_dataset(sys.argv[1]))", "PATH"],
    "world": ["-c", "import matex_data as md; print('alone', md.training.world())"],
    "run": ["-m", "matex_data", "run", "SCRIPT"],
    "inspect": ["-m", "matex_data", "inspect", "PATH"],
    "validate": ["-m", "matex_data", "validate", "PATH"],
    "bench": ["-m", "matex_data", "bench", "PATH"],
    "fit": ["-c", FIT],
}
SLURM = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}
LAUNCHES = {
    "srun": SLURM,
    "hydra": {"PMI_RANK": "0", "PMI_SIZE": "4"},
    "prterun": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"},
    "flux": {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "4"},
    "torchrun": {"LOCAL_RANK": "0", "WORLD_SIZE": "4", "RANK": "0"},
}
WORLD = "import matex_data as md; print(md.training.world())"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("singletons")
    (folder / "script.py").write_text("print('alone')")
    with h5py.File(folder / "x.h5", "w") as file:
        file["x"] = np.arange(96.0).reshape(12, 8)
    return folder


def _run(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = {"PATH": str(folder / "x.h5"), "SCRIPT": str(folder / "script.py")}
    env = without_rank() | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"} | variables
    arguments = [sys.executable, *(paths.get(word, word) for word in command)]
    return subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=120, cwd=os.sep)


def _assert_refused(done: subprocess.CompletedProcess[str], variable: str) -> None:
    assert (done.returncode, done.stdout) == (1, "")
    assert "a launcher started 4 processes, and MPI connects none of them" in done.stderr
    assert f"expected: 4 ranks ({variable} in the environment)" in done.stderr
    assert re.search("found: 1 rank, with (MPICH|Open MPI)", done.stderr)
    for remedy in ("mpiexec that belongs to this MPI", "srun --mpi=pmi2", "--mpi=pmix", "MATEX_ALLOW_SINGLETONS=1"):
        assert remedy in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("entry", [pytest.param(e, marks=pytest.mark.slow if e == "fit" else ()) for e in ENTRIES])
def test_every_entry_refuses(entry: str, folder: Path) -> None:
    _assert_refused(_run(ENTRIES[entry], folder, **SLURM), "SLURM_STEP_NUM_TASKS")


@pytest.mark.parametrize("launcher", list(LAUNCHES)[1:])
def test_every_launcher_tells_its_number_of_processes(launcher: str, folder: Path) -> None:
    variable = list(LAUNCHES[launcher])[1]
    _assert_refused(_run(["-c", WORLD], folder, **LAUNCHES[launcher]), variable)


def test_a_rank_alone_tells_the_least_number(folder: Path) -> None:
    """MPICH ends the process itself where it finds PMIx, which it does not support."""
    code = "from matex_data.machine import launch; print(*launch())"
    done = _run(["-c", code], folder, PMIX_RANK="3")
    assert done.stdout.split() == ["3", "4", "PMIX_RANK"]


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a plain process of sbatch or salloc
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"},
        {**SLURM, "MATEX_ALLOW_SINGLETONS": "1"},
        {**SLURM, "MATEX_RANK_PROCESS": "1"},  # a process that a rank has started
        {"WORLD_SIZE": "4"},  # of a job's own script
        {"WORLD_SIZE": "1", "LOCAL_RANK": "0"},
    ],
    ids=["sbatch", "srun -n 1", "allowed", "child", "variable", "torchrun of one"],
)
def test_what_is_alone_on_purpose_runs(variables: dict[str, str], folder: Path) -> None:
    done = _run(["-c", WORLD], folder, **variables)
    assert done.stdout.strip() == "World(rank=0, size=1, local_rank=0)", done.stderr


SPAWNED = """
import multiprocessing, os, sys

def count(path):
    import matex_data as md
    return len(md.open_dataset(path)), md.training.world().size

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(*pool.apply(count, (sys.argv[1],)))
"""


def test_spawned_workers_run(folder: Path) -> None:
    """Of a rank that has not used this package itself, so that it has not marked its children."""
    (folder / "spawned.py").write_text(SPAWNED)
    done = _run([str(folder / "spawned.py"), "PATH"], folder, **SLURM)
    assert done.stdout.split() == ["12", "1"], done.stderr


CHILD = f"""
import os, shlex, subprocess, sys
import matex_data as md
size = md.training.world().size
command = shlex.join([sys.executable, "-c", {WORLD!r}])
env = {{key: value for key, value in os.environ.items() if key != "PMI_FD"}}
child = subprocess.run(["sh", "-c", "true; " + command], capture_output=True, text=True, env=env)
print("RESULT", size, child.stdout.strip() or child.stderr)
"""


def test_a_process_that_a_rank_starts_runs() -> None:
    """Through a shell, and without the connection of its rank to the launcher."""
    done = run_script(2, CHILD, timeout=60, forked=False)
    expected = "RESULT 2 World(rank=0, size=1, local_rank=0)"
    assert [line for line in done.stdout.splitlines() if line.startswith("RESULT")] == [expected] * 2, done.stderr


@pytest.mark.skipif(not (OPENMPI / "installed").exists(), reason="no Open MPI in build/openmpi (make test installs it)")
@pytest.mark.skipif("MATEX_MPIEXEC" in os.environ, reason="the launcher has to be that of MPICH")
def test_a_launcher_of_another_library(folder: Path) -> None:
    """MPICH's mpiexec starts ranks of Open MPI, which are singletons for it."""
    variables = {"MPI4PY_MPIABI": "openmpi", "OPAL_PREFIX": str(OPENMPI), "LD_LIBRARY_PATH": str(OPENMPI / "lib")}
    command = [mpiexec(), "-n", "4", sys.executable, "-c", WORLD]
    done = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "World" not in done.stdout
    assert "expected: 4 ranks (PMI_SIZE in the environment)" in done.stderr
    assert "found: 1 rank, with Open MPI v" in done.stderr


@pytest.mark.skipif(not (OPENMPI / "installed").exists(), reason="no Open MPI in build/openmpi (make test installs it)")
@pytest.mark.skipif("MATEX_MPIEXEC" in os.environ, reason="the launcher has to be another one than that of the tests")
def test_ranks_of_mpich_under_the_launcher_of_open_mpi() -> None:
    """MPICH itself may end such processes, since it does not support PMIx."""
    command = [str(OPENMPI / "bin" / "mpiexec"), "-n", "2", sys.executable, "-c", WORLD]
    env = environment(OPAL_PREFIX=str(OPENMPI))
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "World" not in done.stdout
    assert re.search("OMPI_COMM_WORLD_SIZE|unsupported PMI version PMIx", done.stderr)
