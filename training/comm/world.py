"""Who am I: rank, number of ranks, and the rank on this node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matex_data.mpi.library import MPI

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
    from matex_data.mpi.node import local_rank

    return local_rank(MPI.COMM_WORLD).rank
