"""Deflated chunks to rows, without Python for each of them: libdeflate in a loop that Numba compiles.

For a chunk of some hundred kilobytes or less, Python's part of the work would take an eighth of the time, and half of
it for a small one. The library is the one that imagecodecs brings; where its functions cannot be found by name, chunks
are inflated one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from matex_data.chunk_memory import Bytes, for_one_chunk
from matex_data.codecs import DEFLATE, SHUFFLE, Pipeline
from matex_data.compiled import compiled
from matex_data.index import Array, Integers
from matex_data.unshuffle import rows_kernel

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
    place: Integers,
    first: Integers,
    last: Integers,
) -> int:
    """Inflate one chunk after the other, each row to its place; how many there were before one that is broken.

    Parameters
    ----------
    stored : uint8[n], the chunks, one behind the other.
    nbytes : int64[k], of each of them.
    decoded : bytes of a decoded chunk.
    width : as ``width_for`` says.
    out : [rows, ...], contiguous, of the dtype that is stored.
    place : int64[m], rows of ``out``.
    first, last : int64[k], which of the places are those of the rows of a chunk.
    """
    library = _library()
    decompressor = library.libdeflate_alloc_decompressor() if library else None
    if not decompressor or int(nbytes.sum()) > stored.nbytes:
        return 0
    planes = for_one_chunk(decoded).reshape(width, -1)
    rows = out.reshape(len(out), -1).view(f"<u{width}")
    inflate, kernel = _kernel(width)
    begin = np.cumsum(nbytes) - nbytes
    addresses = (decompressor, stored.ctypes.data, planes.ctypes.data)
    try:
        return int(kernel(inflate, *addresses, begin, nbytes, planes, rows, place, first, last))
    finally:
        library.libdeflate_free_decompressor(decompressor)


@cache
def _library() -> Any:
    """libdeflate (https://github.com/ebiggers/libdeflate, libdeflate.h), if its functions can be found."""
    try:
        library = ctypes.CDLL(import_module("imagecodecs._deflate").__file__)
        library.libdeflate_alloc_decompressor.restype = ctypes.c_void_p
        library.libdeflate_free_decompressor.argtypes = (ctypes.c_void_p,)
        library.libdeflate_zlib_decompress.restype = ctypes.c_int
    except (ImportError, OSError, AttributeError):
        return None
    return library


@cache
def _kernel(width: int) -> tuple[Any, Callable[..., int]]:
    """``libdeflate_zlib_decompress`` as an argument of what is compiled, and that."""
    from numba import from_dtype, int32, int64, intp, types, uint8

    rows_of = rows_kernel(width)
    kind = int32(intp, intp, intp, intp, intp, intp)

    class Inflate(types.WrapperAddressProtocol):  # type: ignore[misc]
        def __wrapper_address__(self) -> int | None:
            return ctypes.cast(_library().libdeflate_zlib_decompress, ctypes.c_void_p).value

        def signature(self) -> Any:
            return kind

    def chunks_of(
        inflate: Any, decompressor: Any, stored: Any, scratch: Any, begin: Any, nbytes: Any, planes: Any, out: Any,
        place: Any, first: Any, last: Any,
    ) -> Any:  # fmt: skip
        for i in range(len(begin)):
            # With nowhere to write the size to, any but the whole one is an error.
            if inflate(decompressor, stored + begin[i], nbytes[i], scratch, planes.size, 0) != 0:
                return i
            rows_of(planes, out, place[first[i] : last[i]])
        return len(begin)

    numbers, planes = types.Array(int64, 1, "C", readonly=True), types.Array(uint8, 2, "C", readonly=True)
    rows = types.Array(from_dtype(np.dtype(f"u{width}")), 2, "C")
    addresses = (types.FunctionType(kind), intp, intp, intp)
    return Inflate(), compiled(chunks_of, intp(*addresses, numbers, numbers, planes, rows, numbers, numbers, numbers))
