"""Processes that a rank starts or forks: they are no ranks, and MPI is out of their reach.

An MPI library does not survive ``fork``, and a process that a rank starts inherits the environment of that rank, by
which it would introduce itself to the job as the same rank again. So these processes read their data without MPI.
"""

from __future__ import annotations

import multiprocessing
import os

import mpi4py

RANK_PROCESS = "MATEX_RANK_PROCESS"
"""Environment variable: process id of the rank whose children inherit it."""

_forked = False


def is_child_process() -> bool:
    """Return whether this process was started or forked by a rank, so that it must not call MPI."""
    return _forked or _STARTED


def _started_by_a_rank() -> bool:
    inheriting = getattr(multiprocessing.current_process(), "_inheriting", False)  # a child that is being set up
    by_multiprocessing = inheriting or multiprocessing.parent_process() is not None
    return RANK_PROCESS in os.environ and (by_multiprocessing or os.environ[RANK_PROCESS] == str(os.getppid()))


def _note_fork() -> None:
    global _forked
    _forked = True


def note_rank() -> None:
    """Let processes that this one starts know that it is a rank."""
    os.environ[RANK_PROCESS] = str(os.getpid())


def keep_mpi_out() -> None:
    """Let MPI not start in a process that a rank has started; before ``mpi4py.MPI`` is imported."""
    if _STARTED:
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False


_STARTED = _started_by_a_rank()
os.register_at_fork(after_in_child=_note_fork)
