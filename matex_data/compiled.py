"""Loops that Numba compiles, in a thread that begins when they are first wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from matex_data.locks import Lock

L = TypeVar("L")


def compiled(loop: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """Compile a loop over arrays for one signature, or load it from the cache that Numba keeps on disk.

    The loop runs without the lock of the interpreter.
    """
    from numba import njit  # importing Numba takes most of a second

    try:
        return njit(signature, nogil=True, cache=True)(loop)  # type: ignore[no-any-return]
    except (RuntimeError, OSError):  # no writable folder for the cache, or a full one
        return njit(signature, nogil=True)(loop)  # type: ignore[no-any-return]


class Compiling(Generic[L]):
    """Loops that are compiled while others do their work.

    Parameters
    ----------
    name : of the thread.
    make : returns the loops; takes about a second.

    Examples
    --------
    >>> doubling = Compiling("example", lambda: lambda number: 2 * number)
    >>> doubling.now()(3)
    6
    >>> doubling.loops() is doubling.now()
    True
    """

    def __init__(self, name: str, make: Callable[[], L]) -> None:
        self._name, self._make = name, make
        self._loops: L | None = None
        self._begun = Lock()  # taken once, by the thread that begins; a forked process begins anew

    def loops(self) -> L | None:
        """Return the loops, or None while they are not compiled; the first call begins with that."""
        if self._loops is None and self._begun.acquire(blocking=False):
            threading.Thread(target=self.now, name=f"matex compiles {self._name}").start()
        return self._loops

    def now(self) -> L:
        """Return the loops, and compile them in this thread if no other has done so."""
        if self._loops is None:
            self._loops = self._make()
        return self._loops
