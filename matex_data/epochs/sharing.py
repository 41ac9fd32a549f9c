"""Windows of which each block is read and decoded by one rank, and whose rows go to the ranks that need them.

Where a batch has not two blocks for each rank, every rank would read nearly every block to take a few rows of it. Here
each rank reads whole blocks of a window (`EpochOrder.owned`), by itself, from the time on when the window is planned.
Then the ranks exchange rows like those of ``shuffle="global"``. The batches are the same as without.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from matex_data._types import Integers
from matex_data.epochs.exchange import ABSENT, DistributedSamples, ExchangedWindow
from matex_data.epochs.window import EpochReader, PendingWindow
from matex_data.index.model import ranges
from matex_data.index.runs import Runs
from matex_data.mpi.communicator import Communicator
from matex_data.reading.execute import execute
from matex_data.reading.plan import Arrays
from matex_data.reading.pool import first_error
from matex_data.reading.skipping import SampleRead
from matex_data.sampling.schedule import EpochOrder, StepPositions


@dataclass(frozen=True)
class OwnedSamples(DistributedSamples):
    """Samples of one window, of which each rank holds those of the blocks that it has read.

    Parameters
    ----------
    comm : the ranks.
    order : of the epoch, from which the owner of each sample follows.
    runs : samples of this rank, ascending.
    arrays : field name -> their rows.
    """

    comm: Communicator
    order: EpochOrder
    runs: Runs
    arrays: Arrays

    def owners(self, positions: Integers) -> Integers:
        return self.order.owners(positions, self.comm.size)

    def local(self, positions: Integers) -> Integers:
        return self.runs.rank(positions)


class SharedEpochReader(EpochReader):
    """Windows of an epoch that the ranks read for one another.

    Parameters
    ----------
    context : files that each rank reads by itself, memory, and a communicator.
    schedule, epoch, start, window_steps, skipped : see ``EpochReader``.
    """

    def plan(self, begin: int, end: int) -> PendingWindow:
        """Plan steps ``begin`` to ``end``, and start to read the blocks of this rank."""
        context, comm = self.context, self.context.session.comm
        with context.profile.timed("planning"):
            window = self.epoch.window(begin, end, comm.rank, comm.size)
            runs = self.epoch.owned(begin, end, comm.rank, comm.size)
            # Rows are taken from these arrays one by one: lists in arrays of their own, not in one.
            arrays = context.buffers.arrays(list(context.index.fields.values()), runs.total)
            owned = OwnedSamples(comm, self.epoch, runs, arrays)
            read = self.read(runs, np.arange(runs.total), arrays)
            futures = execute(read.plan(self._chunks), context.session.files)
            positions = np.empty(window.runs.total, np.int64)
            positions[window.destination] = ranges(window.runs.start, window.runs.count)
            drawn = StepPositions(positions, window.sizes, window.rows)
            return ExchangedWindow(context, comm, drawn, partial(_held, owned, read, futures), self.pads, marks=True)


def _held(owned: OwnedSamples, read: SampleRead, futures: list[Future[None]]) -> OwnedSamples:
    """Wait for the reads of this rank, and return its samples, with those that could not be read."""
    error = read.finish(first_error(futures))
    if error is not None:
        raise error
    absent = np.zeros(owned.runs.total, bool)
    absent[read.absent] = True
    return replace(owned, arrays={**owned.arrays, ABSENT: absent})
