"""Communicators and open files for reading: every reader has its own, and they are used again.

Communicators are scarce (MPI libraries have some thousand), and making or ending one is collective, while the end of
a Python object is not. So the ranks agree which of them nobody needs any more, whenever they need another.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from matex_data.io.counters import Profile
from matex_data.io.files import Files
from matex_data.mpi import abort
from matex_data.mpi.attributes import attached
from matex_data.mpi.communicator import Communicator
from matex_data.mpi.deadlines import Liveness, poll, wait_until
from matex_data.mpi.library import MPI
from matex_data.mpi.node import local_rank
from matex_data.mpi.processes import is_child_process
from matex_data.mpi.status import StatusExchange
from matex_data.mpi.watchdog import waiting_for


class ReadSession:
    """A communicator and open files that one reader has for itself.

    Parameters
    ----------
    comm : for this channel alone.
    threaded : whether MPI may be called from threads; if not, the ranks do not agree with one another.

    Attributes
    ----------
    closers : called before the communicator is freed; each ends what uses it.
    """

    def __init__(self, comm: Communicator, threaded: bool) -> None:
        self.comm = comm
        self.status_exchange = StatusExchange(comm if threaded else Communicator(rank=comm.rank, size=comm.size))
        self.files = Files(comm, [], "independent")
        self.closers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._user: weakref.ref[Any] | None = None

    @property
    def unused(self) -> bool:
        """Whether its user is gone, on this rank."""
        return self._user is None or self._user() is None

    def assign(self, user: object) -> None:
        """Belong to ``user`` as long as that lives."""
        self._user = weakref.ref(user)

    def close(self) -> None:
        """End what uses it, and free the communicator. *Collective*."""
        for closer in list(self.closers):
            closer.close()
        for closer in list(self.closers):
            closer.join()
        self.files.close()
        self.comm.free()


class ReadSessions:
    """The channels of a communicator.

    Parameters
    ----------
    comm : the ranks that share data sets.
    threaded : whether MPI may be called from several threads.
    """

    def __init__(self, comm: Communicator, threaded: bool = True) -> None:
        self.comm = comm
        self.threaded = threaded
        self._channels: list[ReadSession] = []

    def open(self, paths: Sequence[str], mode: str, profile: Profile | None = None) -> ReadSession:
        """Return a channel with these files open, to ``assign`` whoever asks for it. *Collective*.

        Raises
        ------
        DataError : a file cannot be opened; MPI has no communicator left.
        PartitionError : not all ranks come.
        """
        busy = [not channel.unused for channel in self._channels]
        idle = [self._channels[number] for number in np.flatnonzero(np.array(self.comm.maximum(*busy, 0)[:-1]) == 0)]
        for channel in idle:
            channel.files.close()
        if not idle:
            idle = [ReadSession(self.comm.duplicate(), self.threaded)]
            self._channels += idle
        idle[0].files = Files(idle[0].comm, paths, mode, profile)
        return idle[0]

    def close(self) -> None:
        """Free the communicators. *Collective*."""
        for channel in self._channels:
            channel.close()
        self._channels.clear()
        if self.comm.liveness is not None:
            self.comm.liveness.close()
        self.comm.free()


def read_sessions(comm: MPI.Intracomm | None) -> ReadSessions:
    """Return the channels of a communicator, made when they are first asked for. *Collective*.

    Parameters
    ----------
    comm : the user's; duplicated, so that nothing here meets the user's own messages. None: all ranks; a process that
        was started or forked by a rank is alone.

    Raises
    ------
    PartitionError : not all ranks come.
    """
    if is_child_process():
        return ReadSessions(Communicator())
    comm = MPI.COMM_WORLD if comm is None else comm
    if comm.size == 1:
        return ReadSessions(Communicator())
    return attached(comm, _connect)


def _connect(comm: MPI.Intracomm) -> ReadSessions:
    threaded = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
    arrival = comm.Ibarrier()
    wait_until(lambda seconds: poll(lambda: bool(arrival.Test()), seconds), None)
    with waiting_for(None):
        abort.connect(comm)
        local_rank(comm)
        return ReadSessions(Communicator(comm.Dup(), Liveness(comm.Dup()) if threaded else None), threaded)
