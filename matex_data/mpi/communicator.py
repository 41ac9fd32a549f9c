"""The ranks that share something, and what they tell one another. No wait for them is without end."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np

from matex_data._types import Integers
from matex_data.errors import DataError, PartitionError
from matex_data.machine import out_of_memory
from matex_data.mpi.deadlines import Liveness, poll, wait_until
from matex_data.mpi.library import MPI
from matex_data.mpi.processes import is_child_process
from matex_data.mpi.watchdog import waiting_for


class PendingMaximum:
    """Element-wise maximum over all ranks, on its way while this rank does other things. Any thread may ask for it.

    Parameters
    ----------
    comm : in which all ranks begin their rounds in one order. *Collective*.
    values : int64[n], of this rank.
    """

    def __init__(self, comm: Communicator, values: Integers) -> None:
        self._comm = comm
        self._values = values  # MPI may read it until all ranks have begun
        self._largest = values if comm.alone else np.empty_like(values)
        self._request: MPI.Request | None = None
        self._lock = Lock()
        if not comm.alone:
            self._request = comm.mpi.Iallreduce(self._values, self._largest, MPI.MAX)
            _PENDING.add(self)

    def done(self, seconds: float = 0.0) -> bool:
        """Return whether all ranks have begun this round, within so many seconds."""
        return poll(self._test, seconds)

    def wait(self) -> Integers:
        """Return the maximum, int64[n].

        Raises
        ------
        PartitionError : not all ranks come.
        """
        if not self._test():
            self._comm.wait_until(self.done)
        return self._largest

    def result(self) -> Integers:
        """Return the maximum, int64[n], however long it takes: for threads that nobody waits for."""
        self.done(float("inf"))
        return self._largest

    def _test(self) -> bool:
        with self._lock:
            if self._request is not None and self._request.Test():
                self._request = None
                _PENDING.discard(self)
            return self._request is None


_PENDING: set[PendingMaximum] = set()
"""Rounds that MPI still works on: their memory must not be used for anything else, even if nobody asks for them."""


def has_pending() -> bool:
    """Return whether a round of this process has not been begun by all ranks."""
    return not all(round_.done() for round_ in list(_PENDING))


class Communicator:
    """Ranks that share data sets; or one process alone, without MPI.

    Parameters
    ----------
    mpi : for this alone; None: there is nobody to speak to.
    liveness : of these ranks; None: they cannot be asked where they are.
    rank, size : where there is no ``mpi``: whose share this process reads.
    """

    def __init__(
        self, mpi: MPI.Intracomm | None = None, liveness: Liveness | None = None, rank: int = 0, size: int = 1
    ) -> None:
        self._mpi = mpi
        self.liveness = liveness
        self.rank = rank if mpi is None else int(mpi.rank)
        self.size = size if mpi is None else int(mpi.size)
        self._busy = Lock()

    @property
    def alone(self) -> bool:
        """Whether this process speaks to no other rank: there is none, or it was forked."""
        return self._mpi is None or is_child_process()

    @property
    def mpi(self) -> MPI.Intracomm:
        """The communicator of MPI.

        Raises
        ------
        PartitionError : this process has none.
        """
        if self._mpi is None or is_child_process():
            raise PartitionError(
                f"this process was forked by rank {self.rank}, and cannot speak to the other ranks",
                remedy="do what all ranks do together before the fork; afterwards, batches() of a data set that is not "
                "shuffled, or has a seed, gives the share of this rank",
            )
        return self._mpi

    def wait_until(self, happened: Callable[[float], bool]) -> None:
        """Return once ``happened(seconds)``; see ``liveness.wait_until``."""
        wait_until(happened, self.liveness)

    def start_maximum(self, values: Any) -> PendingMaximum:
        """Begin to find the element-wise maximum of int64[n] over all ranks. *Collective*."""
        return PendingMaximum(self, np.array(values, np.int64))

    def maximum(self, *values: int) -> list[int]:
        """Return the largest of each value over all ranks. *Collective*.

        Raises
        ------
        PartitionError : not all ranks come; another thread of this rank is in such a call.
        """
        with self._together():
            return [int(value) for value in self.start_maximum(values).wait()]

    def poll(self, request: MPI.Request) -> None:
        """Return once the request has completed, however long it takes: for threads that nobody waits for."""
        poll(request.Test)

    def wait(self, request: MPI.Request) -> None:
        """Return once the request has completed, of much data, which all ranks have begun or are about to begin.

        MPI moves some 16 KB each time that it is asked whether it is done: pauses between would make it slow.
        """
        with waiting_for(self.liveness):
            request.Wait()

    def barrier(self) -> None:
        """Return when all ranks are here. *Collective*. Raises what ``maximum`` raises."""
        self.maximum(0)

    def allgather(self, value: Any) -> list[Any]:
        """Return the Python objects of all ranks, by rank. *Collective*. Raises what ``maximum`` raises."""
        if self.size == 1:
            return [value]
        with self._together():
            self.start_maximum([0]).wait()
            with waiting_for(self.liveness):
                return list(self.mpi.allgather(value))

    def broadcast(self, value: Any) -> Any:
        """Return the Python object of rank 0. *Collective*. Raises what ``maximum`` raises."""
        if self.size == 1:
            return value
        with self._together():
            self.start_maximum([0]).wait()
            with waiting_for(self.liveness):
                return self.mpi.bcast(value)

    def agree(self, error: BaseException | None) -> None:
        """Raise the same error on every rank, if any rank has one. *Collective*."""
        if self.alone:
            found = self._explained(error)
        else:
            (failed,) = self.maximum(error is not None)
            found = self.first_error(error) if failed else None
        if found is not None:
            raise found

    def first_error(self, mine: BaseException | None) -> BaseException | None:
        """Return the error of the lowest rank that has one. *Collective*."""
        mine = self._explained(mine)
        if self.alone:
            return mine
        packed = next((error for error in self.allgather(pickle_error(mine)) if error is not None), None)
        found: BaseException | None = None if packed is None else pickle.loads(packed)
        return found

    def _explained(self, error: BaseException | None) -> BaseException | None:
        """Return the error; where memory ran out, one that says on which rank."""
        return error and (out_of_memory(error, self.rank, "the data of this rank") or error)

    def duplicate(self) -> Communicator:
        """Return a communicator of the same ranks, for another purpose. *Collective*.

        Raises
        ------
        DataError : MPI has no more of them.
        """
        if self.alone:
            return Communicator(rank=self.rank, size=self.size)
        self.barrier()
        try:
            with waiting_for(self.liveness):
                return Communicator(self.mpi.Dup(), self.liveness)
        except MPI.Exception as error:
            raise DataError(
                "MPI has no communicator left for another pass over data",
                expected="at most some 2,000 iterators, batches and data sets of TensorFlow in use at once",
                found=error,
                remedy="let go of those that are not needed any more (del), or open fewer at once",
            ) from error

    def free(self) -> None:
        """Give the communicator back to MPI. *Collective*."""
        if not self.alone:
            with waiting_for(self.liveness):
                self.mpi.Free()

    @contextmanager
    def _together(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise PartitionError(
                "two threads of one rank make calls that all ranks make together, at the same time",
                expected="one thread at a time, in one order on all ranks",
                remedy="call from one thread, or give each thread a communicator of its own: "
                "open_dataset(..., comm=MPI.COMM_WORLD.Dup())",
            )
        try:
            yield
        finally:
            self._busy.release()


def pickle_error(error: BaseException | None) -> bytes | None:
    """Return the error as bytes that another rank can unpickle; one that cannot travel becomes a ``DataError``."""
    if error is None:
        return None
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:  # pickling runs code of other people's exceptions: anything may come of it
        text = "".join(traceback.format_exception_only(error)).strip()
        packed = pickle.dumps(DataError(f"a rank failed: {text}"))
    return packed
