"""What a reader knows of the ranks, when they look at a large file together. No MPI here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from matex_data._types import Bytes
from matex_data.errors import DataError


class IndexingRanks(Protocol):
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

        The first read of a file opens it, and belongs to the thread that runs the user's program; any other thread may
        go on, one at a time.

        Raises
        ------
        DataError : the file is shorter, or cannot be read.
        """


class SingleRank:
    """The only rank."""

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
                remedy="let nobody write to the data while it is read",
            )
