"""Start scripts with ``mpiexec``, under a time limit, and end every process of theirs."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]

_SETTINGS = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUNBUFFERED": "",  # lines of several ranks would be mixed
    # More ranks than cores is usual in a test; the names are those of Open MPI 4 and 5.
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


class Hung(Exception):
    """A script did not end within its time limit; the text holds its output and its threads' stacks."""


@dataclass(frozen=True)
class Completed:
    """How a script ended; ``seconds`` is the wall time."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float


def mpiexec() -> str:
    """The ``mpiexec`` that ``MATEX_MPIEXEC`` names, that of this environment, or that of the system.

    Where there is none the test is skipped; under ``CI=true`` it fails, so that no run is green for want of MPI.
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
    """This process's environment, with one thread a rank, and with the tests' package importable."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **_SETTINGS, "PYTHONPATH": path, **changes}


def run_script(
    ranks: int, script: Path | str, *args: str, timeout: float = 60, env: Mapping[str, str] | None = None
) -> Completed:
    """Run a script (a path, or code as text) on several ranks, each a Python process of its own.

    Raises
    ------
    Hung : it did not end within ``timeout`` seconds. No process of it is left.
    """
    with _as_file(script) as path, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        command = [mpiexec(), "-n", str(ranks), sys.executable, str(path), *args]
        begin = time.monotonic()
        process = subprocess.Popen(
            command,
            env=environment(**(env or {})),
            stdin=subprocess.DEVNULL,
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


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started: MPI launchers give each rank a session of its own."""
    children = _children(process.pid)
    shared = shared_memory(process.pid)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.kill()
    process.wait()
    psutil.wait_procs(children, timeout=5)
    for path in shared:
        path.unlink(missing_ok=True)


def shared_memory(pid: int) -> set[Path]:
    """Files of MPI's shared memory that the ranks below a process have: they outlive ranks that are killed."""
    paths = set()
    for child in _children(pid):
        with contextlib.suppress(psutil.Error, AttributeError):  # not every system tells
            paths |= {Path(part.path) for part in child.memory_maps() if part.path.startswith("/dev/shm/mpi")}
    return paths


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _dump_stacks(pid: int) -> None:
    """Make every Python process print its threads' stacks: the fault handler does so on SIGABRT."""
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
