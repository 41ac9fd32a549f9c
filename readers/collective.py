"""Ranks that index a large file collectively, as readers see them. No MPI here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from matex_data._types import Bytes
from matex_data.errors import DataError


class IndexingRanks(Protocol):
    """Ranks that index files collectively.

    Attributes
    ----------
    rank, size : number of this rank, and number of ranks.
    """

    rank: int
    size: int

    def allgather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank. *Collective*."""

    def agree(self, error: Exception | None) -> None:
        """Raise the error of the lowest rank that has one, on every rank. *Collective*."""

    def read(self, path: str, offset: int, memory: Bytes) -> None:
        """Fill ``memory`` with the bytes of a file from ``offset`` on. *Collective*.

        Each rank reads its own bytes, or none. The first read of a file opens it and has to run on the main thread;
        later reads may run on another thread, one at a time.

        Raises
        ------
        DataError : the file is shorter, or cannot be read.
        """


class SingleRank:
    """Single rank, which reads with the functions of Python."""

    rank = 0
    size = 1

    def allgather(self, value: Any) -> list[Any]:
        return [value]

    def agree(self, error: Exception | None) -> None:
        if error is not None:
            raise error

    def read(self, path: str, offset: int, memory: Bytes) -> None:
        with Path(path).open("rb") as file:
            file.seek(offset)
            found = file.readinto(memory.data)
        if found < len(memory):
            raise DataError(
                "the file is shorter than it was",
                file=path,
                byte=offset + found,
                expected=f"at least {offset + len(memory)} bytes",
                found=f"{offset + found} bytes",
                remedy="do not write to the data while it is read",
            )
