"""Aligned memory that is used again, as soon as nobody looks at it any more."""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from contextlib import suppress
from os import register_at_fork
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matex_data.fields import Field

HUGE_PAGE = 2 << 20  # bytes
KEPT_LARGE = 8  # free blocks of a pool that wait for their next use: as many windows as can be on their way
KEPT_SMALL = 32  # the same of blocks that are smaller than a huge page
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
ALIGNMENT = 64  # bytes; TensorFlow takes memory that is aligned like this without a copy


class _Lease:
    """Owner of one block of memory: the arrays made of it keep it alive, and its end gives the block back.

    NumPy collapses chains of views down to the object that owns the memory, so this must not be an array.
    """

    def __init__(self, pool: BufferPool, memory: mmap.mmap) -> None:
        self._pool = pool
        self._memory = memory
        address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (len(memory),),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        self._pool.give_back(self._memory)


class BufferPool:
    """Blocks of memory, in bytes; thread-safe.

    A block that is free and large enough is used again: its pages are there already, and touching fresh ones
    costs more than copying into old ones.
    """

    def __init__(self) -> None:
        self._free: deque[mmap.mmap] = deque()
        self._returned: deque[mmap.mmap] = deque()  # by owners at their end
        self._lock = Lock()
        _POOLS.add(self)

    def renew(self) -> None:
        """Forget what is free, and who holds the lock: in a forked process, that may be a thread of its parent."""
        self._free.clear()
        self._returned.clear()
        self._lock = Lock()

    def bytes(self, count: int) -> NDArray[np.uint8]:
        """uint8[count], aligned; the memory is used again once no array looks at it."""
        with self._lock:
            self._take_back()
            # The one freed last is the likeliest to be in the processor's cache.
            fitting = (m for m in reversed(self._free) if count <= len(m) <= 4 * max(count, HUGE_PAGE))
            memory = next(fitting, None)
            if memory is not None:
                self._free.remove(memory)
        if memory is None:
            memory = _fresh(count)
        return np.asarray(_Lease(self, memory))[:count]

    def give_back(self, memory: mmap.mmap) -> None:
        """Take memory that nobody looks at any more.

        The end of an owner may come in any thread, and in the middle of any other call of this pool, since Python may
        collect garbage there. So this takes no lock that its own thread may hold.
        """
        self._returned.append(memory)
        if self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        """Keep what was returned, or unmap it where enough is free. The lock is held."""
        while self._returned:
            memory = self._returned.popleft()
            self._free.append(memory)
            alike = [m for m in self._free if (len(m) < HUGE_PAGE) == (len(memory) < HUGE_PAGE)]
            if len(alike) > (KEPT_SMALL if len(memory) < HUGE_PAGE else KEPT_LARGE):
                self._free.remove(alike[0])

    def arrays(self, fields: list[Field], rows: int) -> dict[str, NDArray[Any]]:
        """An array of ``rows`` samples for each field, in one block; its contents are undefined."""
        plain = [field for field in fields if not field.array_dtype.hasobject]
        sizes = [rows * field.row_bytes for field in plain]
        starts = np.cumsum([0] + [size + -size % ALIGNMENT for size in sizes])
        block = self.bytes(int(starts[-1]))
        arrays = {field.name: field.empty(rows) for field in fields if field.array_dtype.hasobject}
        for field, start, size in zip(plain, starts, sizes, strict=False):
            memory = block[start : start + size]
            arrays[field.name] = memory.view(field.array_dtype).reshape(rows, *field.shape)
        return arrays


_POOLS: weakref.WeakSet[BufferPool] = weakref.WeakSet()


def _renew_all() -> None:
    for pool in list(_POOLS):
        pool.renew()


register_at_fork(after_in_child=_renew_all)


def _fresh(count: int) -> mmap.mmap:
    """New memory of at least ``count`` bytes; in huge pages where it is large and the system has them."""
    unit = HUGE_PAGE if count >= HUGE_PAGE else mmap.PAGESIZE
    nbytes = max(unit, count + -count % unit)
    try:
        memory = mmap.mmap(-1, nbytes, _PRIVATE)
    except OSError as error:
        raise MemoryError(f"unable to allocate {nbytes} bytes ({error})") from error
    if unit == HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
