"""Windows of which each block is read and decoded by one rank, and whose rows go to the ranks that need them.

Where a batch has not two blocks for each rank, every rank would read nearly every block to take a few rows of it. Here
each rank reads whole blocks of a window (`EpochOrder.owned`), by itself, from the time on when the window is planned.
Then the ranks exchange rows like those of ``shuffle="global"``. The batches are the same as without.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from matex_data._types import Integers
from matex_data.epochs.exchange import DistributedSamples, exchange_rows
from matex_data.epochs.window import EpochReader, LoadedWindow, PendingWindow, leave_out
from matex_data.fields import Field
from matex_data.index.model import ranges
from matex_data.index.runs import Runs
from matex_data.io.counters import Profile
from matex_data.io.files import Files
from matex_data.mpi.communicator import Communicator
from matex_data.reading.context import NO_ROWS, ReadContext
from matex_data.reading.execute import execute
from matex_data.reading.plan import Arrays
from matex_data.reading.pool import first_error, wait_for_all
from matex_data.reading.skipping import SampleRead
from matex_data.sampling.schedule import EpochOrder, Window

_ABSENT = Field("absent", (), np.dtype(bool))


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
        run = np.searchsorted(self.runs.start, positions, side="right") - 1
        local: Integers = self.runs.first[run] + positions - self.runs.start[run]
        return local


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
            return SharedWindow(context, window, owned, partial(_absent, read, futures), self.pads)


def _absent(read: SampleRead, futures: list[Future[None]]) -> Integers:
    """Wait for the reads, and return the rows of samples that are left out."""
    error = read.finish(first_error(futures))
    if error is not None:
        raise error
    return read.absent


class SharedWindow(PendingWindow):
    """Window whose blocks the ranks read for one another.

    Parameters
    ----------
    context : memory and communicator.
    window : samples that this rank needs.
    owned : samples that it reads.
    finish : waits until these are read, and returns the rows of them that could not be.
    pad : turn samples that could not be read into padding.
    """

    exchanges = True

    def __init__(
        self, context: ReadContext, window: Window, owned: OwnedSamples, finish: Callable[[], Integers], pad: bool
    ) -> None:
        self._context, self._window, self._pad = context, window, pad
        self._owned: OwnedSamples | None = owned
        self._finish = finish
        self._futures: list[Future[None]] = []
        self._absent = np.zeros(window.runs.total, bool)
        self._error: Exception | None = None

    def start(self, files: Files, profile: Profile) -> None:
        """Wait until this rank has read its blocks, and exchange the rows. *Collective*.

        Keep the error of a block for ``wait``: the windows before this one are complete.

        Raises
        ------
        MemoryError : memory has run out on this rank. The other ranks have been informed.
        """
        window, owned, error, positions = self._window, self._owned, None, NO_ROWS
        assert owned is not None
        fields = {**self._context.index.fields, "": _ABSENT}
        arrays: Arrays = {}
        with profile.timed("reading"):
            try:
                absent = np.zeros(owned.runs.total, bool)
                absent[self._finish()] = True
                owned = replace(owned, arrays={**owned.arrays, "": absent})
                samples = window.runs.total
                arrays = self._context.allocate(window.rows, samples)
                self.loaded = LoadedWindow(dict(arrays), window.sizes, np.arange(samples, window.rows))
                positions = np.empty(samples, np.int64)
                positions[window.destination] = ranges(window.runs.start, window.runs.count)
            except Exception as failure:  # of any kind: the other ranks have to raise it
                error = failure
            self._owned = None  # its memory is free once the rows are sent
            arrays[""] = self._absent
            try:
                self._futures = exchange_rows(self._context, owned, positions, fields, arrays, error)
            except Exception as failure:
                if failure is not error:
                    raise
                self._error = error

    def wait(self, profile: Profile) -> None:
        """Wait until all rows are in the window. Raise the first error."""
        if self._error is not None:
            raise self._error
        with profile.timed("decoding"):
            wait_for_all(self._futures)
        absent = np.flatnonzero(self._absent)
        self.loaded = leave_out(self.loaded, absent, self._context.index.fields, self._pad)
        profile.add(samples=self._window.runs.total - len(absent))
