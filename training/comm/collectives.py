"""MPI operations on NumPy arrays of any size, that leave the processor to others while they wait."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from matex_data import machine
from matex_data._types import Array
from matex_data.mpi.deadlines import Liveness
from matex_data.mpi.library import MPI
from matex_data.mpi.watchdog import waiting_for

Op = Literal["mean", "sum", "max", "min"]

CALL_BYTES = 1 << 30
"""One MPI call moves at most so many bytes: counts of some libraries end at 2 GiB."""
SPINS = 50
"""Tests of a request (some 100 us) before its thread sleeps between them."""
SLEEP = 5e-5
"""Seconds between two tests of a request."""
_OPS: dict[str, MPI.Op] = {"mean": MPI.SUM, "sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}


class Collectives:
    """A communicator of its own, and the operations that training needs on it.

    Parameters
    ----------
    comm : is duplicated, unless it has one rank. *Collective*.
    liveness : of its ranks.
    oversubscribed : the ranks of this node take up all its cores. MPI libraries spin while they wait, which then
        takes the core from the very rank that is waited for; so waiting ranks sleep instead.
    """

    def __init__(self, comm: MPI.Intracomm, liveness: Liveness | None, oversubscribed: bool | None = None) -> None:
        self.comm = comm.Dup() if comm.size > 1 else comm
        self.liveness = liveness
        self.checked: set[bytes] = set()  # what all ranks have said on it that they are about to do
        self.oversubscribed = machine.local_size() >= machine.cores() if oversubscribed is None else oversubscribed

    def reduce(self, flat: Array, op: Op = "sum") -> None:
        """Combine a flat array over all ranks in place. *Collective*."""
        for segment in _segments(flat):
            if self.oversubscribed:
                self._wait(self.comm.Iallreduce(MPI.IN_PLACE, segment, _OPS[op]))
                continue
            with waiting_for(self.liveness):
                self.comm.Allreduce(MPI.IN_PLACE, segment, _OPS[op])

    def broadcast(self, flat: Array, root: int = 0) -> None:
        """Give all ranks the flat array of rank ``root``, in place. *Collective*."""
        self.barrier()  # the root could go on, and leave, while others wait for others yet
        for segment in _segments(flat.view(np.uint8)):
            self._wait(self.comm.Ibcast(segment, root))

    def gather(self, rows: Array) -> Array:
        """The rows of all ranks, those of rank 0 first; ranks may have different numbers of them. *Collective*."""
        own, counts = np.array([len(rows)], np.int64), np.empty(self.comm.size, np.int64)
        self._wait(self.comm.Iallgather(own, counts))  # MPI may read ``own`` until then
        out = np.empty((int(counts.sum()), *rows.shape[1:]), rows.dtype)
        row_bytes = math.prod(rows.shape[1:]) * rows.dtype.itemsize
        ends = np.cumsum(counts)
        if out.nbytes < CALL_BYTES:
            sizes, offsets = counts * row_bytes, (ends - counts) * row_bytes
            mine = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
            everyone = [out.reshape(-1).view(np.uint8), sizes, offsets, MPI.BYTE]
            self._wait(self.comm.Iallgatherv(mine, everyone))
            return out
        out[ends[self.comm.rank] - counts[self.comm.rank] : ends[self.comm.rank]] = rows
        for root, (count, end) in enumerate(zip(counts, ends, strict=True)):
            self.broadcast(out[end - count : end].reshape(-1), root)
        return out

    def barrier(self) -> None:
        """Return when all ranks are here. *Collective*."""
        self._wait(self.comm.Ibarrier())

    def allgather_object(self, mine: Any) -> list[Any]:
        """The Python objects of all ranks, by rank. *Collective*."""
        self.barrier()
        return list(self.comm.allgather(mine))

    def close(self) -> None:
        """Free the communicator. *Collective*."""
        if self.comm.size > 1:
            self.comm.Free()

    def _wait(self, request: MPI.Request) -> None:
        """Wait for a request, spinning at first. Its buffers belong to the caller, who must keep them till then."""
        with waiting_for(self.liveness):
            for _ in range(SPINS):
                if request.Test():
                    return
                os.sched_yield()
            while not request.Test():
                time.sleep(SLEEP)


def _segments(flat: Array) -> Iterator[Array]:
    step = max(1, CALL_BYTES // flat.dtype.itemsize)
    for start in range(0, flat.size, step):
        yield flat[start : start + step]
