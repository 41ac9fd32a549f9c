"""Ranks of one machine."""

from __future__ import annotations

from enum import IntEnum

from matex_data import machine
from matex_data.machine import RankAndSize
from matex_data.mpi.library import MPI


def local_rank(comm: MPI.Intracomm) -> RankAndSize:
    """Return the position of this rank on its machine, and set ``machine.local_size``.

    *Collective* unless the environment of the launcher has the answer.
    """
    found = RankAndSize(0, 1) if comm.size == 1 else machine.launched_local_rank()
    if found is None:
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        found = RankAndSize(node.rank, node.size)
        node.Free()
    machine.set_local_size(max(found.size, machine.local_size()))  # ``comm`` may lack ranks of the job
    return found


def on_one_machine(comm: MPI.Intracomm) -> bool:
    """Return whether all ranks share the memory of one machine. *Collective*."""
    if comm.size == 1:
        return True
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    found = node.size == comm.size
    node.Free()
    return bool(found)


def gather_cores(comm: MPI.Intracomm) -> None:
    """Set ``machine.local_size``, and the cores that the other ranks of this machine may use. *Collective*."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    of_ranks = node.allgather(machine.core_numbers())
    del of_ranks[node.rank]
    node.Free()
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


def core_share(comm: MPI.Intracomm) -> CoreShare:
    """Return the share of a rank on the machine where it is smallest. *Collective*."""
    if comm.size == 1:
        return CoreShare.OWN  # it waits for nobody; and without an MPI library there is no ``Split_type``
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    of_ranks = node.allgather(machine.core_numbers())
    node.Free()
    ranks, cores = max(len(of_ranks), machine.local_size()), len(frozenset().union(*of_ranks))
    if ranks > cores:
        share = CoreShare.OVERSUBSCRIBED
    elif ranks < cores or sum(map(len, of_ranks)) == cores:
        share = CoreShare.OWN
    else:
        share = CoreShare.FULL
    return CoreShare(comm.allreduce(int(share), MPI.MAX))
