"""MPI collectives on NumPy arrays of any size; waiting ranks yield their core."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from itertools import starmap
from typing import Any, Literal

import numpy as np

from matex_data._types import Array, Bools, Integers
from matex_data.mpi.activity import meeting
from matex_data.mpi.communicator import COMPLETION_TIME, left_call
from matex_data.mpi.deadlines import derived, waiting_for
from matex_data.mpi.library import MPI
from matex_data.mpi.liveness import Liveness
from matex_data.mpi.node import CoreShare
from matex_data.mpi.polling import poll
from matex_data.timeline import timeline
from matex_data.training.comm.drift import DriftCheck, WaitingClock

Op = Literal["mean", "sum", "max", "min"]

CALL_BYTES = 1 << 30
"""Largest number of bytes in one MPI call; counts of some MPI libraries end at 2 GiB."""
SLICE_BYTES = 8 << 20
"""Bytes in one reduction within a machine: they stay in the caches.

67 MB between two ranks on two busy cores: 44 ms in slices, 75 ms in one call, with MPICH and Open MPI; between four 103
and 158 ms, with Open MPI 124 and 242 ms. Slices of 4 MB were up to a sixth slower, a shared window of MPI up to a half.
"""
SPINS = 50
"""Tests of a request before its thread begins to sleep, about 100 us."""
SLEEP, LONGEST_SLEEP = 5e-5, 1e-3
"""Seconds of sleep between two tests of a request: in waits of up to 5 ms, and in long ones.

In between a sleep is a hundredth of the wait so far. With the short sleep alone a waiting rank took 7 % of a core.
"""
_INTERRUPTED: list[Any] = []
"""Requests of waits that Ctrl-C has ended, with their buffers, of which not all requests hold references."""
_OPS: dict[str, MPI.Op] = {"mean": MPI.SUM, "sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}


class Collectives:
    """Private communicator and the collectives that training runs on it.

    Parameters
    ----------
    comm : communicator that nothing else uses, which ``close`` frees; one of a single rank may be any.
    liveness : reports the state of the other ranks to a waiting rank; None: they cannot be queried.
    share : of a rank in the cores of its machine, equal on all ranks. MPI libraries spin while they wait, which takes
        the core from whoever wants it. So ranks that share cores sleep until all of them have come, and ranks that are
        more than the cores sleep between the parts of an operation, too.
    clock : runs during collective operations; shared by the communicators of a channel.
    slice_bytes : largest number of bytes in one reduction, equal on all ranks.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        liveness: Liveness | None,
        share: CoreShare,
        clock: WaitingClock,
        slice_bytes: int = CALL_BYTES,
    ) -> None:
        self.comm = comm
        self.liveness = liveness
        self.share = share
        self.clock = clock
        self.slice_bytes = slice_bytes
        self._drift = DriftCheck(clock)
        self._interrupted: MPI.Request | None = None

    def duplicate(self) -> Collectives:
        """Return new collectives of the same ranks. *Collective*."""
        comm = self.comm if self.comm.size == 1 else derived(self.liveness, self.comm.Dup)
        return Collectives(comm, self.liveness, self.share, self.clock, self.slice_bytes)

    def reduce(self, flat: Array, op: Op = "sum", met: bool = False) -> None:
        """Reduce an array over all ranks, in place. *Collective*.

        Parameters
        ----------
        flat : array of one dimension, of the same size and dtype on every rank.
        op : "mean" sums like "sum"; the caller scales its array by its weight before. "max" and "min" are NaN where any
            rank has NaN.
        met : all ranks have just met, in ``have_equal``.
        """
        if not met:
            self._meet()
        # MPI compares floats, so that NaN stays or is lost by the order of the ranks.
        missing = np.isnan(flat) if flat.dtype.kind == "f" and op in ("max", "min") else None
        with timeline.span(f"{op} of {flat.nbytes:,} bytes", "communication"):
            for segment in segments(flat, self.slice_bytes):
                self._run(self.comm.Allreduce, self.comm.Iallreduce, MPI.IN_PLACE, segment, _OPS[op])
        if missing is not None:
            self.reduce(missing.view(np.uint8), "max", met=True)
            flat[missing] = np.nan
        self.compare_ranks()

    def have_equal(self, number: int) -> bool:
        """Return whether all ranks give the same number, below 2**62. *Collective*; ranks sleep until all have come."""
        extremes = np.array([number, -number], np.int64)
        arguments = MPI.IN_PLACE, extremes, MPI.MAX
        if self.share == CoreShare.FULL:
            with timeline.span("waiting for ranks", "communication"):
                self._wait(self.comm.Iallreduce, *arguments)
        else:
            self._run(self.comm.Allreduce, self.comm.Iallreduce, *arguments)
        return bool(extremes[0] == -extremes[1])

    def same(self, numbers: Integers, met: bool = False) -> Bools:
        """Return for each integer whether all ranks give the same one. *Collective*.

        Parameters
        ----------
        numbers : int64[n], as many on every rank.
        met : as of ``reduce``.
        """
        extremes = np.concatenate([numbers, -numbers])
        self.reduce(extremes, "max", met)
        equal: Bools = extremes[: len(numbers)] == -extremes[len(numbers) :]
        return equal

    def reduce_scatter(self, rows: Array) -> Array:
        """Return row r of the sum of the arrays of all ranks on rank r. *Collective*.

        Parameters
        ----------
        rows : array of shape (ranks, elements), of the same shape and dtype on every rank.
        """
        self._meet()
        out = np.empty(rows.shape[1], rows.dtype)
        step = max(1, CALL_BYTES // (len(rows) * rows.itemsize))
        for start in range(0, len(out), step):
            sent, received = np.ascontiguousarray(rows[:, start : start + step]), out[start : start + step]
            with timeline.span(f"sum of {sent.nbytes:,} bytes, scattered", "communication"):
                self._run(self.comm.Reduce_scatter_block, self.comm.Ireduce_scatter_block, sent, received, MPI.SUM)
        self.compare_ranks()
        return out

    def allgather(self, flat: Array) -> Array:
        """Return the arrays of all ranks as rows, in the order of ranks. *Collective*.

        Parameters
        ----------
        flat : array of one dimension, of the same size and dtype on every rank.
        """
        self._meet()
        out = np.empty((self.comm.size, flat.size), flat.dtype)
        step = max(1, CALL_BYTES // (self.comm.size * flat.itemsize))
        for start in range(0, flat.size, step):
            sent = np.ascontiguousarray(flat[start : start + step])
            received = out if sent.size == flat.size else np.empty((self.comm.size, sent.size), flat.dtype)
            with timeline.span(f"gather of {received.nbytes:,} bytes", "communication"):
                self._run(
                    self.comm.Allgather,
                    self.comm.Iallgather,
                    [sent.view(np.uint8), MPI.BYTE],
                    [received.reshape(-1).view(np.uint8), MPI.BYTE],
                )
            out[:, start : start + step] = received
        return out

    def exchange(self, flat: Array) -> Array:
        """Send section r of an array to rank r, for all r; return what all ranks have sent here. *Collective*.

        Parameters
        ----------
        flat : array of one dimension, of less than 2 GiB, of the same size and dtype on every rank.

        Returns
        -------
        sections : array of shape (ranks, elements): this rank's section of the array of each rank. The sections are
            consecutive and differ by at most one element.
        """
        self._meet()
        ends = np.arange(self.comm.size + 1) * flat.size // self.comm.size * flat.itemsize
        sizes = np.diff(ends)
        own = int(sizes[self.comm.rank])
        out = np.empty((self.comm.size, own // flat.itemsize), flat.dtype)
        sent = [flat.view(np.uint8), sizes, ends[:-1], MPI.BYTE]
        received = [out.reshape(-1).view(np.uint8), np.full_like(sizes, own), np.arange(len(sizes)) * own, MPI.BYTE]
        self._run(self.comm.Alltoallv, self.comm.Ialltoallv, sent, received)
        self.compare_ranks()
        return out

    def broadcast(self, flat: Array, root: int = 0) -> None:
        """Broadcast an array of one dimension from rank ``root``, in place. *Collective*."""
        if flat.dtype.hasobject:  # texts
            flat[:] = self.allgather_object(flat if self.comm.rank == root else None)[root]
            return
        self.barrier()  # MPI_Bcast lets the root return, and leave the program, before the others have called it
        for segment in segments(flat.view(np.uint8)):
            self._wait(self.comm.Ibcast, segment, root)

    def gather(self, rows: Array) -> Array:
        """Return the concatenated rows of all ranks, in the order of ranks. *Collective*.

        Parameters
        ----------
        rows : array of shape (rows, ...); the number of rows may differ between ranks.
        """
        if rows.dtype.hasobject:  # texts
            return np.concatenate(self.allgather_object(rows))
        own_count, counts = np.array([len(rows)], np.int64), np.empty(self.comm.size, np.int64)
        self._wait(self.comm.Iallgather, own_count, counts)
        out = np.empty((int(counts.sum()), *rows.shape[1:]), rows.dtype)
        row_bytes = math.prod(rows.shape[1:]) * rows.dtype.itemsize
        ends = np.cumsum(counts)
        if out.nbytes < CALL_BYTES:
            sizes, offsets = counts * row_bytes, (ends - counts) * row_bytes
            source = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
            self._wait(self.comm.Iallgatherv, source, [out.reshape(-1).view(np.uint8), sizes, offsets, MPI.BYTE])
            return out
        out[ends[self.comm.rank] - counts[self.comm.rank] : ends[self.comm.rank]] = rows
        for root, (count, end) in enumerate(zip(counts, ends, strict=True)):
            self.broadcast(out[end - count : end].reshape(-1), root)
        return out

    def gather_at_root(self, array: Array) -> Array | None:
        """Return the arrays of all ranks, stacked by rank, on rank 0; None on the others. *Collective*.

        Parameters
        ----------
        array : array of less than 2 GiB, of the same shape and dtype on every rank.
        """
        if self.comm.size == 1:
            return array[None]
        own, root = np.ascontiguousarray(array), self.comm.rank == 0
        stack = np.empty((self.comm.size, *array.shape), array.dtype) if root else None
        received = None if stack is None else [stack.reshape(-1).view(np.uint8), own.nbytes, MPI.BYTE]
        self._wait(self.comm.Igather, [own.reshape(-1).view(np.uint8), MPI.BYTE], received)
        return stack

    def barrier(self) -> None:
        """Return once all ranks have called this. *Collective*."""
        with meeting(self.liveness):
            self._wait(self.comm.Ibarrier)

    def allgather_object(self, value: Any) -> list[Any]:
        """Return the Python objects of all ranks, by rank. *Collective*."""
        self.barrier()
        return list(self.comm.allgather(value))

    def close(self) -> None:
        """Free the communicator. *Collective*."""
        if self.comm.size > 1:
            self.comm.Free()

    def _meet(self) -> None:
        """Sleep until all ranks have come, where blocking in MPI would take the core from a rank that has not."""
        if self.share == CoreShare.FULL:
            with timeline.span("waiting for ranks", "communication"):
                self.barrier()

    def _run(self, blocking: Callable[..., None], started: Callable[..., MPI.Request], *arguments: Any) -> None:
        """Block in MPI; where ranks are more than cores, start the operation and sleep between its parts instead."""
        if self.share == CoreShare.OVERSUBSCRIBED:
            self._wait(started, *arguments)
            return
        self._check_complete()
        with waiting_for(self.liveness), self.clock:
            blocking(*arguments)

    def compare_ranks(self) -> None:
        """Look for a slow rank; where ranks are more than cores, whoever gets a core is faster. *Collective*."""
        if self.comm.size > 1 and self.share != CoreShare.OVERSUBSCRIBED:
            self._drift.after_reduction(self)

    def _wait(self, start: Callable[..., MPI.Request], *arguments: Any) -> None:
        """Start an operation and wait for it."""
        self._check_complete()
        started: list[MPI.Request] = []
        try:
            started.extend(starmap(start, [arguments]))  # in C: no interrupt comes between the start and the list
            (request,) = started
            with waiting_for(self.liveness), self.clock:
                for _ in range(SPINS):
                    if request.Test():
                        return
                    os.sched_yield()
                begin = time.monotonic()
                while not request.Test():
                    time.sleep(min(max(SLEEP, (time.monotonic() - begin) / 100), LONGEST_SLEEP))
        except BaseException:
            if started:
                self._interrupted = started[0]
                _INTERRUPTED.append((started, arguments))
            raise

    def _check_complete(self) -> None:
        """Raise ``PartitionError`` if ranks have not come to an interrupted call: they would take the next for it."""
        if self._interrupted is not None and not poll(self._interrupted.Test, COMPLETION_TIME):
            raise left_call(self.comm.rank)
        self._interrupted = None


def segments(flat: Array, nbytes: int = CALL_BYTES) -> Iterator[Array]:
    """Yield views of an array, each of so many bytes at most: small enough for one MPI call."""
    step = max(1, nbytes // flat.dtype.itemsize)
    for start in range(0, flat.size, step):
        yield flat[start : start + step]
