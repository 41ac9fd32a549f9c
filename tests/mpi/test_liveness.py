"""Liveness threads: late answers, many messages, the end of the thread, and censuses of up to 64 real ranks."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import pytest
from mpi4py import MPI

from matex_data.mpi import liveness as module
from matex_data.mpi.activity import State, busy, own_state
from matex_data.mpi.liveness import Liveness
from tests.support.launch import run_script
from tests.support.machine_speed import scaled

_STATE_ANSWER, _QUERY, _CENSUS = 2, 3, 5  # MPI tags


class _Request:
    def Test(self) -> bool:  # noqa: N802 (of mpi4py)
        return True


class _Message:
    def __init__(self, content: bytes) -> None:
        self._content = content

    def Recv(self, buffer: list[Any], _: MPI.Status) -> None:  # noqa: N802
        buffer[0][:] = self._content


class _Comm:
    """Communicator of two ranks; the messages of the other one are what a test puts in."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.received: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self.endless: tuple[int, bytes] | None = None

    def Isend(self, buffer: list[Any], _: int, __: int) -> _Request:  # noqa: N802
        self.sent.append(bytes(buffer[0]))
        return _Request()

    def Improbe(self, _: int, __: int, status: MPI.Status) -> _Message | None:  # noqa: N802
        try:
            tag, content = self.endless or self.received.get_nowait()
        except queue.Empty:
            return None
        status.source, status.tag = 1, tag
        status.Set_elements(MPI.BYTE, len(content))
        return _Message(content)


class _SlowStates:
    """States, of which the first one that is received keeps its thread until ``go_on``."""

    SILENT = State.SILENT

    def __init__(self) -> None:
        self.received, self.go_on = threading.Event(), threading.Event()

    def __call__(self, value: int) -> State:
        self.received.set()
        self.go_on.wait(10)
        return State(value)


def test_an_answer_that_comes_during_the_next_query_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    states = _SlowStates()
    monkeypatch.setattr(module, "State", states)
    monkeypatch.setattr(module, "ANSWER_TIME", 0.3)
    monkeypatch.setattr(module, "QUERY_INTERVAL", 0.001)
    comm = _Comm()
    liveness = Liveness(comm)  # type: ignore[arg-type]
    try:
        timer = threading.Timer(0.1, lambda: comm.received.put((_STATE_ANSWER, comm.sent[0][:8] + b"\2late")))
        timer.start()
        assert liveness.states([1]) == {1: (State.SILENT, "")}
        assert states.received.is_set()
        threading.Timer(0.1, states.go_on.set).start()  # while the second query waits
        assert liveness.states([1]) == {1: (State.SILENT, "")}
        assert len(comm.sent) == 2
    finally:
        states.go_on.set()
        liveness.stop()


def test_the_thread_goes_on_after_an_error_and_says_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "QUERY_INTERVAL", 0.001)
    comm = _Comm()
    liveness = Liveness(comm)  # type: ignore[arg-type]
    try:
        for _ in range(3):
            comm.received.put((_CENSUS, b"no census"))
        comm.received.put((_QUERY, bytes(9)))
        end = time.monotonic() + scaled(20)
        while not comm.sent and time.monotonic() < end:
            time.sleep(0.001)
        assert len(comm.sent) == 1, "the query is answered"
        assert len([record for record in caplog.records if "goes on" in record.message]) == 1
    finally:
        liveness.stop()


def test_an_error_that_stays_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUERY_INTERVAL", 0.001)
    comm, reasons = _Comm(), queue.SimpleQueue[str]()

    def broken(*_: Any) -> None:
        raise OSError("the network is gone")

    comm.Improbe = broken  # type: ignore[method-assign]
    liveness = Liveness(comm, on_failure=reasons.put)  # type: ignore[arg-type]
    try:
        assert "rank 0 of 2 ends the job" in reasons.get(timeout=scaled(20))
    finally:
        liveness.stop()


def test_the_thread_ends_however_many_queries_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUERY_INTERVAL", 0.001)
    comm = _Comm()
    comm.endless = (_QUERY, bytes(9))
    liveness = Liveness(comm)  # type: ignore[arg-type]
    while not comm.sent:
        time.sleep(0.001)
    begin = time.monotonic()
    liveness.stop()
    answered = len(comm.sent)
    time.sleep(0.05)
    comm.endless = None
    assert len(comm.sent) == answered, "the thread still uses the communicator, which is free by now"
    assert time.monotonic() - begin < scaled(20)


RANKS = """
import os, sys, time
from mpi4py import MPI
from matex_data.mpi.activity import busy
from matex_data.mpi.deadlines import wait_until
from matex_data.mpi.liveness import Liveness
from matex_data.mpi.polling import poll

case, seconds = sys.argv[1], float(sys.argv[2])
comm = MPI.COMM_WORLD
liveness = Liveness(comm.Dup())
start = comm.Ibarrier()
poll(start.Test)
begin = time.monotonic()
if case == "leave" and comm.rank == comm.size - 1:
    sys.exit()  # its exit handler waits for all ranks
if case == "busy" and comm.rank == 0:
    with busy("its save"):
        time.sleep(seconds)
request, found = comm.Ibarrier() if case == "busy" else None, "complete"
try:
    wait_until(lambda seconds: poll(lambda: request is not None and request.Test(), seconds), liveness)
except Exception as error:
    found = str(error).splitlines()[0]
waited, sent = time.monotonic() - begin, liveness.sent
os.write(1, f"{comm.rank}|{waited:.2f}|{sent}|{found}\\n".encode())
"""

MANY = pytest.mark.parametrize(
    "ranks", [5, pytest.param(32, marks=pytest.mark.slow), pytest.param(64, marks=pytest.mark.slow)]
)


def _lines(ranks: int, *arguments: str, time_limit: str) -> tuple[list[float], int, set[str], str]:
    """Return the seconds that each rank has waited, the number of messages, the outcomes, and stderr."""
    done = run_script(ranks, RANKS, *arguments, env={"MATEX_TIMEOUT": time_limit}, timeout=150, forked=ranks < 10)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|", 3) for line in done.stdout.splitlines()]
    return [float(row[1]) for row in rows], sum(int(row[2]) for row in rows), {row[3] for row in rows}, done.stderr


@pytest.mark.openmpi
@MANY
def test_a_rank_that_has_left_is_noticed_soon(ranks: int) -> None:
    seconds, messages, found, _ = _lines(ranks, "leave", "0", time_limit="60")
    assert found == {f"rank {ranks - 1} has come to the end of its program, and this one waits for it"}
    assert len(seconds) == ranks - 1
    assert all(5 <= waited < 15 for waited in seconds), seconds
    assert messages < 4.5 * ranks


@pytest.mark.openmpi
@MANY
def test_a_rank_may_be_busy_for_longer_than_the_time_limit(ranks: int) -> None:
    busy = 4 if ranks < 10 else 12
    seconds, messages, found, errors = _lines(ranks, "busy", f"{busy}", time_limit=f"{busy / 6}")
    assert found == {"complete"}
    assert len(seconds) == ranks and max(seconds) < busy + 10, seconds
    assert "busy with its save" in errors
    assert messages < 4.5 * ranks * 7  # a census every sixth of the time


def test_an_activity_that_ends_late_leaves_the_next_one_alone() -> None:
    late, ended = busy("the first"), busy("the second")
    late.__enter__()
    ended.__enter__()
    late.__exit__(None, None, None)
    assert own_state() == (State.BUSY, "the second")
    ended.__exit__(None, None, None)
    assert own_state()[0] is not State.BUSY
