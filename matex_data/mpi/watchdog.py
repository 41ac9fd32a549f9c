"""Deadlines for waits inside MPI calls, which cannot be interrupted: a thread aborts the job instead."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from matex_data.mpi.abort import abort_job
from matex_data.mpi.activity import inside, waiting
from matex_data.mpi.deadlines import Wait
from matex_data.mpi.library import MPI
from matex_data.mpi.liveness import Liveness

INTERVAL = 1.0
"""Seconds between two checks of the waits of this process."""


class Watchdog:
    """Thread that aborts the job when a registered wait of this process exceeds its deadline."""

    def __init__(self) -> None:
        self.waits: dict[int, Wait] = {}
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread if it does not run yet."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="matex-watchdog", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while True:
            time.sleep(INTERVAL)
            for thread, wait in list(self.waits.items()):
                if time.monotonic() >= wait.next_check:
                    self._check(thread, wait)

    def _check(self, thread: int, wait: Wait) -> None:
        """End the job if a wait is too long, or if that cannot be told: nobody else would end it."""
        world = MPI.COMM_WORLD
        try:
            error: BaseException | None = wait.check(lambda: self.waits.get(thread) is not wait)
        except Exception as failure:
            error = failure
        if error is not None and self.waits.get(thread) is wait:
            abort_job(f"rank {world.rank} of {world.size} ends the job: {error}")


_WATCHDOG = Watchdog()


@contextmanager
def waiting_for(ranks: Liveness | None, call: str = "") -> Iterator[None]:
    """Context manager: let the watchdog check this thread, which is inside an MPI call. Do not nest it.

    Parameters
    ----------
    ranks : liveness of the ranks that take part in the call; None if they cannot be queried.
    call : of MPI, with its file, for the error; "": it has no name.
    """
    with waiting(), inside(call) if call else nullcontext(), _watched(Wait(ranks, call)):
        yield


@contextmanager
def reading(call: str) -> Iterator[None]:
    """Context manager: let the watchdog end the job if a read of this thread does not return. Do not nest it.

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
    try:
        _WATCHDOG.waits[thread] = wait
        _WATCHDOG.start()
        yield
    finally:
        _WATCHDOG.waits.pop(thread, None)
