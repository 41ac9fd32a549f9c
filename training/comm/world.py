"""Who am I: rank, number of ranks, and the rank on this node."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matex_data.mpi.library import MPI

_LOCAL_RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")

alone: ContextVar[bool] = ContextVar("alone", default=False)
"""This rank does something that the others do not: nothing that it calls may wait for them."""


@contextlib.contextmanager
def running_alone() -> Iterator[None]:
    """Context manager: what this rank saves, predicts and evaluates is its own, and whole."""
    token = alone.set(True)
    try:
        yield
    finally:
        alone.reset(token)


class World(NamedTuple):
    """This process among those that train together."""

    rank: int
    size: int
    local_rank: int


def world() -> World:
    """Rank, number of ranks and rank on this node of the whole job.

    *Collective* at its first call where the launcher leaves the local rank open (several ranks, and
    none of the usual environment variables).
    """
    comm = comm_or_world(None)
    return World(comm.rank, comm.size, _local_rank())


def comm_or_world(comm: MPI.Intracomm | None) -> MPI.Intracomm:
    """The communicator meant by the user's ``comm``: all ranks of the job for None."""
    if comm is not None:
        return comm
    from matex_data.mpi.library import MPI

    return MPI.COMM_WORLD


@cache
def _local_rank() -> int:
    from matex_data.mpi.library import MPI

    if MPI.COMM_WORLD.size == 1:
        return 0
    for name in _LOCAL_RANK:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    rank = node.rank
    node.Free()
    return rank
