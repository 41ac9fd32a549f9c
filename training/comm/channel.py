"""The communicators that training has for itself, one set for each communicator of the user."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from matex_data.io.sessions import read_sessions
from matex_data.mpi.attributes import attached
from matex_data.mpi.library import MPI
from matex_data.training.comm.collectives import Collectives
from matex_data.training.comm.thread import CommunicationPool
from matex_data.training.comm.world import comm_or_world


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
        self.communicator = read_sessions(comm).comm
        liveness = self.communicator.liveness
        self.graph = Collectives(comm, liveness)
        self.host = Collectives(comm, liveness)
        self.counters: dict[str, Any] = {}  # what others keep with a communicator, such as the order in graphs
        self._pools: dict[int, CommunicationPool] = {}

    def pool(self, threads: int) -> CommunicationPool:
        """So many threads, each with a communicator of its own. *Collective* the first time for each number."""
        if threads not in self._pools:
            self._pools[threads] = CommunicationPool(self.graph, threads)
        return self._pools[threads]

    def check_same(self, operation: str, collectives: Collectives | None = None) -> None:
        """Make sure that all ranks are about to do the same. *Collective* the first time for each ``what`` on a line.

        Raises
        ------
        RuntimeError : on all ranks, if they are not.
        """
        collectives = collectives or self.host
        digest = hashlib.blake2b(operation.encode(), digest_size=7).digest()
        if digest in collectives.checked:
            return
        threads = int.from_bytes(digest, "little")
        extremes = np.array([threads, -threads], np.int64)
        collectives.reduce(extremes, "max")
        if extremes[0] != -extremes[1]:
            raise RuntimeError(
                f"the ranks do not do the same: rank {self.rank} is about to {operation}\n"
                "  remedy: build the same model and the same training step on every rank"
            )
        collectives.checked.add(digest)

    def close(self) -> None:
        """Free the communicators. *Collective*."""
        for pool in self._pools.values():
            pool.close()
        self.graph.close()
        self.host.close()


def open_channel(comm: MPI.Intracomm | None = None) -> Channel:
    """Return the channel of a communicator. *Collective* the first time for each communicator."""
    return attached(comm_or_world(comm), Channel)
