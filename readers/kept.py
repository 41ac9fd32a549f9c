"""Decoded files that a process keeps: those that it used last, up to a number of bytes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from matex_data._types import Array
from matex_data.index.library import LibraryRows
from matex_data.lru import LeastRecentlyUsed

KEPT_BYTES = 256 << 20  # in the memory of a process, for all data sets; the last file stays whatever its size
BLOCK_BYTES = 256 << 10  # of neighbouring rows that are shuffled as one block
_OBJECT_BYTES = 64  # of a text in memory, beside its characters

Decoded = TypeVar("Decoded", bound=Array | dict[str, Array])

kept = LeastRecentlyUsed[Array | dict[str, Array]](KEPT_BYTES)


def kept_file(key: Hashable, decode: Callable[[], Decoded]) -> Decoded:
    """Return a file by its key, which the first thread that needs it decodes unless it is kept; the others wait."""
    return kept.made(key, decode, _nbytes)  # type: ignore[return-value]


def _nbytes(decoded: Array | dict[str, Array]) -> int:
    if isinstance(decoded, dict):
        return sum(map(_nbytes, decoded.values()))
    if not decoded.dtype.hasobject:
        return int(decoded.nbytes)
    objects = decoded.ravel().tolist()
    contents = sum(one.nbytes if isinstance(one, np.ndarray) else len(one) for one in objects)
    return int(decoded.nbytes) + contents + _OBJECT_BYTES * decoded.size


@dataclass(frozen=True, eq=False)
class KeptRows(LibraryRows):
    """Rows of an array that is decoded as a whole, by each rank that needs any of them, and kept for the others."""

    path: str

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return max(1, min(self.rows, BLOCK_BYTES // max(1, self.row_bytes)))

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Size of a row, in bytes."""

    @abstractmethod
    def decode(self) -> Array:
        """Return the whole array; raise ``DataError`` if the file is damaged or cannot be read."""

    def sources(self) -> Sequence[str]:
        return (self.path,)

    def read(self, start: int, stop: int) -> Array:
        return kept_file(self, self.decode)[start:stop]
