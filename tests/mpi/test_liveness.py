"""Queries of a liveness thread: answers that come late, many messages, and the end of the thread."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import pytest
from mpi4py import MPI

from matex_data.mpi import deadlines
from matex_data.mpi.deadlines import Liveness, State

_STATE_ANSWER, _QUERY = 2, 3  # MPI tags


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
    monkeypatch.setattr(deadlines, "State", states)
    monkeypatch.setattr(deadlines, "ANSWER_TIME", 0.3)
    monkeypatch.setattr(deadlines, "QUERY_INTERVAL", 0.001)
    comm = _Comm()
    liveness = Liveness(comm)  # type: ignore[arg-type]
    try:
        timer = threading.Timer(0.1, lambda: comm.received.put((_STATE_ANSWER, comm.sent[0][:8] + b"\2late")))
        timer.start()
        assert liveness.states() == {1: (State.SILENT, "")}
        assert states.received.is_set()
        threading.Timer(0.1, states.go_on.set).start()  # while the second query waits
        assert liveness.states() == {1: (State.SILENT, "")}
        assert len(comm.sent) == 2
    finally:
        states.go_on.set()
        liveness.stop()


def test_the_thread_ends_however_many_queries_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "QUERY_INTERVAL", 0.001)
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
    assert time.monotonic() - begin < 1
