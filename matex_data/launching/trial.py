"""Trial of MPI in child processes, which may crash or hang."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from matex_data.launching.library import without_rank

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
        env=without_rank(),
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
