"""Every wait for other ranks has an end, and the error says which rank is missing, and where it is instead.

Each rank has a thread that answers the questions of the others. A rank that waits asks after a few seconds, then less
and less often. A rank that has left its program ends the wait at once. After ``MATEX_TIMEOUT`` seconds the wait ends
anyway, unless a rank says that it is busy on behalf of all: writing a checkpoint, running a callback.
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
from typing import TypeVar

from matex_data.errors import PartitionError
from matex_data.mpi.abort import abort_job
from matex_data.mpi.library import MPI
from matex_data.mpi.processes import is_child_process

log = logging.getLogger("matex_data")

FIRST_LOOK = 5.0  # seconds of waiting after which a rank asks the others for the first time
ANSWER_TIME = 3.0  # seconds that the others have for an answer
POLL = 0.1  # seconds between two looks at questions
SHORTEST_NAP, LONGEST_NAP = 2e-5, 5e-4  # seconds between two looks at a request, the longer it takes
_HEAD = struct.Struct("<qB")  # of a message: number of the question, state
_ASK, _ANSWER, _QUESTION, _REPLY = 1, 2, 3, 4  # tags; the last two: about what ``answer`` knows
T = TypeVar("T")
_LIBRARIES = tuple(str(Path(sysconfig.get_path(name)).resolve()) for name in ("purelib", "platlib", "stdlib"))


class State(IntEnum):
    """State of a rank, as it answers others."""

    RUNNING = 0
    WAITING = 1
    BUSY = 2
    LEFT = 3
    SILENT = 4  # has not answered


_busy: dict[int, str] = {}  # by thread
_waiting: dict[int, int] = {}  # by thread: waits, one in the other
_calls: dict[int, str] = {}  # by thread: the call that every rank has to make
_left = False


def timeout() -> float:
    """Return the seconds after which a wait for another rank ends: the environment variable ``MATEX_TIMEOUT``."""
    return float(os.environ.get("MATEX_TIMEOUT", "600"))


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Context manager: other ranks that wait meanwhile go on waiting, however long this takes."""
    thread = threading.get_ident()
    outer = _busy.get(thread)
    _busy[thread] = what
    try:
        yield
    finally:
        _busy.pop(thread)
        if outer is not None:
            _busy[thread] = outer


@contextmanager
def waiting() -> Iterator[None]:
    """Context manager: this thread waits for other ranks."""
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
    """Context manager: this thread is in a call that every rank has to make, as errors of waits in it say."""
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
    for thread, what in list(_busy.items()):
        if thread not in _waiting:
            return State.BUSY, what
    return (State.WAITING if _waiting else State.RUNNING), user_location()


def user_location() -> str:
    """Return the line of the user's program that the main thread is at."""
    main = threading.main_thread().ident
    frame: FrameType | None = sys._current_frames().get(main) if main is not None else None
    innermost = frame
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "an unknown place"
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}, in {frame.f_code.co_name}"


def _is_library(frame: FrameType) -> bool:
    own = str(frame.f_globals.get("__name__")).split(".")[0] == "matex_data"
    return own or frame.f_code.co_filename.startswith(("<frozen", *_LIBRARIES))


class Liveness:
    """Thread of one rank that answers the others, and asks them.

    Making one is *collective*.

    Parameters
    ----------
    comm : of several ranks, for this alone. MPI has to allow calls from several threads.

    Attributes
    ----------
    answer : gives the reply to a question that another rank puts by ``consult``; called in the thread.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self.on_query: Callable[[bytes], bytes] = lambda question: b""
        self._replies: dict[int, bytes] = {}
        self.rank, self.size = comm.rank, comm.size
        self._answers: dict[int, tuple[State, str]] = {}
        self._question = 0
        self._sent: list[tuple[MPI.Request, bytes]] = []
        self._sending, self._asking = threading.Lock(), threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="matex-liveness", daemon=True)
        self._thread.start()
        _ALL.add(self)

    def states(self) -> dict[int, tuple[State, str]]:
        """Return the states of the other ranks by rank; those that do not answer are ``SILENT``."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        with self._asking:
            answers = self._ask(others, _ASK, b"", self._answers)
        return {rank: answers.get(rank, (State.SILENT, "")) for rank in others}

    @property
    def ended(self) -> bool:
        """Whether the thread has ended, which is at the end of the program."""
        return self._ended.is_set()

    def query(self, ranks: Sequence[int], question: bytes) -> dict[int, bytes]:
        """Return what ``answer`` of other ranks replies to a question, by rank; without those that are silent."""
        with self._asking:
            return self._ask(ranks, _QUESTION, question, self._replies)

    def _ask(self, ranks: Sequence[int], tag: int, text: bytes, answers: dict[int, T]) -> dict[int, T]:
        """Return the answers once all have answered, or have not in time."""
        self._question += 1
        answers.clear()
        for rank in ranks:
            self._send(rank, tag, _HEAD.pack(self._question, 0) + text)
        end = time.monotonic() + ANSWER_TIME
        while len(answers) < len(ranks) and time.monotonic() < end and not self._ended.is_set():
            time.sleep(0.01)
        return dict(answers)

    def close(self) -> None:
        """End the thread and free the communicator. *Collective*."""
        barrier = self._comm.Ibarrier()  # nobody asks any more
        poll(lambda: bool(barrier.Test()))
        self.stop()
        self._comm.Free()

    def stop(self) -> None:
        """End the thread."""
        _ALL.discard(self)
        self._ended.set()
        self._thread.join(ANSWER_TIME)

    def leave(self) -> MPI.Request:
        """Return a request that completes when all ranks are at the end of their programs. *Collective*."""
        return self._comm.Ibarrier()

    def _serve(self) -> None:
        status = MPI.Status()
        while not self._ended.wait(POLL) and not MPI.Is_finalized():
            while (message := self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
                memory = bytearray(status.Get_count(MPI.BYTE))
                message.Recv([memory, MPI.BYTE], status)
                source, tag = status.Get_source(), status.Get_tag()
                question, state = _HEAD.unpack_from(memory)
                text = bytes(memory[_HEAD.size :])
                if tag == _ASK:
                    mine, at = _state()
                    self._send(source, _ANSWER, _HEAD.pack(question, mine) + at.encode()[-400:])
                elif tag == _QUESTION:
                    self._send(source, _REPLY, _HEAD.pack(question, 0) + self.on_query(text))
                elif question == self._question and tag == _ANSWER:
                    self._answers[source] = State(state), text.decode(errors="replace")
                elif question == self._question:
                    self._replies[source] = text

    def _send(self, rank: int, tag: int, text: bytes) -> None:
        with self._sending:
            self._sent = [(request, data) for request, data in self._sent if not request.Test()]
            self._sent.append((self._comm.Isend([text, MPI.BYTE], rank, tag), text))


class Wait:
    """A wait for other ranks, from now on.

    Parameters
    ----------
    liveness : of the ranks that are waited for; None: they cannot be asked.

    Attributes
    ----------
    next_check : time (``time.monotonic``) at which ``check`` is due.
    """

    def __init__(self, liveness: Liveness | None) -> None:
        self._liveness = liveness
        self._begin, self._seconds = time.monotonic(), timeout()
        self._deadline = self._begin + self._seconds
        self._interval = FIRST_LOOK if liveness is not None else self._seconds
        self._told = False
        self.next_check = min(self._deadline, self._begin + self._interval)

    def check(self) -> PartitionError | None:
        """Return why it is of no use to go on waiting, or None."""
        states = self._liveness.states() if self._liveness is not None else {}
        gone = [rank for rank, (state, _) in states.items() if state == State.LEFT]
        if gone:
            return _left_error(gone)
        now = time.monotonic()
        if now >= self._deadline:
            hindrance = next((what for state, what in states.values() if state == State.BUSY), None)
            if hindrance is None:
                return _absent_error(states, now - self._begin)
            if not self._told:
                log.warning("waiting for another rank for %.0f s: it is busy with %s", now - self._begin, hindrance)
            self._told = True
            self._deadline = now + self._seconds
        self._interval *= 2
        self.next_check = min(self._deadline, now + self._interval)
        return None


def wait_until(happened: Callable[[float], bool], liveness: Liveness | None) -> None:
    """Return once ``happened(seconds)`` says so, which looks for at most that many seconds.

    Raises
    ------
    PartitionError : another rank has left its program, or does not come in time.
    """
    wait = Wait(liveness)
    with waiting():
        while not happened(max(0.0, wait.next_check - time.monotonic())):
            error = wait.check()
            if error is not None:
                raise error


def poll(happened: Callable[[], bool], seconds: float = float("inf")) -> bool:
    """Return whether ``happened()`` within so many seconds, looking now and then: less often the longer it takes."""
    begin, pause = time.monotonic(), SHORTEST_NAP
    while not happened():
        waited = time.monotonic() - begin
        if waited >= seconds:
            return False
        time.sleep(pause)
        pause = min(2 * pause, max(LONGEST_NAP, waited / 1000))
    return True


def _left_error(ranks: list[int]) -> PartitionError:
    return PartitionError(
        f"rank {', '.join(map(str, ranks[:5]))} has come to the end of its program, and this one waits for it",
        expected=_expected(),
        found=f"this rank is at {user_location()}",
        remedy="take the same number of batches on every rank, and let none leave the program before the others",
    )


def _absent_error(states: dict[int, tuple[State, str]], seconds: float) -> PartitionError:
    words = {State.RUNNING: "is at", State.WAITING: "waits for other ranks, too, at", State.SILENT: "does not answer"}
    order = sorted(states.items(), key=lambda item: item[1][0] == State.WAITING)
    found = [f"rank {rank} {words[state]} {at}".rstrip() for rank, (state, at) in order if state in words]
    more = f"; and {len(found) - 4} more" if len(found) > 4 else ""
    return PartitionError(
        f"another rank does not take part: this one has waited {seconds:.0f} s",
        expected=f"{_expected()}, and none is slower than the others by so much",
        found="; ".join([f"this rank is at {user_location()}", *found[:4]]) + more,
        remedy="pass over the data on every rank alike; where one rank may take that long, "
        "set MATEX_TIMEOUT to more seconds",
    )


_ALL: weakref.WeakSet[Liveness] = weakref.WeakSet()


@atexit.register
def leave() -> None:
    """Tell whoever waits for this rank that it has left, until all ranks have. *Collective*.

    MPI would wait for them, too, but would tell nobody. Ends the job where a rank has vanished.
    """
    global _left
    if _left or is_child_process() or MPI.Is_finalized():
        return
    _left = True
    everyone = list(_ALL)
    barriers = [liveness.leave() for liveness in everyone]
    heard = time.monotonic()

    def all_left() -> bool:
        return all(barrier.Test() for barrier in barriers)

    while not poll(all_left, FIRST_LOOK):
        states = {state for liveness in everyone for state, _ in liveness.states().values()}
        if State.SILENT not in states or all_left():  # whoever knows that all have left answers no more
            heard = time.monotonic()
        elif time.monotonic() - heard > timeout():
            abort_job(f"a rank has not answered for {timeout():g} s: the job ends")
    for liveness in everyone:
        liveness.stop()


def stop() -> None:
    """End the threads of this process, before MPI ends."""
    for liveness in list(_ALL):
        liveness.stop()
