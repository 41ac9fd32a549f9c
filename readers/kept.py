"""Files that can only be decoded as a whole: a process keeps those that it has used last, up to a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

from matex_data._types import Array
from matex_data.locks import Lock

KEPT_BYTES = 256 << 20  # in the memory of a process, for all data sets; the last file stays whatever its size
_OBJECT_BYTES = 64  # of a text in memory, beside its characters

Decoded = TypeVar("Decoded", bound=Array | dict[str, Array])


class Kept:
    """Decoded files by their keys, of which the least recently used ones are dropped. Threads may share it.

    Parameters
    ----------
    nbytes : bytes of all files.

    Examples
    --------
    >>> import numpy as np
    >>> files = Kept(100)
    >>> [files.get(name, lambda: np.zeros(8)).nbytes for name in ("a.npz", "b.npz")], list(files)
    ([64, 64], ['b.npz'])
    """

    def __init__(self, nbytes: int) -> None:
        self._most = nbytes
        self._files: OrderedDict[Hashable, tuple[Array | dict[str, Array], int]] = OrderedDict()
        self._used = 0
        self._lock = Lock()

    def __iter__(self) -> Iterator[Hashable]:
        return iter(list(self._files))

    def get(self, key: Hashable, decode: Callable[[], Decoded]) -> Decoded:
        """Return a file, which is decoded unless it is kept.

        Two threads that ask for a file at once may both decode it; neither waits for the other.
        """
        with self._lock:
            if key in self._files:
                self._files.move_to_end(key)
                return self._files[key][0]  # type: ignore[return-value]
        decoded = decode()
        with self._lock:
            _, replaced = self._files.pop(key, (None, 0))
            self._files[key] = (decoded, _nbytes(decoded))
            self._used += self._files[key][1] - replaced
            while self._used > self._most and len(self._files) > 1:
                _, (_, freed) = self._files.popitem(last=False)
                self._used -= freed
        return decoded


def _nbytes(decoded: Array | dict[str, Array]) -> int:
    if isinstance(decoded, dict):
        return sum(map(_nbytes, decoded.values()))
    texts = sum(map(len, decoded.ravel().tolist())) + _OBJECT_BYTES * decoded.size if decoded.dtype.hasobject else 0
    return int(decoded.nbytes) + texts


kept = Kept(KEPT_BYTES)
