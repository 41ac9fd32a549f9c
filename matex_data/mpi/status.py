"""Exchange of the status of each rank before collective work, so that no rank waits for one that failed or stopped."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np

from matex_data._types import Integers
from matex_data.errors import DataError
from matex_data.mpi.communicator import Communicator, PendingMaximum

T = TypeVar("T")


class Status(IntEnum):
    """Status of a rank. All ranks act on the highest status among them."""

    CONTINUE = 0
    STOP = 1
    FAILED = 2


class StatusExchange:
    """Reduction of a status and of counts over all ranks.

    Parameters
    ----------
    comm : communicator for this object alone.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def start(self, status: Status, counts: Integers) -> PendingMaximum:
        """Start to reduce a status and int64[n] counts. *Collective*. Pass the result to ``split_result``."""
        return self._comm.start_maximum(np.concatenate([[int(status)], counts]))

    def exchange(self, status: Status, counts: Integers) -> tuple[Status, Integers]:
        """Return the highest status and the element-wise maximum of ``counts``. *Collective*.

        Raises
        ------
        PartitionError : another rank does not make this call.
        """
        return split_result(self.start(status, counts).wait())

    def on_root(self, function: Callable[[], T]) -> T:
        """Return what a function returns on rank 0, like ``Communicator.on_root``. *Collective*."""
        return self._comm.on_root(function)

    def gather(self, value: Any) -> list[Any]:
        """Return the Python objects of all ranks, by rank; only its own where each has its own status. *Collective*."""
        return [value] if self._comm.alone else self._comm.allgather(value)

    def first_error(self, own: BaseException | None) -> BaseException:
        """Return the error of the lowest rank that has one. *Collective*, after ``FAILED``."""
        return self._comm.first_error(own) or DataError("a rank reported a failure, but no error")


def split_result(maximum: Integers) -> tuple[Status, Integers]:
    """Return the highest status and the largest counts of a reduction that ``start`` began."""
    return Status(int(maximum[0])), maximum[1:]
