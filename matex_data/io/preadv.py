"""Scatter reads: adjacent bytes of a file into several ranges of memory, without MPI."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from matex_data._types import Bytes, Integers
from matex_data.index.runs import runs_where

GAP_BYTES = 4096  # between short runs that are read as one: a call takes as long, and storage reads whole pages
SPAN_BYTES = 1 << 20  # of them at a time
LEAST_NEAR = 8  # of them that are worth it
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
    if not len(first):
        return 0
    size = np.add.reduceat(nbytes, first)
    near = (offset[1:] >= offset[:-1]) & (offset[1:] - (offset + size)[:-1] <= GAP_BYTES)
    near &= np.maximum(size[1:], size[:-1]) <= GAP_BYTES
    alone = ~(np.append(near, False) | np.append(False, near))
    total, ends = 0, np.append(first, len(nbytes))
    for low, count in zip(*(column.tolist() for column in runs_where(near | (alone[1:] & alone[:-1]))), strict=True):
        high = low + count
        of_buffers = slice(ends[low], ends[high])
        columns = offset[low:high], first[low:high] - first[low], address[of_buffers], nbytes[of_buffers]
        total += (_read_runs if alone[low] or count < LEAST_NEAR else _read_near)(descriptor, *columns)
    return total


def _read_near(descriptor: int, offset: Integers, first: Integers, address: Integers, nbytes: Integers) -> int:
    """Read short runs that lie near one another with what is between them, some at a time; see `read`."""
    total, ends = 0, np.append(first, len(nbytes))
    position = np.cumsum(nbytes) - nbytes
    position += np.repeat(offset - position[first], np.diff(ends))  # in the file
    end = offset + np.add.reduceat(nbytes, first)
    for low, high in _divided(offset, end):
        begin, of_buffers = int(offset[low]), slice(ends[low], ends[high])
        columns = position[of_buffers] - begin, address[of_buffers], nbytes[of_buffers]
        between = np.empty(int(end[low:high].max()) - begin, np.uint8)
        if os.preadv(descriptor, [between.data], begin) == len(between):
            _copy(between, *columns)
            total += int(columns[2].sum())
        else:
            runs = offset[low:high], first[low:high] - first[low]
            total += _read_runs(descriptor, *runs, *columns[1:])
    return total


def _divided(offset: Integers, end: Integers) -> Iterator[tuple[int, int]]:
    """Yield the first run and the end of consecutive runs that span at most ``SPAN_BYTES``, or of one run."""
    edges = np.flatnonzero(np.diff((end - offset[0]) // SPAN_BYTES, prepend=-1))
    return zip(edges.tolist(), [*edges[1:].tolist(), len(offset)], strict=True)


def _copy(source: Bytes, position: Integers, address: Integers, nbytes: Integers) -> None:
    """Copy ranges of bytes at these positions of an array to these addresses: those of one length at once."""
    base = int(address.min())
    memory: Any = (ctypes.c_char * (int((address + nbytes).max()) - base)).from_address(base)
    order = np.argsort(nbytes, kind="stable")
    for low, count in zip(*(column.tolist() for column in runs_where(np.diff(nbytes[order]) == 0)), strict=True):
        alike = order[low : low + count]
        if not nbytes[alike[0]]:
            continue
        item = np.dtype((np.void, int(nbytes[alike[0]])))
        items = (np.ndarray(len(one) - item.itemsize + 1, item, one, strides=(1,)) for one in (memory, source))
        to, stored = items
        to[address[alike] - base] = stored[position[alike]]


def _read_runs(descriptor: int, offset: Integers, first: Integers, address: Integers, nbytes: Integers) -> int:
    """Read runs, each by a call of its own; see `read`."""
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
