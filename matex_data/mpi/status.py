"""Ranks agree on how to go on: no rank is left waiting for one that failed or left."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from matex_data._types import Integers
from matex_data.errors import DataError
from matex_data.mpi.communicator import Communicator, PendingMaximum


class Status(IntEnum):
    """What a rank wants; the highest of all ranks is what they do."""

    CONTINUE = 0
    STOP = 1
    FAILED = 2


class StatusExchange:
    """Rounds in which every rank says what it wants and learns what all do.

    Parameters
    ----------
    comm : for this alone.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def start(self, status: Status, counts: Integers) -> PendingMaximum:
        """Tell both to the other ranks. *Collective*. ``split_result`` reads the result."""
        return self._comm.start_maximum(np.concatenate([[int(status)], counts]))

    def exchange(self, status: Status, counts: Integers) -> tuple[Status, Integers]:
        """Return the highest status, and the element-wise maximum of ``counts``. *Collective*.

        Raises
        ------
        PartitionError : not all ranks come.
        """
        return split_result(self.start(status, counts).wait())

    def first_error(self, mine: BaseException | None) -> BaseException:
        """Return the error of the lowest rank that has one. *Collective*, after ``FAILED``."""
        return self._comm.first_error(mine) or DataError("a rank reported a failure, but no error")


def split_result(largest: Integers) -> tuple[Status, Integers]:
    """Split what a round has found into the highest status and the largest counts."""
    return Status(int(largest[0])), largest[1:]
