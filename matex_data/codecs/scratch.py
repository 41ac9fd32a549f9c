"""Memory that bytes pass through on their way, used again and again: fresh memory costs page faults."""

from __future__ import annotations

from collections.abc import Callable
from threading import local

import numpy as np

from matex_data._types import Bytes

Memory = Callable[[int], Bytes]
"""Gives uint8 memory of so many bytes."""


class _Scratch(local):
    """Two buffers for each thread: a step of a pipeline reads from one and writes to the other."""

    def __init__(self) -> None:
        self.buffers = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
        self.momentary = np.empty(0, np.uint8)


_SCRATCH = _Scratch()


def thread_scratch(nbytes: int) -> Bytes:
    """Memory for what is used up before this thread asks for it again: a decoded chunk, a run of samples."""
    if _SCRATCH.momentary.nbytes < nbytes:
        _SCRATCH.momentary = np.empty(nbytes, np.uint8)
    return _SCRATCH.momentary[:nbytes]


def memory_for(data: Bytes, passing: bool, out: Bytes | None, nbytes: int) -> Bytes:
    """Where a step that reads ``data`` can write to: scratch if the result is only ``passing``, else ``out``."""
    if out is not None and not passing and out.nbytes == nbytes:
        return out
    if not passing and out is None:
        return np.empty(nbytes, np.uint8)
    which = int(np.may_share_memory(_SCRATCH.buffers[0], data))
    if _SCRATCH.buffers[which].nbytes < nbytes:
        _SCRATCH.buffers[which] = np.empty(nbytes, np.uint8)
    return _SCRATCH.buffers[which][:nbytes]


def of_this_thread(data: Bytes) -> bool:
    """Whether the bytes lie in scratch memory, which the next chunk will overwrite."""
    return any(np.may_share_memory(data, buffer) for buffer in _SCRATCH.buffers)
