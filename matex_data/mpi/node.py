"""Ranks of one machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

from matex_data import machine
from matex_data.machine import RankAndSize
from matex_data.mpi.deadlines import derived, waiting_for
from matex_data.mpi.library import MPI
from matex_data.mpi.liveness import Liveness


@contextmanager
def of_this_machine(comm: MPI.Intracomm, liveness: Liveness | None = None) -> Iterator[MPI.Intracomm]:
    """Context manager: communicator of the ranks of this machine, for calls of MPI in this block. *Collective*.

    Parameters
    ----------
    liveness : of the ranks of ``comm``; None: they cannot be queried.
    """
    with waiting_for(liveness):
        node: Any = derived(liveness, comm.Split_type, MPI.COMM_TYPE_SHARED)
        yield node
        node.Free()


def local_rank(comm: MPI.Intracomm) -> RankAndSize:
    """Return the position of this rank on its machine, and set ``machine.local_size``.

    *Collective* unless the environment of the launcher has the answer.
    """
    found = RankAndSize(0, 1) if comm.size == 1 else machine.launched_local_rank()
    if found is None:
        with of_this_machine(comm) as node:
            found = RankAndSize(node.rank, node.size)
    machine.set_local_size(max(found.size, machine.local_size()))  # ``comm`` may lack ranks of the job
    return found


def on_one_machine(comm: MPI.Intracomm, liveness: Liveness | None = None) -> bool:
    """Return whether all ranks share the memory of one machine. *Collective*."""
    if comm.size == 1:
        return True
    with of_this_machine(comm, liveness) as node:
        return bool(node.size == comm.size)


def gather_cores(comm: MPI.Intracomm) -> None:
    """Set ``machine.local_size``, and the cores that the other ranks of this machine may use. *Collective*."""
    with of_this_machine(comm) as node:
        of_ranks = node.allgather(machine.core_numbers())
        del of_ranks[node.rank]
    machine.set_cores_of_others(of_ranks)
    launched = machine.launched_local_rank()
    machine.set_local_size(max(len(of_ranks) + 1, launched.size if launched else 1, machine.local_size()))


class CoreShare(IntEnum):
    """Share of a rank in the cores of its machine, from the largest to the smallest."""

    OWN = 0
    """A core that a rank keeps busy while it waits is wanted by nobody: ranks are bound to cores, or cores are left."""
    FULL = 1
    """There is a core for each rank."""
    OVERSUBSCRIBED = 2
    """There are more ranks than cores."""


def core_share(comm: MPI.Intracomm, liveness: Liveness | None = None) -> CoreShare:
    """Return the share of a rank on the machine where it is smallest. *Collective*."""
    if comm.size == 1:
        return CoreShare.OWN  # it waits for nobody; and without an MPI library there is no ``Split_type``
    with of_this_machine(comm, liveness) as node:
        of_ranks = node.allgather(machine.core_numbers())
    ranks, cores = max(len(of_ranks), machine.local_size()), len(frozenset().union(*of_ranks))
    if ranks > cores:
        share = CoreShare.OVERSUBSCRIBED
    elif ranks < cores or sum(map(len, of_ranks)) == cores:
        share = CoreShare.OWN
    else:
        share = CoreShare.FULL
    with waiting_for(liveness):
        return CoreShare(comm.allreduce(int(share), MPI.MAX))
