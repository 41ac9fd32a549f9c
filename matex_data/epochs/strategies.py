"""Strategies by which the samples of an epoch get to a rank: what the reader runs, and the planner counts.

`Streamed` reads in every epoch, each rank for itself; `Shared` reads each block by one rank, which sends its rows to
the others. Those that keep samples in memory are in ``matex_data.epochs.kept``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import numpy as np

from matex_data._types import Integers
from matex_data.epochs.exchange import shared_window
from matex_data.epochs.window import EpochReader, PendingWindow, file_window
from matex_data.errors import PartitionError
from matex_data.index.library import LibraryRows
from matex_data.index.model import Index
from matex_data.index.runs import Runs
from matex_data.locks import cached_property
from matex_data.machine import memory_shortage
from matex_data.mpi.processes import is_child_process
from matex_data.reading.context import ReadContext
from matex_data.reading.skipping import SkippedSamples
from matex_data.reading.source import Source
from matex_data.sampling.schedule import EpochOrder, Schedule, rank_range
from matex_data.sampling.sizing import POSITION_BYTES, WINDOW_LIMIT
from matex_data.words import nbytes_text

READ_BYTES = 64 << 20  # of one read of a rank, about, at most; each read costs Python time
LEAST_READ_BYTES = 4 << 20
EXCHANGE_BYTES = 16 << 20  # of one exchange of a rank, about, at most; a dozen times as much is in memory
WINDOWS_IN_MEMORY = 6  # consumed, waiting, read, decoded, planned, and one that is freed late
READS_IN_MEMORY = 64  # that the memory of a rank would hold; several are under way at once
SHARED_BLOCKS = 4  # that the cache of a rank holds, where it reads blocks for all: those which windows have begun
ORDERED_SAMPLES = 1 << 22  # of a lane, whose order is computed at once, however few of them a rank owns
LEAST_READS = 6  # of an epoch, so that one is read while another is decoded and a third one is consumed
ORDER_BYTES = 64  # of a block: its samples, its number, and both in the order of the epoch
SHARED_SAMPLE = 8  # blocks of a window in a sample of what the ranks read for one another
SAMPLED_PARTNERS = 4  # ranks whose messages are counted


def read_bytes(memory: int) -> int:
    """Return the bytes that each rank reads at once, by the least memory in bytes that a rank may use."""
    return int(min(READ_BYTES, max(LEAST_READ_BYTES, memory // READS_IN_MEMORY)))


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
    most = nbytes // max(1, schedule.batch_size // ranks * max(source.row_bytes, POSITION_BYTES))
    if schedule.seed is not None and not schedule.uniform:
        most = min(most, ORDERED_SAMPLES // max(1, schedule.batch_size // schedule.lanes))
    return read_ahead_steps(schedule.steps, schedule.window_steps, most)


class Strategy(ABC):
    """Way of the samples of an epoch from the files to the ranks.

    Parameters
    ----------
    source : the opened files.
    schedule : order of the samples in all epochs.
    ranks : number of ranks: those of the source, or any others, whose costs are counted.
    nbytes : of a rank's samples that are read at once, about, at most.

    Attributes
    ----------
    read_steps : steps that are read at once; whole windows of the schedule.
    windows : number of windows that a rank plans one after the other in an epoch.
    effort : samples to handle to plan one of them.
    samples_mixed : samples that are shuffled at a time.
    skipped : samples that each epoch finds to be unreadable, and leaves out; None: it reads none, or all.
    """

    windows: int
    effort: int
    samples_mixed: int
    skipped: SkippedSamples | None = None

    def __init__(self, source: Source, schedule: Schedule, ranks: int, nbytes: int = READ_BYTES) -> None:
        self.source, self.schedule, self.ranks = source, schedule, ranks
        self.read_steps = steps_within(nbytes, source, schedule, ranks)

    @abstractmethod
    def prepare(self) -> None:
        """Check that the ranks of the source can read this way, and read what they keep in memory. *Collective*.

        Raises
        ------
        PartitionError : they cannot.
        """

    @abstractmethod
    def open(self) -> ReadContext:
        """Open a context for these epochs. *Collective*."""

    @abstractmethod
    def plan(self, reader: EpochReader, begin: int, end: int) -> PendingWindow:
        """Plan the window of steps ``begin`` to ``end`` of an epoch, and allocate its arrays."""

    def reader(self, context: ReadContext, epoch: int, start: int) -> EpochReader:
        """Return the windows of an epoch from step ``start`` on."""
        begins = range(start, self.schedule.steps, self.read_steps)
        return EpochReader(context, self.schedule, epoch, begins, self.plan, self.skipped)

    @abstractmethod
    def window(self, rank: int, number: int, ranks: int) -> tuple[Runs, Integers, int]:
        """Return the samples that a rank reads for a window, their rows in its arrays, and the length of these.

        Parameters
        ----------
        rank, number : of the rank, and of the window.
        ranks : number of ranks among which the samples are divided: all, or ``sampled_ranks``.
        """

    @abstractmethod
    def memory(self) -> int:
        """Return the bytes of samples and their order in the memory of a rank."""

    @property
    def sampled_ranks(self) -> int:
        """Return the number of ranks among which the samples of a window are divided to draw a sample of them."""
        return self.ranks

    @cached_property
    def epoch(self) -> EpochOrder:
        """Return the order of the first epoch."""
        return self.schedule.epoch(0)

    @property
    def share_bytes(self) -> int:
        """Return the bytes of a rank's samples of an epoch in memory."""
        return -(-self.schedule.segments.total // self.ranks) * self.source.row_bytes

    @property
    def cache_bytes(self) -> int:
        """Return the capacity of a rank's cache of decoded chunks, in bytes."""
        return self.source.cache_bytes(self.ranks, self.schedule.window_rows * self.source.row_bytes)

    def messages_per_step(self) -> float:
        """Return the messages that a rank sends for the data of a step: one reduction for each window."""
        return int(np.ceil(np.log2(self.ranks))) / self.read_steps

    def most_messages_per_step(self) -> float:
        """Return the messages of the rank that sends most."""
        return self.messages_per_step()


class Streamed(Strategy):
    """Windows that are read in every epoch; in a uniform permutation of all samples, row by row."""

    def __init__(self, source: Source, schedule: Schedule, ranks: int, nbytes: int = READ_BYTES) -> None:
        super().__init__(source, schedule, ranks, nbytes)
        self.skipped = source.skipped
        self.windows = -(-schedule.steps // self.read_steps)
        # The order of a lane is computed as a whole, however little of it a rank owns.
        self.effort = max(schedule.batch_size // ranks, schedule.batch_size // schedule.lanes) * self.read_steps
        self.samples_mixed = 1 if schedule.seed is None else schedule.window_steps * schedule.batch_size
        if schedule.uniform:
            self.effort = schedule.batch_size // ranks * self.read_steps
            self.samples_mixed = schedule.segments.total

    def prepare(self) -> None:
        source, schedule = self.source, self.schedule
        if schedule.uniform:
            source.comm.agree(single_row_error(source))
            return
        window = schedule.window_rows * source.row_bytes
        if source.options.window_bytes is None and window > max(WINDOW_LIMIT, schedule.batch_size * source.row_bytes):
            own = self.read_steps * (schedule.batch_size // self.ranks) * source.row_bytes
            rank = f"rank {source.comm.rank} of {self.ranks}"
            purpose = f"shuffled windows of {nbytes_text(window)}, of which {rank} has its share,"
            remedy = (
                f"open the files with window_bytes={WINDOW_LIMIT >> 20} << 20 (another order), or use more machines"
            )
            source.comm.agree(memory_shortage(WINDOWS_IN_MEMORY * own, purpose, remedy=remedy))

    def open(self) -> ReadContext:
        return self.source.read_context(self.schedule.window_rows * self.source.row_bytes)

    def plan(self, reader: EpochReader, begin: int, end: int) -> PendingWindow:
        return file_window(reader, begin, end)

    def steps_of(self, number: int) -> tuple[int, int]:
        """Return the first step of a window, and the end of its steps."""
        begin = number * self.read_steps
        return begin, min(begin + self.read_steps, self.schedule.steps)

    def window(self, rank: int, number: int, ranks: int) -> tuple[Runs, Integers, int]:
        window = self.epoch.window(*self.steps_of(number), rank, ranks)
        return window.runs, window.destination, window.rows

    def memory(self) -> int:
        return self.memory_with(self.cache_bytes)

    def memory_with(self, cache_bytes: int) -> int:
        """Return the bytes of samples and their order in memory, with a cache of decoded chunks."""
        window = self.read_steps * (self.schedule.batch_size // self.ranks) * self.source.row_bytes
        windows = min(WINDOWS_IN_MEMORY, self.windows) * window
        decoded = min(cache_bytes, self.share_bytes) if _has_chunks(self.source.index) else 0
        return windows + decoded + ORDER_BYTES * len(self.schedule.segments.start)


class Shared(Strategy):
    """Windows of which each block is read by one rank, which sends its rows to the others."""

    def __init__(self, source: Source, schedule: Schedule, ranks: int, nbytes: int = READ_BYTES) -> None:
        super().__init__(source, schedule, ranks, min(nbytes, EXCHANGE_BYTES))
        self._alone = Streamed(source, schedule, ranks, min(nbytes, EXCHANGE_BYTES))
        self.skipped = source.skipped
        self.windows, self.effort = self._alone.windows, self._alone.effort
        self.samples_mixed = self._alone.samples_mixed
        blocks = int(schedule.blocks.max(initial=0)) + 1
        self._block_bytes = max(1, schedule.segments.total * source.row_bytes // blocks)
        self._blocks = self.read_steps * schedule.batch_size * source.row_bytes // self._block_bytes

    def prepare(self) -> None:
        self._alone.prepare()

    def open(self) -> ReadContext:
        context = self.source.read_context(io="independent")
        return replace(context, cache_bytes=self.cache_bytes)

    def plan(self, reader: EpochReader, begin: int, end: int) -> PendingWindow:
        alone = is_child_process()  # it cannot communicate
        return file_window(reader, begin, end) if alone else shared_window(reader, begin, end)

    def window(self, rank: int, number: int, ranks: int) -> tuple[Runs, Integers, int]:
        runs = self.epoch.owned(*self._alone.steps_of(number), rank, ranks)
        return runs, np.arange(runs.total), runs.total

    @property
    def sampled_ranks(self) -> int:
        """Return the number of ranks, but no more than there are some blocks for each: else most would read nothing."""
        return min(self.ranks, max(1, self._blocks // SHARED_SAMPLE))

    @property
    def cache_bytes(self) -> int:
        """Return the capacity of the cache, of the blocks that windows have begun, in bytes."""
        kept = self._block_bytes * (self.source.kept_bytes or self.source.row_bytes) // self.source.row_bytes
        return max(super().cache_bytes, SHARED_BLOCKS * kept)

    def memory(self) -> int:
        blocks = -(-self._blocks // self.ranks) * self._block_bytes
        return self._alone.memory_with(self.cache_bytes) + WINDOWS_IN_MEMORY // 2 * blocks

    def messages_per_step(self) -> float:
        # Agreements, of the window, on the memory for the exchange and on its rows; and the exchange of counts, which
        # MPI libraries make in as many messages.
        return 4 * super().messages_per_step() + self._partners * self._exchanges / self.read_steps

    def most_messages_per_step(self) -> float:
        blocks = -(-self._blocks // self.ranks)
        rows = max(1, self._block_bytes // self.source.row_bytes)
        needed_by = min(rows, self.ranks - 1, -(-self.ranks // self.schedule.lanes) + 1)
        sent = blocks * needed_by * (self._exchanges - 1) + self._partners
        return max(self.messages_per_step(), 4 * super().messages_per_step() + sent / self.read_steps)

    @property
    def _exchanges(self) -> int:
        """Number of messages to each partner: positions, samples left out, and each field."""
        return 2 + len(self.source.index.fields)

    @cached_property
    def _partners(self) -> float:
        """Number of other ranks that read what a rank needs of a window, the mean of some ranks."""
        rng, partners = np.random.default_rng(0), []
        for rank in rng.choice(self.ranks, min(self.ranks, SAMPLED_PARTNERS), replace=False).tolist():
            runs, *_ = self._alone.window(rank, self.windows // 2, self.ranks)
            owners = np.unique(self.epoch.owners(runs.numbers(np.arange(runs.total)), self.ranks))
            partners.append(len(owners[owners != rank]))
        return float(np.mean(partners))


def single_row_error(source: Source) -> PartitionError | None:
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


def _has_chunks(index: Index) -> bool:
    return any(layout.block_rows > 1 for file in index.files[:1] for layout in file.layouts.values())
