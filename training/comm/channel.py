"""Private communicators of training, one set for each communicator of the user."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from matex_data.io.sessions import read_sessions
from matex_data.mpi.attributes import attached
from matex_data.mpi.library import MPI
from matex_data.mpi.node import core_share
from matex_data.pipeline.buffers import BufferPool
from matex_data.training.comm.collectives import Collectives
from matex_data.training.comm.drift import WaitingClock
from matex_data.training.comm.thread import CommunicationPool
from matex_data.training.comm.world import comm_or_world

KEPT_BUFFERS = 1 << 10  # as many as a model may have large gradients


class Channel:
    """Duplicates of one communicator. *Collective*.

    ``open_channel(comm)`` creates one channel for each communicator and returns it again later.

    Parameters
    ----------
    comm : communicator of the user.

    Attributes
    ----------
    graph : collectives of operations in TensorFlow graphs.
    host : collectives of Python code.
    communicator : communicator of the data path, with its time limits and error agreement.
    buffers : memory of results; the tensors of a step return it when the next step begins.
    counters : sequence counters of this channel, by name; see ``SequenceCounter``.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED and comm.size > 1:
            raise RuntimeError(
                "training on several ranks calls MPI from several threads, which this MPI does not support\n"
                "  expected: MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE\n"
                "  remedy: install an MPI library that is built with thread support"
            )
        self.user = comm
        self.rank = comm.rank
        self.size = comm.size
        self.communicator = read_sessions(comm).comm
        liveness = self.communicator.liveness
        self.graph = Collectives(comm, liveness, core_share(comm), WaitingClock())
        self.host = self.graph.duplicate()
        self.counters: dict[str, Any] = {}
        self.buffers = BufferPool(kept=KEPT_BUFFERS)
        self._pools: dict[int, CommunicationPool] = {}

    def pool(self, threads: int) -> CommunicationPool:
        """Return the pool of that many communication threads. *Collective* at the first call for each number."""
        if threads not in self._pools:
            self._pools[threads] = CommunicationPool(self.graph, threads)
        return self._pools[threads]

    def check_same(self, operation: str, collectives: Collectives | None = None) -> None:
        """Raise an error unless all ranks are about to do the same operation.

        *Collective* at the first call with each ``operation`` on each communicator.

        Parameters
        ----------
        operation : description of the operation, with the shapes and dtypes of its arrays.
        collectives : communicator on which the operation runs; None: ``host``.

        Raises
        ------
        RuntimeError : on all ranks, if the descriptions differ.
        """
        collectives = collectives or self.host
        digest = hashlib.blake2b(operation.encode(), digest_size=7).digest()
        if digest in collectives.checked:
            return
        number = int.from_bytes(digest, "little")
        extremes = np.array([number, -number], np.int64)
        collectives.reduce(extremes, "max")
        if extremes[0] != -extremes[1]:
            raise RuntimeError(
                "the ranks do not do the same operation\n"
                "  expected: the same operation on all ranks\n"
                f"  found: rank {self.rank} is about to {operation}\n"
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
    """Return the channel of a communicator. *Collective* at the first call for each communicator.

    Parameters
    ----------
    comm : communicator; None: all ranks of the job.
    """
    return attached(comm_or_world(comm), Channel)
