"""Aligned memory that is reused as soon as no array refers to it."""

from __future__ import annotations

import mmap
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matex_data.codecs.scratch import aligned_arrays
from matex_data.fields import Field

HUGE_PAGE = 2 << 20  # bytes
KEPT_LARGE = 8  # free blocks that a pool of windows keeps: as many as there can be windows in flight
KEPT_SMALL = 32  # free blocks smaller than a huge page that a pool keeps
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class _Lease:
    """Owner of one block of memory. Arrays on the block keep it alive; its deletion returns the block to the pool.

    It must not be an array, because NumPy collapses chains of views to the array that owns the memory.
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

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # else globals may be gone
            self._pool.give_back(self._memory)


class BufferPool:
    """Thread-safe pool of memory blocks.

    A free block that is large enough is reused: the first write to a fresh page costs more than a copy to an old one.

    Parameters
    ----------
    kept : most free blocks of at least a huge page; None: as many as there can be windows in flight.
    """

    def __init__(self, kept: int | None = None) -> None:
        self._kept = KEPT_LARGE if kept is None else kept
        self._free: deque[mmap.mmap] = deque()  # whose methods are atomic: no thread waits for another one

    def __reduce__(self) -> tuple[type[BufferPool], tuple[int]]:
        return BufferPool, (self._kept,)

    def bytes(self, count: int) -> NDArray[np.uint8]:
        """Return uint8[count], aligned, with undefined contents.

        Raises
        ------
        MemoryError : the system has no memory left.
        """
        # The block freed last is the likeliest to be in the processor's cache.
        fitting = (m for m in reversed(self._free.copy()) if count <= len(m) <= 4 * max(count, HUGE_PAGE))
        memory = next((m for m in fitting if self._has_removed(m)), None)
        return np.asarray(_Lease(self, memory or _fresh(count)))[:count]

    def give_back(self, memory: mmap.mmap) -> None:
        """Take back a block that no array refers to, and unmap the oldest of its kind where there are too many.

        Python may collect an owner in any thread, and during any other method of this pool.
        """
        self._free.append(memory)
        small = len(memory) < HUGE_PAGE
        same_kind = [m for m in self._free.copy() if (len(m) < HUGE_PAGE) == small]
        if len(same_kind) > (KEPT_SMALL if small else self._kept):
            self._has_removed(same_kind[0])

    def _has_removed(self, memory: mmap.mmap) -> bool:
        """Remove a free block, and return whether no other thread has done so."""
        try:
            self._free.remove(memory)
        except ValueError:
            return False
        return True

    def arrays(self, fields: list[Field], rows: int) -> dict[str, NDArray[Any]]:
        """Return a dict of arrays of ``rows`` samples for each field, in one block, with undefined contents."""
        numeric = [field for field in fields if not field.array_dtype.hasobject]
        objects = {field.name: field.empty(rows) for field in fields if field.array_dtype.hasobject}
        arrays = aligned_arrays(self.bytes, [((rows, *field.shape), field.array_dtype) for field in numeric])
        return objects | {field.name: array for field, array in zip(numeric, arrays, strict=True)}


def _fresh(count: int) -> mmap.mmap:
    """Map new memory of at least ``count`` bytes, in huge pages if it is large and the kernel has them."""
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
