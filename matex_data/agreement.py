"""Ranks agree on how to go on, without spinning: no rank is left waiting for one that failed or left."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from enum import IntEnum
from math import inf
from threading import Lock

import numpy as np
from mpi4py import MPI

from matex_data.errors import DataError
from matex_data.index import Integers

SHORTEST_NAP, LONGEST_NAP = 2e-5, 5e-4  # seconds between two looks at a request, the longer it takes


class Status(IntEnum):
    """What a rank wants; the highest of all ranks is what they do."""

    GO_ON = 0
    STOPPED = 1
    FAILED = 2


def patience() -> float:
    """Seconds until a wait for another rank ends with an error; the environment variable ``MATEX_TIMEOUT``."""
    return float(os.environ.get("MATEX_TIMEOUT", "600"))


class Round:
    """What the ranks are about to agree on; it goes on while they do other things. Any thread may ask for it.

    Parameters
    ----------
    comm : used for nothing else but rounds, which all ranks begin in one order. *Collective*.
    said : int64[n], of this rank; the ranks agree on the element-wise maximum.
    """

    def __init__(self, comm: MPI.Intracomm, said: Integers) -> None:
        self._agreed = said if comm.size == 1 else np.empty_like(said)
        self._request: MPI.Request | None = None if comm.size == 1 else comm.Iallreduce(said, self._agreed, MPI.MAX)
        self._lock = Lock()

    def wait(self, seconds: float = inf) -> bool:
        """Until all ranks have begun this round; False if they have not in that time."""
        deadline, nap = time.monotonic() + seconds, SHORTEST_NAP
        while not self._done():
            if time.monotonic() > deadline:
                return False
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP)
        return True

    def result(self) -> tuple[Status, Integers]:
        """The highest status and the largest counts of all ranks; waits for them."""
        self.wait()
        return Status(int(self._agreed[0])), self._agreed[1:]

    def _done(self) -> bool:
        with self._lock:
            if self._request is not None and self._request.Test():
                self._request = None
            return self._request is None


class Agreement:
    """Rounds in which every rank says what it wants and learns what all do.

    Parameters
    ----------
    comm : used for nothing else at the same time.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def begin(self, status: Status, counts: Integers) -> Round:
        """Say both to the other ranks. *Collective*."""
        return Round(self._comm, np.concatenate([[int(status)], counts]).astype(np.int64))

    def reach(self, status: Status, counts: Integers) -> tuple[Status, Integers]:
        """The highest status, and the element-wise maximum of ``counts``. *Collective*."""
        return self.begin(status, counts).result()

    def error(self, mine: BaseException | None) -> BaseException:
        """The error of the lowest rank that has one. *Collective*, after ``FAILED``."""
        return first_error(self._comm, mine) or DataError("a rank reported a failure, but no error")


def agree(comm: MPI.Intracomm, error: BaseException | None) -> None:
    """Every rank raises the same error, if any rank has one. *Collective*."""
    found = first_error(comm, error)
    if found is not None:
        raise found


def first_error(comm: MPI.Intracomm, mine: BaseException | None) -> BaseException | None:
    """The error of the lowest rank that has one. *Collective*."""
    if comm.size == 1:
        return mine
    packed = next((error for error in comm.allgather(portable(mine)) if error is not None), None)
    found: BaseException | None = None if packed is None else pickle.loads(packed)
    return found


def portable(error: BaseException | None) -> bytes | None:
    """The error as bytes that another rank can make it of; one that cannot travel becomes a ``DataError``."""
    if error is None:
        return None
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:  # pickling runs code of other people's exceptions: anything may come of it
        text = "".join(traceback.format_exception_only(error)).strip()
        packed = pickle.dumps(DataError(f"a rank failed: {text}"))
    return packed
