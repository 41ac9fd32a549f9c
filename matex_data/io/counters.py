"""Counters of the time and the amount of data of each stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from matex_data.locks import Lock
from matex_data.timeline import timeline


@dataclass
class Profile:
    """Time and amount of data of each stage on this rank.

    Parameters
    ----------
    planning : seconds to find the byte ranges of the next samples.
    reading : seconds in read calls, in the prefetch thread.
    decoding : seconds from the end of the reads to complete rows.
    waiting : seconds that the consumer waited for data.
    samples : samples delivered.
    bytes : bytes read from files.
    exchanged : bytes of samples received from other ranks.
    skipped : samples that this rank has found to be unreadable, with ``on_error="skip"``.
    """

    planning: float = 0.0
    reading: float = 0.0
    decoding: float = 0.0
    waiting: float = 0.0
    samples: int = 0
    bytes: int = 0
    exchanged: int = 0
    skipped: int = 0

    def add(self, **amounts: float) -> None:
        """Add to these counters, and to those of the process. Any thread may call it."""
        with _LOCK:
            for profile in (self, _PROCESS):
                for name, amount in amounts.items():
                    setattr(profile, name, getattr(profile, name) + amount)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Context manager: add the seconds in it to a stage."""
        begin = time.perf_counter()
        try:
            with timeline.span("waiting for data" if stage == "waiting" else stage, "data"):
                yield
        finally:
            self.add(**{stage: time.perf_counter() - begin})


_PROCESS = Profile()
_LOCK = Lock()


def process_profile() -> Profile:
    """Return the counters of all data sets of this process, which keep counting. Do not add to them."""
    return _PROCESS
