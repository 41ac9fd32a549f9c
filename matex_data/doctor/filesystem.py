"""Speed of a file system: what it takes to open and to read files of it."""

from __future__ import annotations

import os
import statistics
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

BLOCK = 4096
"""Bytes of a read whose time is the latency."""
LARGE = 4 << 20
"""Bytes of a read of the measured bandwidth."""
SECONDS = 2.0
"""Time in which each of the two is measured."""
_FILES = 200  # of a folder that are looked at


class Speed(NamedTuple):
    """Speed of reading files that this machine has not in its cache, as far as the system drops them.

    Attributes
    ----------
    file : that was read.
    open_seconds : median time to open a file and to look up its size.
    latency : median time of a read of 4 KiB at a random position, in seconds.
    bandwidth : of consecutive reads of 4 MiB, in bytes per second; None if the file is smaller.
    """

    file: str
    open_seconds: float
    latency: float
    bandwidth: float | None


def measure(path: str) -> Speed | None:
    """Return the speed of a file, or of the largest one of a folder; None if there is nothing to read.

    Raises
    ------
    OSError : the system cannot read it.
    """
    files = files_of(path)
    if not files:
        return None
    file = max(files, key=lambda name: Path(name).stat().st_size)
    opened = []
    for each in files[:20]:
        begin = time.perf_counter()
        descriptor = os.open(each, os.O_RDONLY)
        os.fstat(descriptor)
        opened.append(time.perf_counter() - begin)
        os.close(descriptor)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        nbytes = os.fstat(descriptor).st_size
        return Speed(file, statistics.median(opened), _latency(descriptor, nbytes), _bandwidth(descriptor, nbytes))
    finally:
        os.close(descriptor)


def files_of(path: str) -> list[str]:
    """Return a file, or the first files of a folder that are not empty, sorted."""
    if Path(path).is_file():
        return [path] if Path(path).stat().st_size else []
    names: list[str] = []
    with suppress(OSError), os.scandir(path) as entries:
        names = [entry.path for entry in islice(entries, _FILES) if entry.is_file() and entry.stat().st_size]
    return sorted(names)


def _forget(descriptor: int) -> None:
    """Let the system drop the file from its cache, if it can."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _latency(descriptor: int, nbytes: int) -> float:
    """Return the median time of small reads, spread over the file so that no read-ahead has them."""
    _forget(descriptor)
    times, end = [], time.perf_counter() + SECONDS
    for number in range(50):
        position = (number * 0.6180339887 % 1) * max(0, nbytes - BLOCK)  # the golden ratio: far from earlier ones
        begin = time.perf_counter()
        os.pread(descriptor, BLOCK, int(position))
        times.append(time.perf_counter() - begin)
        if time.perf_counter() > end:
            break
    return statistics.median(times)


def _bandwidth(descriptor: int, nbytes: int) -> float | None:
    if nbytes < LARGE:
        return None
    _forget(descriptor)
    buffer, read = bytearray(LARGE), 0
    begin = now = time.perf_counter()
    while read < nbytes and now - begin < SECONDS:
        count = os.preadv(descriptor, [buffer], read)
        if not count:
            break
        read, now = read + count, time.perf_counter()
    return read / max(now - begin, 1e-9)
