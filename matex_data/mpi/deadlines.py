"""Deadlines for every wait on other ranks.

Each rank runs a thread that answers queries from the others about its state. A waiting rank queries them after
``FIRST_CHECK`` seconds, then at growing intervals. The wait fails at once if another rank has reached the end of its
program, and after ``MATEX_TIMEOUT`` seconds otherwise, unless a rank reports that it is busy on behalf of all, as with
a checkpoint or a callback. The error names the missing rank and the line that it executes.
"""

from __future__ import annotations

import atexit
import logging
import os
import struct
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any

from matex_data.errors import PartitionError
from matex_data.mpi.abort import abort_job
from matex_data.mpi.library import MPI
from matex_data.mpi.processes import is_child_process

log = logging.getLogger("matex_data")

FIRST_CHECK = 5.0  # seconds from the begin of a wait to the first query
MESSAGE_AFTER = 60.0  # seconds from the begin of a wait to a message about the missing ranks
ANSWER_TIME = 3.0  # seconds in which other ranks have to answer
QUERY_INTERVAL = 0.1  # seconds between two looks for queries
SHORTEST_SLEEP, LONGEST_SLEEP = 2e-5, 5e-4  # seconds between two tests of a request
READ_AHEAD = "matex-read"  # name of threads that read data ahead of the program
_HEADER = struct.Struct("<qB")  # of a message: number of the query, state
_STATE_QUERY, _STATE_ANSWER, _QUERY, _ANSWER = 1, 2, 3, 4  # MPI tags; ``on_query`` answers the last two
_LIBRARIES = tuple(str(Path(sysconfig.get_path(name)).resolve()) for name in ("purelib", "platlib", "stdlib"))


class State(IntEnum):
    """State of a rank, as it reports it to others."""

    RUNNING = 0
    WAITING = 1
    BUSY = 2
    LEFT = 3
    SILENT = 4  # it did not answer


_busy: dict[int, str] = {}  # by thread: the activity
_waiting: dict[int, int] = {}  # by thread: depth of nested waits
_calls: dict[int, str] = {}  # by thread: the collective call of the user
_left = False


def timeout() -> float:
    """Return the limit in seconds of a wait for another rank: the environment variable ``MATEX_TIMEOUT``."""
    return float(os.environ.get("MATEX_TIMEOUT", "600"))


@contextmanager
def busy(activity: str) -> Iterator[None]:
    """Context manager: extend the waits of other ranks for this one as long as the activity takes."""
    thread = threading.get_ident()
    outer = _busy.get(thread)
    _busy[thread] = activity
    try:
        yield
    finally:
        _busy.pop(thread)
        if outer is not None:
            _busy[thread] = outer


@contextmanager
def waiting() -> Iterator[None]:
    """Context manager: report that this thread waits for other ranks."""
    thread = threading.get_ident()
    _waiting[thread] = _waiting.get(thread, 0) + 1
    try:
        yield
    finally:
        _waiting[thread] -= 1
        if not _waiting[thread]:
            del _waiting[thread]


@contextmanager
def collective(call: str) -> Iterator[None]:
    """Context manager: name the collective call of this thread in errors of waits."""
    thread = threading.get_ident()
    outermost = thread not in _calls
    _calls.setdefault(thread, call)
    try:
        yield
    finally:
        if outermost:
            del _calls[thread]


def _expected() -> str:
    call = next(iter(list(_calls.values())), None)
    if call is None:
        return "all ranks make the same calls"
    return f"every rank calls {call}, not one rank alone (as within `if rank == 0:`)"


def _state() -> tuple[State, str]:
    if _left:
        return State.LEFT, ""
    for thread, activity in list(_busy.items()):
        if thread not in _waiting:
            return State.BUSY, activity
    return (State.WAITING if _waiting else State.RUNNING), user_location()


def waits_for_ranks() -> bool:
    """Return whether the program waits for other ranks, or has ended; threads that read ahead do not count."""
    readers = {thread.ident for thread in threading.enumerate() if thread.name == READ_AHEAD}
    return _left or any(thread not in readers for thread in list(_waiting))


def user_location() -> str:
    """Return file, line and function of the user's program that the main thread executes."""
    main = threading.main_thread().ident
    frame: FrameType | None = sys._current_frames().get(main) if main is not None else None
    innermost = frame
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "an unknown line"
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}, in {frame.f_code.co_name}"


def _is_library(frame: FrameType) -> bool:
    own = str(frame.f_globals.get("__name__")).split(".")[0] == "matex_data"
    return own or frame.f_code.co_filename.startswith(("<frozen", *_LIBRARIES))


class Liveness:
    """Thread that answers queries of other ranks, and sends queries to them. *Collective*.

    Parameters
    ----------
    comm : communicator of several ranks, for this object alone. MPI has to provide ``MPI_THREAD_MULTIPLE``.

    Attributes
    ----------
    on_query : function that answers a ``query`` of another rank, called in the thread.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self.on_query: Callable[[bytes], bytes] = lambda query: b""
        self.rank, self.size = comm.rank, comm.size
        self._number = 0  # of the last query
        self._answers: dict[int, dict[int, Any]] = {}  # by query that waits, and by rank
        self._sent: list[tuple[MPI.Request, bytes]] = []
        self._sending, self._numbering = threading.Lock(), threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="matex-liveness", daemon=True)
        self._thread.start()
        _ALL.add(self)

    @property
    def ended(self) -> bool:
        """Return whether the thread has ended, as at the end of the program."""
        return self._ended.is_set()

    def states(self) -> dict[int, tuple[State, str]]:
        """Return the state and the activity or location of every other rank."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        states: dict[int, tuple[State, str]] = self._query(others, _STATE_QUERY, b"")
        return {rank: states.get(rank, (State.SILENT, "")) for rank in others}

    def query(self, ranks: Sequence[int], query: bytes) -> dict[int, bytes]:
        """Return the answers of ``on_query`` on other ranks, by rank, without the ranks that do not answer."""
        return self._query(ranks, _QUERY, query)

    def _query(self, ranks: Sequence[int], tag: int, text: bytes) -> dict[int, Any]:
        """Send a query, and return the answers that arrive within ``ANSWER_TIME``, by rank.

        An answer carries the number of its query, and belongs to that one alone: a late one is dropped.
        """
        answers: dict[int, Any] = {}
        with self._numbering:
            self._number += 1
            number = self._number
        self._answers[number] = answers
        for rank in ranks:
            self._send(rank, tag, _HEADER.pack(number, 0) + text)
        end = time.monotonic() + ANSWER_TIME
        while len(answers) < len(ranks) and time.monotonic() < end and not self._ended.is_set():
            time.sleep(0.01)
        self._answers.pop(number)
        return dict(answers)

    def close(self) -> None:
        """End the thread and free the communicator. *Collective*."""
        barrier = self._comm.Ibarrier()  # no rank sends queries from here on
        poll(lambda: bool(barrier.Test()))
        poll(self._all_sent, ANSWER_TIME)  # MPI reads the texts until then
        self.stop()
        self._comm.Free()

    def stop(self) -> None:
        """End the thread."""
        _ALL.discard(self)
        self._ended.set()
        self._thread.join(ANSWER_TIME)

    def leave(self) -> MPI.Request:
        """Return a request that completes when all ranks have reached the end of their programs. *Collective*."""
        return self._comm.Ibarrier()

    def _serve(self) -> None:
        status = MPI.Status()
        while not self._ended.wait(QUERY_INTERVAL) and not MPI.Is_finalized():
            while not self._ended.is_set():
                message = self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
                if message is None:
                    break
                memory = bytearray(status.Get_count(MPI.BYTE))
                message.Recv([memory, MPI.BYTE], status)
                source, tag = status.Get_source(), status.Get_tag()
                number, state = _HEADER.unpack_from(memory)
                text = bytes(memory[_HEADER.size :])
                if tag == _STATE_QUERY:
                    own, location = _state()
                    self._send(source, _STATE_ANSWER, _HEADER.pack(number, own) + location.encode()[-400:])
                elif tag == _QUERY:
                    self._send(source, _ANSWER, _HEADER.pack(number, 0) + self.on_query(text))
                else:
                    answer = (State(state), text.decode(errors="replace")) if tag == _STATE_ANSWER else text
                    self._answers.get(number, {})[source] = answer

    def _send(self, rank: int, tag: int, text: bytes) -> None:
        self._all_sent()
        with self._sending:
            self._sent.append((self._comm.Isend([text, MPI.BYTE], rank, tag), text))

    def _all_sent(self) -> bool:
        """Release the texts that MPI has sent, and return whether none is left."""
        with self._sending:
            self._sent = [(request, text) for request, text in self._sent if not request.Test()]
            return not self._sent


class Wait:
    """Wait for other ranks, from the creation of this object on.

    Parameters
    ----------
    liveness : of the ranks; None if MPI allows no thread that could query them.

    Attributes
    ----------
    next_check : time (``time.monotonic``) of the next ``check``.
    """

    def __init__(self, liveness: Liveness | None) -> None:
        self._liveness = liveness
        self._begin, self._seconds = time.monotonic(), timeout()
        self._deadline = self._begin + self._seconds
        self._interval = FIRST_CHECK if liveness is not None else self._seconds
        self._warned = self._told = False
        self.next_check = min(self._deadline, self._begin + self._interval)

    def check(self) -> PartitionError | None:
        """Query the other ranks; return the error that ends the wait, or None to continue."""
        states = self._liveness.states() if self._liveness is not None else {}
        left = [rank for rank, (state, _) in states.items() if state == State.LEFT]
        if left:
            return _left_error(left)
        now = time.monotonic()
        if now - self._begin >= MESSAGE_AFTER and not self._told:
            self._told = True
            self._tell(states, now - self._begin)
        if now >= self._deadline:
            activity = next((text for state, text in states.values() if state == State.BUSY), None)
            if activity is None:
                return _absent_error(states, now - self._begin)
            if not self._warned:
                log.warning("waiting for another rank for %.0f s: it is busy with %s", now - self._begin, activity)
            self._warned = True
            self._deadline = now + self._seconds
        self._interval *= 2
        message = self._deadline if self._told else self._begin + MESSAGE_AFTER
        self.next_check = min(self._deadline, message, now + self._interval)
        return None

    def _tell(self, states: dict[int, tuple[State, str]], seconds: float) -> None:
        """Log which ranks are missing, on the first rank that waits for them."""
        waiting = [rank for rank, (state, _) in states.items() if state == State.WAITING]
        missing = {rank: found for rank, found in states.items() if rank not in waiting}
        if self._liveness is None or not missing or self._liveness.rank > min(waiting, default=self._liveness.rank):
            return
        call = next(iter(list(_calls.values())), "a collective operation")
        log.warning("waiting in %s for %.0f s: %s", call, seconds, _described(missing))


def wait_until(happened: Callable[[float], bool], liveness: Liveness | None) -> None:
    """Return when an event has happened that other ranks cause.

    Parameters
    ----------
    happened : waits for at most the given number of seconds, and returns whether the event has happened.
    liveness : of the ranks.

    Raises
    ------
    PartitionError : another rank has reached the end of its program, or the time is over.
    """
    wait = Wait(liveness)
    with waiting():
        while not happened(max(0.0, wait.next_check - time.monotonic())):
            error = wait.check()
            if error is not None:
                raise error


def poll(happened: Callable[[], bool], seconds: float = float("inf")) -> bool:
    """Return whether ``happened()`` becomes true within a time. Sleep between the calls, longer and longer."""
    begin, sleep = time.monotonic(), SHORTEST_SLEEP
    while not happened():
        waited = time.monotonic() - begin
        if waited >= seconds:
            return False
        time.sleep(sleep)
        sleep = min(2 * sleep, max(LONGEST_SLEEP, waited / 1000))
    return True


def _left_error(ranks: list[int]) -> PartitionError:
    return PartitionError(
        f"rank {', '.join(map(str, ranks[:5]))} has come to the end of its program, and this one waits for it",
        expected=_expected(),
        found=f"this rank is at {user_location()}",
        remedy="take the same number of batches on every rank, and let none leave the program before the others",
    )


def _absent_error(states: dict[int, tuple[State, str]], seconds: float) -> PartitionError:
    order = dict(sorted(states.items(), key=lambda item: item[1][0] == State.WAITING))
    return PartitionError(
        f"another rank does not take part: this one has waited {seconds:.0f} s",
        expected=f"{_expected()}, and none is slower than the others by so much",
        found=f"this rank is at {user_location()}; {_described(order)}",
        remedy="iterate over the data alike on every rank; "
        "if one rank may take longer, set MATEX_TIMEOUT to more seconds",
    )


def _described(states: dict[int, tuple[State, str]]) -> str:
    """Return what the first four of these ranks do, as text."""
    words = {
        State.RUNNING: "is at",
        State.WAITING: "waits for other ranks, too, at",
        State.BUSY: "is busy with",
        State.SILENT: "does not answer",
    }
    found = [f"rank {rank} {words[state]} {text}".rstrip() for rank, (state, text) in states.items() if state in words]
    return "; ".join(found[:4]) + (f"; and {len(found) - 4} more" if len(found) > 4 else "")


_ALL: weakref.WeakSet[Liveness] = weakref.WeakSet()


@atexit.register
def leave() -> None:
    """Report that this rank has reached the end of its program, until all ranks have. *Collective*.

    ``MPI_Finalize`` waits for the other ranks as well, but without an answer to their queries. Abort the job if a rank
    does not answer for ``MATEX_TIMEOUT`` seconds.
    """
    global _left
    if _left or is_child_process() or MPI.Is_finalized():
        return
    _left = True
    threads = list(_ALL)
    barriers = [liveness.leave() for liveness in threads]
    last_answer = time.monotonic()

    def all_left() -> bool:
        return all(barrier.Test() for barrier in barriers)

    while not poll(all_left, FIRST_CHECK):
        states = {state for liveness in threads for state, _ in liveness.states().values()}
        if State.SILENT not in states or all_left():  # a rank that has passed the barriers answers no more
            last_answer = time.monotonic()
        elif time.monotonic() - last_answer > timeout():
            abort_job(f"the job ends: a rank has not answered for {timeout():g} s")
    for liveness in threads:
        liveness.stop()


def stop_threads() -> None:
    """End the liveness threads of this process, before MPI ends."""
    for liveness in list(_ALL):
        liveness.stop()
