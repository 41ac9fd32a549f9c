"""Files that can only be decoded as a whole: a process keeps those that it has used last, up to a number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import numpy as np

from matex_data._types import Array
from matex_data.lru import LeastRecentlyUsed

KEPT_BYTES = 256 << 20  # in the memory of a process, for all data sets; the last file stays whatever its size
_OBJECT_BYTES = 64  # of a text in memory, beside its characters

Decoded = TypeVar("Decoded", bound=Array | dict[str, Array])


class Kept:
    """Decoded files by their keys, bounded in bytes. Threads may share it.

    Parameters
    ----------
    nbytes : bytes of all files.

    Examples
    --------
    >>> import numpy as np
    >>> files = Kept(100)
    >>> [files.get(name, lambda: np.zeros(8)).nbytes for name in ("a.npz", "b.npz")]
    [64, 64]
    """

    def __init__(self, nbytes: int) -> None:
        self.files = LeastRecentlyUsed[Array | dict[str, Array]](nbytes)

    def get(self, key: Hashable, decode: Callable[[], Decoded]) -> Decoded:
        """Return a file, which is decoded unless it is kept.

        Two threads that ask for a file at once may both decode it; neither waits for the other.
        """
        decoded = self.files.get(key)
        if decoded is None:
            decoded = decode()
            self.files.add(key, decoded, _nbytes(decoded))
        return decoded  # type: ignore[return-value]


def _nbytes(decoded: Array | dict[str, Array]) -> int:
    if isinstance(decoded, dict):
        return sum(map(_nbytes, decoded.values()))
    if not decoded.dtype.hasobject:
        return int(decoded.nbytes)
    objects = decoded.ravel().tolist()
    contents = sum(one.nbytes if isinstance(one, np.ndarray) else len(one) for one in objects)
    return int(decoded.nbytes) + contents + _OBJECT_BYTES * decoded.size


kept = Kept(KEPT_BYTES)
