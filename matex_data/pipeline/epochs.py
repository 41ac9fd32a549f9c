"""Where the batches of an epoch come from: read again in every epoch, or kept in memory."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from matex_data._types import Integers
from matex_data.errors import PartitionError
from matex_data.index.library import LibraryRows
from matex_data.machine import free_memory, memory_shortage
from matex_data.mpi.communicator import Communicator
from matex_data.pipeline.epoch_reader import EpochReader
from matex_data.pipeline.exchange import Exchanges, Holding
from matex_data.pipeline.execute import Arrays
from matex_data.pipeline.prefetcher import Passage, Prefetcher
from matex_data.pipeline.source import Source
from matex_data.pipeline.window import LoadedWindow
from matex_data.sampling.schedule import Schedule, Window, rank_range

READ_BYTES = 64 << 20  # brought together by a rank, about, at most: Python is paid for each time
LEAST_READ_BYTES = 4 << 20
EXCHANGE_BYTES = 16 << 20  # that a rank gets in one exchange, about, at most: some dozen times that is in memory
READ_SHARE = 64  # of the memory that a rank may use, one part in so many: several are on their way at once
LEAST_PARTS = 6  # of an epoch: one is read while the one before it is decoded and the one before that is consumed
IN_VAIN = 1 / 12  # of all that was read, at most, should the pass for which a window was read ahead never come


def read_bytes(comm: Communicator) -> int:
    """What each rank brings together, in bytes: it follows from the memory that it may use. *Collective*."""
    least = -comm.maximum(-free_memory())[0]
    return int(min(READ_BYTES, max(LEAST_READ_BYTES, least // READ_SHARE)))


def read_ahead_steps(steps: int, window_steps: int, most: int) -> int:
    """Steps of an epoch that come together: whole windows, in few parts of about the same length, but not too few.

    Parameters
    ----------
    steps : of an epoch.
    window_steps : of a window, which is not cut.
    most : steps that may come together, if a window does not have more.
    """
    windows = max(1, -(-steps // window_steps))
    fit = max(1, min(most // window_steps, windows // LEAST_PARTS))
    parts = -(-windows // fit)
    return window_steps * -(-windows // parts)


class Epochs(ABC):
    """Epochs of one rank.

    Parameters
    ----------
    source : the opened files.
    schedule : who gets which sample when.

    Attributes
    ----------
    together : steps that come together, whole windows of the schedule.
    """

    def __init__(self, source: Source, schedule: Schedule) -> None:
        self.source = source
        self.schedule = schedule
        self.rank, self.size = source.comm.rank, source.comm.size
        step_bytes = max(1, schedule.batch_size // self.size * source.row_bytes)
        self.together = read_ahead_steps(schedule.steps, schedule.window_steps, read_bytes(source.comm) // step_bytes)

    @abstractmethod
    def windows(self, epoch: int, start: int) -> Iterator[LoadedWindow]:
        """The rank's share of an epoch from a step on, ``together`` steps at a time. *Collective*."""


class StreamedEpochs(Epochs):
    """Every epoch is read from the files. *Collective*.

    Who has come twice is likely to come again: from the second pass on, the end of one begins to read for the next.
    """

    def __init__(self, source: Source, schedule: Schedule) -> None:
        super().__init__(source, schedule)
        self._supply, self._process = source.supply(), os.getpid()
        self._stream: Prefetcher | None = None
        self._count = 0

    def windows(self, epoch: int, start: int) -> Iterator[LoadedWindow]:
        if self._process != os.getpid():  # forked: MPI, open files and threads have stayed with the parent
            self._supply, self._process, self._stream = self.source.supply(), os.getpid(), None
        course: Passage | None = self._end_stream()
        if course is None or (course.number, course.begins.start) != (epoch, start):
            course = EpochReader(self._supply, self.schedule, epoch, start, self.together)
        self._count += 1
        self._stream = stream = Prefetcher(course, again=self._count > 1 and IN_VAIN * self._count * len(course) >= 1)
        try:
            yield from stream
        finally:
            stream.close()

    def _end_stream(self) -> Passage | None:
        """An earlier pass that was not finished ends here, on every rank alike; the course that has begun after it."""
        if self._stream is None:
            return None
        self._stream.close()
        self._stream.join()
        following, self._stream = self._stream.following, None
        return following


class MemoryEpochs(Epochs):
    """The rank's share is read once. It stays the same, and is shuffled as a whole in every epoch. *Collective*.

    Raises
    ------
    PartitionError : the share does not fit into the memory.
    """

    def __init__(self, source: Source, schedule: Schedule) -> None:
        whole = replace(schedule, window_steps=max(1, schedule.steps), fixed_block_order=True)
        super().__init__(source, whole)
        self.together = max(1, read_bytes(source.comm) * self.size // max(1, schedule.batch_size * source.row_bytes))
        samples = self._window(0).runs
        remedy = 'leave out cache="memory", or use more machines'
        source.comm.agree(
            memory_shortage(samples.total * source.row_bytes, f"the share of rank {self.rank}", remedy=remedy)
        )
        self._held: Arrays = source.gather(samples)

    def windows(self, epoch: int, start: int) -> Iterator[LoadedWindow]:
        window = self._window(epoch)
        number = np.full(window.rows, -1, np.int64)
        number[window.destination] = np.arange(window.runs.total)
        for first in range(start, len(window.sizes), self.together):
            sizes = window.sizes[first : first + self.together]
            begin = int(window.sizes[:first].sum())
            yield self._taken(number[begin : begin + int(sizes.sum())], sizes)

    def _window(self, epoch: int) -> Window:
        return self.schedule.epoch(epoch).window(0, self.schedule.steps, self.rank, self.size)

    def _taken(self, number: Integers, sizes: Integers) -> LoadedWindow:
        fields = self.source.index.fields
        arrays = self.source.pool.arrays(list(fields.values()), len(number))
        real = int((number >= 0).sum())  # padding comes last
        for name, array in arrays.items():
            np.take(self._held[name], number[:real], axis=0, out=array[:real], mode="clip")
            fields[name].blank(array[real:])
        return LoadedWindow(arrays, sizes, len(number) - real)


class RowEpochs(StreamedEpochs):
    """Every epoch is a uniform permutation of all samples, which are read one by one. *Collective*.

    Raises
    ------
    PartitionError : the samples cannot be read one by one.
    """

    def __init__(self, source: Source, schedule: Schedule) -> None:
        source.comm.agree(_no_single_rows(source))
        super().__init__(source, schedule)


class GlobalEpochs(Epochs):
    """Every epoch is a uniform permutation of all samples, which the ranks keep in memory and exchange. *Collective*.

    Raises
    ------
    PartitionError : the share of a rank does not fit into the memory; MPI does not allow calls from threads.
    """

    def __init__(self, source: Source, schedule: Schedule) -> None:
        super().__init__(source, schedule)
        most = EXCHANGE_BYTES // max(1, schedule.batch_size // self.size * source.row_bytes)
        self.together = max(1, min(self.together, most))
        comm, total = source.comm, schedule.segments.total
        comm.agree(_no_exchange(source))
        start, stop = rank_range(total, self.rank, self.size)
        single = _no_single_rows(source) is None
        remedy = 'global_reads="rows" (reads single rows in every epoch), ' if single else ""
        what = f'the share of rank {self.rank} of {self.size}, which shuffle="global" keeps,'
        remedy = f"use {remedy}more machines, fewer fields, or shuffle=True"
        comm.agree(memory_shortage((stop - start) * source.row_bytes, what, remedy=remedy))
        self._holding = Holding(comm, total, source.load(schedule.segments))
        self._supply, self._process = source.exchange_supply(), os.getpid()
        self._stream: Prefetcher | None = None

    def windows(self, epoch: int, start: int) -> Iterator[LoadedWindow]:
        if self._process != os.getpid():  # forked: threads have stayed with the parent
            self._supply, self._process, self._stream = self.source.exchange_supply(), os.getpid(), None
        if self._stream is not None:
            self._stream.close()
            self._stream.join()
        course = Exchanges(self._supply, self.schedule, self._holding, epoch, start, self.together)
        self._stream = stream = Prefetcher(course)
        try:
            yield from stream
        finally:
            stream.close()


def _no_exchange(source: Source) -> PartitionError | None:
    """Return why the ranks cannot exchange samples in the background; or None."""
    if source.comm.size == 1 or source.threaded:
        return None
    return PartitionError(
        'shuffle="global" exchanges samples between the ranks in a thread, which this MPI does not allow',
        expected="MPI_THREAD_MULTIPLE",
        remedy='use an MPI library that gives it, global_reads="rows", or shuffle=True',
    )


def _no_single_rows(source: Source) -> PartitionError | None:
    """Return why the samples cannot be read one by one, with the first field that stands against it; or None."""
    for file in source.index.files:
        for name in source.index.fields:
            part = file.layouts[name]
            if part.block_rows > 1 or part.borders() is not None or isinstance(part, LibraryRows):
                together = f"{part.block_rows:,} of its rows" if part.block_rows > 1 else "several of its rows"
                return PartitionError(
                    'global_reads="rows" reads samples one by one, which this field does not allow',
                    file=file.path,
                    field=name,
                    expected="rows of fixed size, each of which can be read alone",
                    found=f"{together} are stored together (chunks, or text)",
                    remedy='use global_reads="memory" where the data fit into the memory of all ranks, store the field '
                    "contiguously, or use shuffle=True",
                )
    return None
