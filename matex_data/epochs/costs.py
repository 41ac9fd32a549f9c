"""Costs of an epoch on any number of ranks, from the schedule and the read plans of a real one. No data are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from matex_data._types import Integers
from matex_data.epochs.batches import strategy_for
from matex_data.epochs.strategies import Shared, Strategy, Streamed
from matex_data.index.cache import ChunkCache
from matex_data.index.library import MemoryRows
from matex_data.index.model import Index
from matex_data.index.ragged import empty_output
from matex_data.index.runs import Runs
from matex_data.io.files import MOST_OPEN_FILES
from matex_data.io.modes import choose
from matex_data.lru import LeastRecentlyUsed
from matex_data.reading.buffers import BufferPool
from matex_data.reading.plan import ReadPlan, plan_reads
from matex_data.reading.source import Source, rows_at_once
from matex_data.sampling.schedule import Schedule
from matex_data.sampling.sizing import estimate_quality
from matex_data.words import nbytes_text

GOOD_AMPLIFICATION = 1.2
GOOD_READ_BYTES = 1_000_000
FEW_READS = 1000  # of a rank in an epoch, whose time does not count even if each takes some milliseconds
FEWER_READS = 4  # times as many reads as with sharing make small reads worth its messages
CHOICE_EFFORT = 1 << 19  # samples whose reads are planned to choose whether ranks share them: some 50 ms
FILE_EFFORT = 1000  # samples whose reads are planned in the time of a file's: 0.1 ms
MOST_WINDOWS = 512  # that are planned to obtain the costs
SAMPLED_RANKS = 8
SAMPLED_WINDOWS = 8
UNLIMITED = 1 << 62  # bytes of a cache
SECTIONS = 8  # of the data set, whose reads in the order of the files are planned


@dataclass(frozen=True)
class EpochCosts:
    """Costs of one epoch of batches, for all ranks and for one of them.

    Parameters
    ----------
    ranks : number of ranks.
    batch_size : samples of a global batch.
    steps : batches of the epoch.
    lanes : positions in the sequence of blocks that each batch is drawn from; 1 without a shuffle.
    samples_mixed : samples that a window shuffles.
    amplification : bytes that all ranks read, divided by those that one rank reads for the same samples in the order of
        the files; nan if the library of the format reads all of them.
    bytes_read : by all ranks, from the files.
    reads_per_rank : read calls of a rank, on average.
    mean_read_bytes : of a read call.
    opens_per_rank : files that a rank opens.
    bytes_per_rank : memory of a rank for the samples and their order, estimated, without libraries and the model.
    bytes_per_node : memory of all ranks of a node; None if the number of its ranks is unknown.
    messages_per_step : messages of a rank for the data of one step, without those of the training.
    exact : whether all windows of all ranks were planned; otherwise a sample of them.
    uncounted : fields that the library of the format reads: their bytes and reads are unknown, and left out.
    remedies : what to change where a figure is bad.
    shared : whether each block is read by one rank, which sends its rows to those that need them.
    most_messages_per_step : messages of the rank that sends most: that of a block whose rows many ranks need.
    reads : how the ranks read the files, and why.
    """

    ranks: int
    batch_size: int
    steps: int
    lanes: int
    samples_mixed: int
    amplification: float
    bytes_read: int
    reads_per_rank: float
    mean_read_bytes: float
    opens_per_rank: float
    bytes_per_rank: int
    bytes_per_node: int | None
    messages_per_step: float
    exact: bool
    uncounted: tuple[str, ...]
    remedies: tuple[str, ...]
    shared: bool = False
    most_messages_per_step: float = 0.0
    reads: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain values, which can be stored as JSON; an unknown amplification is None."""
        figures = asdict(self)
        return figures | {"amplification": None if np.isnan(self.amplification) else self.amplification}

    def __str__(self) -> str:
        node = "" if self.bytes_per_node is None else f", {nbytes_text(self.bytes_per_node)} a node"
        lines = [
            f"{self.ranks:,} ranks, batches of {self.batch_size:,}, {self.steps:,} steps an epoch"
            + ("" if self.exact else " (estimated from a sample of the windows)"),
            f"read by all ranks: {nbytes_text(self.bytes_read)}, {self.amplification:.2f} times the bytes needed"
            if self.bytes_read
            else "read by all ranks: unknown",
            f"a rank: {self.reads_per_rank:,.0f} reads of {nbytes_text(self.mean_read_bytes)}; "
            f"files opened: {self.opens_per_rank:,.0f}",
            *([f"files are read by {self.reads}"] if self.reads else []),
            *(["each chunk is read by one rank, which sends its rows to the others"] if self.shared else []),
            f"samples shuffled at a time: {self.samples_mixed:,}; lanes: {self.lanes:,}",
            f"memory for samples: {nbytes_text(self.bytes_per_rank)} a rank{node}",
            f"messages of a rank: {self.messages_per_step:,.2f} a step on average, at most "
            f"{self.most_messages_per_step:,.2f}, without those of the training",
        ]
        if self.uncounted:
            lines.append(f"not counted, since the library of the format reads them: {', '.join(self.uncounted)}")
        return "\n".join(lines + [f"remedy: {remedy}" for remedy in self.remedies])


def estimate_costs(
    source: Source, schedule: Schedule, ranks: int, ranks_per_node: int | None = None, effort: int = 1 << 23
) -> EpochCosts:
    """Return the costs of the first epoch of a schedule.

    All windows of all ranks are planned if that takes no more than ``effort``. Otherwise the windows are a sample: of
    eight ranks drawn at random, always the same ones, up to eight consecutive windows each, from a random one on; the
    window before them fills the cache of decoded chunks and is not counted. The bytes needed are those of reads in
    the order of the files: of all samples, or of eight sections at equal distances.

    Parameters
    ----------
    source : the opened files.
    schedule : order of the samples.
    ranks : number of ranks.
    ranks_per_node : number of ranks that share a machine; None: unknown.
    effort : limit on the samples whose reads are planned.
    """
    plans = _Plans(source, schedule, ranks)
    shared = plans.share_reads()
    strategy = strategy_for(source, schedule, ranks, shared)
    counted, exact = plans.windows(type(strategy), effort)
    drawn = schedule.full_steps * schedule.batch_size + schedule.left_over
    total = counted.samples if exact else drawn  # a mixture draws samples again
    needed = plans.in_order(effort).bytes_per_sample
    per_sample = counted.bytes_per_sample
    reads = counted.reads_per_sample * total / ranks
    files = len(source.index.sources)
    mode = choose(source.options.io, source.index.sources.paths, ranks)
    opens = files if mode.collective else counted.opens(total / ranks)
    read_at_once = counted.nbytes / max(1, counted.windows) * counted.ranks / ranks
    memory = strategy.memory() + int(2 * read_at_once)
    costs = EpochCosts(
        ranks,
        schedule.batch_size,
        schedule.steps,
        schedule.lanes,
        strategy.samples_mixed,
        per_sample / needed if needed else float("nan"),
        round(per_sample * total),
        reads,
        counted.nbytes / max(1, counted.reads),
        opens,
        memory,
        None if ranks_per_node is None else memory * ranks_per_node,
        strategy.messages_per_step(),
        exact,
        _uncounted(source.index),
        (),
        shared,
        strategy.most_messages_per_step(),
        str(mode),
    )
    return replace(costs, remedies=tuple(_remedies(costs, strategy)))


class _Plans:
    """Plans of the windows of a schedule, and of its samples in the order of the files, each of which is made once.

    Parameters
    ----------
    source : the opened files.
    schedule : order of the samples.
    ranks : number of ranks.
    """

    def __init__(self, source: Source, schedule: Schedule, ranks: int) -> None:
        self._source, self._schedule, self._ranks = source, schedule, ranks
        self._file_effort = 1 + FILE_EFFORT * len(source.index.sources) // max(1, len(source.index))  # of a sample
        self.windows, self.in_order = cache(self._windows), cache(self._in_order)

    def _windows(self, kind: type[Strategy], effort: int) -> tuple[_Counted, bool]:
        strategy = kind(self._source, self._schedule, self._ranks)
        return _plan_windows(strategy, effort // self._file_effort)

    def _in_order(self, effort: int) -> _Counted:
        return _plan_in_order(self._source, self._schedule, effort // self._file_effort)

    def share_reads(self) -> bool:
        """Return whether the ranks read blocks for one another.

        They do if they would read too many bytes if each read for itself, or, in many small reads, what are few large
        ones.
        """
        source, schedule, ranks = self._source, self._schedule, self._ranks
        if ranks == 1 or schedule.uniform or source.options.cache is not None or not source.sessions.threaded:
            return False
        if source.shared is not None:
            return source.shared
        counted, _ = self.windows(Streamed, CHOICE_EFFORT)
        needed = self.in_order(CHOICE_EFFORT)
        if counted.bytes_per_sample > GOOD_AMPLIFICATION * needed.bytes_per_sample:
            return True
        many = counted.reads_per_sample * schedule.segments.total / ranks > FEW_READS
        if not many or counted.nbytes >= GOOD_READ_BYTES * counted.reads:
            return False
        if counted.reads_per_sample <= FEWER_READS * needed.reads_per_sample:  # as few as there can be
            return False
        shared, _ = self.windows(Shared, CHOICE_EFFORT)
        return counted.reads_per_sample > FEWER_READS * shared.reads_per_sample


class _Counted:
    """Sums over planned windows.

    Attributes
    ----------
    samples, nbytes, reads, windows : of all windows that were counted.

    Parameters
    ----------
    ranks : number of ranks among which the samples are divided.
    """

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks
        self.samples = self.nbytes = self.reads = self.windows = 0
        self._opens = self._files = 0

    @property
    def bytes_per_sample(self) -> float:
        """Bytes to read for a sample."""
        return self.nbytes / max(1, self.samples)

    @property
    def reads_per_sample(self) -> float:
        """Reads of a sample."""
        return self.reads / max(1, self.samples)

    def add(self, samples: int, plan: ReadPlan) -> None:
        """Count a window."""
        tasks = [task for of_file in plan.tasks.values() for task in of_file]
        self.samples += samples
        self.windows += 1
        self.nbytes += sum(task.total for task in tasks)
        self.reads += sum(task.count for task in tasks)

    def add_opens(self, opened: int, touched: int) -> None:
        """Count the files that a rank opens for the counted windows, and all that it has touched."""
        self._opens += opened
        self._files = max(self._files, touched)

    def opens(self, samples: float) -> float:
        """Return the files that a rank opens for ``samples``."""
        return max(float(self._files), self._opens / max(1, self.samples) * samples)


def _plan_windows(strategy: Strategy, effort: int) -> tuple[_Counted, bool]:
    """Plan all windows, or a sample of them; return the sums, and whether it is all."""
    every = strategy.ranks * strategy.windows
    if every <= MOST_WINDOWS and every * strategy.effort <= effort:
        counted = _Counted(strategy.ranks)
        for rank in range(strategy.ranks):
            _plan_rank(strategy, rank, 0, strategy.windows, counted)
        return counted, True
    ranks = strategy.sampled_ranks
    counted, rng = _Counted(ranks), np.random.default_rng(0)
    count = max(1, min(SAMPLED_RANKS, ranks, effort // (2 * strategy.effort)))
    length = min(strategy.windows, max(1, min(SAMPLED_WINDOWS, effort // (count * strategy.effort) - 1)))
    for rank in np.sort(rng.choice(ranks, count, replace=False)).tolist():
        first = int(rng.integers(strategy.windows - length + 1))
        _plan_rank(strategy, rank, first, first + length, counted)
    return counted, False


def _plan_rank(strategy: Strategy, rank: int, first: int, stop: int, counted: _Counted) -> None:
    """Plan windows of a rank, and the one before them, which is not counted."""
    index = strategy.source.index
    of_sample = strategy.cache_bytes * strategy.ranks // counted.ranks
    chunks, scratch = ChunkCache(of_sample), BufferPool()
    opened = LeastRecentlyUsed[int](MOST_OPEN_FILES)
    misses, touched = 0, set[int]()
    for number in range(max(0, first - 1), stop):
        runs, destination, rows = strategy.window(rank, number, counted.ranks)
        plan = _planned(index, runs, destination, rows, chunks, scratch)
        for file in plan.tasks:
            misses += opened.get(file) is None and number >= first
            opened.add(file, file, 1)
        touched.update(plan.tasks)
        if number >= first:
            counted.add(runs.total, plan)
    counted.add_opens(misses, len(touched))


def _planned(
    index: Index, runs: Runs, destination: Integers, rows: int, chunks: ChunkCache, scratch: BufferPool
) -> ReadPlan:
    """Return the reads of a window, into arrays whose memory nobody touches."""
    arrays = {name: empty_output(field, rows, index.inner_bytes(name)) for name, field in index.fields.items()}
    return plan_reads(index, runs, destination, arrays, chunks, scratch)


def _plan_in_order(source: Source, schedule: Schedule, effort: int) -> _Counted:
    """Return the reads of samples in the order of the files.

    The sample in front of a section is planned before it, so that a chunk which they share counts where it begins.
    """
    samples, scratch, counted = schedule.samples, BufferPool(), _Counted()
    chunks = ChunkCache(UNLIMITED)
    for first, stop in _sections(schedule, rows_at_once(source.row_bytes), effort):
        if first and counted.samples != first:
            chunks = ChunkCache(UNLIMITED)
            before = samples.part(first - 1, first)
            _planned(source.index, before, np.zeros(1, np.int64), 1, chunks, scratch)
        section = samples.part(first, stop)
        plan = _planned(source.index, section, np.arange(stop - first), stop - first, chunks, scratch)
        counted.add(stop - first, plan)
    return counted


def _sections(schedule: Schedule, step: int, effort: int) -> Iterator[tuple[int, int]]:
    """Yield the begin and the end of sections of the samples: of all, or of eight that consist of whole blocks.

    Parameters
    ----------
    schedule : with the samples in the order of the files.
    step : samples whose reads are planned at once.
    effort : limit on the samples of all sections.
    """
    total = schedule.segments.total
    if total <= min(effort, 2 * SECTIONS * step):
        yield from ((first, min(first + step, total)) for first in range(0, total, step))
        return
    step = max(1, min(step, effort // SECTIONS, total // SECTIONS))
    borders = schedule.segments.first
    for number in range(SECTIONS):
        first = number * (total - step) // (SECTIONS - 1)
        if schedule.uniform:
            yield first, first + step
            continue
        low = min(int(np.searchsorted(borders, first)), len(borders) - 2)
        high = max(low + 1, min(int(np.searchsorted(borders, borders[low] + step)), len(borders) - 1))
        yield int(borders[low]), int(borders[high])


def _uncounted(index: Index) -> tuple[str, ...]:
    """Return the names of fields without byte ranges, by the layouts of the first file."""
    layouts = {name: file.layouts[name] for file in index.files[:1] for name in index.fields}
    return tuple(
        name for name, layout in layouts.items() if layout.rows and not layout.end() and type(layout) is not MemoryRows
    )


def _remedies(costs: EpochCosts, strategy: Strategy) -> list[str]:
    """Return advice for the figures that are bad, as sentences."""
    schedule, source = strategy.schedule, strategy.source
    remedies: list[str] = []
    shuffled = schedule.seed is not None and not schedule.uniform
    small = costs.mean_read_bytes < GOOD_READ_BYTES and costs.reads_per_rank > FEW_READS
    again = costs.amplification > GOOD_AMPLIFICATION
    if not (again or small):
        return remedies
    problem = (
        f"all ranks together read each byte {costs.amplification:.1f} times"
        if again
        else f"reads of {nbytes_text(costs.mean_read_bytes)} are small"
    )
    share = f'cache="memory" reads each sample once, and keeps {nbytes_text(strategy.share_bytes)} on each rank'
    if shuffled and source.options.cache is None:
        block = max(estimate_quality(schedule, source.row_bytes).block_bytes, 1 if again else GOOD_READ_BYTES)
        total = schedule.segments.total * source.row_bytes
        window = min(total, 2 * block * min(costs.batch_size, 2 * costs.ranks))
        if schedule.window_rows * source.row_bytes < window and total >= 2 * block * costs.ranks:
            block_bytes = f"block_bytes={block} and " if not again else ""
            remedies.append(
                f"{problem}: open the files with {block_bytes}window_bytes={-(-window >> 20)} << 20, of which each of "
                f"{costs.ranks:,} ranks has its share"
            )
        if again:
            remedies.append("smaller chunks (64 KiB to 1 MiB) let more ranks read chunks of their own")
        remedies.append(f'{share}; so does shuffle="global"')
    elif schedule.uniform and source.options.global_reads == "rows":
        remedies.append(f'{problem}: global_reads="memory" keeps {nbytes_text(strategy.share_bytes)} on each rank')
    elif source.options.cache is None and not schedule.uniform:
        remedies.append(f"{problem}, since each rank reads its rows of every batch: {share}")
    return remedies
