"""Sessions of one process whose threads read the same data set."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier, Event

import pytest
from mpi4py import MPI

from matex_data import DataError, PartitionError
from matex_data.io.files import Files
from matex_data.io.sessions import ReadSessions
from matex_data.locks import Lock
from matex_data.mpi.communicator import Communicator
from tests.support.ranks import Pool

THREADS = 8


def test_a_session_belongs_to_one_reader_from_the_moment_it_is_opened() -> None:
    sessions, start = ReadSessions(Communicator()), Barrier(THREADS)

    def opened(_: int) -> object:
        start.wait()
        return sessions.open([], "independent")

    with ThreadPoolExecutor(THREADS) as threads:
        assert len(set(threads.map(opened, range(THREADS)))) == THREADS


def test_a_session_that_cannot_open_its_files_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(comm: Communicator, paths: list[str], *_: object) -> Files:
        if paths:
            raise DataError("the file cannot be read")
        return Files(comm, paths, "independent")

    monkeypatch.setattr("matex_data.io.sessions.Files", opened)
    sessions = ReadSessions(Communicator())
    for _ in range(2):
        with pytest.raises(DataError):
            sessions.open(["a.h5"], "independent")
    assert [session.unused for session in sessions._sessions] == [True]


def test_threads_of_one_process_wait_for_each_other() -> None:
    comm, held, end = Communicator(), Event(), Event()

    def hold() -> None:
        with comm.one_thread_at_a_time(comm._busy):
            held.set()
            end.wait(30)

    with ThreadPoolExecutor(2) as threads:
        threads.submit(hold)
        held.wait()
        found = threads.submit(comm.maximum, 7)
        assert wait([found], timeout=0.1).not_done
        end.set()
        assert found.result(timeout=30) == [7]


def _second_thread(comm: MPI.Intracomm) -> str:
    lock, of_ranks = Lock(), Communicator(comm)
    with (
        of_ranks.one_thread_at_a_time(lock),
        pytest.raises(PartitionError) as caught,
        of_ranks.one_thread_at_a_time(lock),
    ):
        pass
    return str(caught.value)


@pytest.mark.rank_counts(3)
def test_a_second_thread_of_several_ranks_raises(pool: Pool) -> None:
    assert all("two threads of one rank" in error for error in pool.run(_second_thread))
