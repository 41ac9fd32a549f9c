"""Activity of this rank, as it reports it to the others: it runs, waits for them, is busy for them, or has left."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType

from matex_data.paths import is_library

READ_AHEAD = "matex-read"
"""Name of threads that read data ahead of the program."""


class RankState(IntEnum):
    """State of a rank, as it reports it to others."""

    RUNNING = 0
    WAITING = 1
    BUSY = 2
    LEFT = 3
    SILENT = 4  # it did not answer


_busy: dict[object, tuple[int, str]] = {}  # by entry of the context: thread and activity, the innermost last
_waiting: dict[int, int] = {}  # by thread: depth of nested waits
_calls: dict[int, str] = {}  # by thread: the collective call of the user
_inside: dict[int, str] = {}  # by thread: the call of MPI, with its file
_meetings: list[object] = []  # that the main thread is in: their ranks, the innermost last
_polling: set[int] = set()  # threads that wait for other ranks, for which this rank waits itself
_met = 0  # number of meetings, and of waits of such threads, that have begun
_left = False


@contextmanager
def busy(activity: str) -> Iterator[None]:
    """Context manager: extend the waits of other ranks for this one as long as the activity takes.

    After an exception the context may end late, when Python collects the callback that holds it; so it removes its own
    entry, whatever the thread has begun since.
    """
    entry = object()
    _busy[entry] = threading.get_ident(), activity
    try:
        yield
    finally:
        del _busy[entry]


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
def meeting(ranks: object) -> Iterator[None]:
    """Context manager: report that the main thread waits until all ranks have come, which exchange a few numbers.

    Parameters
    ----------
    ranks : liveness of the ranks.
    """
    global _met
    if threading.get_ident() != threading.main_thread().ident:
        yield
        return
    _met += 1
    _meetings.append(ranks)
    try:
        yield
    finally:
        _meetings.pop()


@contextmanager
def polling() -> Iterator[None]:
    """Context manager: report that a thread which reads ahead waits for other ranks."""
    global _met
    thread = threading.get_ident()
    _met += 1
    _polling.add(thread)
    try:
        yield
    finally:
        _polling.discard(thread)


def meetings(ranks: object) -> int | None:
    """Return the number of meetings so far if this rank is in one of these ranks, and reads nothing; None if not."""
    threads = threading.enumerate()
    reads = any(thread.name == READ_AHEAD and thread.ident not in _polling for thread in threads)
    return _met if _meetings[-1:] == [ranks] and not reads else None


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


@contextmanager
def inside(call: str) -> Iterator[None]:
    """Context manager: name the call of MPI that this thread makes, beside the location of this rank. Do not nest it.

    Parameters
    ----------
    call : name of the function, and of the file.
    """
    thread = threading.get_ident()
    _inside[thread] = call
    try:
        yield
    finally:
        del _inside[thread]


def collective_call() -> str | None:
    """Return the collective call of the user that this rank is in; None if it has no name."""
    return next(iter(list(_calls.values())), None)


def note_end() -> bool:
    """Report from now on that this rank has reached the end of its program; return whether it had before."""
    global _left
    before, _left = _left, True
    return before


def own_state() -> tuple[RankState, str]:
    """Return the state of this rank, and its activity or its location."""
    if _left:
        return RankState.LEFT, ""
    for thread, activity in reversed(list(_busy.values())):
        if thread not in _waiting:
            return RankState.BUSY, activity
    return (RankState.WAITING if _waiting else RankState.RUNNING), user_location()


def waits_for_ranks() -> bool:
    """Return whether the program waits for other ranks, or has ended; threads that read ahead do not count."""
    readers = {thread.ident for thread in threading.enumerate() if thread.name == READ_AHEAD}
    return _left or any(thread not in readers for thread in list(_waiting))


def user_location() -> str:
    """Return file, line and function of the user's program that the main thread executes, and what MPI does."""
    calls = "".join(f"; MPI: {call}" for call in list(_inside.values())[:2])
    return _line_of_user() + calls


def _line_of_user() -> str:
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
    return own or is_library(frame.f_code.co_filename)
