"""The communicators that training has for itself, and the operations on arrays that go through them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from matex_data.training.courier import Crew
from matex_data.training.ranks import communicator

Array = NDArray[Any]
Op = Literal["mean", "sum", "max", "min"]

CALL_BYTES = 1 << 30
"""One MPI call moves at most so many bytes: counts of some libraries end at 2 GiB."""
_OPS: dict[str, MPI.Op] = {"mean": MPI.SUM, "sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}


class Channel:
    """Duplicates of one communicator: ``graph`` for operations inside graphs, ``host`` for those outside.

    *Collective*. Use ``channel(comm)``, which makes one per communicator.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED and comm.size > 1:
            raise RuntimeError("training needs an MPI that lets any thread call it (at least MPI_THREAD_SERIALIZED)")
        self.user = comm
        self.rank = comm.rank
        self.size = comm.size
        self.graph = comm.Dup() if comm.size > 1 else comm
        self.host = comm.Dup() if comm.size > 1 else comm
        self.shelf: dict[str, Any] = {}  # what others keep with a communicator, such as the order in graphs
        self._crews: dict[int, Crew] = {}
        self._agreed: set[bytes] = set()

    def crew(self, number: int) -> Crew:
        """So many threads, each with a communicator of its own. *Collective* the first time for each number."""
        if number not in self._crews:
            self._crews[number] = Crew(self.graph, number)
        return self._crews[number]

    def agree(self, what: str, comm: MPI.Intracomm | None = None) -> None:
        """Make sure that all ranks are about to do the same. *Collective* the first time for each ``what``.

        Raises
        ------
        RuntimeError : on all ranks, if they are not.
        """
        comm = comm or self.host
        digest = hashlib.blake2b(what.encode(), digest_size=7).digest()
        if digest in self._agreed:
            return
        number = int.from_bytes(digest, "little")
        extremes = np.array([number, -number], np.int64)
        comm.Allreduce(MPI.IN_PLACE, extremes, MPI.MAX)
        if extremes[0] != -extremes[1]:
            raise RuntimeError(
                f"the ranks do not do the same: rank {self.rank} is about to {what}\n"
                "  remedy: build the same model and the same training step on every rank"
            )
        self._agreed.add(digest)

    def close(self) -> None:
        """Free the communicators. *Collective*."""
        for crew in self._crews.values():
            crew.close()
        if self.size > 1:
            self.graph.Free()
            self.host.Free()


def channel(comm: MPI.Intracomm | None = None) -> Channel:
    """The channel of that communicator. *Collective* the first time for each communicator."""
    comm = communicator(comm)
    found = comm.Get_attr(_KEY)
    if found is None:
        found = Channel(comm)
        comm.Set_attr(_KEY, found)
    assert isinstance(found, Channel)
    return found


def _forget(comm: MPI.Comm, _: int, found: Channel) -> None:
    if comm != MPI.COMM_WORLD:  # that one ends with MPI itself
        found.close()


_KEY = MPI.Comm.Create_keyval(delete_fn=_forget)


def reduce(comm: MPI.Intracomm, flat: Array, op: Op = "sum") -> None:
    """Combine a flat array over all ranks in place. *Collective*."""
    for piece in _pieces(flat):
        comm.Allreduce(MPI.IN_PLACE, piece, _OPS[op])


def share(comm: MPI.Intracomm, flat: Array, root: int = 0) -> None:
    """Give all ranks the flat array of rank ``root``, in place. *Collective*."""
    for piece in _pieces(flat.view(np.uint8)):
        comm.Bcast(piece, root)


def gather(comm: MPI.Intracomm, rows: Array) -> Array:
    """The rows of all ranks, those of rank 0 first; ranks may have different numbers of them. *Collective*."""
    counts = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([len(rows)], np.int64), counts)
    out = np.empty((int(counts.sum()), *rows.shape[1:]), rows.dtype)
    row_bytes = math.prod(rows.shape[1:]) * rows.dtype.itemsize
    ends = np.cumsum(counts)
    if out.nbytes < CALL_BYTES:
        sizes, places = counts * row_bytes, (ends - counts) * row_bytes
        mine = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        comm.Allgatherv(mine, [out.reshape(-1).view(np.uint8), sizes, places, MPI.BYTE])
        return out
    out[ends[comm.rank] - counts[comm.rank] : ends[comm.rank]] = rows
    for root, (count, end) in enumerate(zip(counts, ends, strict=True)):
        share(comm, out[end - count : end].reshape(-1), root)
    return out


def _pieces(flat: Array) -> Iterator[Array]:
    step = max(1, CALL_BYTES // flat.dtype.itemsize)
    for start in range(0, flat.size, step):
        yield flat[start : start + step]
