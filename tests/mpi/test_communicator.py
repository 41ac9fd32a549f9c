"""Communicators: what they carry, whose they are, and what becomes of them."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from mpi4py import MPI

from matex_data import PartitionError, open_dataset
from matex_data.io.sessions import read_sessions
from matex_data.mpi.communicator import Communicator, has_pending
from tests.mpi.conftest import ROWS
from tests.support.ranks import Pool


def _rounds(comm: MPI.Intracomm) -> list[list[int]]:
    """Results of rounds that nobody keeps the arrays of; ranks come late in turn."""
    opened, found = read_sessions(comm).comm, []
    for number in range(40):
        if number % comm.size == comm.rank:
            time.sleep(0.001)
        round_ = opened.start_maximum([number * comm.size + comm.rank] + [number] * 50)
        noise = [np.full(51, -7) for _ in range(20)]  # takes memory that was let go of too early
        found.append(round_.wait().tolist())
        del noise
    assert not has_pending()
    return found


@pytest.mark.openmpi
def test_what_ranks_say_lives_until_all_have_heard_it(pool: Pool) -> None:
    expected = [[number * pool.size + pool.size - 1] + [number] * 50 for number in range(40)]
    assert pool.run(_rounds) == [expected] * pool.size


def _at_the_same_time(comm: MPI.Intracomm, path: str) -> list[str]:
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
    with inside._exclusive():  # as during a collective call
        barrier.wait()
        thread.join()
    return errors


@pytest.mark.rank_counts(2)
def test_calls_of_two_threads_at_once_are_an_error(pool: Pool, path: str) -> None:
    for errors in pool.run(_at_the_same_time, path):
        assert len(errors) == 1 and "two threads of one rank" in errors[0] and "Dup()" in errors[0]


def _sub_communicators(comm: MPI.Intracomm, path: str, number: int) -> float:
    total = 0.0
    for _ in range(number):
        part = comm.Split(comm.rank % 2)
        data = open_dataset(path, comm=part, inputs="x")
        total = sum(float(batch.sum()) for batch in data.batches(48))
        iterator = iter(data.batches(48))
        next(iterator)  # a pass in use does not keep the communicator
        part.Free()
    return total


@pytest.mark.rank_counts(4)
def test_communicators_of_freed_communicators_are_free(pool: Pool, path: str) -> None:
    before = len(threading.enumerate())
    totals = pool.run(_sub_communicators, path, 40, timeout=120)
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
def test_too_many_data_sets_at_once_are_said_so(pool: Pool) -> None:
    for error in pool.run(_exhausted, timeout=120):
        assert error.startswith("DataError: MPI has no communicator left") and "del" in error
