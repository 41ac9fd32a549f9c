"""Deadlines for waits inside MPI calls, which cannot be interrupted: a thread aborts the job instead."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from matex_data.mpi.abort import abort_job
from matex_data.mpi.activity import waiting
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
                    error = wait.check(lambda thread=thread, wait=wait: self.waits.get(thread) is not wait)  # type: ignore[misc]
                    if error is not None and self.waits.get(thread) is wait:
                        world = MPI.COMM_WORLD
                        abort_job(f"rank {world.rank} of {world.size} ends the job: {error}")


_WATCHDOG = Watchdog()


@contextmanager
def waiting_for(ranks: Liveness | None) -> Iterator[None]:
    """Context manager: let the watchdog check this thread, which is inside an MPI call. Do not nest it.

    Parameters
    ----------
    ranks : liveness of the ranks that take part in the call; None if they cannot be queried.
    """
    thread = threading.get_ident()
    with waiting():
        _WATCHDOG.waits[thread] = Wait(ranks)
        _WATCHDOG.start()
        try:
            yield
        finally:
            del _WATCHDOG.waits[thread]
