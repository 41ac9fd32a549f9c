"""Collective operations on Python objects and small integer arrays, with a deadline for every wait."""

from __future__ import annotations

import hashlib
import pickle
import struct
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from matex_data._types import Integers
from matex_data.errors import DataError, PartitionError
from matex_data.locks import Lock, cached_property
from matex_data.machine import out_of_memory
from matex_data.mpi.activity import meeting, polling
from matex_data.mpi.deadlines import CHECK_INTERVAL, derived, wait_until, waiting_for
from matex_data.mpi.library import MPI
from matex_data.mpi.liveness import Liveness
from matex_data.mpi.polling import poll
from matex_data.mpi.processes import is_child_process
from matex_data.words import exact_text

T = TypeVar("T")


LEAST = -(1 << 63)  # of int64


@dataclass(frozen=True)
class Equal:
    """Arguments that have to be equal on all ranks, which compare a digest of them.

    Parameters
    ----------
    arguments : by name.
    problem, remedy : of the error if they differ.
    """

    arguments: Mapping[str, Any]
    problem: str
    remedy: str

    @cached_property
    def texts(self) -> dict[str, str]:
        """Text of each argument, with all numbers of its arrays."""
        return {name: exact_text(value) for name, value in self.arguments.items()}

    def digest(self) -> list[int]:
        """Return two numbers of 62 bits, and their negatives."""
        data = hashlib.blake2b(repr(self.texts).encode("utf-8", "surrogateescape"), digest_size=16).digest()
        return _with_negative([number >> 2 for number in struct.unpack("<2Q", data)])

    def difference(self, rank: int, of_root: Mapping[str, str]) -> PartitionError | None:
        """Return the error of this rank, with the arguments that differ from those of rank 0; None if none does."""
        names = [name for name in dict.fromkeys([*of_root, *self.texts]) if of_root.get(name) != self.texts.get(name)]
        expected, found = (
            ", ".join(f"{name}={texts[name]}" for name in names if name in texts) for texts in (of_root, self.texts)
        )
        there = f"as on rank 0: {expected}"
        error = PartitionError(self.problem, expected=there, found=f"on rank {rank}: {found}", remedy=self.remedy)
        return error if names else None


def _with_negative(numbers: Sequence[int]) -> list[int]:
    """Return numbers whose maximum over all ranks shows which are equal; see `_are_same`."""
    return [*numbers, *(-number for number in numbers)]


def _are_same(maximum: Sequence[int]) -> list[bool]:
    """Return which numbers are equal on all ranks."""
    half = len(maximum) // 2
    return [most == -least for most, least in zip(maximum[:half], maximum[half:], strict=True)]


class PendingMaximum:
    """Non-blocking reduction: the element-wise maximum over all ranks. Any thread may call the methods.

    Parameters
    ----------
    comm : communicator, in which all ranks start their reductions in the same order. *Collective*.
    values : int64[n], of this rank.
    """

    def __init__(self, comm: Communicator, values: Integers) -> None:
        self._comm = comm
        self._values = values  # MPI reads it until all ranks have started the reduction
        self._maximum = values if comm.alone else np.empty_like(values)
        self._request: MPI.Request | None = None
        self._lock = Lock()
        if not comm.alone:
            self._request = comm.mpi.Iallreduce(self._values, self._maximum, MPI.MAX)
            _PENDING.add(self)

    def done(self, seconds: float = 0.0) -> bool:
        """Return whether the reduction completes within a number of seconds."""
        return poll(self._test, seconds)

    def wait(self) -> Integers:
        """Return the maximum, int64[n].

        Raises
        ------
        PartitionError : another rank does not start the reduction in time.
        """
        if not self._test():
            with meeting(self._comm.liveness):
                self._comm.wait_until(self.done)
        return self._maximum

    def result(self) -> Integers:
        """Return the maximum, int64[n]. Wait without a deadline, in a thread whose consumer has one."""
        with polling():
            self.done(float("inf"))
        return self._maximum

    def _test(self) -> bool:
        with self._lock:
            if self._request is not None and self._request.Test():
                self._request = None
                _PENDING.discard(self)
            return self._request is None


_PENDING: set[PendingMaximum] = set()
"""References to incomplete reductions, since MPI still accesses their memory."""


COMPLETION_TIME = 0.1
"""Seconds that a call may take to complete after an interrupt, if all ranks have come to it."""


def left_call(rank: int) -> PartitionError:
    """Return the error of a rank whose previous call was interrupted, or failed, before the other ranks have come."""
    return PartitionError(
        "this rank has left a collective call before the others have come to it",
        expected="each rank to complete what all have begun",
        found=f"rank {rank} goes on after an interrupt, or an error, in such a call",
        remedy="end the job, and start it again: the ranks are at different calls",
    )


def has_pending() -> bool:
    """Return whether a reduction of this process is incomplete."""
    return not all(reduction.done() for reduction in list(_PENDING))


class Communicator:
    """Ranks that share datasets; or a single process without MPI.

    Parameters
    ----------
    mpi : communicator of MPI, for this object alone; None for a single process.
    liveness : of these ranks; None for a single process.
    rank, size : without ``mpi``: position in the partition of the samples.

    Attributes
    ----------
    sharded_data : the program has data of which each rank has its own rows, or an optimizer that averages over them.
    """

    def __init__(
        self, mpi: MPI.Intracomm | None = None, liveness: Liveness | None = None, rank: int = 0, size: int = 1
    ) -> None:
        self._mpi = mpi
        self.liveness = liveness
        self.rank = rank if mpi is None else int(mpi.rank)
        self.size = size if mpi is None else int(mpi.size)
        self._busy = Lock()
        self._latest: PendingMaximum | None = None
        self.sharded_data = False
        self._on_sharded_data: list[Callable[[], None]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return Communicator, (None, None, self.rank, self.size)  # for another process, which does not communicate

    def note_sharded_data(self) -> None:
        """Set ``sharded_data``; the first time, run the callbacks of ``on_sharded_data``."""
        if not self.sharded_data:
            self.sharded_data = True
            for callback in self._on_sharded_data:
                callback()

    def on_sharded_data(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` when ``sharded_data`` is set."""
        self._on_sharded_data.append(callback)

    @property
    def alone(self) -> bool:
        """Return whether this process exchanges nothing with others: it is the only rank, or it was forked."""
        return self._mpi is None or is_child_process()

    @property
    def mpi(self) -> MPI.Intracomm:
        """Return the communicator of MPI; raise ``PartitionError`` if this process must not call MPI."""
        if self._mpi is None or is_child_process():
            raise PartitionError(
                f"this process has the share of rank {self.rank} without MPI (it was forked, or is a rank of "
                "torch.distributed), and cannot exchange data with the other ranks",
                remedy="make collective calls before the fork (or before the data set is pickled); afterwards, iterate "
                "over batches() of a dataset without shuffling, or with a seed: they hold the samples of this rank",
            )
        return self._mpi

    def wait_until(self, happened: Callable[[float], bool]) -> None:
        """Return when an event has happened; see ``deadlines.wait_until``. One rank waits for its own threads only."""
        if self.size > 1:
            wait_until(happened, self.liveness)
            return
        while not happened(CHECK_INTERVAL):
            pass

    def start_maximum(self, values: Any) -> PendingMaximum:
        """Start to reduce int64[n] to the element-wise maximum over all ranks. *Collective*."""
        return PendingMaximum(self, np.array(values, np.int64))

    def maximum(self, *values: int) -> list[int]:
        """Return the maximum of each value over all ranks. *Collective*.

        Raises
        ------
        PartitionError : another rank does not make this call in time; another thread makes a collective call.
        """
        with self.one_thread_at_a_time(self._busy):
            return [int(value) for value in self._complete_maximum(values)]

    def _complete_maximum(self, values: Any) -> Integers:
        """Return the maximum over all ranks, as ``start_maximum`` starts it, once those before are complete."""
        if self._latest is not None and not self._latest.done(COMPLETION_TIME):
            raise left_call(self.rank)
        self._latest = self.start_maximum(values)
        found = self._latest.wait()
        self._latest = None
        return found

    def poll(self, request: MPI.Request) -> None:
        """Return when the request has completed. Wait without a deadline, in a thread whose consumer has one."""
        with polling():
            poll(request.Test)

    def wait(self, request: MPI.Request) -> None:
        """Return when a request for much data has completed, which all ranks are about to start.

        MPI moves some 16 KB per test of a request, so that ``poll``, which sleeps between the tests, would be slow.
        """
        with waiting_for(self.liveness):
            request.Wait()

    def barrier(self) -> None:
        """Return when all ranks have made this call. *Collective*. Raises like ``maximum``."""
        self.maximum(0)

    def allgather(self, value: Any) -> list[Any]:
        """Return the Python objects of all ranks, by rank. *Collective*. Raises like ``maximum``."""
        if self.size == 1:
            return [value]
        with self._all_here():
            return list(self.mpi.allgather(value))

    def gather(self, value: Any) -> list[Any] | None:
        """Return the Python objects of all ranks, by rank, on rank 0; None on others. *Collective*."""
        if self.size == 1:
            return [value]
        with self._all_here():
            gathered: list[Any] | None = self.mpi.gather(value)
            return gathered

    def broadcast(self, value: Any) -> Any:
        """Return the Python object of rank 0. *Collective*. Raises like ``maximum``."""
        if self.size == 1:
            return value
        with self._all_here():
            return self.mpi.bcast(value)

    def combine(self, value: T, function: Callable[[T, T], T]) -> T:
        """Return one object made of those of all ranks, two at a time along a tree. *Collective*.

        No rank holds more than two of them at once. Raises like ``maximum``.

        Parameters
        ----------
        value : of this rank.
        function : makes one object of two, those of lower ranks first; associative. It raises no error.
        """
        if self.size == 1:
            return value
        with self._all_here():
            combined: T = self.mpi.allreduce(value, function)
            return combined

    def sum_of_lower(self, values: Integers) -> Integers:
        """Return the sum of the int64[n] of all ranks below this one. *Collective*. Raises like ``maximum``."""
        total = np.zeros(len(values), np.int64)
        if self.size > 1:
            with self._all_here():
                self.mpi.Exscan(np.ascontiguousarray(values, np.int64), total)
        return total if self.rank else np.zeros(len(values), np.int64)  # MPI leaves that of rank 0 undefined

    def same(self, *numbers: int) -> list[bool]:
        """Return which of some int64 are equal on all ranks. *Collective*. Raises like ``maximum``.

        Examples
        --------
        >>> Communicator().same(7, 8)
        [True, True]
        """
        return _are_same(self.maximum(*_with_negative(numbers)))

    def agree(
        self, error: BaseException | None = None, equal: Equal | None = None, numbers: Sequence[int] = ()
    ) -> list[int]:
        """Return the maximum of each number over all ranks, in one reduction with what may be wrong. *Collective*.

        Parameters
        ----------
        error : of this rank, on account of which no rank goes on.
        equal : arguments that have to be equal on all ranks.
        numbers : int64. What rank 0 decides is ``comm.of_root(number)``.

        Raises
        ------
        Exception : the error of the lowest rank that has one, on every rank.
        PartitionError : arguments differ between the ranks.

        Examples
        --------
        >>> Communicator().agree(None, Equal({"batch_size": 8}, "the batches differ", "give the same"), [3])
        [3]
        """
        if self.alone:
            if error is not None:
                raise self._explain(error) or error
            return list(numbers)
        digest = () if equal is None else equal.digest()
        failed, *found = self.maximum(error is not None, *digest, *numbers)
        if failed:
            raise self.first_error(error) or DataError("a rank reported a failure, but no error")
        if equal is not None and not all(_are_same(found[: len(digest)])):
            self.agree(equal.difference(self.rank, self.broadcast(equal.texts)))
        return found[len(digest) :]

    def of_root(self, number: int) -> int:
        """Return a number that ``agree`` takes from rank 0: that of this rank, or one below all others."""
        return int(number) if self.rank == 0 or self.alone else LEAST

    def agreed(self, function: Callable[[], T], equal: Equal | None = None) -> T:
        """Return what a function returns on this rank; raise the error of the lowest rank that has one. *Collective*.

        Errors of any kind count, a warning that is an error included, and arguments that differ; see `agree`.

        Examples
        --------
        >>> Communicator().agreed(lambda: "read")
        'read'
        """
        results: list[T] = []
        failure: Exception | None = None
        try:
            results.append(function())
        except Exception as error:
            failure = error
        self.agree(failure, equal)
        return results.pop()

    def on_root(self, function: Callable[[], T]) -> T:
        """Return what a function returns on rank 0, which alone calls it; raise its error on all ranks. *Collective*.

        Whatever one rank does for all goes by this way: the others would wait for ever for a rank that has failed.

        Examples
        --------
        >>> Communicator().on_root(lambda: ["a.h5", "b.h5"])
        ['a.h5', 'b.h5']
        """
        value: Any = self.agreed(function if self.rank == 0 else lambda: None)
        found: T = value if self.alone else self.broadcast(value)
        return found

    def first_error(self, own: BaseException | None) -> BaseException | None:
        """Return the error of the lowest rank that has one. *Collective*."""
        own = self._explain(own)
        if self.alone:
            return own
        pickled = next((error for error in self.allgather(pickle_error(own)) if error is not None), None)
        first: BaseException | None = None if pickled is None else pickle.loads(pickled)
        return first

    def _explain(self, error: BaseException | None) -> BaseException | None:
        """Return the error; ``OutOfMemory`` with the rank in place of a lack of memory."""
        return error and (out_of_memory(error, self.rank, "the data of this rank") or error)

    def duplicate(self) -> Communicator:
        """Return a new communicator of the same ranks. *Collective*.

        Raises
        ------
        DataError : MPI has no communicator left.
        """
        if self.alone:
            return Communicator(rank=self.rank, size=self.size)
        try:
            with self._all_here():
                return Communicator(derived(self.liveness, self.mpi.Dup), self.liveness)
        except MPI.Exception as error:
            raise DataError(
                "MPI has no communicator left for another iterator",
                expected="at most some 2,000 iterators, batches and TensorFlow datasets in use at once",
                found=error,
                remedy="delete those that are no longer needed (del), or open fewer at once",
            ) from error

    def split(self, color: int, key: int) -> MPI.Intracomm:
        """Return the communicator of the ranks of one color, in the order of their keys. *Collective*.

        Raises like ``maximum``.
        """
        with self._all_here():
            return MPI.Intracomm(derived(self.liveness, self.mpi.Split, color, key))

    def free(self) -> None:
        """Free the communicator. *Collective*."""
        if not self.alone:
            with waiting_for(self.liveness):
                self.mpi.Free()

    @contextmanager
    def _all_here(self) -> Iterator[None]:
        """Context manager: a blocking call of MPI, which begins once all ranks have come, each within its time."""
        with self.one_thread_at_a_time(self._busy):
            self._complete_maximum([0])
            with meeting(self.liveness), waiting_for(self.liveness):  # maybe in another call than the others
                yield

    @contextmanager
    def one_thread_at_a_time(self, lock: Lock) -> Iterator[None]:
        """Context manager: hold a lock during collective calls.

        Another thread waits if this process is alone. Otherwise the order of the threads might differ between ranks.

        Raises
        ------
        PartitionError : another thread of one of several ranks holds it.
        """
        if self.alone:
            with lock:  # no signal leaves it locked
                yield
            return
        if not lock.acquire(blocking=False):
            raise PartitionError(
                "two threads of one rank make collective calls at the same time",
                expected="one thread at a time, in the same order on all ranks",
                remedy="call from one thread, or give each thread a communicator of its own: "
                "open_dataset(..., comm=MPI.COMM_WORLD.Dup())",
            )
        try:
            yield
        finally:
            lock.release()


def pickle_error(error: BaseException | None) -> bytes | None:
    """Return the error as bytes that another rank can unpickle; a ``DataError`` with its text if that fails."""
    if error is None:
        return None
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # pickling runs code of the class of the error
        text = "".join(traceback.format_exception_only(error)).strip()
        pickled = pickle.dumps(DataError(f"a rank failed: {text}"))
    return pickled
