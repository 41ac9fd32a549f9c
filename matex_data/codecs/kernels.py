"""The loops that Numba compiles: off Python's lock, and kept in a folder for the next program to use.

Import it where a loop is about to run: Numba takes most of a second, which others need not wait. Numba keeps what has
no closure over another compiled function, so that one loop serves both those who inflate and those who do not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import from_dtype, int32, int64, intp, njit, types, uint8
from numba.extending import intrinsic

LINE = 64  # bytes of a line of the processor's cache
_WHOLE = ir.IntType(64)
_LINE = ir.VectorType(_WHOLE, LINE // 8)


@intrinsic  # type: ignore[untyped-decorator]
def _inflated(_: Any, function: Any, decompressor: Any, stored: Any, nbytes: Any, to: Any, size: Any) -> Any:
    """Call ``libdeflate_zlib_decompress``, which lies at the address ``function``; 0 if all went well.

    It has nowhere to write the decoded size to: then any but the whole one is an error.
    """

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [_WHOLE] * 6)
        pointer = builder.inttoptr(arguments[0], kind.as_pointer())
        return builder.call(pointer, [*arguments[1:], ir.Constant(_WHOLE, 0)])

    return int32(function, decompressor, stored, nbytes, to, size), generate


@cache
def chunks_to_rows(width: int) -> Callable[..., int]:
    """The loop for elements of 1, 2, 4 or 8 bytes, whose bytes lie in as many planes.

    Its arguments: addresses of libdeflate's function (0: nothing is to be inflated), of its decompressor, of the stored
    chunks and of ``planes``; int64[k], where each chunk begins and how long it is; uint8[width, elements], the planes
    of a decoded chunk; rows of unsigned numbers; int64[m], destinations of rows; int64[k] twice, the first destination
    of each chunk and the one after its last. It gives the number of chunks before one that is broken.
    """
    unsigned: Any = np.dtype(f"u{width}").type

    def loop(
        function: Any, decompressor: Any, stored: Any, scratch: Any, begin: Any, nbytes: Any, planes: Any, out: Any,
        destination: Any, first: Any, last: Any,
    ) -> Any:  # fmt: skip
        length = out.shape[1]
        for chunk in range(len(begin)):
            where = stored + begin[chunk]
            if function != 0 and _inflated(function, decompressor, where, nbytes[chunk], scratch, planes.size) != 0:
                return chunk
            for row in range(last[chunk] - first[chunk]):
                start, to = row * length, destination[first[chunk] + row]
                for i in range(length):
                    element = unsigned(0)
                    for plane in range(width):
                        element |= unsigned(planes[plane, start + i]) << unsigned(8 * plane)
                    out[to, i] = element
        return len(begin)

    numbers, planes = types.Array(int64, 1, "C", readonly=True), types.Array(uint8, 2, "C", readonly=True)
    rows = types.Array(from_dtype(np.dtype(unsigned)), 2, "C")
    kind = intp(intp, intp, intp, intp, numbers, numbers, planes, rows, numbers, numbers, numbers)
    return _compiled(kind, loop)


@intrinsic  # type: ignore[untyped-decorator]
def _streamed(_: Any, to: Any, source: Any) -> Any:
    """Copy one line of the processor's cache to an address that is a multiple of its length, past the cache."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        to, source = (builder.inttoptr(address, _LINE.as_pointer()) for address in arguments)
        store = builder.store(builder.load(source, align=1), to, align=LINE)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return ir.Constant(_WHOLE, 0)

    return int64(to, source), generate


@intrinsic  # type: ignore[untyped-decorator]
def _copied(_: Any, to: Any, source: Any) -> Any:
    """Copy one byte."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        to, source = (builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in arguments)
        builder.store(builder.load(source), to)
        return ir.Constant(_WHOLE, 0)

    return int64(to, source), generate


@intrinsic  # type: ignore[untyped-decorator]
def _seen_by_all(_: Any) -> Any:
    """What was streamed is in memory before anything that follows."""

    def generate(_: Any, builder: Any, __: Any, ___: Any) -> Any:
        builder.fence("seq_cst")
        return ir.Constant(_WHOLE, 0)

    return int64(), generate


@cache
def pieces_to_places() -> Callable[..., int]:
    """The loop that copies pieces of memory which follow one another to places of their own.

    The places are written past the processor's cache: they are read much later, and what is in the cache stays there.

    Its arguments: address of the first piece; int64[k], addresses of the places; int64[k], bytes of each.
    """

    def loop(source: Any, address: Any, nbytes: Any) -> Any:
        for piece in range(len(address)):
            to, end = address[piece], address[piece] + nbytes[piece]
            shift = source - to
            streamed = min(end, to + -to % LINE)
            last = streamed + (end - streamed) // LINE * LINE
            for at in range(to, streamed):
                _copied(at, at + shift)
            for at in range(streamed, last, LINE):
                _streamed(at, at + shift)
            for at in range(last, end):
                _copied(at, at + shift)
            source += nbytes[piece]
        return _seen_by_all()

    numbers = types.Array(int64, 1, "C", readonly=True)
    return _compiled(intp(intp, numbers, numbers), loop)


def _compiled(kind: Any, loop: Callable[..., Any]) -> Callable[..., int]:
    try:
        compiled: Callable[..., int] = njit(kind, nogil=True, cache=True)(loop)
    except (RuntimeError, OSError):  # no folder that can be written to, or a full one
        compiled = njit(kind, nogil=True)(loop)
    return compiled
