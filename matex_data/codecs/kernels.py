"""The loops that Numba compiles: off Python's lock, and kept in a folder for the next program to use.

Import it where a loop is about to run: Numba takes most of a second, which others need not wait. Numba keeps what has
no closure over another compiled function, so that one loop serves both those who inflate and those who do not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import int64, intp, njit, types
from numba.extending import intrinsic

LINE = 64  # bytes of a line of the processor's cache
_WHOLE = ir.IntType(64)
_LINE = ir.VectorType(_WHOLE, LINE // 8)


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
