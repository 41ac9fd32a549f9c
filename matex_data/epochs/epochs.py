"""Sources of the batches of an epoch: files that are read in every epoch, or samples that are kept in memory."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from matex_data._types import Integers
from matex_data.epochs.computed import compute_fields
from matex_data.epochs.exchange import ExchangeEpochReader, KeptSamples
from matex_data.epochs.prefetcher import Prefetcher
from matex_data.epochs.sharing import SharedEpochReader
from matex_data.epochs.skipping import SkippingEpochReader, leave_out
from matex_data.epochs.window import EpochReader, LoadedWindow, PendingWindow, StrictEpochReader, WholeWindow
from matex_data.errors import PartitionError
from matex_data.index.computed import Drawing
from matex_data.index.library import LibraryRows
from matex_data.locks import cached_property
from matex_data.machine import free_memory, memory_shortage
from matex_data.mpi.communicator import Communicator
from matex_data.mpi.processes import is_child_process
from matex_data.reading.context import ReadContext
from matex_data.reading.source import Source
from matex_data.sampling.schedule import Schedule, Window, rank_range
from matex_data.sampling.sizing import WINDOW_LIMIT

READ_BYTES = 64 << 20  # of one read of a rank, about, at most; each read costs Python time
LEAST_READ_BYTES = 4 << 20
EXCHANGE_BYTES = 16 << 20  # of one exchange of a rank, about, at most; a dozen times as much is in memory
WINDOWS_IN_MEMORY = 6  # consumed, waiting, read, decoded, planned, and one that is freed late
READS_IN_MEMORY = 64  # that the memory of a rank would hold; several are under way at once
SHARED_BLOCKS = 4  # that the cache of a rank holds, where it reads blocks for all: those which windows have begun
ORDERED_SAMPLES = 1 << 22  # of a lane, whose order is computed at once, however few of them a rank owns
LEAST_READS = 6  # of an epoch, so that one is read while another is decoded and a third one is consumed


def read_bytes(comm: Communicator) -> int:
    """Return the bytes that each rank reads at once, from the memory that the ranks may use. *Collective*."""
    least = -comm.maximum(-free_memory())[0]
    return int(min(READ_BYTES, max(LEAST_READ_BYTES, least // READS_IN_MEMORY)))


def read_ahead_steps(steps: int, window_steps: int, most: int) -> int:
    """Return the steps that are read at once: whole windows, in few reads of about equal length, but not too few.

    Parameters
    ----------
    steps : steps of an epoch.
    window_steps : steps of a window, which is never divided.
    most : limit on the steps read at once; a single window may exceed it.
    """
    windows = max(1, -(-steps // window_steps))
    fit = max(1, min(most // window_steps, windows // LEAST_READS))
    reads = -(-windows // fit)
    return window_steps * -(-windows // reads)


def steps_within(nbytes: int, source: Source, schedule: Schedule, ranks: int) -> int:
    """Return the steps that a rank reads at once.

    Every rank computes the order of whole lanes: at once of no more than ``ORDERED_SAMPLES`` samples of each, or of one
    window.

    Parameters
    ----------
    nbytes : of a rank's samples, about, at most; a single window may exceed it.
    source : the opened files.
    schedule : order of the samples.
    ranks : number of ranks.
    """
    most = nbytes // max(1, schedule.batch_size // ranks * source.row_bytes)
    if schedule.seed is not None and not schedule.uniform:
        most = min(most, ORDERED_SAMPLES // max(1, schedule.batch_size // schedule.lanes))
    return read_ahead_steps(schedule.steps, schedule.window_steps, most)


class Epochs(ABC):
    """Loaded windows of one rank, epoch by epoch.

    Parameters
    ----------
    source : the opened files.
    schedule : order of the samples in all epochs.

    Attributes
    ----------
    read_steps : steps that are read at once; whole windows of the schedule.
    """

    def __init__(self, source: Source, schedule: Schedule) -> None:
        self.source = source
        self.schedule = schedule
        self.rank, self.size = source.comm.rank, source.comm.size
        self.read_steps = steps_within(read_bytes(source.comm), source, schedule, self.size)

    @abstractmethod
    def windows(self, epoch: int, start: int) -> Iterator[LoadedWindow]:
        """Yield this rank's windows of ``read_steps`` steps each, from step ``start`` on. *Collective*."""


class PrefetchedEpochs(Epochs):
    """Epochs that a background thread loads ahead of the consumer. Only one of them is under way at a time."""

    def __init__(self, source: Source, schedule: Schedule) -> None:
        super().__init__(source, schedule)
        self._context: ReadContext | None = None
        self._process = os.getpid()
        self._prefetcher: Prefetcher | None = None

    def windows(self, epoch: int, start: int) -> Iterator[LoadedWindow]:
        """Yield this rank's windows from step ``start`` on. End an unfinished earlier epoch. *Collective*."""
        if self._process != os.getpid():  # after a fork, MPI, open files and threads belong to the parent process
            self._context, self._process, self._prefetcher = None, os.getpid(), None
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher.join()
        self._prefetcher = prefetcher = Prefetcher(self._reader(self._opened(), epoch, start))
        try:
            yield from prefetcher
        finally:
            prefetcher.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_context": None, "_process": -1, "_prefetcher": None}

    def _opened(self) -> ReadContext:
        """Return the context of these epochs; open it first if need be. *Collective*."""
        if self._context is None:
            self._context = self._open()
        return self._context

    @abstractmethod
    def _open(self) -> ReadContext:
        """Open a context for these epochs. *Collective*."""

    @abstractmethod
    def _reader(self, context: ReadContext, epoch: int, start: int) -> EpochReader:
        """Return the reader of one epoch."""


class StreamedEpochs(PrefetchedEpochs):
    """Epochs that are read from the files each time. *Collective*.

    Raises
    ------
    PartitionError : windows that have grown with the batch or the data do not fit into the memory of a rank.
    """

    def __init__(self, source: Source, schedule: Schedule) -> None:
        super().__init__(source, schedule)
        window = schedule.window_rows * source.row_bytes
        has_grown = window > max(WINDOW_LIMIT, schedule.batch_size * source.row_bytes)
        if source.window_bytes is None and has_grown and not schedule.uniform:
            own = self.read_steps * (schedule.batch_size // self.size) * source.row_bytes
            purpose = f"shuffled windows of {window >> 20} MiB, of which rank {self.rank} of {self.size} has its share,"
            remedy = (
                f"open the files with window_bytes={WINDOW_LIMIT >> 20} << 20 (another order), or use more machines"
            )
            source.comm.agree(memory_shortage(WINDOWS_IN_MEMORY * own, purpose, remedy=remedy))
        self._opened()

    def _open(self) -> ReadContext:
        return self.source.read_context(self.schedule.window_rows * self.source.row_bytes)

    def _reader(self, context: ReadContext, epoch: int, start: int) -> EpochReader:
        skipped = self.source.skipped
        if skipped is not None:
            return SkippingEpochReader(context, self.schedule, epoch, start, self.read_steps, skipped)
        return StrictEpochReader(context, self.schedule, epoch, start, self.read_steps)


class SharedEpochs(StreamedEpochs):
    """Epochs of which each block is read by one rank, which sends its rows to the others. *Collective*."""

    def __init__(self, source: Source, schedule: Schedule) -> None:
        super().__init__(source, schedule)
        self.read_steps = exchanged_steps(source, schedule, source.comm.size)

    def _open(self) -> ReadContext:
        window = self.schedule.window_rows * self.source.row_bytes
        context = self.source.read_context(window, "independent")
        blocks = SHARED_BLOCKS * cached_block_bytes(self.source, self.schedule)
        return replace(context, cache_bytes=max(context.cache_bytes, blocks))

    def _reader(self, context: ReadContext, epoch: int, start: int) -> EpochReader:
        if is_child_process():  # it cannot communicate
            return super()._reader(context, epoch, start)
        return SharedEpochReader(context, self.schedule, epoch, start, self.read_steps, self.source.skipped)


def exchanged_steps(source: Source, schedule: Schedule, ranks: int) -> int:
    """Return the steps whose rows the ranks exchange at once: whole windows of the schedule."""
    return steps_within(EXCHANGE_BYTES, source, schedule, ranks)


def mean_block_bytes(source: Source, schedule: Schedule) -> int:
    """Return the mean size of a block in memory, in bytes."""
    return schedule.segments.total * source.row_bytes // (int(schedule.blocks.max(initial=0)) + 1)


def cached_block_bytes(source: Source, schedule: Schedule) -> int:
    """Return the mean size of what a rank keeps of a block while it reads the rows, in bytes."""
    return mean_block_bytes(source, schedule) * (source.kept_bytes or source.row_bytes) // source.row_bytes


@dataclass(frozen=True)
class RowsOfSteps:
    """Rows of a shard in the order of an epoch.

    Parameters
    ----------
    number : int64, the rows of all steps, one step after the other; -1 for padding, which comes last in a step.
    sizes : int64[steps], rows of each step.
    """

    number: Integers
    sizes: Integers

    def of(self, begin: int, end: int) -> tuple[Integers, Integers]:
        """Return the rows, and the sizes, of steps ``begin`` to ``end``."""
        sizes, first = self.sizes[begin:end], int(self.sizes[:begin].sum())
        return self.number[first : first + int(sizes.sum())], sizes


class InMemoryEpochs(Epochs):
    """Epochs over samples that each rank reads once, keeps, and shuffles as a whole every time. *Collective*.

    Raises
    ------
    PartitionError : the shard of a rank does not fit into its memory.
    """

    def __init__(self, source: Source, schedule: Schedule) -> None:
        whole = replace(schedule, window_steps=max(1, schedule.steps), fixed_block_order=True)
        super().__init__(source, whole)
        self.read_steps = max(1, read_bytes(source.comm) * self.size // max(1, schedule.batch_size * source.row_bytes))
        self._kept, self.drawing = kept, _ = source.kept()
        shard = self._window(0).runs
        remedy = 'leave out cache="memory", or use more machines'
        source.comm.agree(
            memory_shortage(shard.total * kept.row_bytes, f"the shard of rank {self.rank}", remedy=remedy)
        )
        self._shard, absent = kept.read(shard)
        self._is_absent = np.zeros(shard.total, bool)
        self._is_absent[absent] = True

    def windows(self, epoch: int, start: int) -> Iterator[LoadedWindow]:
        """Yield this rank's windows from step ``start`` on, copied from its shard."""
        taken = self.order(epoch)
        for first in range(start, self.schedule.steps, self.read_steps):
            yield self.take(taken, first, first + self.read_steps)

    def order(self, epoch: int) -> RowsOfSteps:
        """Return the rows of the shard in the order of an epoch."""
        window = self._window(epoch)
        number = np.full(window.rows, -1, np.int64)
        number[window.destination] = np.arange(window.runs.total)
        return RowsOfSteps(number, window.sizes)

    def _window(self, epoch: int) -> Window:
        return self.schedule.epoch(epoch).window(0, self.schedule.steps, self.rank, self.size)

    def take(self, order: RowsOfSteps, begin: int, end: int) -> LoadedWindow:
        """Copy the rows of steps ``begin`` to ``end`` from the shard."""
        number, sizes = order.of(begin, end)
        fields = self._kept.index.fields
        arrays = self._kept.buffers.arrays(list(fields.values()), len(number))
        samples = int((number >= 0).sum())
        for name, array in arrays.items():
            np.take(self._shard[name], number[:samples], axis=0, out=array[:samples], mode="clip")
            fields[name].blank(array[samples:])
        loaded = LoadedWindow(arrays, sizes, np.arange(samples, len(number)))
        absent = np.flatnonzero(self._is_absent[number[:samples]])
        return leave_out(loaded, absent, fields, self.schedule.remainder == "pad")


class ComputedEpochs(PrefetchedEpochs):
    """Epochs over samples in memory, of which functions compute fields anew in each epoch. *Collective*.

    The functions run in the pool, and all ranks raise the error of one; they read no files.

    Raises
    ------
    PartitionError : the shard of a rank does not fit into its memory.
    """

    def __init__(self, source: Source, schedule: Schedule) -> None:
        self._memory = InMemoryEpochs(source, schedule)
        super().__init__(source, self._memory.schedule)
        self.read_steps = self._memory.read_steps
        self._opened()

    def _open(self) -> ReadContext:
        return replace(self.source.read_context(io="independent"), changed_file=_unchanged)

    def _reader(self, context: ReadContext, epoch: int, start: int) -> EpochReader:
        assert self._memory.drawing is not None
        return ComputingEpochReader(context, self._memory, self._memory.drawing, epoch, start)


def _unchanged() -> None:
    """Return None, since files that have been read whole may change."""


class ComputingEpochReader(EpochReader):
    """Windows of an epoch of ``ComputedEpochs``.

    Parameters
    ----------
    context : a communicator for these epochs alone.
    memory : samples of this rank.
    drawing : functions that compute fields.
    epoch : number of the epoch, from 0 on.
    start : first step.
    """

    def __init__(self, context: ReadContext, memory: InMemoryEpochs, drawing: Drawing, epoch: int, start: int) -> None:
        super().__init__(context, memory.schedule, epoch, start, memory.read_steps)
        self._memory, self._drawing = memory, drawing

    @cached_property
    def _order(self) -> RowsOfSteps:
        return self._memory.order(self._number)

    def plan(self, begin: int, end: int) -> PendingWindow:
        """Copy the samples of steps ``begin`` to ``end``, and compute their fields."""
        loaded = self._memory.take(self._order, begin, end)
        return WholeWindow(compute_fields(loaded, self._drawing, self._number))


class SingleRowEpochs(StreamedEpochs):
    """Epochs in a uniform permutation of all samples, which are read row by row. *Collective*.

    Raises
    ------
    PartitionError : a field does not allow reads of single rows.
    """

    def __init__(self, source: Source, schedule: Schedule) -> None:
        source.comm.agree(_single_row_error(source))
        super().__init__(source, schedule)


class ExchangedEpochs(PrefetchedEpochs):
    """Epochs in a uniform permutation of all samples, which the ranks keep in memory and exchange. *Collective*.

    Raises
    ------
    PartitionError : the shard of a rank does not fit into its memory; MPI does not allow calls from threads.
    """

    def __init__(self, source: Source, schedule: Schedule) -> None:
        super().__init__(source, schedule)
        most = EXCHANGE_BYTES // max(1, schedule.batch_size // self.size * source.row_bytes)
        self.read_steps = max(1, min(self.read_steps, most))
        comm, total = source.comm, schedule.segments.total
        comm.agree(_exchange_error(source))
        self._kept, self._drawing = kept, _ = source.kept()
        start, stop = rank_range(total, self.rank, self.size)
        single = _single_row_error(source) is None
        remedy = 'global_reads="rows" (reads single rows in every epoch), ' if single else ""
        purpose = f'the shard of rank {self.rank} of {self.size}, which shuffle="global" keeps,'
        remedy = f"use {remedy}more machines, fewer fields, or shuffle=True"
        comm.agree(memory_shortage((stop - start) * kept.row_bytes, purpose, remedy=remedy))
        arrays, absent = kept.read(kept.block(schedule.samples))
        if source.skipped is not None:
            absent = np.concatenate(comm.allgather(absent + start))
        self._samples = KeptSamples(comm, total, arrays, absent)
        self._opened()

    def _open(self) -> ReadContext:
        context = self._kept.exchange_context()
        return context if self._drawing is None else replace(context, lists=False)

    def _reader(self, context: ReadContext, epoch: int, start: int) -> EpochReader:
        steps = self.read_steps
        return ExchangeEpochReader(context, self.schedule, self._samples, epoch, start, steps, self._drawing)


def _exchange_error(source: Source) -> PartitionError | None:
    """Return the error if the ranks cannot exchange samples in the background, else None."""
    if source.comm.size == 1 or source.threaded:
        return None
    return PartitionError(
        'shuffle="global" exchanges samples between the ranks in a thread, which this MPI does not allow',
        expected="MPI_THREAD_MULTIPLE",
        remedy='use an MPI library that provides it, global_reads="rows", or shuffle=True',
    )


def _single_row_error(source: Source) -> PartitionError | None:
    """Return the error if rows cannot be read singly, else None. Of many files each rank looks at its block."""
    table, comm = source.index.files, source.comm
    for number in dict.fromkeys([0, *range(*rank_range(len(table), comm.rank, comm.size))]):
        file = table[number]
        for name in source.index.fields:
            layout = file.layouts[name]
            if layout.block_rows > 1 or layout.borders() is not None or isinstance(layout, LibraryRows):
                stored = f"blocks of {layout.block_rows:,} rows" if layout.block_rows > 1 else "blocks of several rows"
                return PartitionError(
                    'global_reads="rows" reads single rows, which this field does not allow',
                    file=file.path,
                    field=name,
                    expected="rows of fixed size, each of which can be read alone",
                    found=f"{stored} (chunks, or text)",
                    remedy='use global_reads="memory" if the data fit into the memory of all ranks, store the field '
                    "contiguously, or use shuffle=True",
                )
    return None
