"""Epochs of PyTorch's workers: forked anew for each pass, they go on where the workers before them began."""

from __future__ import annotations

import mmap
import os
import sys
from typing import Any
from weakref import WeakSet

import numpy as np

from matex_data._types import Integers
from matex_data.errors import PartitionError
from matex_data.mpi.processes import is_child_process

MOST_WORKERS = 1023  # of one loader; their memory is two pages


class WorkerEpochs:
    """Epochs that forked workers of a ``torch.utils.data.DataLoader`` have begun, in memory that they share.

    A loader forks all its workers before it asks any of them for a batch. So the epochs that had begun at the time of
    the fork are those of earlier passes, and equal for all workers of one pass. The parent process itself never begins
    an epoch, and would otherwise hand the same one to the workers of every pass.
    """

    def __init__(self) -> None:
        self._shared: Integers | None = None  # for each worker the epochs that it has begun; last, the pass's seed
        self._at_fork: Integers | None = None
        _live.add(self)

    def prepare_fork(self) -> None:
        """Note which epochs have begun, for the child: there, a worker forked at the same time may be ahead of it."""
        if self._shared is None:
            self._shared = np.frombuffer(mmap.mmap(-1, 8 * (MOST_WORKERS + 1)), np.int64)
        self._at_fork = self._shared.copy()

    def forget(self) -> None:
        """Forget the epochs that have begun: the next one is given."""
        self._at_fork = None
        if self._shared is not None:
            self._shared[:] = 0

    def begin(self, epoch: int) -> int:
        """Return the epoch to begin, at least ``epoch``, and tell the workers of later passes.

        Raises
        ------
        PartitionError : workers of the same pass would read different epochs.
        """
        worker = _worker_info()
        if worker is None or self._shared is None:
            return epoch
        number, seed = int(worker.id), int(worker.seed) - int(worker.id)
        begun, self._at_fork = self._at_fork, None  # later passes of a persistent worker count on by themselves
        if begun is not None:
            latest = int(begun[:-1].max())
            if number >= MOST_WORKERS or (begun[number] < latest and begun[-1] == seed):
                raise PartitionError(
                    "the workers of a DataLoader do not know which epoch to begin",
                    expected=f"at most {MOST_WORKERS} workers, of which none reads before all are forked",
                    found=f"worker {number} of {worker.num_workers}",
                    remedy="read the batches in a generator: def __iter__(self): ... yield batch",
                )
            epoch = max(epoch, latest)
        self._shared[number], self._shared[-1] = epoch + 1, seed
        return epoch


def _worker_info() -> Any:
    """Return PyTorch's description of the worker that this process is, or None."""
    torch_data = sys.modules.get("torch.utils.data")
    return torch_data.get_worker_info() if torch_data is not None and is_child_process() else None


_live: WeakSet[WorkerEpochs] = WeakSet()


def _prepare_fork() -> None:
    if "torch.utils.data" in sys.modules and not is_child_process():
        for epochs in list(_live):
            epochs.prepare_fork()


os.register_at_fork(before=_prepare_fork)
