"""Loops that Numba compiles, which run without the interpreter lock. Numba keeps them on disk for the next process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


def compiled(loop: Callable[..., None], signature: Any) -> Callable[..., None]:
    """Compile a loop over arrays for one signature, or load it from the cache."""
    from numba import njit  # importing Numba takes most of a second

    with _without_extensions():
        try:
            return njit(signature, nogil=True, cache=True)(loop)  # type: ignore[no-any-return]
        except (RuntimeError, OSError):  # no writable folder for the cache, or a full one
            return njit(signature, nogil=True)(loop)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _without_extensions() -> Iterator[None]:
    """Context manager: Numba loads no extensions of other packages, as it does at the first compilation.

    Awkward, vector and what they import take several seconds. The user's first own compilation loads them.
    """
    from numba.core import entrypoints

    before = getattr(entrypoints, "_already_initialized", True)  # private: without it, extensions are loaded
    entrypoints._already_initialized = True
    try:
        yield
    finally:
        entrypoints._already_initialized = before
