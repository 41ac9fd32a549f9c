"""Processes that a rank starts or forks, and names of files that tell whose process writes them.

They must not call MPI: an MPI library does not survive ``fork``, and a started process inherits the environment with
which its rank introduced itself to the launcher. Such processes read data without MPI.
"""

from __future__ import annotations

import functools
import glob
import multiprocessing
import os
import platform
import re
import shutil
from contextlib import suppress
from pathlib import Path

import mpi4py

RANK_PROCESS = "MATEX_RANK_PROCESS"
"""Environment variable: process id of a rank, inherited by its children."""

_forked = False


def is_child_process() -> bool:
    """Return whether a rank started or forked this process."""
    return _forked or _STARTED


def is_running(process: int) -> bool:
    """Return whether a process of this machine runs."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # a process of another user
        return True
    return True


def unfinished_name(begin: str, end: str = "") -> str:
    """Return the name of a file or folder that this process removes or renames; see `remove_unfinished`."""
    return f"{begin}{platform.node()}~{os.getpid()}~{end}"


@functools.cache
def remove_unfinished(folder: Path, begin: str) -> None:
    """Remove what processes of this machine that were killed have left in a folder, by the begin of `unfinished_name`.

    What those of other machines have left stays, since they may run, and so does what another user has left. Once a
    process: a shared file system takes seconds to list a folder of many files, at each save of each rank.
    """
    begin += f"{platform.node()}~"  # no name of a machine has a tilde
    for path in folder.glob(f"{glob.escape(begin)}*~*"):
        process = re.match(r"\d+(?=~)", path.name[len(begin) :])
        if process is None or is_running(int(process[0])):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def is_descendant_of_rank() -> bool:
    """Return whether this process inherits its environment from a rank, or its variables from a parent process."""
    by_rank = os.environ.get(RANK_PROCESS, str(os.getpid())) != str(os.getpid())
    return by_rank or is_child_process() or _by_multiprocessing()


def _by_multiprocessing() -> bool:
    starting = getattr(multiprocessing.current_process(), "_inheriting", False)  # before parent_process() is set
    return starting or multiprocessing.parent_process() is not None


def _started() -> bool:
    """Return whether a rank, or any process through ``multiprocessing``, has started this process afresh."""
    return _by_multiprocessing() or os.environ.get(RANK_PROCESS) == str(os.getppid())


def _note_fork() -> None:
    global _forked
    _forked = True


def mark_rank() -> None:
    """Note in the environment that this process is a rank, for the processes that it starts."""
    os.environ[RANK_PROCESS] = str(os.getpid())


def disable_mpi_in_child() -> None:
    """Prevent ``mpi4py.MPI`` from initializing MPI in a process that a rank started. Call it before that import."""
    if _STARTED:
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False


_STARTED = _started()
os.register_at_fork(after_in_child=_note_fork)
