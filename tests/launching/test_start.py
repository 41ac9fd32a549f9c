"""``matex run -n``: the ranks that it starts, their exit code and signals, and processes that are ranks already."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from matex_data import PartitionError, machine
from matex_data.launching import start
from matex_data.launching.launchers import Launcher
from matex_data.launching.library import mpi_library
from matex_data.machine import without_rank
from matex_data.training.launcher.arguments import parse
from tests.cli.test_commands import CALL
from tests.support.launch import environment, kill, run_script

SCRIPT = """
import sys
from mpi4py import MPI
first = MPI.Is_initialized() and "tensorflow" not in sys.modules
print(*MPI.COMM_WORLD.allgather((MPI.COMM_WORLD.rank, first, sys.argv[1:])), flush=True)
sys.exit(7)
"""


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in (*machine._RANKS, machine._RANKS_ALONE, ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_URI")):
        for name in names:
            monkeypatch.delenv(name, raising=False)


@pytest.mark.openmpi
def test_ranks_are_started_and_mpi_before_tensorflow(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_script(0, CALL, "run", "-n", "2", str(tmp_path / "script.py"), "-n", "9", forked=False, timeout=200)
    assert done.returncode == 7, done.stderr
    assert "(0, True, ['-n', '9']) (1, True, ['-n', '9'])" in done.stdout
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("matex run: ")]
    assert " -n 2 " in line and line.endswith("script.py -n 9")


STARTED = """
import sys
from matex_data.launching.start import start
start(sys.argv[1], [sys.executable, "-c", sys.argv[2]])
"""
WAIT = """
import time
from mpi4py import MPI
print("ranks", MPI.COMM_WORLD.allreduce(1), flush=True)
time.sleep(100)
"""


@pytest.mark.openmpi
def test_a_signal_ends_the_job() -> None:
    job = subprocess.Popen(
        [sys.executable, "-c", STARTED, "2", WAIT],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert job.stdout is not None
        assert job.stdout.readline().split() == ["ranks", "2"]
        ranks = [child for child in psutil.Process(job.pid).children(recursive=True) if "python" in child.name()]
        assert len(ranks) == 2
        job.send_signal(signal.SIGTERM)
        assert job.wait(30) != 0
        _, alive = psutil.wait_procs(ranks, timeout=10)
        assert not alive
    finally:
        kill(job)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variables", "ranks", "expected"),
    [
        ({}, "4", False),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "4", True),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, "auto", True),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, "4", False),
        ({"SLURM_PROCID": "0"}, "4", False),  # the script of a job
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}, "8", True),
        ({"PALS_RANKID": "0"}, "2", True),  # tells no number of ranks: never start ranks of ranks
    ],
)
def test_processes_that_are_ranks_start_none(
    variables: dict[str, str], ranks: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert start.is_started(ranks) is expected


def test_another_number_of_ranks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(PartitionError, match="would each start 2 others"):
        start.is_started("2")
    for value in ("0", "-1", "many", ""):
        with pytest.raises(PartitionError, match="no number of ranks"):
            start.is_started(value)


def test_a_launcher_that_is_named_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MATEX_MPIEXEC", "/no/such/mpiexec")
    with pytest.raises(PartitionError, match=r"MATEX_MPIEXEC names no program.*\n.*'/no/such/mpiexec'"):
        start.launcher_command(2, mpi_library())


@pytest.mark.parametrize(
    ("given", "needed"), [(["--save-every", "5"], "--checkpoint"), (["--micro-batches", "auto"], "--stages")]
)
def test_options_that_need_another_one(given: list[str], needed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([*given, __file__])
    assert f"{given[0]} is for {needed}" in capsys.readouterr().err
    assert parse([*given, needed, "2", __file__]).of_run


def test_number_of_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in start._GPUS:
        monkeypatch.delenv(name, raising=False)
    assert start.count_of_ranks("3") == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert start.count_of_ranks("auto") == machine.cores()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,3")
    assert start.count_of_ranks("auto") == 3
    (tmp_path / "nodes").write_text("a\na\nb\nb\nb\n")
    monkeypatch.setenv("PBS_JOBID", "1.site")
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    assert start.count_of_ranks("auto") == 5
    monkeypatch.delenv("PBS_JOBID")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "16")
    assert start.count_of_ranks("auto") == 16


def test_open_mpi_is_told_of_more_ranks_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "cores", lambda: 4)
    launcher = Launcher("mpiexec", "openmpi", "Open MPI 5.0.8")
    unbound = ["mpiexec", "-n", "4", "--bind-to", "none"]
    assert start.mpiexec_command(launcher, 4) == unbound
    assert start.mpiexec_command(launcher, 5)[3:] == [*unbound[3:], "--map-by", ":OVERSUBSCRIBE"]
    assert start.mpiexec_command(Launcher("mpiexec", "mpich", ""), 5) == ["mpiexec", "-n", "5"]


def test_what_makes_a_process_a_rank_is_not_inherited() -> None:
    """A job may be started from one that is a rank, alone in its job."""
    done = run_script(1, "from matex_data.machine import without_rank; print(sorted(without_rank()))")
    assert done.returncode == 0, done.stderr
    kept = set(eval(done.stdout.strip().splitlines()[-1]))
    assert {"PATH", "PYTHONHASHSEED"} < kept
    assert not [name for name in kept if name.startswith(("PMI", "OMPI_COMM_WORLD", "HYDI"))]
    assert set(without_rank()) <= set(environment())


@pytest.mark.parametrize("ranks", [["-n", "4"], ["-n4"], ["--ranks", "4"], ["--ranks=4"]])
@pytest.mark.parametrize("script", [["train.py", "-n", "8", "--stages", "9"], ["-m", "package.train", "-n", "8"]])
def test_the_option_of_the_launcher_is_not_the_scripts(
    ranks: list[str], script: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    before, behind = ["--stages", "2"], ["--no-verify"]
    found = parse([*before, *ranks, *behind, *script])
    assert found.ranks == "4" and found.of_ranks == [*before, *behind, *script]
    assert found.of_run["arguments"] == [text for text in script[1:] if text != "package.train"]
    assert found.of_run["stages"] == 2 and found.of_run["verify"] == "never"
    assert parse(found.of_ranks).of_run == found.of_run and parse(found.of_ranks).ranks is None
