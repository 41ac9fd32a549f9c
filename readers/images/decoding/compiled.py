"""Loops that Numba compiles, which run without the interpreter lock. Numba keeps them on disk for the next process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def compiled(loop: Callable[..., None], signature: Any) -> Callable[..., None]:
    """Compile a loop over arrays for one signature, or load it from the cache."""
    from numba import njit  # importing Numba takes most of a second

    try:
        return njit(signature, nogil=True, cache=True)(loop)  # type: ignore[no-any-return]
    except (RuntimeError, OSError):  # no writable folder for the cache, or a full one
        return njit(signature, nogil=True)(loop)  # type: ignore[no-any-return]
