"""Bytes that the ranks of a machine have in memory once.

They lie in a file without a name in the memory of the machine, which each rank maps. The system frees it with the last
of the processes that hold it, however they end; a window of MPI would have to be freed by all ranks together.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from matex_data._types import Array, Bytes
from matex_data.mpi.communicator import Communicator
from matex_data.mpi.deadlines import derived, waiting_for
from matex_data.mpi.library import MPI

FOLDER = "/dev/shm"
LEAST_BYTES = 1 << 20  # that are worth a file
MOST_BYTES = 1 << 30  # of one MPI call


def share(comm: Communicator, data: memoryview | None) -> memoryview:
    """Return the bytes of rank 0, in one copy for all ranks of a machine if possible. *Collective*.

    Parameters
    ----------
    comm : the ranks.
    data : the bytes, on rank 0.
    """
    return gathered(comm, np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)).data


def gathered(comm: Communicator, own: Array) -> Array:
    """Return the elements of all ranks, one after the other, in one copy for all ranks of a machine if possible.

    *Collective*. The array cannot be written to.

    Parameters
    ----------
    comm : the ranks.
    own : 1-D array of this rank, of numbers of the same dtype on all ranks.
    """
    if comm.size == 1:
        return own
    sizes = comm.allgather(own.nbytes)
    if sum(sizes) < LEAST_BYTES:
        return np.frombuffer(b"".join(comm.allgather(own.tobytes())), own.dtype)
    with waiting_for(comm.liveness):
        node: Any = derived(comm.liveness, comm.mpi.Split_type, MPI.COMM_TYPE_SHARED, comm.rank)
        content, is_shared = _memory(node, sum(sizes))
        ranks = node.allgather(comm.rank) if is_shared else [comm.rank]  # that read this memory; the first receives
        leads = ranks[0] == comm.rank
        leaders: Any = derived(comm.liveness, comm.mpi.Split, 0 if leads else MPI.UNDEFINED, comm.rank)
        try:
            end = sum(sizes[: comm.rank + 1])
            content[end - own.nbytes : end] = np.ascontiguousarray(own).view(np.uint8)
            node.Barrier()
            if leads:
                _exchange(leaders, ranks, content, sizes)
            node.Barrier()
        finally:
            node.Free()
            if leads:
                leaders.Free()
    content.flags.writeable = False
    return content.view(own.dtype)


def _exchange(leaders: MPI.Intracomm, ranks: list[int], content: Bytes, sizes: list[int]) -> None:
    """Let each of these ranks have the bytes of all ranks. *Collective*.

    Parameters
    ----------
    ranks : whose bytes this one has.
    content, sizes : memory for the bytes of all ranks, and their numbers.
    """
    ends = np.cumsum(sizes).tolist()
    for root, of_leader in enumerate(leaders.allgather(ranks)):
        for rank in of_leader:
            for begin in range(ends[rank] - sizes[rank], ends[rank], MOST_BYTES):
                leaders.Bcast(content[begin : min(begin + MOST_BYTES, ends[rank])], root)


def _memory(node: MPI.Intracomm, size: int) -> tuple[Bytes, bool]:
    """Return new memory of a number of bytes, and whether all ranks of the machine have the same. *Collective*."""
    path = node.bcast(_file(size) if node.rank == 0 and node.size > 1 else None)
    mapped: mmap.mmap | None = None
    if path is not None:
        with suppress(OSError), Path(path).open("r+b") as file:  # ranks in containers may not see the file
            mapped = mmap.mmap(file.fileno(), size)
    everywhere = node.allreduce(mapped is not None, MPI.LAND)
    if path is not None and node.rank == 0:
        Path(path).unlink()
    if everywhere and mapped is not None:
        return np.frombuffer(mapped, np.uint8), True
    return np.empty(size, np.uint8), False


def _file(size: int) -> str | None:
    """Return the path of a new file in memory of a number of bytes; None if there is no room."""
    try:
        handle, path = tempfile.mkstemp(prefix="matex-", dir=FOLDER)
    except OSError:
        return None
    try:
        os.posix_fallocate(handle, 0, size)  # without room, a write to mapped memory would kill the process
        return path
    except OSError:
        Path(path).unlink()
        return None
    finally:
        os.close(handle)
