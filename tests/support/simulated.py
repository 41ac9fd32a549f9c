"""Simulated ranks: threads that gather objects and read files as MPI ranks do."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from matex_data._types import Bytes
from matex_data.index.model import FileIndex

TIMEOUT = 20.0
"""Seconds that a rank waits for the others in a collective call."""


class _Simulated:
    """One simulated rank. A rank that misses a collective call breaks the barrier of the others."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list[Any]) -> None:
        self.rank = rank
        self.size = size
        self._barrier = barrier
        self._board = board

    def allgather(self, value: Any) -> list[Any]:
        self._board[self.rank] = pickle.dumps(value)
        self._barrier.wait(TIMEOUT)
        values = [pickle.loads(value) for value in self._board]
        self._barrier.wait(TIMEOUT)
        return values

    def agree(self, error: Exception | None) -> None:
        first_error = next((found for found in self.allgather(error) if found is not None), None)
        if first_error is not None:
            raise first_error

    def gather_files(self, files: Sequence[FileIndex]) -> list[FileIndex]:
        """Return the files of all ranks, on every rank."""
        return [file for of_rank in self.allgather(list(files)) for file in of_rank]

    def read(self, path: str, offset: int, memory: Bytes) -> None:
        self.allgather("read")
        handle = os.open(path, os.O_RDONLY)
        try:
            memory[:] = np.frombuffer(os.pread(handle, len(memory), offset), np.uint8)
        finally:
            os.close(handle)


def on_ranks(size: int, task: Callable[[Any], Any]) -> list[Any]:
    """Run ``task(ranks)`` on ``size`` simulated ranks, and return its results by rank; raise the error of any rank."""
    barrier, board = threading.Barrier(size), [None] * size
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: task(_Simulated(rank, size, barrier, board)), range(size)))
