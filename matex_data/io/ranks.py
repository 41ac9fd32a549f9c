"""Ranks that index one file together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matex_data.index.files import FileColumns, columns_of
from matex_data.index.model import FileIndex
from matex_data.io.coalesce import ReadTask
from matex_data.io.files import Files
from matex_data.mpi.communicator import Communicator


class MpiRanks:
    """Ranks of a communicator, with the interface of ``matex_data.readers.ranks.IndexingRanks``.

    Parameters
    ----------
    comm : communicator of these ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._files: Files | None = None
        self.rank = comm.rank
        self.size = comm.size

    def allgather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank. *Collective*."""
        return self._comm.allgather(value)

    def agree(self, error: Exception | None) -> None:
        """Raise the error of the lowest rank that has one, on every rank. *Collective*."""
        self._comm.agree(error)

    def gather_files(self, files: Sequence[FileIndex]) -> Sequence[FileIndex]:
        """Return the files of all ranks, by rank and in columns, on rank 0; elsewhere those of this rank. *Collective*.

        Raises
        ------
        Exception : a layout cannot be pickled.
        """
        by_rank = self._comm.gather(self._comm.agreed(lambda: columns_of(files)))
        return files if by_rank is None else FileColumns.joined(by_rank)

    def read(self, path: str, offset: int, memory: NDArray[np.uint8]) -> None:
        """Read bytes of a file; each rank has its own, or none.

        Parameters
        ----------
        path : the file.
        offset : first byte of this rank.
        memory : uint8[n], destination.

        Raises
        ------
        DataError : the file is too short, or cannot be read.
        """
        if self._files is None or list(self._files.paths) != [path]:
            self._files = Files(self._comm, [path], "independent")
        begin, nbytes, address = (np.array([value]) for value in (offset, len(memory), memory.ctypes.data))
        self._files.read(0, ReadTask(begin, nbytes, address))

    def close(self) -> None:
        """Close the file."""
        self._files = None
