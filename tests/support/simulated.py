"""Ranks without MPI: threads that gather and read as ranks do."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from matex_data._types import Bytes

PATIENCE = 20.0
"""Seconds after which a rank that waits for another gives up."""


class _Simulated:
    """One of several threads. A rank that leaves out a collective call breaks the barrier of the others."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list[Any]) -> None:
        self.rank = rank
        self.size = size
        self._barrier = barrier
        self._board = board

    def allgather(self, value: Any) -> list[Any]:
        self._board[self.rank] = pickle.dumps(value)
        self._barrier.wait(PATIENCE)
        said = [pickle.loads(value) for value in self._board]
        self._barrier.wait(PATIENCE)
        return said

    def agree(self, error: Exception | None) -> None:
        found = next((said for said in self.allgather(error) if said is not None), None)
        if found is not None:
            raise found

    def read(self, path: str, offset: int, memory: Bytes) -> None:
        self.allgather("read")
        handle = os.open(path, os.O_RDONLY)
        try:
            memory[:] = np.frombuffer(os.pread(handle, len(memory), offset), np.uint8)
        finally:
            os.close(handle)


def together(size: int, task: Callable[[Any], Any]) -> list[Any]:
    """What ``task(ranks)`` returns on each of ``size`` ranks; an exception of one is raised here."""
    barrier, board = threading.Barrier(size), [None] * size
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: task(_Simulated(rank, size, barrier, board)), range(size)))
