"""Communicators: reductions, threads, reuse and exhaustion."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from matex_data import PartitionError, open_dataset
from matex_data.io.sessions import read_sessions
from matex_data.mpi.communicator import Communicator, has_pending
from matex_data.training.replacements import replaced
from tests.mpi.conftest import ROWS
from tests.support.ranks import Pool


def _maxima(comm: MPI.Intracomm) -> list[list[int]]:
    """Return the results of reductions whose arrays have no other reference; one rank after the other is late."""
    opened, found = read_sessions(comm).comm, []
    for number in range(40):
        if number % comm.size == comm.rank:
            time.sleep(0.001)
        reduction = opened.start_maximum([number * comm.size + comm.rank] + [number] * 50)
        noise = [np.full(51, -7) for _ in range(20)]  # reuses memory that was freed too early
        found.append(reduction.wait().tolist())
        del noise
    assert not has_pending()
    return found


@pytest.mark.openmpi
def test_values_stay_in_memory_until_all_ranks_have_read_them(pool: Pool) -> None:
    expected = [[number * pool.size + pool.size - 1] + [number] * 50 for number in range(40)]
    assert pool.run(_maxima) == [expected] * pool.size


def _after_an_interrupt(comm: MPI.Intracomm) -> list[int]:
    """Return a maximum after a call that an interrupt has ended on one rank, before and after the others came to it."""
    opened = read_sessions(comm).comm.duplicate()

    def interrupt(happened: Any) -> None:
        raise KeyboardInterrupt

    if comm.rank == 0:
        with replaced(opened, wait_until=interrupt), contextlib.suppress(KeyboardInterrupt):
            opened.maximum(1)
        for call in (opened.barrier, lambda: opened.allgather(7)):
            with pytest.raises(PartitionError, match="has left a collective call"):
                call()
    comm.Barrier()
    if comm.rank > 0:
        assert opened.maximum(5) == [5]
    comm.Barrier()
    return opened.maximum(comm.rank)


@pytest.mark.rank_counts(2, 3)
def test_a_call_that_only_one_rank_has_left_is_not_taken_for_the_next(pool: Pool) -> None:
    assert pool.run(_after_an_interrupt) == [[pool.size - 1]] * pool.size


def _concurrent_calls(comm: MPI.Intracomm, path: str) -> list[str]:
    data, errors, barrier = open_dataset(path, comm=comm), [], threading.Barrier(2)
    inside = read_sessions(comm).comm

    def second() -> None:
        barrier.wait()
        try:
            data.batches(48)
        except PartitionError as error:
            errors.append(str(error))

    thread = threading.Thread(target=second)
    thread.start()
    with inside.one_thread_at_a_time(inside._busy):  # as during a collective call
        barrier.wait()
        thread.join()
    return errors


@pytest.mark.rank_counts(2)
def test_collective_calls_of_two_threads_raise(pool: Pool, path: str) -> None:
    for errors in pool.run(_concurrent_calls, path):
        assert len(errors) == 1 and "two threads of one rank" in errors[0] and "Dup()" in errors[0]


def _sub_communicators(comm: MPI.Intracomm, path: str, number: int) -> float:
    total = 0.0
    for _ in range(number):
        part = comm.Split(comm.rank % 2)
        data = open_dataset(path, comm=part, inputs="x")
        total = sum(float(batch.sum()) for batch in data.batches(48))
        iterator = iter(data.batches(48))
        next(iterator)  # does not keep the communicator alive
        part.Free()
    return total


@pytest.mark.rank_counts(4)
def test_freeing_a_communicator_frees_its_duplicates(pool: Pool, path: str) -> None:
    before = len(threading.enumerate())
    totals = pool.run(_sub_communicators, path, 10, timeout=120)
    assert sum(totals) == pytest.approx(2 * sum(range(ROWS * 8)))
    assert len(threading.enumerate()) == before


def _exhausted(comm: MPI.Intracomm) -> str:
    opened: list[Communicator] = []
    first = read_sessions(comm).comm
    try:
        while True:
            opened.append(first.duplicate())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        for each in opened:
            each.free()


@pytest.mark.rank_counts(2)
def test_exhausted_communicators_raise(pool: Pool) -> None:
    for error in pool.run(_exhausted, timeout=120):
        assert error.startswith("DataError: MPI has no communicator left") and "del" in error
