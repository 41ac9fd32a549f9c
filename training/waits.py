"""Every wait for other ranks has an end: the job ends, and says what this rank waited for."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from types import TracebackType

from mpi4py import MPI

from matex_data.agreement import patience

LOOKS = 20
"""How often a wait is looked at before its end."""
OTHERS = 1.0
"""Seconds in which other ranks may say what they wait for, too, before the job ends."""


class Waits:
    """Waits of this process; each is a ``with`` block, and every thread may have one.

    MPI itself waits for ever, within calls that nothing interrupts. So a thread looks at the clock instead.
    """

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._watch: threading.Thread | None = None

    def __enter__(self) -> None:
        self._since[threading.get_ident()] = time.monotonic()
        if self._watch is None:
            self._watch = threading.Thread(target=self._look, name="matex-waits", daemon=True)
            self._watch.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._since[threading.get_ident()]

    def _look(self) -> None:
        limit = patience()
        while True:
            time.sleep(limit / LOOKS)
            begun = min(list(self._since.values()), default=None)
            if begun is not None and time.monotonic() - begun > limit:
                self._end_job(limit)

    @staticmethod
    def _end_job(seconds: float) -> None:
        world = MPI.COMM_WORLD
        main = threading.main_thread().ident
        frame = sys._current_frames().get(main) if main is not None else None
        sys.stderr.write(
            f"\n---- rank {world.rank} of {world.size} has waited {seconds:g} s for other ranks, at\n"
            f"{''.join(traceback.format_stack(frame))}"
            "  expected: all ranks take the same steps, and none is slower than the others by so much\n"
            "  remedy: give every rank as many batches as the others; where one rank may take that long, "
            "set MATEX_TIMEOUT to more seconds\n"
        )
        sys.stderr.flush()
        time.sleep(OTHERS)
        world.Abort(1)


waiting = Waits()
