"""Scratch memory of each thread, reused from chunk to chunk: fresh memory costs page faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from threading import local
from typing import Any

import numpy as np

from matex_data._types import Array, Bytes

Memory = Callable[[int], Bytes]
"""Allocator: return uint8 memory of so many bytes."""
ALIGNMENT = 64  # bytes; TensorFlow uses memory of this alignment without a copy


def new_memory(nbytes: int) -> Bytes:
    """Return fresh memory, uint8[nbytes]."""
    return np.empty(nbytes, np.uint8)


def aligned_arrays(memory: Memory, specs: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[Array]:
    """Return arrays of these shapes and dtypes in one block, with undefined contents; aligned if the block is."""
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in specs]
    starts = np.cumsum([0] + [size + -size % ALIGNMENT for size in sizes]).tolist()
    block = memory(starts[-1])
    views = (block[start : start + size] for start, size in zip(starts, sizes, strict=False))
    return [view.view(dtype).reshape(shape) for view, (shape, dtype) in zip(views, specs, strict=True)]


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
