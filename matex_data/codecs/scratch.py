"""Scratch memory of each thread, reused from chunk to chunk: fresh memory costs page faults."""

from __future__ import annotations

from collections.abc import Callable
from threading import local

import numpy as np

from matex_data._types import Bytes

Memory = Callable[[int], Bytes]
"""Allocator: return uint8 memory of so many bytes."""


class _Scratch(local):
    """Scratch memory of one thread: a filter reads from one of two buffers and writes to the other."""

    def __init__(self) -> None:
        self.buffers = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
        self.result = np.empty(0, np.uint8)


_SCRATCH = _Scratch()


def thread_scratch(nbytes: int) -> Bytes:
    """Return uint8 memory that is valid until this thread calls the function again."""
    if _SCRATCH.result.nbytes < nbytes:
        _SCRATCH.result = np.empty(nbytes, np.uint8)
    return _SCRATCH.result[:nbytes]


def filter_output(data: Bytes, is_last: bool, out: Bytes | None, nbytes: int) -> Bytes:
    """Return memory for the output of a filter that reads ``data``.

    Parameters
    ----------
    data : uint8[n], input of the filter.
    is_last : no filter is undone after this one: return ``out`` or new memory, otherwise scratch memory.
    out : uint8[m] for the result of all filters, or None.
    nbytes : size of the output.
    """
    if is_last and out is not None and out.nbytes == nbytes:
        return out
    if is_last and out is None:
        return np.empty(nbytes, np.uint8)
    other = int(np.may_share_memory(_SCRATCH.buffers[0], data))
    if _SCRATCH.buffers[other].nbytes < nbytes:
        _SCRATCH.buffers[other] = np.empty(nbytes, np.uint8)
    return _SCRATCH.buffers[other][:nbytes]


def is_scratch(data: Bytes) -> bool:
    """Return whether the bytes lie in this thread's buffers, which the next chunk overwrites."""
    return any(np.may_share_memory(data, buffer) for buffer in _SCRATCH.buffers)
