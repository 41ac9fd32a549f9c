"""Scatter reads: adjacent bytes of a file into several ranges of memory, without MPI."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np

from matex_data._types import Integers

MOST_BUFFERS = 1024  # of one preadv, the limit of POSIX systems
PROBES = 8  # bytes of a file that are looked for in the page cache before a window is read
_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)  # of Linux: read what needs no waiting


def read(descriptor: int, offset: Integers, first: Integers, address: Integers, nbytes: Integers) -> int:
    """Read runs of a file into memory.

    Parameters
    ----------
    descriptor : file descriptor, open for reading.
    offset : int64[runs], first byte of each run in the file.
    first : int64[runs], index of the first destination of each run.
    address, nbytes : int64[k], destinations in memory.

    Returns
    -------
    count : number of bytes read; less than ``nbytes.sum()`` only at the end of the file.

    Raises
    ------
    OSError : the system cannot read the file.
    """
    columns = zip(address.tolist(), nbytes.tolist(), strict=True)
    buffers = [(ctypes.c_char * size).from_address(begin) for begin, size in columns]
    begins, sizes = first.tolist(), np.add.reduceat(nbytes, first).tolist() if len(first) else []
    total = 0
    for start, low, high, size in zip(offset.tolist(), begins, [*begins[1:], len(buffers)], sizes, strict=True):
        run = buffers[low:high]
        count = os.preadv(descriptor, run, start) if high - low <= MOST_BUFFERS else 0
        total += count if count == size else count + _read_rest(descriptor, start + count, _remaining(run, count))
    return total


def is_cached(descriptor: int, offset: Integers) -> bool:
    """Return whether bytes of a file are in the page cache; False if the system or the file system does not tell.

    Parameters
    ----------
    descriptor : file descriptor, open for reading.
    offset : int64[k], the bytes. Some of them are looked at, the first and the last one among them.
    """
    if _NOWAIT is None or not len(offset):
        return False
    few = len(offset) <= PROBES
    probes = offset if few else offset[np.linspace(0, len(offset) - 1, PROBES).astype(np.int64)]
    try:
        return all(os.preadv(descriptor, [bytearray(1)], probe, _NOWAIT) for probe in probes.tolist())
    except OSError:  # a byte is not there, or these files know no such reads
        return False


def _read_rest(descriptor: int, offset: int, buffers: list[Any]) -> int:
    """Read one run in as many calls as necessary."""
    total = 0
    while buffers:
        count = os.preadv(descriptor, buffers[:MOST_BUFFERS], offset + total)
        if count == 0:
            break
        total += count
        buffers = _remaining(buffers, count)
    return total


def _remaining(buffers: list[Any], count: int) -> list[Any]:
    """Return what is left of the buffers after ``count`` bytes."""
    filled = 0
    while filled < len(buffers) and count >= len(buffers[filled]):
        count -= len(buffers[filled])
        filled += 1
    remaining = buffers[filled:]
    if count:
        remaining[0] = memoryview(remaining[0]).cast("B")[count:]
    return remaining
