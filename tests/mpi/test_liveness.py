"""Liveness threads: late answers, errors, strangers, the death of a rank, and censuses of up to 64 real ranks."""

from __future__ import annotations

import asyncio
import gc
import logging
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from mpi4py import MPI

from matex_data.mpi import liveness as module
from matex_data.mpi.activity import RankState, busy, own_state
from matex_data.mpi.addresses import addresses
from matex_data.mpi.census import FAN_OUT
from matex_data.mpi.liveness import MOST_STRANGERS, Liveness
from tests.support.launch import run_script
from tests.support.machine_speed import scaled


class _Request:
    def Wait(self) -> bool:  # noqa: N802 (of mpi4py)
        return True


class _Comm:
    """Communicator of ranks in one process, which exchange their addresses by queues."""

    def __init__(self, rank: int, queues: list[queue.SimpleQueue[bytes]]) -> None:
        self.rank, self.size, self._queues = rank, len(queues), queues
        self._message = b""

    def Isend(self, buffer: list[Any], receiver: int, _: int) -> _Request:  # noqa: N802
        self._queues[receiver].put(bytes(buffer[0]))
        return _Request()

    def Probe(self, _: int, __: int, status: MPI.Status) -> None:  # noqa: N802
        self._message = self._queues[self.rank].get(timeout=20)
        status.Set_elements(MPI.BYTE, len(self._message))

    def Recv(self, buffer: list[Any], _: int, __: int) -> None:  # noqa: N802
        buffer[0][:] = self._message


@contextmanager
def connected(size: int = 2, **arguments: Any) -> Iterator[list[Liveness]]:
    """Context manager: the liveness threads of a number of ranks, in this process."""
    queues = [queue.SimpleQueue[bytes]() for _ in range(size)]
    ranks = [Liveness(_Comm(rank, queues), **arguments) for rank in range(size)]  # type: ignore[arg-type]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.stop()


def eventually(happens: Callable[[], bool]) -> bool:
    """Return whether an event happens within 20 seconds."""
    end = time.monotonic() + scaled(20)
    while not happens() and time.monotonic() < end:
        time.sleep(0.01)
    return happens()


def test_any_rank_asks_any_other_by_way_of_those_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matex_data.mpi.census.FAN_OUT", 2)
    with connected(7) as ranks:
        for rank in ranks:
            rank.on_query = lambda query, rank=rank.rank: query + b" by %d" % rank
        assert ranks[6].query(range(7), b"heard") == {rank: b"heard by %d" % rank for rank in range(7)}
        assert set(ranks[3].states([4, 5])) == {4, 5}
        assert sum(ranks[5].census().counts.values()) == 7  # type: ignore[union-attr]


def test_an_answer_that_comes_during_the_next_query_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_TIME", 0.3)
    go_on, asked = threading.Event(), threading.Event()

    def answer(query: bytes) -> bytes:
        if query == b"first":
            asked.set()
            go_on.wait(20)
        return query

    with connected() as (asking, answering):
        answering.on_query = answer
        assert asking.query([1], b"first") == {} and asked.is_set()
        threading.Timer(0.1, go_on.set).start()  # while the second query waits
        assert eventually(lambda: asking.query([1], b"second") == {1: b"second"})


def test_the_thread_goes_on_after_an_error_and_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    def fail(query: bytes) -> bytes:
        raise ValueError("no such query")

    with connected() as (asking, answering):
        answering.on_query = fail
        asking._answers[0] = {}
        for _ in range(3):
            asking._in_thread(asking._route, 1, "query", 0, 0, b"")
        assert eventually(lambda: any("goes on" in record.message for record in caplog.records))
        assert asking.states([1])[1][0] is not RankState.SILENT, "the next query is answered"
        assert len([record for record in caplog.records if "goes on" in record.message]) == 1


def test_a_thread_that_cannot_go_on_ends_the_job() -> None:
    reasons = queue.SimpleQueue[str]()

    def fail(_: float | None) -> None:
        del first._loop._selector.select  # type: ignore[attr-defined]
        raise OSError("no descriptor is left")

    with connected(on_failure=reasons.put) as (first, _):
        first._loop._selector.select = fail  # type: ignore[attr-defined]
        assert "rank 0 of 2 ends the job" in reasons.get(timeout=scaled(20))
        first._thread.join(scaled(20))
    assert not asyncio.all_tasks(first._loop)


def test_the_death_of_a_rank_is_told_to_all_and_a_goodbye_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matex_data.mpi.census.FAN_OUT", 2)
    deaths = queue.SimpleQueue[tuple[int, bool]]()
    with connected(6, on_death=lambda rank, first: deaths.put((rank, first))) as ranks:
        assert sum(ranks[5].census().counts.values()) == 6  # type: ignore[union-attr]
        ranks[4].stop()
        ranks[5]._in_thread(ranks[5]._close_sockets)  # as the system closes those of a process that is killed
        ranks[5]._ended.set()
        told = [deaths.get(timeout=scaled(20)) for _ in range(4)]
        assert sorted(told) == [(5, False), (5, False), (5, False), (5, True)]


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_leaves_while_it_is_being_connected_has_not_died(first: int) -> None:
    """Its neighbour may know it already, and go on."""
    deaths = queue.SimpleQueue[tuple[int, bool]]()
    for trial in range(60):
        with connected(2, on_death=lambda rank, first: deaths.put((rank, first))) as ranks:
            time.sleep(trial % 20 * 1e-4)
            ranks[first].stop()
            time.sleep(0.01)
    assert deaths.empty()


def test_strangers_do_not_keep_the_ranks_below_away() -> None:
    with ExitStack() as stack:
        ranks = stack.enter_context(connected(FAN_OUT + 1))
        address = ranks[0]._listener.getsockname()
        for _ in range(2 * MOST_STRANGERS):
            stack.enter_context(socket.create_connection(address))
        assert eventually(lambda: len(ranks[0]._neighbours) == FAN_OUT)
        assert all(
            list(rank._neighbours) == [0] for rank in ranks[1:] if eventually(lambda rank=rank: rank._neighbours)
        )


def test_threads_that_end_leave_no_message(caplog: pytest.LogCaptureFixture) -> None:
    with connected(3) as ranks, socket.create_connection(ranks[0]._listener.getsockname()):
        ranks[1].states([0])
    assert all(rank.ended for rank in ranks)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_caller_that_comes_as_the_thread_ends_leaves_no_message(caplog: pytest.LogCaptureFixture) -> None:
    go_on = threading.Event()
    with connected() as (called, other):
        assert other.states([0])[0][0] is not RankState.SILENT
        called._in_thread(go_on.wait, 20)  # the next round of its loop finds the caller, and the end
        with socket.create_connection(called._listener.getsockname()):
            threading.Timer(0.1, go_on.set).start()
            called.stop()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_task_that_begins_as_the_thread_ends_is_not_left_behind(recwarn: pytest.WarningsRecorder) -> None:
    async def begin() -> None:
        """Do nothing."""

    with connected() as (leaving, _):

        def begin_last() -> None:
            leaving._loop.stop()
            leaving._loop.create_task(begin())

        leaving._in_thread(begin_last)
        leaving.stop()
    gc.collect()
    assert not [warning for warning in recwarn if "never awaited" in str(warning.message)]


RANKS = """
import os, sys, time
from mpi4py import MPI
from matex_data.mpi.activity import busy
from matex_data.mpi.deadlines import wait_until
from matex_data.mpi.liveness import Liveness
from matex_data.mpi.polling import poll

case, seconds = sys.argv[1], float(sys.argv[2])
comm = MPI.COMM_WORLD
messages = []

class Counted(Liveness):
    def _send(self, *message):
        messages.append(message)
        super()._send(*message)

liveness = Counted(comm.Dup())
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
waited, sent = time.monotonic() - begin, len(messages)
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
    error = rf"rank (\d+, )*{ranks - 1} has come to the end of its program, and this one waits for it"
    assert all(re.fullmatch(error, text) for text in found), found  # who has raised it has left, too
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
    assert own_state() == (RankState.BUSY, "the second")
    ended.__exit__(None, None, None)
    assert own_state()[0] is not RankState.BUSY


SCRIPT = """
import os, signal, sys, time

child = os.fork()
if child:  # what the launcher watches: it goes on when the rank is killed, and so does its side of MPI's connections
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        time.sleep(60)
    os._exit(os.waitstatus_to_exitcode(status))

from mpi4py import MPI
from matex_data.io.sessions import read_sessions

victim, how = int(sys.argv[1]), sys.argv[2]
comm = read_sessions(MPI.COMM_WORLD).comm
comm.barrier()
time.sleep(1)
if comm.rank == victim and how == "kill":
    print("killed at", time.time(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if comm.rank == victim and how == "worker":  # a process that the rank has forked keeps copies of its connections
    if os.fork():
        print("killed at", time.time(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
if how == "leave":
    print("end", comm.rank)
    sys.exit(0)
comm.barrier()
"""
SECONDS = 5.0


@pytest.mark.openmpi
@pytest.mark.parametrize(
    ("ranks", "victim", "how"),
    [
        pytest.param(2, 0, "kill", marks=pytest.mark.slow),
        (4, 1, "kill"),
        pytest.param(3, 0, "worker", marks=pytest.mark.slow),
        pytest.param(16, 0, "kill", marks=pytest.mark.slow),
        pytest.param(16, 5, "kill", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_ends_the_job(ranks: int, victim: int, how: str) -> None:
    done = run_script(ranks, SCRIPT, str(victim), how, forked=False, timeout=60)
    end = time.time()
    assert done.returncode != 0
    assert f"the process of rank {victim} has died" in done.stderr
    (killed,) = re.findall(r"killed at ([\d.]+)", done.stdout)
    assert end - float(killed) < SECONDS


def test_ranks_that_end_in_order_raise_no_alarm() -> None:
    done = run_script(4, SCRIPT, "0", "leave", forked=False)
    assert done.returncode == 0, done.stderr
    assert "died" not in done.stderr
    assert done.stdout.count("end") == 4


def test_addresses_are_those_of_this_machine() -> None:
    found = addresses()
    assert found[-1] == "127.0.0.1"
    for host in found:
        with socket.socket() as listener:
            listener.bind((host, 0))  # fails at addresses of others


STRANGERS = """
import socket, sys, time
from mpi4py import MPI
from matex_data.io.sessions import read_sessions
from matex_data.mpi.activity import RankState

def dropped(call):
    call.settimeout(5)
    try:
        return call.recv(1) == b""
    except ConnectionError:
        return True

comm = read_sessions(MPI.COMM_WORLD).comm
comm.barrier()
time.sleep(1)
if comm.rank == 0:
    port = comm.liveness._listener.getsockname()[1]
    calls = [socket.create_connection(("127.0.0.1", port)) for _ in range(24)]  # of which 8 say nothing
    for number, call in enumerate(calls[8:]):
        call.sendall((b"GET / HTTP/1.1" + bytes(100), b"x")[number % 2])
comm.barrier()
slowest = 0.0
for _ in range(8):
    if comm.rank == 1:
        begin = time.monotonic()
        assert comm.liveness.states([0])[0][0] != RankState.SILENT
        slowest = max(slowest, time.monotonic() - begin)
if comm.rank == 1:
    print("slowest answer", slowest, flush=True)
comm.barrier()
if comm.rank == 0:
    time.sleep(2)
    print("dropped", all(dropped(call) for call in calls), flush=True)
comm.barrier()
"""


@pytest.mark.openmpi
def test_strangers_are_dropped_and_delay_nobody() -> None:
    done = run_script(2, STRANGERS, forked=False, timeout=60)
    assert done.returncode == 0 and "died" not in done.stderr, done.stderr
    (slowest,) = re.findall(r"slowest answer ([\d.]+)", done.stdout)
    assert float(slowest) < scaled(1) and "dropped True" in done.stdout, done.stdout
