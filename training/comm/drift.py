"""Find a rank that is slower than the others, which wait for it in every step."""

from __future__ import annotations

import logging
import platform
import threading
import time
from statistics import median_high
from typing import TYPE_CHECKING

import numpy as np

from matex_data._types import Array
from matex_data.io.counters import process_profile

if TYPE_CHECKING:
    from matex_data.training.comm.collectives import Collectives

log = logging.getLogger("matex_data.training")

SECONDS = 5.0
"""Least time between two comparisons that count."""
REDUCTIONS = 50
"""Least number of reductions between two comparisons; a step has one or a few."""
COMPARISONS = 3
"""Comparisons in a row that have to find the same rank: tracing, a checkpoint or any other pause falls into one."""
GAIN = 1.5
"""Factor by which training would be faster if the slowest rank were as fast as the median of the others."""
_MARGIN, _GROWTH = 1.2, 4  # of the next comparison: aim above SECONDS; at most so many times the reductions


class WaitingClock:
    """Clock that runs while at least one thread of this rank is in a collective operation of one channel.

    Attributes
    ----------
    warned : this rank has reported a slow one.
    """

    def __init__(self) -> None:
        self.warned = False
        self._lock = threading.Lock()
        self._threads = 0
        self._seconds = self._since = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._threads:
                self._since = time.perf_counter()
            self._threads += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads -= 1
            if not self._threads:
                self._seconds += time.perf_counter() - self._since

    def read(self) -> Array:
        """Return the seconds since any fixed time, those of waiting for ranks, and those of waiting for data."""
        with self._lock:
            now = time.perf_counter()
            running = now - self._since if self._threads else 0.0
            return np.array([now, self._seconds + running, process_profile().waiting])


class DriftCheck:
    """Comparison of the times that the ranks spend outside of collective operations: the slowest rank waits least.

    The ranks exchange three numbers every few seconds, after the same reduction on each of them.
    """

    def __init__(self, clock: WaitingClock) -> None:
        self._clock = clock
        self._start = clock.read()
        self._count = 0
        self._next = REDUCTIONS
        self._suspect, self._slow_comparisons = -1, 0
        self._done = False

    def after_reduction(self, collectives: Collectives) -> None:
        """Count a reduction; if a comparison is due, compare the ranks and warn once of a slow one. *Collective*."""
        self._count += 1
        if self._count < self._next or self._done:
            return
        now = self._clock.read()
        by_rank = collectives.gather((now - self._start)[None])
        elapsed = float(by_rank[:, 0].max())
        # All ranks compute the same from the same numbers.
        wanted = int(self._count * _MARGIN * SECONDS / max(elapsed, 1e-9))
        self._next = max(REDUCTIONS, min(wanted, _GROWTH * self._count))
        self._start, self._count = now, 0
        rank = slow_rank(by_rank[:, 0] - by_rank[:, 1], elapsed) if elapsed >= SECONDS else None
        self._slow_comparisons = 0 if rank is None else self._slow_comparisons + 1 if rank == self._suspect else 1
        self._suspect = -1 if rank is None else rank
        if rank is not None and self._slow_comparisons >= COMPARISONS:
            self._done = True
            host = collectives.allgather_object(platform.node())[rank]
            if collectives.comm.rank == 0 and not self._clock.warned:
                self._clock.warned = True
                _warn(rank, host, by_rank)


def slow_rank(own: Array, elapsed: float) -> int | None:
    """Return the rank without whose delay training would be ``GAIN`` times as fast; None if there is none.

    Parameters
    ----------
    own : float64[ranks], seconds of each rank outside of collective operations.
    elapsed : seconds in and outside of them.
    """
    slowest = int(own.argmax())
    delay = own[slowest] - median_high(np.delete(own, slowest))
    return slowest if elapsed >= GAIN * (elapsed - delay) else None


def _warn(rank: int, host: str, by_rank: Array) -> None:
    own = by_rank[:, 0] - by_rank[:, 1]
    elapsed, _, data = by_rank[rank]
    reading = f" ({data / elapsed:.0%} of the time waiting for data)" if data else ""
    log.warning(
        "rank %d on %s is slower than the other ranks, which wait for it: of %.1f s it was busy for %.1f s%s, the "
        "others for %.1f s (median)\n"
        "  remedy: look on %s for other programs, a processor that is throttled or slower, and slower storage; in the "
        "script for callbacks and larger batches of this rank. MATEX_TIMELINE=run.json shows the time of each rank",
        *(rank, host, elapsed, own[rank], reading, median_high(np.delete(own, rank)), host),
    )
