"""Activity of this rank, as it reports it to the others: it runs, waits for them, is busy for them, or has left."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from types import FrameType
from typing import Any

from matex_data.paths import is_of_user

READ_AHEAD = "matex-read"
"""Name of threads that read data ahead of the program."""


class RankState(IntEnum):
    """State of a rank, as it reports it to others."""

    RUNNING = 0
    WAITING = 1
    BUSY = 2
    LEFT = 3
    SILENT = 4  # it did not answer


_entries: dict[object, tuple[str, int, Any]] = {}
"""What the threads are in: kind, thread, and text or ranks of each context, the innermost last."""
_met = 0  # number of meetings, and of waits of threads that read ahead, that have begun
_left = False


@contextmanager
def _noted(kind: str, detail: Any = None) -> Iterator[None]:
    """Context manager: note what this thread is in.

    After an exception the context may end late, when Python collects the callback that holds it; so it removes its own
    entry, whatever the thread has begun since.
    """
    entry = object()
    _entries[entry] = kind, threading.get_ident(), detail
    try:
        yield
    finally:
        del _entries[entry]


def _of(kind: str) -> list[tuple[int, Any]]:
    """Return thread and detail of each context of a kind that has not ended."""
    return [(thread, detail) for noted, thread, detail in list(_entries.values()) if noted == kind]


def busy(activity: str) -> AbstractContextManager[None]:
    """Return a context manager: extend the waits of other ranks for this one as long as the activity takes."""
    return _noted("busy", activity)


def waiting() -> AbstractContextManager[None]:
    """Return a context manager: report that this thread waits for other ranks."""
    return _noted("waiting")


def meeting(ranks: object, for_main: bool = False) -> AbstractContextManager[None]:
    """Return a context manager: report that the main thread waits until all ranks have come, which exchange numbers.

    Parameters
    ----------
    ranks : liveness of the ranks.
    for_main : the main thread waits for this one, whichever it is.
    """
    global _met
    if not for_main and threading.get_ident() != threading.main_thread().ident:
        return nullcontext()
    _met += 1
    return _noted("meeting", ranks)


def polling() -> AbstractContextManager[None]:
    """Return a context manager: report that a thread which reads ahead waits for other ranks."""
    global _met
    _met += 1
    return _noted("polling")


def meetings(ranks: object) -> int | None:
    """Return the number of meetings so far if this rank is in one of these ranks, and reads nothing; None if not."""
    polls = {thread for thread, _ in _of("polling")}
    reads = any(thread.name == READ_AHEAD and thread.ident not in polls for thread in threading.enumerate())
    latest = [met for _, met in _of("meeting")][-1:]
    return _met if latest == [ranks] and not reads else None


def collective(call: str) -> AbstractContextManager[None]:
    """Return a context manager: name the collective call of this thread, the outermost one, in errors of waits."""
    return _noted("collective", call)


def inside(call: str) -> AbstractContextManager[None]:
    """Return a context manager: name the call of MPI that this thread makes, beside the location of this rank.

    Parameters
    ----------
    call : name of the function, and of the file.
    """
    return _noted("inside", call)


def collective_call() -> str | None:
    """Return the collective call of the user that this rank is in; None if it has no name."""
    return next((call for _, call in _of("collective")), None)


def note_end() -> bool:
    """Report from now on that this rank has reached the end of its program; return whether it had before."""
    global _left
    before, _left = _left, True
    return before


def own_state() -> tuple[RankState, str]:
    """Return the state of this rank, and its activity or its location."""
    if _left:
        return RankState.LEFT, ""
    waits = {thread for thread, _ in _of("waiting")}
    for thread, activity in reversed(_of("busy")):
        if thread not in waits:
            return RankState.BUSY, activity
    return (RankState.WAITING if waits else RankState.RUNNING), user_location()


def waits_for_ranks() -> bool:
    """Return whether the program waits for other ranks, or has ended; threads that read ahead do not count."""
    readers = {thread.ident for thread in threading.enumerate() if thread.name == READ_AHEAD}
    return _left or any(thread not in readers for thread, _ in _of("waiting"))


def user_location() -> str:
    """Return file, line and function of the user's program that the main thread executes, and what MPI does."""
    calls = "".join(f"; MPI: {call}" for _, call in _of("inside")[:2])
    return _line_of_user() + calls


def _line_of_user() -> str:
    main = threading.main_thread().ident
    frame: FrameType | None = sys._current_frames().get(main) if main is not None else None
    innermost = frame
    while frame is not None and not is_of_user(frame):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "an unknown line"
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}, in {frame.f_code.co_name}"
