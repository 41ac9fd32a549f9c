"""Aligned memory that is used again, as soon as nobody looks at it any more."""

from __future__ import annotations

import mmap
from collections import deque
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matex_data.fields import Field

KEPT = 4  # free blocks of a pool that wait for their next use
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
ALIGNMENT = 64  # bytes; TensorFlow takes memory that is aligned like this without a copy


class _Lease:
    """Owner of one block of memory: the arrays made of it keep it alive, and its end gives the block back.

    NumPy collapses chains of views down to the object that owns the memory, so this must not be an array.
    """

    def __init__(self, pool: Pool, memory: mmap.mmap) -> None:
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


class Pool:
    """Blocks of memory, in bytes; thread-safe.

    A block that is free and large enough is used again: its pages are there already, and touching fresh ones
    costs more than copying into old ones.
    """

    def __init__(self) -> None:
        self._free: deque[mmap.mmap] = deque()
        self._lock = Lock()

    def bytes(self, count: int) -> NDArray[np.uint8]:
        """uint8[count], aligned; the memory is used again once no array looks at it."""
        with self._lock:
            fitting = [memory for memory in self._free if count <= len(memory) <= 4 * max(count, mmap.PAGESIZE)]
            memory = min(fitting, key=len, default=None)
            if memory is not None:
                self._free.remove(memory)
        if memory is None:
            memory = mmap.mmap(-1, max(mmap.PAGESIZE, count + -count % mmap.PAGESIZE), _PRIVATE)
        return np.asarray(_Lease(self, memory))[:count]

    def give_back(self, memory: mmap.mmap) -> None:
        """Called by the owner's end, on whatever thread that is."""
        with self._lock:
            self._free.append(memory)
            if len(self._free) > KEPT:
                self._free.popleft()

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
