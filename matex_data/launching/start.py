"""Start of the ranks of ``matex run -n``: which command, and how many ranks; and trials of MPI in child processes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from matex_data import machine
from matex_data.errors import PartitionError
from matex_data.launching.launchers import (
    MPIEXEC,
    Launcher,
    batch_system,
    choose,
    find_launchers,
    find_srun,
    plugin_for,
    plugins,
    srun_command,
)
from matex_data.launching.library import MpiLibrary, mpi_library
from matex_data.mpi.processes import RANK_PROCESS

AUTO = "auto"
_GPUS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def is_started(ranks: str) -> bool:
    """Return whether a launcher has started this process as one of so many ranks, so that there are none to start.

    Parameters
    ----------
    ranks : value of ``-n``: a number, or "auto".

    Raises
    ------
    PartitionError : it has started another number; the value is neither a number nor "auto".
    """
    if ranks != AUTO and not (ranks.isascii() and ranks.isdecimal() and int(ranks) > 0):
        raise PartitionError("no number of ranks", expected="-n with a number from 1 on, or -n auto", found=repr(ranks))
    found = machine.launch()
    if found is None:
        return False
    if machine.launched_rank() is None:  # this launcher tells no number of ranks
        return True
    if found.size == 1:  # of a job's script, or of a single task: the ranks are still to be started
        return False
    if ranks not in (AUTO, str(found.size)):
        raise PartitionError(
            f"these processes are ranks already, and would each start {ranks} others",
            expected=f"-n {found.size}, as {found.variable} says, or -n auto, or no -n",
            found=f"-n {ranks}",
            remedy="leave out the launcher before matex, or -n behind it",
        )
    return True


def start(ranks: str, command: Sequence[str]) -> NoReturn:
    """Replace this process by a launcher that starts ranks; its exit code and signals are those of the job.

    Print the command in one line on stderr.

    Parameters
    ----------
    ranks : a number, or "auto".
    command : of each rank.

    Raises
    ------
    DataError : mpi4py has no MPI library.
    PartitionError : no launcher fits it.
    """
    library = mpi_library()
    line = [*launcher_command(count_of_ranks(ranks), library), *command]
    sys.stderr.write(f"matex run: {shlex.join(line)}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    environment = machine.without_rank()
    environment.pop(RANK_PROCESS, None)
    os.execvpe(line[0], line, environment)


def count_of_ranks(ranks: str) -> int:
    """Return the number of ranks; for "auto" that of a job's tasks, else of this machine's GPUs, else of its cores."""
    if ranks != AUTO:
        return int(ranks)
    job = batch_system()
    if job:
        tasks = machine.number_in("SLURM_NTASKS") if job[0] == "Slurm" else _slots_of_job()
        if tasks:
            return tasks
    return gpus() or machine.cores()


def launcher_command(ranks: int, library: MpiLibrary) -> list[str]:
    """Return the start of a command that starts ranks with an MPI library, up to the program of the ranks.

    Raises
    ------
    PartitionError : there is no launcher that fits the library, or ``MATEX_MPIEXEC`` names none.
    """
    named = os.environ.get(MPIEXEC)
    if named and shutil.which(named) is None:
        raise PartitionError(
            f"{MPIEXEC} names no program", found=repr(named), remedy=f"name an mpiexec, or unset {MPIEXEC}"
        )
    srun = find_srun() if os.environ.get("SLURM_JOB_ID") and not named else None
    available = plugins(srun.path) if srun else ()
    plugin = plugin_for(library, available)
    if srun and plugin:
        return srun_command(srun.path, ranks, plugin)
    launchers = find_launchers(library)
    chosen = choose(launchers, library)
    if chosen is None:
        found = [f"{launcher.path} ({launcher.kind or 'of an unknown MPI'})" for launcher in launchers]
        found += [f"srun with --mpi={', '.join(available) or 'none'}"] if srun else []
        raise PartitionError(
            "no launcher fits the MPI library of mpi4py",
            expected=f"an mpiexec of {library.version} ({library.file or 'its file is unknown'})",
            found=", ".join(found) or "none",
            remedy=f"put the bin folder of this MPI in front of PATH, or name its mpiexec in {MPIEXEC}; "
            "matex doctor shows what fits",
        )
    return mpiexec_command(chosen, ranks)


def mpiexec_command(launcher: Launcher, ranks: int) -> list[str]:
    """Return the start of a command: a launcher other than ``srun`` with a number of ranks.

    Outside of a job Open MPI would bind two ranks to one core each on a machine of any size, and refuse more ranks than
    cores.
    """
    command = [launcher.path, "-n", str(ranks)]
    if launcher.kind == "openmpi" and not batch_system():
        command += ["--bind-to", "none", *(["--map-by", ":OVERSUBSCRIBE"] if ranks > machine.cores() else [])]
    return command


def _slots_of_job() -> int | None:
    """Return the number of ranks for which PBS or LSF has made room; None if it does not tell."""
    if os.environ.get("PBS_NODEFILE"):
        try:
            return len(Path(os.environ["PBS_NODEFILE"]).read_text().split())
        except OSError:
            return None
    return machine.number_in("LSB_DJOB_NUMPROC")


def gpus() -> int:
    """Return the number of GPUs that this process may use, by the devices of the system, without TensorFlow."""
    for name in _GPUS:
        if name in os.environ:
            return len([number for number in os.environ[name].split(",") if number.strip() not in ("", "-1")])
    nvidia = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return nvidia or sum(_has_simd(node) for node in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties"))


def _has_simd(node: Path) -> bool:
    """Return whether a node of AMD's driver is a GPU: a CPU has no SIMD units."""
    try:
        return any(
            line.split() != ["simd_count", "0"] for line in node.read_text().splitlines() if "simd_count" in line
        )
    except OSError:
        return False


SECONDS = 30.0
"""Time in which ranks have to start."""
_RANK = """
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
print(f"size={MPI.COMM_WORLD.size} level={MPI.Query_thread()}")
"""


class Outcome(NamedTuple):
    """Outcome of a trial.

    Attributes
    ----------
    connected : all ranks were connected.
    level : number of the level of threads that MPI allows; None if it did not start.
    text : what happened.
    """

    connected: bool
    level: int | None
    text: str


def start_alone() -> Outcome:
    """Start MPI in one child process without a launcher."""
    return start_ranks([], 1)


def start_ranks(launcher: Sequence[str], ranks: int) -> Outcome:
    """Start ranks with a launcher, and compare the number of ranks that each of them sees.

    Parameters
    ----------
    launcher : command up to the program of the ranks.
    ranks : number of ranks.
    """
    begin = time.monotonic()
    process = subprocess.Popen(
        [*launcher, sys.executable, "-c", _RANK],
        env=machine.without_rank(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return Outcome(False, None, f"hangs: no answer within {SECONDS:g} s")
    finally:
        with suppress(ProcessLookupError):  # ranks that outlive their launcher
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return _outcome(out, errors, process.returncode, ranks, time.monotonic() - begin)


def _outcome(out: str, errors: str, code: int, ranks: int, seconds: float) -> Outcome:
    answers = [(int(size), int(level)) for size, level in re.findall(r"size=(\d+) level=(\d+)", out)]
    level = min((level for _, level in answers), default=None)
    sizes = [size for size, _ in answers]
    if code == 0 and sizes == [ranks] * ranks:
        return Outcome(True, level, f"connects {ranks} ranks ({seconds:.1f} s)")
    if sizes and set(sizes) == {1}:
        return Outcome(False, level, f"does not fit: each of {len(sizes)} processes is rank 0 of 1")
    return Outcome(False, level, f"fails: {_reason(errors) or f'exit code {code}'}")


def _reason(errors: str) -> str:
    """Return the line of an error's text that says most: of Python the last one, of a launcher the first one."""
    if "run as root" in errors:
        return "it refuses root unless OMPI_ALLOW_RUN_AS_ROOT and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM are 1"
    lines = [" ".join(line.split()) for line in errors.splitlines() if re.search(r"\w", line)]
    line = ((lines[-1:] if "Traceback" in errors else lines[:1]) or [""])[0]
    return line if len(line) <= 200 else f"{line[:199]}…"
