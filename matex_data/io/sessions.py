"""Reuse of communicators and open files.

Every reader needs a communicator of its own. MPI libraries have some thousand communicators, and making or freeing one
is collective, while the end of a Python object is not. When the ranks need a communicator, they therefore agree first
on one whose user has been deleted on all of them.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from matex_data.io.counters import Profile
from matex_data.io.files import Files, StampOf
from matex_data.locks import Lock
from matex_data.machine import reading_threads, threads
from matex_data.mpi import abort
from matex_data.mpi.attributes import attached
from matex_data.mpi.communicator import Communicator
from matex_data.mpi.deadlines import check_timeout, derived, wait_until, waiting_for
from matex_data.mpi.library import MPI
from matex_data.mpi.liveness import Liveness, all_threads
from matex_data.mpi.node import gather_cores
from matex_data.mpi.polling import poll
from matex_data.mpi.processes import is_child_process


class ReadSession:
    """Communicator and open files of one reader.

    Parameters
    ----------
    comm : communicator for this session alone.
    threaded : whether MPI provides ``MPI_THREAD_MULTIPLE``; otherwise each rank has its own status.

    Attributes
    ----------
    status : ranks that agree on errors; this one, where each has its own status.
    closers : objects that use the communicator; closed before it is freed.
    """

    def __init__(self, comm: Communicator, threaded: bool) -> None:
        self.comm = comm
        self.status = comm if threaded else Communicator(rank=comm.rank, size=comm.size)
        self.files = Files(comm, [], "independent")
        self.closers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.reserved = False  # for the object that is assigned next
        self._user: Callable[[], object] | None = None

    @property
    def unused(self) -> bool:
        """Return whether no object has this session, or will have it: its user has been deleted on this rank."""
        return not self.reserved and (self._user is None or self._user() is None)

    def assign(self, user: object) -> None:
        """Reserve this session until ``user`` is deleted."""
        self._user, self.reserved = weakref.ref(user), False

    def close(self) -> None:
        """Close the users and the files, and free the communicator. *Collective*."""
        for closer in list(self.closers):
            closer.close()
        for closer in list(self.closers):
            closer.join()
        self.files.close()
        self.comm.free()


class ReadSessions:
    """The sessions of a communicator.

    Parameters
    ----------
    comm : ranks that share datasets.
    threaded : whether MPI provides ``MPI_THREAD_MULTIPLE``.
    """

    def __init__(self, comm: Communicator, threaded: bool = True) -> None:
        self.comm = comm
        self.threaded = threaded
        self._sessions: list[ReadSession] = []
        self._opening = Lock()
        self._process = os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_other_process, (self.comm,)  # which reads the share of this rank, without MPI and open files

    def open(
        self, paths: Sequence[str], io: str, profile: Profile | None = None, stamp: StampOf | None = None
    ) -> ReadSession:
        """Return an unused session with these files open. *Collective*.

        Parameters
        ----------
        paths, io, profile, stamp : as of ``Files``.

        Raises
        ------
        DataError : a file cannot be opened; MPI has no communicator left.
        PartitionError : another rank does not make this call.
        """
        if self._process != os.getpid():  # MPI and open files are those of the parent process
            self._process, self._sessions = os.getpid(), []
        with self.comm.one_thread_at_a_time(self._opening):
            session = self._reserved()
        try:
            session.files = Files(session.comm, paths, io, profile, stamp)
        except BaseException:
            session.reserved = False
            raise
        return session

    def _reserved(self) -> ReadSession:
        """Return a session without a user, and reserve it. *Collective*."""
        used = [not session.unused for session in self._sessions]
        idle = [self._sessions[number] for number in np.flatnonzero(np.array(self.comm.maximum(*used, 0)[:-1]) == 0)]
        for session in idle:
            session.files.close()
        if not idle:
            idle = [ReadSession(self.comm.duplicate(), self.threaded)]
            self._sessions += idle
        idle[0].reserved = True
        return idle[0]

    def close(self) -> None:
        """Close all sessions and free the communicators. *Collective*."""
        for session in self._sessions:
            session.close()
        self._sessions.clear()
        if self.comm.liveness is not None:
            self.comm.liveness.close()
        self.comm.free()


@cache
def prepare_process() -> None:
    """Install the hook by which an error ends the job, which no import does. Once in a process."""
    abort.install()


def _in_other_process(comm: Communicator) -> ReadSessions:
    prepare_process()
    return ReadSessions(comm)


def check_environment() -> None:
    """Raise the errors of environment variables that threads use, which could not raise them.

    Raises
    ------
    PartitionError : a number of threads, or ``MATEX_TIMEOUT``, is not a number.
    """
    threads(), reading_threads(), check_timeout()


def read_sessions(comm: MPI.Intracomm | None) -> ReadSessions:
    """Return the sessions of a communicator. *Collective* at the first call for each communicator.

    Parameters
    ----------
    comm : communicator of the user, duplicated here so that no message interferes with the user's; None: all ranks. A
        process that a rank started or forked has sessions of its own, without MPI.

    Raises
    ------
    PartitionError : another rank does not make this call, or a variable of the environment is not a number.
    """
    prepare_process()
    comm = MPI.COMM_WORLD if comm is None else comm
    if is_child_process() or comm.size == 1:
        check_environment()
        return ReadSessions(Communicator())
    return attached(comm, _connect)


def _connect(comm: MPI.Intracomm) -> ReadSessions:
    threaded = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
    arrival = comm.Ibarrier()
    wait_until(lambda seconds: poll(lambda: bool(arrival.Test()), seconds), None)
    with waiting_for(None):
        abort.connect(lambda: derived(None, comm.Dup))  # first, so that an error of all ranks is printed once
        check_environment()
        gather_cores(comm)
        of_the_job = comm.size == MPI.COMM_WORLD.size and not all_threads()  # its first one
        on_death = abort.end_after_death if of_the_job else None
        liveness = Liveness(derived(None, comm.Dup), on_death, abort.abort_job, abort.prepare_end)
        return ReadSessions(Communicator(derived(None, comm.Dup), liveness), threaded)
