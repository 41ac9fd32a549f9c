"""Ranks of one machine."""

from __future__ import annotations

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
