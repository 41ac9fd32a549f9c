"""Waits within calls of MPI have an end, too: a thread looks after them, and ends the job."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from matex_data.mpi import deadlines
from matex_data.mpi.abort import abort_job
from matex_data.mpi.deadlines import Liveness, Wait
from matex_data.mpi.library import MPI

INTERVAL = 1.0
"""Seconds between two looks at the waits of this process."""


class Watchdog:
    """Thread that ends the job when a wait of this process for other ranks is of no use any more.

    Calls of MPI wait for ever, and nothing interrupts them.
    """

    def __init__(self) -> None:
        self.waits: dict[int, Wait] = {}
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, at the first wait."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="matex-watchdog", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while True:
            time.sleep(INTERVAL)
            for thread, wait in list(self.waits.items()):
                if time.monotonic() >= wait.next_check:
                    error = wait.check()
                    if error is not None and self.waits.get(thread) is wait:
                        world = MPI.COMM_WORLD
                        abort_job(f"rank {world.rank} of {world.size} ends the job: {error}")


_WATCHDOG = Watchdog()


@contextmanager
def waiting_for(ranks: Liveness | None) -> Iterator[None]:
    """Context manager: this thread waits for other ranks, within MPI; one wait at a time for each thread.

    Parameters
    ----------
    ranks : that are waited for; None: they cannot be asked where they are.
    """
    thread = threading.get_ident()
    with deadlines.waiting():
        _WATCHDOG.waits[thread] = Wait(ranks)
        _WATCHDOG.start()
        try:
            yield
        finally:
            del _WATCHDOG.waits[thread]
