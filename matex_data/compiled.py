"""Loops that Numba compiles: off Python's lock, and kept in a folder for the next program if it finds one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def compiled(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """The function as machine code for arguments of these types."""
    from numba import njit  # takes most of a second, which others need not wait

    try:
        kept: Callable[..., Any] = njit(signature, nogil=True, cache=True)(function)
    except (RuntimeError, OSError):  # no folder that can be written to, or a full one
        kept = njit(signature, nogil=True)(function)
    return kept
