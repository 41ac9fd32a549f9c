"""Rank, number of ranks, and rank on this node."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from matex_data.errors import PartitionError
from matex_data.locks import setting

if TYPE_CHECKING:
    from matex_data.mpi.library import MPI

alone: ContextVar[bool] = ContextVar("alone", default=False)
"""True while this rank runs code that the others do not run, which must not call collectives."""


on_question: Callable[[], None] = lambda: None  # noqa: E731
"""Called when a program asks for its rank."""


def running_alone() -> AbstractContextManager[None]:
    """Return a context manager: save, predict and evaluate on this rank alone, on whole batches."""
    return setting(alone, True)


def check_not_alone(call: str) -> None:
    """Raise ``PartitionError`` if this rank runs code that the others do not run."""
    if alone.get():
        raise PartitionError(
            f"{call} was called in a callback that writes files, which runs on one rank alone",
            expected="a call on every rank",
            remedy="derive the callback from keras.callbacks.Callback, whose hooks run on every rank",
        )


class World(NamedTuple):
    """Position of this process among the ranks of the job.

    Attributes
    ----------
    rank : 0 to ``size - 1``.
    size : number of ranks.
    local_rank : rank among those of this node, for the choice of a GPU; ``matex run`` chooses one itself.

    Examples
    --------
    >>> import matex_data as md
    >>> rank, size, local_rank = md.training.world()
    >>> 0 <= rank < size
    True
    """

    rank: int
    size: int
    local_rank: int


def world() -> World:
    """Return the rank, the number of ranks and the rank on this node.

    *Collective* at the first call, if the launcher sets none of the usual environment variables of the local rank.

    Examples
    --------
    >>> import matex_data as md
    >>> md.training.world()  # in one process
    World(rank=0, size=1, local_rank=0)
    """
    on_question()
    comm = comm_or_world(None)
    return World(comm.rank, comm.size, _local_rank())


def comm_or_world(comm: MPI.Intracomm | None) -> MPI.Intracomm:
    """Return ``comm``, or the communicator of all ranks for None."""
    if comm is not None:
        return comm
    from matex_data.mpi.library import MPI

    return MPI.COMM_WORLD


@cache
def _local_rank() -> int:
    from matex_data.mpi.library import MPI
    from matex_data.mpi.node import local_rank

    return local_rank(MPI.COMM_WORLD).rank
