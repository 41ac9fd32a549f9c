"""Deflated chunks to rows, without Python for each of them: libdeflate in a loop that Numba compiles.

For a chunk of some hundred kilobytes or less, Python's part of the work would take an eighth of the time, and half of
it for a small one. The library is the one that imagecodecs brings; where its functions cannot be found by name, chunks
are inflated one by one.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.codecs.pipeline import DEFLATE, SHUFFLE, Pipeline
from matex_data.codecs.scratch import thread_scratch

LARGEST = 1 << 20  # bytes of a decoded chunk; larger ones leave the processor's cache on the way, and take long anyway


def width_for(pipeline: Pipeline) -> int | None:
    """Bytes of the elements whose planes ``inflate_rows`` puts together; 1: they lie together; None: it cannot."""
    steps = [step.number for step in pipeline.filters]
    if not 0 < pipeline.nbytes <= LARGEST or _library() is None:
        return None
    if steps == [DEFLATE]:
        return 1
    return pipeline.itemsize if steps == [SHUFFLE, DEFLATE] and pipeline.before_shuffle is not None else None


def inflate_rows(
    stored: Bytes,
    nbytes: Integers,
    decoded: int,
    width: int,
    out: Array,
    destination: Integers,
    first: Integers,
    last: Integers,
) -> int:
    """Inflate one chunk after the other, each row to its destination; how many there were before one that is broken.

    Parameters
    ----------
    stored : uint8[n], the chunks, one behind the other.
    nbytes : int64[k], of each of them.
    decoded : bytes of a decoded chunk.
    width : as ``width_for`` says.
    out : [rows, ...], contiguous, of the dtype that is stored.
    destination : int64[m], rows of ``out``.
    first, last : int64[k], which of the places are those of the rows of a chunk.
    """
    from matex_data.codecs.kernels import chunks_to_rows

    library = _library()
    decompressor = library.alloc() if library and int(nbytes.sum()) <= stored.nbytes else None
    if library is None or not decompressor:
        return 0
    planes = thread_scratch(decoded).reshape(width, -1)
    rows = out.reshape(len(out), -1).view(f"<u{width}")
    addresses = library.inflate, decompressor, stored.ctypes.data, planes.ctypes.data
    try:
        begin = np.cumsum(nbytes) - nbytes
        return chunks_to_rows(width)(*addresses, begin, nbytes, planes, rows, destination, first, last)
    finally:
        library.free(decompressor)


class _Library(NamedTuple):
    """Of libdeflate: what makes and ends a decompressor, and the address of ``libdeflate_zlib_decompress``."""

    alloc: Any
    free: Any
    inflate: int


@cache
def _library() -> _Library | None:
    """libdeflate (https://github.com/ebiggers/libdeflate, libdeflate.h), if its functions can be found."""
    try:
        found = ctypes.CDLL(import_module("imagecodecs._deflate").__file__)
        alloc, free = found.libdeflate_alloc_decompressor, found.libdeflate_free_decompressor
        inflate = ctypes.cast(found.libdeflate_zlib_decompress, ctypes.c_void_p).value
    except (ImportError, OSError, AttributeError):
        return None
    alloc.restype, free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    return _Library(alloc, free, inflate or 0)
