"""Private communicators of training, one set for each communicator of the user, and threads that communicate."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from matex_data.errors import PartitionError
from matex_data.io.sessions import read_sessions
from matex_data.mpi.activity import meeting
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

Operation = Callable[[Collectives], Any]
CLOSE_SECONDS = 10.0


class CommunicationPool:
    """Communication threads that run the operations 0, 1, 2, ... in round-robin order. *Collective*.

    Parameters
    ----------
    collectives : each thread duplicates its communicator.
    size : number of threads.
    """

    def __init__(self, collectives: Collectives, size: int) -> None:
        self._threads = [CommunicationThread(collectives.duplicate()) for _ in range(size)]
        self._futures: dict[int, Future[Any]] = {}

    def submit(self, number: int, operation: Operation) -> None:
        """Queue an operation for its thread; never block."""
        index, thread = divmod(number, len(self._threads))
        self._futures[number] = self._threads[thread].submit(index, operation)

    def result(self, number: int) -> Any:
        """Wait for an operation; return its result or raise its error."""
        return self._futures.pop(number).result()

    def close(self) -> None:
        """End the threads and free their communicators. *Collective*."""
        for thread in self._threads:
            thread.close()


class CommunicationThread:
    """Thread that runs the operations 0, 1, 2, ... one after the other on its own communicator.

    Operation 1 waits for operation 0, even if it is submitted first. So all ranks run the operations in one order, and
    no thread of the caller blocks before all operations are submitted.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._pending: dict[int, tuple[Operation, Future[Any]]] = {}
        self._next = 0
        self._open = True
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="matex-communication", daemon=True)
        self._thread.start()

    def submit(self, number: int, operation: Operation) -> Future[Any]:
        """Queue an operation; never block. After ``close`` it is cancelled."""
        future: Future[Any] = Future()
        with self._changed:
            if self._open:
                self._pending[number] = (operation, future)
                self._changed.notify()
            else:
                future.cancel()
        return future

    def close(self) -> None:
        """End the thread and free its communicator. *Collective*.

        A communicator whose operation is still under way after ``CLOSE_SECONDS`` is left to the end of the process.
        """
        with self._changed:
            self._open = False
            self._changed.notify()
        self._thread.join(timeout=CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._collectives.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next in self._pending or not self._open)
                if not self._open:
                    for _, left in self._pending.values():  # by an operation before them that was never submitted
                        left.cancel()
                    return
                operation, future = self._pending.pop(self._next)
                self._next += 1
            try:
                future.set_result(operation(self._collectives))
            except Exception as error:  # raised again by ``future.result()``
                future.set_exception(error)


SAME_CALLS = "call what is collective on every rank, not within `if rank == 0:`"
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
        self.graph = Collectives(comm, liveness, core_share(comm, liveness), WaitingClock(), nbytes)
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
        if tuple(ranks) not in self._subsets:
            self._subsets[tuple(ranks)] = Subset(self, ranks)
        return self._subsets[tuple(ranks)]

    def counting_variables(self) -> list[Any]:
        """Return the variables that number the collective operations of this channel."""
        return [counter.variable for counter in self.counters.values() if counter.variable is not None]

    def among(self, subset: Subset) -> Replacements:
        """Return a context manager: this channel has the ranks of a subset alone, also in graphs that it traces.

        Parameters
        ----------
        subset : ranks of this channel, among them this one.
        """
        own = {name: getattr(subset, name) for name in ("graph", "host", "counters")}
        return replaced(self, rank=subset.graph.comm.rank, size=subset.graph.comm.size, narrowed=True, **own)

    def check_same(self, operation: str, collectives: Collectives | None = None) -> None:
        """Raise an error unless all ranks are about to do the same operation. *Collective*.

        Every operation is compared, also one that was compared before: a rank that left it out would already be in its
        own operation while another one still compares.

        Parameters
        ----------
        operation : description of the operation, with the shapes and dtypes of its arrays.
        collectives : communicator on which the operation runs; None: ``host``.

        Raises
        ------
        RuntimeError : on all ranks, if the descriptions differ.
        """
        digest = hashlib.blake2b(operation.encode(), digest_size=7).digest()
        with meeting(self.communicator.liveness):
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


class Subset:
    """Some ranks of a channel, with communicators of their own; see ``Channel.subset``. *Collective* among them.

    Parameters
    ----------
    channel : channel of all ranks.
    ranks : ranks of the channel, in the order that they have in the subset.

    Attributes
    ----------
    graph, host, counters : as those of a channel.
    """

    def __init__(self, channel: Channel, ranks: Sequence[int]) -> None:
        group = channel.user.group.Incl(list(ranks))
        comm = derived(channel.communicator.liveness, channel.user.Create_group, group)
        group.Free()
        # Ranks that sleep while they wait are not compared for slowness.
        share, clock = CoreShare.OVERSUBSCRIBED, WaitingClock()
        self.graph = Collectives(comm, channel.communicator.liveness, share, clock, channel.graph.slice_bytes)
        self.host = self.graph.duplicate()
        self.counters: dict[Any, Any] = {}
        comm.Free()


def check_root(channel: Channel, root: int) -> None:
    """Raise ``PartitionError`` unless there is a rank of this number."""
    if not 0 <= root < channel.size:
        raise PartitionError("there is no such rank", expected=f"root= from 0 to {channel.size - 1}", found=root)


def open_channel(comm: MPI.Intracomm | None = None) -> Channel:
    """Return the channel of a communicator. *Collective* at the first call for each communicator.

    Parameters
    ----------
    comm : communicator; None: all ranks of the job.
    """
    return attached(comm_or_world(comm), Channel)
