"""Deadlines for every wait on other ranks.

A waiting rank asks for a census of all ranks every ``CHECK_INTERVAL`` seconds. The wait fails at once if another rank
has reached the end of its program, and after `STANDSTILL` censuses if all ranks wait for one another in different
calls; otherwise ``MATEX_TIMEOUT`` seconds after its begin, or after a rank was last seen to be busy on behalf of all,
as with a checkpoint or a callback. The error names the missing rank and the line that it executes. A wait inside of a
call of MPI cannot be interrupted: there a thread aborts the job instead.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, TypeVar

from matex_data.errors import PartitionError
from matex_data.machine import seconds_of
from matex_data.mpi.abort import abort_job
from matex_data.mpi.activity import RankState, collective_call, inside, note_end, user_location, waiting
from matex_data.mpi.census import RankStates
from matex_data.mpi.library import MPI
from matex_data.mpi.liveness import Liveness, all_threads
from matex_data.mpi.polling import poll
from matex_data.mpi.processes import is_child_process

log = logging.getLogger("matex_data")

T = TypeVar("T")

CHECK_INTERVAL = 5.0
"""Seconds from the begin of a wait to the first census, and from each census to the next."""
STANDSTILL = 3
"""Censuses in a row in which all ranks wait at different lines, and none has gone on, before that is an error."""
MESSAGE_AFTER = 60.0
"""Seconds from the begin of a wait to a message about the missing ranks."""
TIMEOUT = 600.0
"""Seconds that a rank waits for another one, unless ``MATEX_TIMEOUT`` is set."""
WATCH_INTERVAL = 1.0
"""Seconds between two looks at the waits inside of MPI calls, which cannot be interrupted."""
_DESCRIBED = 4  # ranks in a message


def timeout() -> float:
    """Return the limit in seconds of a wait for another rank: ``MATEX_TIMEOUT``, or 600.

    A text that is no number counts as 600: ranks wait for one another before they raise the error of `check_timeout`.
    """
    try:
        return check_timeout()
    except PartitionError:
        return TIMEOUT


def check_timeout() -> float:
    """Return the seconds in the environment variable ``MATEX_TIMEOUT``; 600 if it is not set.

    Raises
    ------
    PartitionError : it is no finite number from 0 on.
    """
    return seconds_of("MATEX_TIMEOUT", TIMEOUT)


class Wait:
    """Wait for other ranks, from the creation of this object on.

    Parameters
    ----------
    liveness : of the ranks; None if they cannot be queried.
    call : of MPI, with its file, that does not return; "": it has no name.

    Attributes
    ----------
    next_check : time (``time.monotonic``) of the next ``check``.
    """

    def __init__(self, liveness: Liveness | None, call: str = "") -> None:
        self._liveness = liveness
        self._call = call
        self._begin, self._seconds = time.monotonic(), timeout()
        self._deadline = self._begin + self._seconds
        self._interval = CHECK_INTERVAL if liveness is not None else self._seconds
        self._warned = self._told = False
        self._met: list[int | None] = []
        self.next_check = min(self._deadline, self._begin + self._interval)

    def check(self, over: Callable[[], bool] = lambda: False) -> PartitionError | None:
        """Ask what the other ranks do; return the error that ends the wait, or None to continue.

        Parameters
        ----------
        over : returns whether the wait is over, so that no answer is needed.
        """
        states = self._liveness.census(over) if self._liveness is not None else RankStates()
        if states is None:
            return None
        if states.count(RankState.LEFT):
            return _left_error(states)
        now, own = time.monotonic(), self._liveness.rank if self._liveness is not None else 0
        self._met = [*self._met[1 - STANDSTILL :], states.ranks_met]
        if self._met == [states.met] * STANDSTILL:
            return _standstill_error(states, own)
        if now - self._begin >= MESSAGE_AFTER and not self._told:
            self._told = True
            self._tell(states, own, now - self._begin)
        activity = next((text for rank, text in states.ranks(RankState.BUSY).items() if rank != own), None)
        if activity is not None:
            self._deadline = now + self._seconds
            if now - self._begin >= self._seconds and not self._warned:
                self._warned = True
                log.warning("waiting for another rank for %.0f s: it is busy with %s", now - self._begin, activity)
        if now >= self._deadline:
            return _absent_error(states, own, now - self._begin, self._call)
        messages = [moment for moment in (self._begin + MESSAGE_AFTER, self._begin + self._seconds) if moment > now]
        self.next_check = min(self._deadline, now + self._interval, *messages)
        return None

    def _tell(self, states: RankStates, own: int, seconds: float) -> None:
        """Log which ranks are missing, on the first rank that waits for them."""
        missing = _described(states, own, (RankState.RUNNING, RankState.BUSY, RankState.SILENT))
        if missing and own <= min(states.ranks(RankState.WAITING), default=own):
            call = collective_call() or self._call or "a collective operation"
            log.warning("waiting in %s for %.0f s: %s", call, seconds, missing)


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
            error = wait.check(lambda: happened(0.0))
            if error is not None:
                raise error


_waits: dict[int, Wait] = {}
"""Waits inside of calls of MPI, by their threads."""


@cache
def _start_watchdog() -> None:
    """Start the thread that ends the job when a wait inside of MPI exceeds its deadline. Once in a process."""
    threading.Thread(target=_watch, name="matex-watchdog", daemon=True).start()


def _watch() -> None:
    while True:
        time.sleep(WATCH_INTERVAL)
        for thread, wait in list(_waits.items()):
            if time.monotonic() >= wait.next_check:
                _check(thread, wait)


def _check(thread: int, wait: Wait) -> None:
    """End the job if a wait is too long, or if that cannot be told: nobody else would end it."""
    world = MPI.COMM_WORLD
    try:
        error: BaseException | None = wait.check(lambda: _waits.get(thread) is not wait)
    except Exception as failure:
        error = failure
    if error is not None and _waits.get(thread) is wait:
        abort_job(f"rank {world.rank} of {world.size} ends the job: {error}")


@contextmanager
def waiting_for(ranks: Liveness | None, call: str = "") -> Iterator[None]:
    """Context manager: let the watchdog check this thread, which is inside an MPI call.

    Parameters
    ----------
    ranks : liveness of the ranks that take part in the call; None if they cannot be queried.
    call : of MPI, with its file, for the error; "": it has no name.
    """
    with waiting(), inside(call) if call else nullcontext(), _watched(Wait(ranks, call)):
        yield


def derived(ranks: Liveness | None, make: Callable[..., T], *arguments: Any) -> T:
    """Return the communicator that a method of MPI makes. *Collective*, as this method is.

    Nothing else calls such methods: within MPI a rank would wait for one that never comes without a deadline.

    Parameters
    ----------
    ranks : as of ``waiting_for``.
    make : method of a communicator, such as ``comm.Split``.
    """
    with waiting_for(ranks):
        return make(*arguments)


@contextmanager
def reading(call: str) -> Iterator[None]:
    """Context manager: let the watchdog end the job if a read of this thread does not return.

    The thread waits for the storage, not for other ranks: it does so longer than others that have left, too.

    Parameters
    ----------
    call : of MPI, with its file, for the error.
    """
    with inside(call), _watched(Wait(None, call)):
        yield


@contextmanager
def _watched(wait: Wait) -> Iterator[None]:
    thread = threading.get_ident()
    around = _waits.get(thread)
    try:
        _waits[thread] = wait
        _start_watchdog()
        yield
    finally:
        if around is None:
            _waits.pop(thread, None)
        else:
            _waits[thread] = around


def _expected() -> str:
    call = collective_call()
    if call is None:
        return "all ranks make the same calls"
    return f"every rank calls {call}, not one rank alone (as within `if rank == 0:`)"


def _left_error(states: RankStates) -> PartitionError:
    left = ", ".join(map(str, states.ranks(RankState.LEFT)))
    return PartitionError(
        f"rank {left} has come to the end of its program, and this one waits for it",
        expected=_expected(),
        found=f"this rank is at {user_location()}",
        remedy="take the same number of batches on every rank, and let none leave the program before the others",
    )


def _standstill_error(states: RankStates, own: int) -> PartitionError:
    return PartitionError(
        "the ranks wait for one another in different calls",
        expected=_expected(),
        found=f"this rank is at {user_location()}; {_described(states, own, (RankState.WAITING,))}",
        remedy="call what is collective on every rank, in the same order",
    )


def _absent_error(states: RankStates, own: int, seconds: float, call: str) -> PartitionError:
    order = (RankState.RUNNING, RankState.BUSY, RankState.SILENT, RankState.WAITING)
    if call:
        return PartitionError(
            f"MPI does not return from {call}: this rank has waited {seconds:.0f} s",
            expected="a storage that answers, and one file that all ranks see",
            found="; ".join(filter(None, [f"this rank is at {user_location()}", _described(states, own, order)])),
            remedy='see with matex doctor whether all nodes see the same file, or read with io="independent"; '
            "if the storage may take longer, set MATEX_TIMEOUT to more seconds",
        )
    return PartitionError(
        f"another rank does not take part: this one has waited {seconds:.0f} s",
        expected=f"{_expected()}, and none is slower than the others by so much",
        found="; ".join(filter(None, [f"this rank is at {user_location()}", _described(states, own, order)])),
        remedy="iterate over the data alike on every rank; "
        "if one rank may take longer, set MATEX_TIMEOUT to more seconds",
    )


def _described(states: RankStates, own: int, order: tuple[RankState, ...]) -> str:
    """Return what the first four of the other ranks do, as text: those of the first state in ``order`` first."""
    words = {
        RankState.RUNNING: "is at",
        RankState.WAITING: "waits for other ranks, too, at",
        RankState.BUSY: "is busy with",
        RankState.SILENT: "does not answer",
    }
    found = [(rank, state, text) for state in order for rank, text in states.ranks(state).items() if rank != own]
    shown = [f"rank {rank} {words[state]} {text}".rstrip() for rank, state, text in found[:_DESCRIBED]]
    this = RankState.WAITING in order or own in states.ranks(RankState.BUSY)
    more = sum(map(states.count, order)) - this - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")


@atexit.register
def leave() -> None:
    """Report that this rank has reached the end of its program, until all ranks have. *Collective*.

    ``MPI_Finalize`` waits for the other ranks as well, but without an answer to their queries. Abort the job if a rank
    does not answer for ``MATEX_TIMEOUT`` seconds.
    """
    if is_child_process() or MPI.Is_finalized() or note_end():
        return
    threads = all_threads()
    barriers = [liveness.leave() for liveness in threads]
    last_answer = time.monotonic()

    def all_left() -> bool:
        return all(barrier.Test() for barrier in barriers)

    while not poll(all_left, CHECK_INTERVAL):
        states = [liveness.census(all_left) or RankStates() for liveness in threads]
        if not any(state.count(RankState.SILENT) for state in states):  # a rank behind the barriers answers no more
            last_answer = time.monotonic()
        elif time.monotonic() - last_answer > timeout():
            abort_job(f"the job ends: a rank has not answered for {timeout():g} s")
    for liveness in threads:
        liveness.stop()
