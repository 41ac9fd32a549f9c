"""Loops that Numba compiles, which run without the interpreter lock. Numba keeps them on disk for the next process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from matex_data.locks import Lock


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
    """Context manager: this thread loads no extensions of other packages into Numba, as the first compilation does.

    Awkward, vector and what they import take several seconds. The user's first own compilation loads them, also while
    this thread compiles: Numba's note of what is loaded stays as it is.
    """
    from numba.core import entrypoints

    own = threading.get_ident()
    with _PATCHING:
        load = entrypoints.init_all  # private: whatever replaces it, Numba calls this name

        def load_in_other_threads() -> None:
            if threading.get_ident() != own:
                load()

        entrypoints.init_all = load_in_other_threads
        try:
            yield
        finally:
            entrypoints.init_all = load


_PATCHING = Lock()
