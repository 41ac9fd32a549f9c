"""Epochs of PyTorch's workers: started anew for each pass, they go on where the workers before them began."""

from __future__ import annotations

import os
import sys
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray, rebuild_ctype, reduce_ctype  # type: ignore[attr-defined]
from typing import Any
from weakref import WeakSet

import numpy as np

from matex_data._types import Integers
from matex_data.errors import PartitionError
from matex_data.mpi.processes import is_child_process

MOST_WORKERS = 1023  # of one loader; their memory is two pages


class WorkerEpochs:
    """Epochs that workers of a ``torch.utils.data.DataLoader`` have begun, in memory that they share.

    A loader forks all its workers, or pickles the data for all of them, before it asks any of them for a batch. So the
    epochs that had begun by then are those of earlier passes, and equal for all workers of one pass. The parent process
    itself never begins an epoch, and would otherwise hand the same one to the workers of every pass.
    """

    def __init__(self) -> None:
        self._memory: Any = None  # int64, for each worker the number of epochs that it has begun; last, the pass's seed
        self._at_start: Integers | None = None
        _live.add(self)

    def share(self) -> None:
        """Note which epochs have begun, for a worker: where it runs, others of its pass may be ahead of it."""
        if self._memory is None:
            self._memory = RawArray("q", MOST_WORKERS + 1)
        self._at_start = self._begun().copy()

    def _begun(self) -> Integers:
        return np.frombuffer(self._memory, np.int64)

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is None:  # only a process that is about to start can share memory
            return {"_memory": None, "_at_start": None}
        self.share()
        _, memory = reduce_ctype(self._memory)  # the first array of a process is of a type that no pickler knows yet
        return {"_memory": memory, "_at_start": self._at_start}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._memory = state["_memory"] and rebuild_ctype(*state["_memory"])
        self._at_start = state["_at_start"]
        _live.add(self)

    def next(self, epoch: int) -> int:
        """Return the epoch that the next pass begins, at least ``epoch``."""
        return epoch if self._memory is None else max(epoch, int(self._begun()[:-1].max()))

    def forget(self) -> None:
        """Forget the epochs that have begun: the next one is given."""
        self._at_start = None
        if self._memory is not None:
            self._begun()[:] = 0

    def begin(self, epoch: int) -> int:
        """Return the epoch to begin, at least ``epoch``, and tell the workers of later passes.

        Raises
        ------
        PartitionError : workers of the same pass would read different epochs.
        """
        worker = _worker_info()
        if worker is None or self._memory is None:
            return epoch
        number, seed = int(worker.id), int(worker.seed) - int(worker.id)
        begun, self._at_start = self._at_start, None  # later passes of a persistent worker count on by themselves
        if begun is not None:
            latest = int(begun[:-1].max())
            if number >= MOST_WORKERS or (begun[number] < latest and begun[-1] == seed):
                raise PartitionError(
                    "the workers of a DataLoader do not know which epoch to begin",
                    expected=f"at most {MOST_WORKERS} workers, of which none reads before all have started",
                    found=f"worker {number} of {worker.num_workers}",
                    remedy="read the batches in a generator: def __iter__(self): ... yield batch",
                )
            epoch = max(epoch, latest)
        shared = self._begun()
        shared[number], shared[-1] = epoch + 1, seed
        return epoch


def _worker_info() -> Any:
    """Return PyTorch's description of the worker that this process is, or None."""
    torch_data = sys.modules.get("torch.utils.data")
    return torch_data.get_worker_info() if torch_data is not None and is_child_process() else None


_live: WeakSet[WorkerEpochs] = WeakSet()


def _prepare_fork() -> None:
    if "torch.utils.data" in sys.modules and not is_child_process():
        for epochs in list(_live):
            epochs.share()


os.register_at_fork(before=_prepare_fork)
