"""What a reader knows of the ranks, when they look at a large file together. No MPI here."""

from __future__ import annotations

import os
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Ranks(Protocol):
    """Ranks that index files together.

    Attributes
    ----------
    rank, size : of this one, and how many there are.
    """

    rank: int
    size: int

    def allgather(self, value: Any) -> list[Any]:
        """What every rank has said, by rank. *Collective*."""

    def agree(self, error: Exception | None) -> None:
        """Raise the error of the lowest rank that has one, on every rank. *Collective*."""

    def read(self, path: str, offset: int, memory: Bytes) -> None:
        """Fill ``memory`` with the bytes of a file, each rank with its own, or with none at all. *Collective*.

        Raises
        ------
        DataError : the file is shorter, or cannot be read.
        """


class Alone:
    """The only rank."""

    rank = 0
    size = 1

    def allgather(self, value: Any) -> list[Any]:
        return [value]

    def agree(self, error: Exception | None) -> None:
        if error is not None:
            raise error

    def read(self, path: str, offset: int, memory: Bytes) -> None:
        if len(memory):
            handle = os.open(path, os.O_RDONLY)
            try:
                memory[:] = np.frombuffer(os.pread(handle, len(memory), offset), np.uint8)
            finally:
                os.close(handle)
