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

from matex_data.mpi.communicator import Communicator
from matex_data.mpi.deadlines import waiting_for
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
    if comm.size == 1:
        assert data is not None
        return data
    comm.barrier()  # with a deadline
    with waiting_for(comm.liveness):
        node: Any = comm.mpi.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
        leaders: Any = comm.mpi.Split(0 if node.rank == 0 else MPI.UNDEFINED, comm.rank)
        try:
            own = memoryview(b"") if leaders == MPI.COMM_NULL else _broadcast(leaders, data)
            return _shared(node, own)
        finally:
            node.Free()
            if leaders != MPI.COMM_NULL:
                leaders.Free()


def _broadcast(comm: MPI.Intracomm, data: memoryview | None) -> memoryview:
    """Return the bytes of rank 0. *Collective*."""
    size = comm.bcast(None if data is None else data.nbytes)
    if comm.size == 1:
        assert data is not None
        return data
    memory = np.empty(size, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    for begin in range(0, size, MOST_BYTES):
        comm.Bcast([memory[begin : begin + MOST_BYTES], MPI.BYTE])
    return memory.data


def _shared(node: MPI.Intracomm, data: memoryview) -> memoryview:
    """Return the bytes of the machine's first rank, from a file that all ranks map. *Collective*."""
    path = _written(data) if node.rank == 0 and node.size > 1 else None
    path = node.bcast(path)
    mapped: mmap.mmap | None = None
    if path is not None:
        with suppress(OSError), Path(path).open("rb") as file:  # ranks in containers may not see the file
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    everywhere = node.allreduce(mapped is not None, MPI.LAND)
    if path is not None and node.rank == 0:
        Path(path).unlink()
    if everywhere and mapped is not None:
        return memoryview(mapped)
    return _broadcast(node, data if node.rank == 0 else None)


def _written(data: memoryview) -> str | None:
    """Write bytes to a new file in memory, and return its path; None if they are few, or there is no room."""
    size = data.nbytes
    if size < LEAST_BYTES:
        return None
    try:
        handle, path = tempfile.mkstemp(prefix="matex-", dir=FOLDER)
    except OSError:
        return None
    with os.fdopen(handle, "wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)  # without room, a write to mapped memory would kill the process
            file.write(data)
            return path
        except OSError:
            Path(path).unlink()
            return None
