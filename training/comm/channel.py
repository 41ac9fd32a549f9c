"""Private communicators of training, one set for each communicator of the user, and threads that communicate."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, NamedTuple

from matex_data.errors import PartitionError
from matex_data.io.sessions import read_sessions
from matex_data.mpi.activity import inside, meeting
from matex_data.mpi.attributes import attached
from matex_data.mpi.communicator import Equal
from matex_data.mpi.deadlines import derived
from matex_data.mpi.library import MPI
from matex_data.mpi.node import CoreShare, core_share, on_one_machine
from matex_data.reading.buffers import BufferPool
from matex_data.training.comm.collectives import CALL_BYTES, SLICE_BYTES, Collectives
from matex_data.training.comm.drift import WaitingClock
from matex_data.training.comm.world import comm_or_world
from matex_data.training.replacements import Replacements, replaced


class CommunicationPool:
    """Threads that run one operation after the other, each on a communicator of its own. *Collective*.

    All ranks submit the same operations in the same order. No caller blocks before all of them are submitted.

    Parameters
    ----------
    collectives : each thread duplicates its communicator.
    """

    def __init__(self, collectives: Collectives, size: int) -> None:
        self._threads = [(ThreadPoolExecutor(1, "matex-communication"), collectives.duplicate()) for _ in range(size)]
        self._futures: dict[int, Future[Any]] = {}

    def submit(self, number: int, operation: Callable[[Collectives], Any]) -> None:
        """Queue an operation for its thread; never block."""
        thread, collectives = self._threads[number % len(self._threads)]
        self._futures[number] = thread.submit(operation, collectives)

    def result(self, number: int) -> Any:
        """Wait for an operation; return its result or raise its error."""
        return self._futures.pop(number).result()

    def close(self) -> None:
        """End the threads and free their communicators. *Collective*."""
        for thread, collectives in self._threads:
            thread.shutdown(cancel_futures=True)
            collectives.close()


SAME_CALLS = "call what is collective on every rank, not within `if rank == 0:`"
KEPT_BUFFERS = 1 << 10  # as many as a model may have large gradients


class Subset(NamedTuple):
    """Some ranks of a channel, with communicators of their own; see ``Channel.subset``."""

    graph: Collectives
    host: Collectives
    counters: dict[Any, Any]


class Channel:
    """Duplicates of one communicator. *Collective*.

    ``open_channel(comm)`` creates one channel for each communicator and returns it again later.

    Attributes
    ----------
    graph : collectives of operations in TensorFlow graphs.
    host : collectives of Python code.
    communicator : communicator of the data path, with its time limits and error agreement.
    buffers : memory of results; the tensors of a step return it when the next step begins.
    counters : sequence counters of this channel, by name or by the pool that they number; see ``SequenceCounter``.
    narrowed : operations run among some of the ranks at present; see ``among``.
    """

    narrowed = False

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
        # With a deadline, which the calls of MPI that follow do not have.
        self.communicator.agree(equal=Equal({"call": "of training"}, "the ranks make different calls", SAME_CALLS))
        nbytes = SLICE_BYTES if on_one_machine(comm, liveness) else CALL_BYTES
        own = comm if comm.size == 1 else derived(liveness, comm.Dup)
        self.graph = Collectives(own, liveness, core_share(comm, liveness), WaitingClock(), nbytes)
        self.host = self.graph.duplicate()
        self.counters: dict[Any, Any] = {}
        self.buffers = BufferPool(kept=KEPT_BUFFERS)
        self._pools: dict[int, CommunicationPool] = {}
        self._subsets: dict[tuple[int, ...], Subset] = {}

    def pool(self, threads: int) -> CommunicationPool:
        """Return the pool of that many communication threads. *Collective* at the first call for each number."""
        if threads not in self._pools:
            self._pools[threads] = CommunicationPool(self.graph, threads)
        return self._pools[threads]

    def subset(self, ranks: Sequence[int]) -> Subset:
        """Return some of the ranks of this channel. *Collective* among them at the first call for each order of them.

        Parameters
        ----------
        ranks : in the order that they have in the subset.
        """
        found = self._subsets.get(tuple(ranks))
        if found is None:
            group, liveness = self.user.group.Incl(list(ranks)), self.communicator.liveness
            comm = derived(liveness, self.user.Create_group, group)
            group.Free()
            # Ranks that sleep while they wait are not compared for slowness.
            share, clock = CoreShare.OVERSUBSCRIBED, WaitingClock()
            graph = Collectives(comm, liveness, share, clock, self.graph.slice_bytes)
            found = self._subsets[tuple(ranks)] = Subset(graph, graph.duplicate(), {})
        return found

    def counting_variables(self) -> list[Any]:
        """Return the variables that number the collective operations of this channel."""
        return [counter.variable for counter in self.counters.values() if counter.variable is not None]

    def among(self, subset: Subset) -> Replacements:
        """Return a context manager: this channel has the ranks of a subset alone, also in graphs that it traces."""
        comm = subset.graph.comm
        return replaced(self, rank=comm.rank, size=comm.size, narrowed=True, **subset._asdict())

    def check_same(self, operation: str, collectives: Collectives | None = None) -> None:
        """Raise ``RuntimeError`` on all ranks unless they are about to do the same operation. *Collective*.

        Every operation is compared, also one that was compared before: a rank that left it out would already be in its
        own operation while another one still compares.

        Parameters
        ----------
        operation : description of the operation, with the shapes and dtypes of its arrays.
        collectives : communicator on which the operation runs; None: ``host``.
        """
        digest = hashlib.blake2b(operation.encode(), digest_size=7).digest()
        in_graph = collectives is self.graph  # whose threads the main thread waits for, in a line of its own
        location = inside("operation of a graph") if in_graph else nullcontext()
        with meeting(self.communicator.liveness, in_graph), location:
            equal = (collectives or self.host).have_equal(int.from_bytes(digest, "little"))
        if not equal:
            raise RuntimeError(
                "the ranks do not do the same operation\n"
                "  expected: the same operation on all ranks\n"
                f"  found: rank {self.rank} is about to {operation}\n"
                "  remedy: build the same model and the same training step on every rank"
            )

    def close(self) -> None:
        """Free the communicators. *Collective*."""
        for pool in self._pools.values():
            pool.close()
        for subset in self._subsets.values():
            subset.graph.close()
            subset.host.close()
        self.graph.close()
        self.host.close()


def check_root(channel: Channel, root: int) -> None:
    """Raise ``PartitionError`` unless there is a rank of this number."""
    if not 0 <= root < channel.size:
        raise PartitionError("there is no such rank", expected=f"root= from 0 to {channel.size - 1}", found=root)


def open_channel(comm: MPI.Intracomm | None = None) -> Channel:
    """Return the channel of a communicator; None: all ranks. *Collective* at the first call for each communicator."""
    return attached(comm_or_world(comm), Channel)
