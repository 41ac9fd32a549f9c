"""Run scripts with ``mpiexec`` under a time limit, and end all their processes."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil
import pytest

from tests.support import machine_speed, shared_memory

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT = 150.0
"""Seconds for a script or a task of ranks: many times what one takes on a machine that does nothing else.

``machine_speed`` scales this limit, and those that tests give.
"""
FORK_SERVER = Path(__file__).with_name("fork_server.py")
SERVER = "MATEX_FORK_SERVER"
"""Environment variable with the socket of a fork server that several processes of tests share."""

_SETTINGS = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONHASHSEED": "0",  # as matex run sets it; forked processes cannot start anew
    "PYTHONUNBUFFERED": "",  # lines of the ranks would mix
    # Tests use more ranks than cores: a rank of MPICH that waits sleeps. Otherwise it keeps a core busy that the others
    # need, and three ranks on two cores take 1.7 times as long.
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
    # The names are those of Open MPI 4 and 5.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


class Hung(Exception):
    """A script did not end within its time limit; the message holds its output and the stacks of its threads."""


@dataclass(frozen=True)
class Completed:
    """Exit code, output and wall time in ``seconds`` of a script."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float


def mpiexec() -> str:
    """Return the ``mpiexec`` that ``MATEX_MPIEXEC`` names, the one of this environment, or the one of the system.

    Skip the test if there is none; fail it if ``CI=true``.
    """
    if "MATEX_MPIEXEC" in os.environ:
        return os.environ["MATEX_MPIEXEC"]
    found = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    if found is None:
        missing = "no mpiexec beside Python or on PATH: pip install mpich"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    return found


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment with one thread per rank, and with ``tests`` importable."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **_SETTINGS, "PYTHONPATH": path, **changes}


def run_script(
    ranks: int,
    script: Path | str,
    *args: str,
    timeout: float = TIME_LIMIT,
    env: Mapping[str, str] | None = None,
    forked: bool = True,
    typed: str = "",
) -> Completed:
    """Run a script (a path, or code as text) on ``ranks`` Python processes.

    Parameters
    ----------
    ranks : number of ranks; 0: one process without ``mpiexec``.
    forked : fork the processes from one that has imported TensorFlow, unless ``env`` has variables that it reads then.
    typed : standard input.

    Raises
    ------
    Hung : the script did not end within ``timeout`` seconds; all its processes have been killed.
    """
    with (
        _as_file(script) as path,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        given.write(typed.encode())
        given.seek(0)
        launcher = [mpiexec(), "-n", str(ranks)] if ranks else []
        variables = environment(**(env or {}))
        python = fork_client() if forked and not _READ_AT_START.search(" ".join(env or {})) else [sys.executable]
        timeout = machine_speed.scaled(timeout)
        begin = time.monotonic()
        process = subprocess.Popen(
            [*launcher, *python, str(path), *args],
            env=variables,
            stdin=given,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            _dump_stacks(process.pid)
            kill(process)
            raise Hung(f"{ranks} ranks of {path} hung ({timeout:g} s)\n{_text(out)}\n{_text(err)}") from None
        finally:
            kill(process)
        return Completed(code, _text(out), _text(err), time.monotonic() - begin)


_READ_AT_START = re.compile("(TF|OMP|KERAS|PYTHON|LD|CUDA|MPI4PY)_")
"""Environment variables that Python, TensorFlow or an MPI library reads when it starts."""


@functools.cache
def _fork_server() -> tuple[subprocess.Popen[bytes] | None, str]:
    """Return the fork server, None if another process has started it, and the path of its socket."""
    if SERVER in os.environ:
        return None, os.environ[SERVER]
    folder = tempfile.mkdtemp(prefix="matex-fork-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = f"{folder}/socket"
    with Path(folder, "stderr").open("w") as errors:
        server = subprocess.Popen(
            [sys.executable, str(FORK_SERVER), "serve", path],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
    return server, path


def share_fork_server() -> None:
    """Start a fork server for this process and those that it starts: it has TensorFlow in memory once."""
    _, os.environ[SERVER] = _fork_server()


def fork_client() -> list[str]:
    """Return the start of a command that has its program forked by the fork server."""
    server, path = _fork_server()
    end = time.monotonic() + machine_speed.scaled(TIME_LIMIT)
    while not Path(path).exists():
        if time.monotonic() > end or (server is not None and server.poll() is not None):
            raise RuntimeError(f"the fork server ended:\n{Path(path).with_name('stderr').read_text()}")
        time.sleep(0.05)
    return [sys.executable, "-E", "-S", str(FORK_SERVER), "client", path]


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all its descendants: MPI launchers give each rank a session of its own."""
    children = _children(process.pid)
    shared = shared_files(children)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.kill()
    process.wait()
    psutil.wait_procs(children, timeout=5)
    for path in shared:
        path.unlink(missing_ok=True)


def shared_files(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return the files of MPI's shared memory that processes map: they outlive processes that are killed."""
    return {path for process in processes for path in shared_memory.mapped(process.pid)}


def _children(pid: int) -> list[psutil.Process]:
    """Return the descendants of a process, and the processes that the fork server forked for them."""
    try:
        found = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    for client in list(found) if _fork_server.cache_info().currsize else []:
        with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):
            forked = psutil.Process(int(Path(f"{_fork_server()[1]}.{client.pid}").read_text()))
            found += [forked, *forked.children(recursive=True)]
    return found


def _dump_stacks(pid: int) -> None:
    """Make every Python process print the stacks of its threads, which its fault handler does on SIGABRT."""
    ranks = [child for child in _children(pid) if "python" in child.name()]
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.send_signal(signal.SIGABRT)
    psutil.wait_procs(ranks, timeout=3)


@contextlib.contextmanager
def _as_file(script: Path | str) -> Iterator[Path]:
    if isinstance(script, Path):
        yield script
        return
    with tempfile.TemporaryDirectory(prefix="matex-script-") as folder:
        path = Path(folder) / "script.py"
        path.write_text(script)
        yield path


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
