"""Where the time goes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock


@dataclass
class Profile:
    """Where the time of this rank's passes went, in seconds, and what they brought.

    Parameters
    ----------
    planning : finding out which bytes the next samples need.
    reading : in calls that read, by the background reader.
    decoding : until what was read had become rows, beyond the time of reading.
    waiting : the consumer waited for data.
    samples, bytes : brought, and read from the files.
    exchanged : bytes of samples that came from the memory of other ranks.
    """

    planning: float = 0.0
    reading: float = 0.0
    decoding: float = 0.0
    waiting: float = 0.0
    samples: int = 0
    bytes: int = 0
    exchanged: int = 0


_ALL = Profile()
_ADDING = Lock()


def _renew_lock() -> None:
    global _ADDING
    _ADDING = Lock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread may have held it


def overall() -> Profile:
    """The profile of all data sets of this process; it goes on from there."""
    return _ALL


@contextmanager
def timed(profile: Profile, part: str) -> Iterator[None]:
    """Add the time that this takes to a part of the profile, and of that of all data sets."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - begin
        with _ADDING:
            for each in (profile, _ALL):
                setattr(each, part, getattr(each, part) + seconds)
