"""Signals and time limits upon which all ranks save their state and end, to be started again."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from matex_data.errors import PartitionError
from matex_data.machine import seconds_of
from matex_data.mpi.attributes import attached
from matex_data.training.comm.channel import open_channel

if TYPE_CHECKING:
    from matex_data.mpi.communicator import Communicator, PendingMaximum
    from matex_data.mpi.library import MPI

log = logging.getLogger("matex_data.training")

EXIT_PREEMPTED: int = os.EX_TEMPFAIL
"""Exit code of a run that has saved its state and wants to be started again: 75."""
SIGNALS = "MATEX_SIGNALS"
"""Environment variable: names of the signals, separated by commas; "none": no signal."""
DEFAULT_SIGNALS = "SIGUSR1,SIGUSR2,SIGTERM"
END_TIMES = ("MATEX_END_TIME", "SLURM_JOB_END_TIME")
"""Environment variables: time at which the job is ended, in seconds since 1970; "none": at no time."""
MARGIN = "MATEX_END_MARGIN"
"""Environment variable: seconds that are to be left when all ranks have saved, beyond what saving takes."""
DEFAULT_MARGIN = 60.0
_TIME_LIMIT = 1 << 16  # reason of a rank that was sent no signal, above all numbers of signals


class Preempted(SystemExit):
    """Request to end the process with ``EXIT_PREEMPTED``, after all ranks have saved."""

    def __init__(self) -> None:
        super().__init__(EXIT_PREEMPTED)


class TimeLimit:
    """Time at which the job is ended, and the time that is needed before.

    Parameters
    ----------
    end : seconds since 1970; None: there is no limit.
    margin : seconds to be left when all ranks have saved; at most half of what is left now.
    now : seconds since 1970.

    Examples
    --------
    >>> limit = TimeLimit(end=1000.0, margin=60.0, now=0.0)
    >>> limit.note_save(20.0)
    >>> limit.is_near(now=890.0), limit.is_near(now=905.0)  # two saves of 20 s and the margin are 100 s
    (False, True)
    """

    def __init__(self, end: float | None, margin: float, now: float) -> None:
        self._end = end
        self._margin = margin if end is None else min(margin, max(0.0, (end - now) / 2))
        self._save = self._interval = 0.0
        self._looked: float | None = None

    def note_save(self, seconds: float) -> None:
        """Note how long a save has taken."""
        self._save = max(self._save, seconds)

    def is_near(self, now: float) -> bool:
        """Return whether it is time to save: the next look may be as late as any look before."""
        if self._looked is not None:
            self._interval = max(self._interval, now - self._looked)
        self._looked = now
        return self._end is not None and now + self._interval + 2 * self._save + self._margin >= self._end


class StopRequests:
    """Requests to this process to save and end."""

    def __init__(self) -> None:
        self._received: int | None = None
        self._previous: dict[int, Any] = {}
        self._limit: TimeLimit | None = None
        self._told = False

    @property
    def limit(self) -> TimeLimit:
        """Return the time limit of the environment."""
        if self._limit is None:
            self._limit = TimeLimit(end_time(), seconds_of(MARGIN, DEFAULT_MARGIN), time.time())
        return self._limit

    def reason(self) -> int:
        """Return the number of the signal that this process was sent, another number near the time limit, or 0."""
        near = self.limit.is_near(time.time())
        return self._received or (_TIME_LIMIT if near else 0)

    def install(self) -> list[int]:
        """Install the handlers of ``signals()``, and return those that had another; it is called by ours."""
        numbers = signals()
        if threading.current_thread() is not threading.main_thread():
            if numbers and not self._told:
                self._told = True
                log.warning("signals do not save this run: fit was not called in the main thread of Python")
            return []
        replaced = [number for number in numbers if signal.getsignal(number) != self._on_signal]
        self._previous |= {number: signal.signal(number, self._on_signal) for number in replaced}
        return list(replaced)

    def uninstall(self, numbers: Sequence[int]) -> None:
        """Put back the handlers that ``install`` has replaced, unless the program has set others since."""
        for number in numbers:
            handler = self._previous.pop(number, None)
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def ignore(self) -> None:
        """Ignore all further signals, as this process is about to end, with a code of its own.

        Once a rank has ended, ``srun -K1`` sends SIGTERM to the others, which end a moment later. Python would put back
        the system's handlers when it ends, but for signals that are ignored.
        """
        if threading.current_thread() is threading.main_thread():
            for number in {signal.SIGTERM, *signals()}:
                signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: Any) -> None:
        self._received = self._received or number
        handler = self._previous.get(number)
        if callable(handler):
            handler(number, frame)


REQUESTS = StopRequests()
"""Requests to this process."""


class StopAgreement:
    """Agreement of the ranks to save and end. *Collective*.

    The reduction of a step completes during the next one, so that no rank waits for it.

    Parameters
    ----------
    comm : communicator of the user.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm: Communicator = open_channel(comm).communicator.duplicate()
        self._pending: PendingMaximum | None = None

    def after_step(self) -> int:
        """Return the reason of any rank at its previous call; 0 if none had one. *Collective*."""
        reason = self._settle()
        if not reason:
            self._pending = self._comm.start_maximum([REQUESTS.reason()])
        return reason

    def now(self) -> int:
        """Return the reason of any rank, now; 0 if none has one. *Collective*."""
        return self._settle() or self._comm.maximum(REQUESTS.reason())[0]

    def _settle(self) -> int:
        pending, self._pending = self._pending, None
        return 0 if pending is None else int(pending.wait()[0])

    def close(self) -> None:
        """Free the communicator. *Collective*."""
        self._settle()
        self._comm.free()


def stop_agreement(comm: MPI.Intracomm) -> StopAgreement:
    """Return the agreement of the ranks of a communicator. *Collective* at the first call for each."""
    return attached(comm, StopAgreement)


@contextmanager
def stopping_on_request() -> Iterator[None]:
    """Context manager: signals request this process to save and end, also beyond it if they did before."""
    replaced = REQUESTS.install()
    try:
        yield
    except Preempted:
        REQUESTS.ignore()
        raise
    finally:
        REQUESTS.uninstall(replaced)


def stop_requested(comm: MPI.Intracomm | None = None) -> bool:
    """Return on all ranks whether any of them was sent a signal, or its time limit is near. *Collective*.

    For training loops of your own, which call it after each step. The first call installs the handlers. Once the result
    is True, signals are ignored: save then, and end with ``sys.exit(matex_data.training.EXIT_PREEMPTED)``.

    Parameters
    ----------
    comm : communicator; None: all ranks of the job.

    Examples
    --------
    >>> import matex_data as md
    >>> for step in range(3):
    ...     if md.training.stop_requested():  # save the weights and the state of the data, and exit
    ...         break
    >>> step
    2
    """
    REQUESTS.install()
    requested = bool(stop_agreement(open_channel(comm).user).now())
    if requested:
        REQUESTS.ignore()
    return requested


def signals() -> list[signal.Signals]:
    """Return the signals of ``MATEX_SIGNALS``; raise ``PartitionError`` if one of them does not exist."""
    text = os.environ.get(SIGNALS, DEFAULT_SIGNALS)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if [name.lower() for name in names] == ["none"]:
        return []
    known = signal.Signals.__members__
    unknown = [name for name in names if name not in known or name in ("SIGKILL", "SIGSTOP")]
    if unknown:
        raise PartitionError(
            f"{SIGNALS} names signals that a process cannot handle",
            expected=f"names like {DEFAULT_SIGNALS}, or none",
            found=", ".join(unknown),
            remedy=f"correct or unset {SIGNALS}",
        )
    return [known[name] for name in names]


def end_time() -> float | None:
    """Return when the job is ended, in seconds since 1970, or None; raise ``PartitionError`` if that is no number."""
    for name in END_TIMES:
        text = os.environ.get(name, "").strip()
        if text.lower() == "none":
            return None
        if text:
            try:
                return float(text)
            except ValueError:
                raise PartitionError(
                    f"{name} is no time",
                    expected="seconds since 1970, as from date +%s, or none",
                    found=repr(text),
                    remedy=f"correct or unset {name}",
                ) from None
    return None


def exit_preempted(reason: int, rank: int, saved: str) -> None:
    """Tell the reason on rank 0 and raise ``Preempted``.

    Parameters
    ----------
    saved : what was saved, as text.
    """
    if rank == 0:
        cause = "the time limit is near" if reason >= _TIME_LIMIT else f"{signal.Signals(reason).name} was received"
        text = "%s: saved %s; all ranks end with exit code %d, to be started again"
        log.warning(text, cause, saved, EXIT_PREEMPTED)
    sys.stdout.flush()
    raise Preempted
