"""Many stretches of a file to many places in memory, without Python in between.

``preadv`` fills many places from one stretch of the file. On Linux, ``io_submit`` takes many such orders in one call of
the system (see io_submit(2)); a file that was not opened with O_DIRECT is read before it returns. So Python's lock is
taken once for some megabytes: several threads could not read small stretches side by side otherwise. Counters of the
system and profilers may not see these reads; the environment variable ``MATEX_IO_SUBMIT=0`` does without them.
Both are called by way of ctypes, since ``os.preadv`` wants an object of Python for each destination.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from matex_data._types import Integers

MOST_VECTORS = 1024  # of one preadv, the limit of POSIX systems
FEW = 8  # runs that are read one by one: orders for them would take Python longer
MOST_ORDERS = 64  # given to the system at once
_PREADV = 7  # IOCB_CMD_PREADV of linux/aio_abi.h
# struct iocb of linux/aio_abi.h, on little-endian machines
_WHAT = [("data", "u8"), ("key", "u4"), ("flags", "i4"), ("opcode", "u2"), ("priority", "i2"), ("descriptor", "u4")]
_WHERE = [("buffer", "u8"), ("nbytes", "u8"), ("offset", "i8"), ("reserved", "u8"), ("more", "u4"), ("result", "u4")]
_ORDER = np.dtype([*_WHAT, *_WHERE])
_EVENT = np.dtype([("data", "u8"), ("order", "u8"), ("result", "i8"), ("more", "i8")])  # struct io_event
_NUMBERS = {"x86_64": (206, 209, 208), "aarch64": (0, 2, 4)}  # io_setup, io_submit, io_getevents

_libc = ctypes.CDLL(None, use_errno=True)
_preadv = _libc.preadv
_preadv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
_preadv.restype = ctypes.c_ssize_t


def read(descriptor: int, offset: Integers, first: Integers, address: Integers, nbytes: Integers) -> int:
    """Fill places in memory; how many bytes there were, less than asked for only where the file ends.

    Parameters
    ----------
    descriptor : of a file that is open for reading.
    offset : int64[runs], byte of the file that each run begins with.
    first : int64[runs], the destination that each run begins with.
    address, nbytes : int64[k], places in memory.

    Raises
    ------
    OSError : the system cannot read the file.
    """
    places = np.empty((len(address), 2), np.int64)  # struct iovec[k]
    places[:, 0], places[:, 1] = address, nbytes
    if len(places) > MOST_VECTORS:
        first, offset = _cut(first, offset, np.cumsum(nbytes) - nbytes, len(places))
    if len(first) <= FEW:
        ends = [*first[1:].tolist(), len(places)]
        runs = zip(offset.tolist(), first.tolist(), ends, strict=True)
        return sum(_read_run(descriptor, begin, places[low:high]) for begin, low, high in runs)
    count = np.diff(first, append=len(places))
    with _queue() as queue:
        found = queue.read(descriptor, offset, places.ctypes.data + first * places.strides[0], count)
    for run in np.flatnonzero(found < np.add.reduceat(nbytes, first)).tolist():  # the rest, or the error
        some = places[first[run] : first[run] + count[run]]
        done = max(0, int(found[run]))
        found[run] = done + _read_run(descriptor, int(offset[run]) + done, _left(some, done))
    return int(found.sum())


def _cut(first: Integers, offset: Integers, before: Integers, count: int) -> tuple[Integers, Integers]:
    """Runs of at most ``MOST_VECTORS`` places."""
    pieces = -(-np.diff(first, append=count) // MOST_VECTORS)
    if pieces.max(initial=0) <= 1:
        return first, offset
    run = np.repeat(np.arange(len(first)), pieces)
    begins = first[run] + MOST_VECTORS * (np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces))
    return begins, offset[run] + before[begins] - before[first[run]]


def _read_run(descriptor: int, offset: int, places: Integers) -> int:
    """The same for one run, in as many calls as it takes."""
    wanted, found = int(places[:, 1].sum()), 0
    while found < wanted:
        count = _preadv(descriptor, places.ctypes.data, len(places), offset + found)
        if count < 0 and ctypes.get_errno() == errno.EINTR:
            continue
        if count < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        if count == 0:
            break
        found += count
        if found < wanted:
            places = _left(places, count)
    return found


def _left(places: Integers, count: int) -> Integers:
    """What ``count`` bytes leave of the places."""
    ends = np.cumsum(places[:, 1])
    full = int(np.searchsorted(ends, count, side="right"))
    left = places[full:].copy()
    if len(left):
        into = count - int(ends[full] - left[0, 1])
        left[0] += (into, -into)
    return left


class _Queue:
    """Orders of one thread at a time; none is taken where the system has no such calls."""

    def __init__(self) -> None:
        self._context = ctypes.c_ulong(0)
        numbers = _NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
        self._numbers = numbers or (0, 0, 0)
        setup = ctypes.c_long(self._numbers[0]), ctypes.c_long(MOST_ORDERS), ctypes.byref(self._context)
        self._works = numbers is not None and _libc.syscall(*setup) == 0
        self._events = np.zeros(MOST_ORDERS, _EVENT)

    def read(self, descriptor: int, offset: Integers, buffer: Integers, count: Integers) -> Integers:
        """int64[k], the bytes that each order brought; 0 or less where it was refused."""
        found = np.zeros(len(offset), np.int64)
        if not self._works or os.environ.get("MATEX_IO_SUBMIT") == "0":
            return found
        orders = np.zeros(len(offset), _ORDER)
        orders["data"], orders["opcode"], orders["descriptor"] = np.arange(len(offset)), _PREADV, descriptor
        orders["buffer"], orders["nbytes"], orders["offset"] = buffer, count, offset
        pointers = orders.ctypes.data + np.arange(len(offset)) * _ORDER.itemsize
        done = 0
        while done < len(offset):
            some = min(MOST_ORDERS, len(offset) - done)
            taken = self._call(1, some, pointers.ctypes.data + done * pointers.itemsize)
            if taken <= 0:
                break
            self._await(taken, found)
            done += taken
        return found

    def _await(self, taken: int, found: Integers) -> None:
        while taken > 0:
            count = self._call(2, taken, taken, self._events.ctypes.data, None)
            if count < 0 and ctypes.get_errno() != errno.EINTR:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            if count > 0:
                events = self._events[:count]
                found[events["data"].astype(np.int64)] = events["result"]
                taken -= count

    def _call(self, number: int, *arguments: int | None) -> int:
        values = [None if value is None else ctypes.c_long(value) for value in arguments]
        return int(_libc.syscall(ctypes.c_long(self._numbers[number]), self._context, *values))


_IDLE: deque[_Queue] = deque()  # used again: ending one takes the system some 30 ms


@contextmanager
def _queue() -> Iterator[_Queue]:
    """One that nobody else has meanwhile."""
    try:
        queue = _IDLE.pop()
    except IndexError:
        queue = _Queue()
    yield queue
    _IDLE.append(queue)
