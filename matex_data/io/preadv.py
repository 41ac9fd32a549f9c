"""Scatter reads: adjacent bytes of a file into several ranges of memory, without MPI."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from matex_data._types import Integers
from matex_data.compiled import Compiling, compiled

MOST_BUFFERS = 1024  # of one preadv, the limit of POSIX systems
FEW_RUNS = 32  # that are read one by one: it costs less than a wait for the loop
VECTOR_BYTES = 16  # of an ``iovec``: the address of a destination and its length, each an int64
PROBES = 8  # bytes of a file that are looked for in the page cache before a window is read
_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)  # of Linux: read what needs no waiting


def read(descriptor: int, offset: Integers, first: Integers, address: Integers, nbytes: Integers) -> int:
    """Read runs of a file into memory.

    Many runs are read in one loop without the interpreter's lock: to give it away and to wait for it at each run costs
    more than a copy of some kilobytes, the more so the more threads read.

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
    edges, sizes = np.append(first, len(nbytes)), np.add.reduceat(nbytes, first)
    vectors = np.column_stack([address, nbytes])
    loop = LOOP.loops() if len(first) > FEW_RUNS else None
    total = run = 0
    while run < len(first):
        begun = run
        if loop is not None:
            run = loop(descriptor, offset, edges, sizes, vectors.ctypes.data, begun)
            total += int(sizes[begun:run].sum())
        if run < len(first):  # what the system does not read at once, or refuses
            total += _read_run(descriptor, int(offset[run]), vectors[edges[run] : edges[run + 1]])
            run += 1
    return total


def _compiled_loop() -> Callable[..., int]:
    """Compile the loop over runs."""
    from numba import int64, intc, intp, types

    preadv = types.ExternalFunction("preadv", intp(intc, intp, intc, int64))

    def read_runs(descriptor: Any, offset: Any, edges: Any, sizes: Any, vectors: Any, run: Any) -> Any:
        """Return the first run, from this one on, of which one system call does not read all bytes."""
        while run < len(offset):
            count = edges[run + 1] - edges[run]
            if preadv(descriptor, vectors + VECTOR_BYTES * edges[run], count, offset[run]) != sizes[run]:
                break
            run += 1
        return run

    numbers = types.Array(int64, 1, "C", readonly=True)
    return compiled(read_runs, int64(intc, numbers, numbers, numbers, intp, int64))


LOOP = Compiling("the reading of rows", _compiled_loop)


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


def _read_run(descriptor: int, offset: int, vectors: Integers) -> int:
    """Read one run in as many calls as necessary.

    Parameters
    ----------
    descriptor, offset : as of ``read``.
    vectors : int64[k, 2], address and length of each destination.
    """
    buffers: list[Any] = [(ctypes.c_char * size).from_address(begin) for begin, size in vectors.tolist()]
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
