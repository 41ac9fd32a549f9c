"""Ranks that index a large file collectively, as readers see them. No MPI here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from matex_data._types import Bytes
from matex_data.errors import DataError
from matex_data.index.model import FileIndex
from matex_data.storage.files import read_into

T = TypeVar("T")


class IndexingRanks(Protocol):
    """Ranks that index files collectively.

    Attributes
    ----------
    rank, size : number of this rank, and number of ranks.

    Examples
    --------
    A single rank, as in a test of a reader:

    >>> ranks: IndexingRanks = SingleRank()
    >>> ranks.rank, ranks.size
    (0, 1)
    """

    rank: int
    size: int

    def allgather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank. *Collective*.

        Examples
        --------
        >>> SingleRank().allgather("lines of this rank")
        ['lines of this rank']
        """

    def agree(self, error: Exception | None) -> None:
        """Raise the error of the lowest rank that has one, on every rank. *Collective*.

        Examples
        --------
        >>> SingleRank().agree(None)  # no rank has an error
        """

    def gather_files(self, files: Sequence[FileIndex]) -> Sequence[FileIndex]:
        """Return the files of all ranks, by rank, on rank 0; elsewhere those of this rank, or all. *Collective*.

        Of many files each rank then has the entries of its own in memory, not those of all.

        Examples
        --------
        >>> SingleRank().gather_files([])
        []
        """

    def read(self, path: str, offset: int, memory: Bytes) -> None:
        """Fill ``memory`` with the bytes of a file from ``offset`` on. *Collective*.

        Each rank reads its own bytes, or none. The first read of a file opens it and has to run on the main thread;
        later reads may run on another thread, one at a time.

        Raises
        ------
        DataError : the file is shorter, or cannot be read.

        Examples
        --------
        >>> import numpy as np
        >>> with open("numbers.txt", "w") as file:
        ...     length = file.write("1,2,3")
        >>> memory = np.empty(3, np.uint8)
        >>> SingleRank().read("numbers.txt", 2, memory)
        >>> memory.tobytes()
        b'2,3'
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

    def gather_files(self, files: Sequence[FileIndex]) -> Sequence[FileIndex]:
        return files

    def read(self, path: str, offset: int, memory: Bytes) -> None:
        found = read_into(path, offset, memory)
        if found < len(memory):
            raise DataError(
                "the file is shorter than it was",
                file=path,
                byte=offset + found,
                expected=f"at least {offset + len(memory)} bytes",
                found=f"{offset + found} bytes",
                remedy="do not write to the data while it is read",
            )


KEPT_BYTES = 64 << 20  # more than the blocks of a large text from which types are inferred


def agreed(ranks: IndexingRanks, task: Callable[[], T]) -> T:
    """Return what a task returns on this rank; raise the error of the lowest rank that has one. *Collective*.

    >>> agreed(SingleRank(), lambda: "header")
    'header'
    """
    results: list[T] = []
    failure: Exception | None = None
    try:
        results.append(task())
    except Exception as error:  # of any kind: every rank has to raise it
        failure = error
    ranks.agree(failure)
    return results.pop()


def read_own_ranges(
    ranks: IndexingRanks, path: str, ranges: Sequence[tuple[int, int]], take: Callable[[int, Bytes], None]
) -> None:
    """Read byte ranges of a file one after the other, other ones on each rank. *Collective*.

    After an error a rank reads nothing more, but enters the reads of the others, and then all ranks raise it.

    Parameters
    ----------
    ranges : offset and length, in bytes, of those of this rank.
    take : function of the number of a range and of its bytes, uint8[n], whose memory is used again.

    Examples
    --------
    >>> with open("words.txt", "w") as file:
    ...     length = file.write("one,two")
    >>> read_own_ranges(SingleRank(), "words.txt", [(0, 3), (4, 3)], lambda i, data: print(i, data.tobytes()))
    0 b'one'
    1 b'two'
    """
    memory = np.empty(max((nbytes for _, nbytes in ranges), default=0), np.uint8)
    failure: Exception | None = None
    for i in range(max(ranks.allgather(len(ranges)))):
        offset, nbytes = ranges[i] if i < len(ranges) and failure is None else (0, 0)
        try:
            ranks.read(path, offset, memory[:nbytes])
            if nbytes:
                take(i, memory[:nbytes])
        except Exception as error:  # of any kind: the other ranks need this one for the rest of the reads
            failure = error
    ranks.agree(failure)


def on_root(ranks: IndexingRanks, task: Callable[[], T]) -> T:
    """Return what a task returns on rank 0, which alone runs it; raise its error on all ranks. *Collective*.

    >>> on_root(SingleRank(), lambda: ["a.png", "b.png"])
    ['a.png', 'b.png']
    """
    value: Any = agreed(ranks, task if ranks.rank == 0 else lambda: None)
    found: T = ranks.allgather(value)[0]
    return found


class KeepingRanks:
    """Ranks that keep the first bytes that they read in memory, so that a second read of them costs nothing.

    Examples
    --------
    >>> import numpy as np
    >>> with open("rows.txt", "w") as file:
    ...     length = file.write("1,2,3")
    >>> ranks, memory = KeepingRanks(SingleRank()), np.empty(5, np.uint8)
    >>> ranks.read("rows.txt", 0, memory)
    >>> ranks.read("rows.txt", 2, memory[:3])
    >>> memory[:3].tobytes()
    b'2,3'
    """

    def __init__(self, ranks: IndexingRanks) -> None:
        self._ranks = ranks
        self.rank, self.size = ranks.rank, ranks.size
        self._kept: list[tuple[str, int, Bytes]] = []
        self._free = KEPT_BYTES

    def allgather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank. *Collective*."""
        return self._ranks.allgather(value)

    def agree(self, error: Exception | None) -> None:
        """Raise the error of the lowest rank that has one, on every rank. *Collective*."""
        self._ranks.agree(error)

    def gather_files(self, files: Sequence[FileIndex]) -> Sequence[FileIndex]:
        """Return files like ``IndexingRanks.gather_files``. *Collective*."""
        return self._ranks.gather_files(files)

    def read(self, path: str, offset: int, memory: Bytes) -> None:
        """Fill ``memory`` like ``IndexingRanks.read``, or from what is kept. *Collective*."""
        done = 0
        for kept_path, begin, data in self._kept:
            at = offset + done - begin
            if kept_path == path and 0 <= at < len(data):
                count = min(len(data) - at, len(memory) - done)
                memory[done : done + count] = data[at : at + count]
                done += count
        rest = memory[done:]
        self._ranks.read(path, offset + done, rest)
        if 0 < len(rest) <= self._free:
            self._free -= len(rest)
            self._kept.append((path, offset + done, rest.copy()))
