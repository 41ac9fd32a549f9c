"""Communication threads: order of the operations, and futures that end with their thread."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import weakref
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from matex_data.errors import PartitionError
from matex_data.mpi.activity import meetings, user_location
from matex_data.training.comm.channel import CommunicationPool, open_channel
from tests.support.ranks import Pool


class _Collectives:
    """Stand-in without MPI, which counts how often its communicators are freed."""

    def __init__(self) -> None:
        self.freed = 0

    def duplicate(self) -> _Collectives:
        return self

    def close(self) -> None:
        self.freed += 1


def test_operations_of_a_thread_run_in_order() -> None:
    done: list[int] = []
    collectives: Any = _Collectives()
    pool = CommunicationPool(collectives, 1)
    for number in range(4):
        pool.submit(number, lambda _, number=number: done.append(number))  # type: ignore[misc]
    for number in (3, 1, 2, 0):
        pool.result(number)
    pool.close()
    assert done == [0, 1, 2, 3] and collectives.freed == 1


def test_closing_ends_what_runs_and_cancels_what_waits() -> None:
    collectives: Any = _Collectives()
    pool = CommunicationPool(collectives, 2)
    begun = threading.Event()
    pool.submit(0, lambda _: (begun.set(), threading.Event().wait(0.05)))
    pool.submit(2, lambda _: None)  # waits for operation 0
    assert begun.wait(10)
    pool.close()
    pool.result(0)
    with pytest.raises(CancelledError):
        pool.result(2)
    assert collectives.freed == 2


def _interrupted(comm: Any) -> list[float]:
    """Return what a rank has after an interrupted wait for the others, which come later."""
    collectives = open_channel(comm).host.duplicate()
    array = np.full(9, comm.rank + 1.0)
    kept = weakref.ref(array)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    if comm.rank == 0:
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with contextlib.suppress(KeyboardInterrupt):
            collectives._wait(collectives.comm.Iallreduce, MPI.IN_PLACE, array)
        signal.signal(signal.SIGALRM, before)
        del array
        with pytest.raises(PartitionError, match="has left a collective call"):
            collectives.barrier()
    comm.Barrier()
    if comm.rank == 1:
        collectives._wait(collectives.comm.Iallreduce, MPI.IN_PLACE, array)
    comm.Barrier()
    collectives.barrier()
    found = kept()
    assert found is not None, "MPI would write to memory that is free"
    return found.tolist()


@pytest.mark.rank_counts(2)
def test_an_interrupted_wait_keeps_its_memory(pool: Pool) -> None:
    assert pool.run(_interrupted) == [[3.0] * 9] * 2


def test_an_interrupt_as_a_request_has_been_started_keeps_it() -> None:
    """In the line behind the start, which once was in front of the block that keeps the request."""
    collectives, started = open_channel(MPI.COMM_SELF).host, []

    def start() -> MPI.Request:
        started.append(collectives.comm.Ibarrier())
        return started[-1]

    def trace(frame: Any, event: str, _: Any) -> Any:
        if started and event == "line" and frame.f_code.co_name == "_wait":
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            collectives._wait(start)
    finally:
        sys.settrace(before)
    assert collectives._interrupted is started[0]
    collectives.barrier()  # it is complete by now


def _met_in_graph(comm: Any) -> list[Any]:
    """Return whether this rank says that it waits, and where, while an operation of a graph waits for the others."""
    channel = open_channel(comm)
    liveness, found = channel.communicator.liveness, []
    operation = threading.Thread(target=channel.check_same, args=("reduce", channel.graph))
    if comm.rank == 0:
        operation.start()
        while not (found and found[0] is not None) and operation.is_alive():
            found = [meetings(liveness), user_location()]
    comm.Barrier()
    if comm.rank == 1:
        operation.start()
    operation.join(30)
    return [*found, meetings(liveness)]


@pytest.mark.rank_counts(2)
def test_the_main_thread_waits_for_the_operations_of_its_graph(pool: Pool) -> None:
    (met, location, after), _ = pool.run(_met_in_graph)
    assert met > 0 and after is None
    assert location.endswith("; MPI: operation of a graph")
