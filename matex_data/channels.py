"""Communicators and open files for reading: every reader has its own, and they are used again.

Communicators are scarce (MPI libraries have some thousand), and making or ending one is collective, while the end of
a Python object is not. So the ranks agree which of them nobody needs any more, whenever they need another.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from matex_data.agreement import Agreement
from matex_data.collective import Files


class Channel:
    """A communicator and open files that one reader has for itself.

    Parameters
    ----------
    comm : for this channel alone.
    threaded : whether MPI may be called from threads; if not, the ranks do not agree with one another.
    """

    def __init__(self, comm: MPI.Intracomm, threaded: bool) -> None:
        self.comm = comm
        self.agreement = Agreement(comm if threaded else MPI.COMM_SELF)
        self.files = Files(comm, [], "independent")
        self._user: weakref.ref[Any] | None = None

    @property
    def unused(self) -> bool:
        """Whether its user is gone, on this rank."""
        return self._user is None or self._user() is None

    def serve(self, user: object) -> None:
        """Belong to ``user`` as long as that lives."""
        self._user = weakref.ref(user)


class Channels:
    """The channels of a communicator.

    Parameters
    ----------
    comm : the user's; duplicated, so that nothing here meets the user's own messages.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm.Dup()
        self.threaded = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
        self._channels: list[Channel] = []

    def open(self, paths: Sequence[str], mode: str) -> Channel:
        """A channel with these files open, to ``serve`` whoever asks for it. *Collective*.

        Raises
        ------
        DataError : a file cannot be opened.
        """
        free = np.array([channel.unused for channel in self._channels], bool)
        if self.comm.size > 1 and len(free):
            self.comm.Allreduce(MPI.IN_PLACE, free, MPI.LAND)
        idle = [self._channels[number] for number in np.flatnonzero(free)]
        for channel in idle:
            channel.files.close()
        if not idle:
            idle = [Channel(self.comm.Dup(), self.threaded)]
            self._channels += idle
        idle[0].files = Files(idle[0].comm, paths, mode)
        return idle[0]


def channels(comm: MPI.Intracomm) -> Channels:
    """The channels of a communicator, made when they are first asked for. *Collective*."""
    kept: Any = comm.Get_attr(_kept_by())
    if isinstance(kept, Channels):
        return kept
    made = Channels(comm)
    comm.Set_attr(_kept_by(), made)
    return made


def _kept_by() -> int:
    if not _KEYS:
        _KEYS.append(MPI.Comm.Create_keyval())
    return _KEYS[0]


_KEYS: list[int] = []
