"""Assign samples to steps and ranks: pure functions of integers, without MPI and files.

An epoch is a sequence of all samples: the blocks of the files, permuted if they are shuffled. The sequence is cut into
*lanes* of equal length; global batch k takes the next ``batch_size / lanes`` samples of every lane. A rank owns
adjacent positions of the batch, hence adjacent lanes, hence one contiguous section of the sequence: it reads only that,
and the ranks exchange nothing. Samples are shuffled within a *window*: the section of each lane that serves a number of
whole steps. Every other lane runs backwards, so that adjacent lanes reach the block that they share at the same time.
Nothing of this depends on the number of ranks, and so neither do the global batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import PartitionError
from matex_data.index.runs import Chosen, Runs, Samples, compress, join_runs, merge, ranges, sort
from matex_data.locks import cached_property
from matex_data.sampling.permutation import Permutation, orders, permutation, salts, whole_number


def rank_range(total: int, rank: int, size: int) -> tuple[int, int]:
    """Return the start and stop of a rank's block of ``total`` items; the first ranks get one item more.

    >>> [rank_range(10, rank, 3) for rank in range(3)]
    [(0, 4), (4, 7), (7, 10)]
    """
    least, more = divmod(total, size)
    start = rank * least + min(rank, more)
    return start, start + least + (rank < more)


@dataclass(frozen=True)
class Window:
    """Samples of consecutive steps that one rank reads at once.

    Parameters
    ----------
    runs : the samples, ascending, so that reads are sequential.
    destination : int64[runs.total], position of each sample in the window.
    sizes : int64[steps], number of rows of each step; the steps follow one another in the window.
    rows : length of the window. It exceeds the number of samples where the last batch is padded.
    copies : int64[2, n], positions of samples, and of further copies of them; None: no sample is in the window twice.
    """

    runs: Runs
    destination: Integers
    sizes: Integers
    rows: int
    copies: Integers | None = None

    def repeat(self, arrays: Mapping[str, Array]) -> None:
        """Copy the rows of samples that are in the window several times."""
        if self.copies is not None:
            for array in arrays.values():
                array[self.copies[1]] = array[self.copies[0]]

    def with_copies(self, rows: Integers) -> Integers:
        """Return rows of samples, and those of their copies."""
        if self.copies is None:
            return rows
        return np.append(rows, self.copies[1][np.isin(self.copies[0], rows)])


@dataclass(frozen=True)
class StepPositions:
    """Samples of consecutive steps of one rank, in the order of the batches.

    Parameters
    ----------
    positions : int64[samples], position of each sample in the data set.
    sizes : int64[steps], number of rows of each step.
    rows : sum of the sizes. It exceeds the number of samples where the last batch is padded.
    """

    positions: Integers
    sizes: Integers
    rows: int


@dataclass(frozen=True)
class Schedule:
    """Assignment of samples to global batches, for all epochs.

    `make_schedule` chooses lanes and windows from the data.

    Parameters
    ----------
    segments : the samples of the data set in the order of the files, split where blocks end.
    batch_size : samples of a global batch.
    lanes : a divisor of ``batch_size``; 1 if samples are not shuffled.
    window_steps : steps of a window.
    seed : of the shuffle; None: the order of the files.
    blocks : int64[segments], the block of each segment, numbered from 0 without gaps.
    remainder : treatment of the samples that do not fill a batch: "drop", "pad" or "keep".
    fixed_block_order : permute the blocks equally in every epoch, so that a rank always has the same samples.
    uniform : draw batches from all samples with equal probability, without lanes and windows.
    chosen : samples of which ``segments`` has the positions; None: it has the samples themselves.

    Examples
    --------
    Six samples in blocks of two, in batches of three, on one rank:

    >>> segments = Runs(np.array([0, 2, 4]), np.array([2, 2, 2]))
    >>> schedule = Schedule(segments, 3, lanes=1, window_steps=2, seed=7, blocks=np.arange(3))
    >>> schedule.steps
    2
    >>> window = schedule.epoch(0).window(0, 2, rank=0, size=1)
    >>> window.runs.total, sorted(window.destination.tolist()), window.sizes.tolist()
    (6, [0, 1, 2, 3, 4, 5], [3, 3])
    """

    segments: Runs
    batch_size: int
    lanes: int
    window_steps: int
    seed: int | None
    blocks: Integers
    remainder: str = "drop"
    fixed_block_order: bool = False
    uniform: bool = False
    chosen: Chosen | None = None

    @property
    def samples(self) -> Samples:
        """Samples of the data set, ascending."""
        return self.segments if self.chosen is None else self.chosen

    def of_positions(self, positions: Runs) -> Runs:
        """Return the samples whose ascending positions the segments number."""
        return positions if self.chosen is None else self.chosen.slice(positions.start, positions.count)

    @property
    def full_steps(self) -> int:
        """Number of full batches in an epoch."""
        return self.segments.total // self.batch_size

    @property
    def left_over(self) -> int:
        """Number of samples in the last batch, if it is neither full nor dropped; else 0."""
        return 0 if self.remainder == "drop" else self.segments.total % self.batch_size

    @property
    def steps(self) -> int:
        """Number of batches in an epoch, equal on every rank."""
        return self.full_steps + (self.left_over > 0)

    @property
    def window_rows(self) -> int:
        """Number of samples of a window, over all ranks."""
        return self.window_steps * self.batch_size

    def epoch(self, number: int) -> EpochOrder:
        """Return the order of one epoch, counted from 0."""
        if self.seed is None or self.uniform:
            return EpochOrder(self, self.segments, number)
        # Segments of one block stay adjacent: otherwise more than one rank would have to read the block.
        key = 0 if self.fixed_block_order else number
        order = permutation(int(self.blocks.max(initial=-1)) + 1, self.seed, key)
        if len(order) < len(self.blocks) or self.chosen is not None:  # an equal order, whatever holds the samples
            order = np.argsort(order[self.blocks], kind="stable")
        return EpochOrder(self, Runs(self.segments.start[order], self.segments.count[order]), number, order)


@dataclass(frozen=True)
class EpochOrder:
    """Order of the samples in one epoch.

    Parameters
    ----------
    schedule : of all epochs.
    sequence : the samples in the permuted order of their blocks, from which the lanes are cut.
    number : of the epoch.
    order : int64[segments], the segment at each position of the sequence; None: they are in the order of the files.
    """

    schedule: Schedule
    sequence: Runs
    number: int
    order: Integers | None = None

    def window(self, begin: int, end: int, rank: int, size: int) -> Window:
        """Return the window of a rank for steps ``begin`` to ``end``; ``begin`` is a multiple of ``window_steps``."""
        schedule = self.schedule
        if schedule.uniform:
            own = self.step_positions(begin, end, rank, size)
            runs, destination = in_file_order(self.sequence.numbers(own.positions))
            return Window(schedule.of_positions(runs), destination, own.sizes, own.rows)
        full = min(end, schedule.full_steps)
        shard_rows = schedule.batch_size // size
        sizes = np.full(max(0, full - begin), shard_rows, np.int64)
        rows = shard_rows * len(sizes)
        if schedule.seed is None:
            runs, destination = self.in_order(begin, full, rank * shard_rows, shard_rows)
        else:
            runs, destination = self.shuffled(begin, full, rank * shard_rows, shard_rows)
        if schedule.left_over and end > schedule.full_steps:
            start, stop = rank_range(schedule.left_over, rank, size)
            last = self._slice([schedule.full_steps * schedule.batch_size + start], [stop - start])
            runs, destination = _sort(
                join_runs(runs, last), np.concatenate([destination, np.arange(rows, rows + stop - start)])
            )
            sizes = np.append(sizes, shard_rows if schedule.remainder == "pad" else stop - start)
            rows += int(sizes[-1])
        return Window(schedule.of_positions(runs), destination, sizes, rows)

    def owned(self, begin: int, end: int, rank: int, size: int) -> Runs:
        """Return the samples, ascending, that a rank reads for all where the ranks share what they read.

        The samples of steps ``begin`` to ``end`` lie in blocks, each of which one rank reads: its turn, so that the
        blocks of any window are divided evenly, and a block that two windows or two lanes share has one reader. The
        reader is one of the ranks that need the lane, or a neighbour of theirs.

        >>> segments = Runs(np.array([0, 2, 4]), np.array([2, 2, 2]))
        >>> order = Schedule(segments, 2, lanes=1, window_steps=1, seed=None, blocks=np.arange(3)).epoch(0)
        >>> [order.owned(0, 3, rank, 2).start.tolist() for rank in (0, 1)]
        [[0, 4], [2]]
        """
        schedule, full = self.schedule, min(end, self.schedule.full_steps)
        if schedule.seed is None:
            start = np.array([begin * schedule.batch_size])
            count = np.array([max(0, full - begin) * schedule.batch_size])
        else:
            _, _, start, count = self._sections(begin, full, np.arange(schedule.lanes))
        if schedule.left_over and end > schedule.full_steps:
            start = np.append(start, schedule.full_steps * schedule.batch_size)
            count = np.append(count, schedule.left_over)
        section, run = self.sequence.overlaps(start, count)
        own = self._readers(run, size) == rank
        section, run = section[own], run[own]
        runs = sort(self.sequence.common(start[section], (start + count)[section], run))
        return schedule.of_positions(runs)

    def owners(self, samples: Integers, size: int) -> Integers:
        """Return the rank of ``size`` ranks that reads the block of each sample, int64[samples]; see `owned`."""
        schedule = self.schedule
        positions = samples if schedule.chosen is None else schedule.chosen.rank(samples)
        segment = np.searchsorted(schedule.segments.start, positions, side="right") - 1
        return self._readers(segment if self.order is None else self._position_of_segment[segment], size)

    def _readers(self, segments: Integers, size: int) -> Integers:
        """Return the rank that reads the block of each segment, by the position of the segment in the sequence.

        As many neighbouring lanes as possible share neighbouring ranks, which take turns: the first block of each of
        these lanes, then the second one of each, and so on.
        """
        lanes = self.schedule.lanes
        groups = gcd(size, lanes)
        group, inner = np.divmod(self._lane_of_block[segments], lanes // groups)
        number = self._number_in_lane[segments] * (lanes // groups) + inner
        return group * (size // groups) + number % (size // groups)

    @cached_property
    def _position_of_segment(self) -> Integers:
        """Position in the sequence of each segment, in the order of the files."""
        assert self.order is not None
        position = np.empty_like(self.order)
        position[self.order] = np.arange(len(self.order))
        return position

    @cached_property
    def _lane_of_block(self) -> Integers:
        """Lane in which the block of each segment of the sequence begins."""
        schedule = self.schedule
        length = max(1, schedule.full_steps * (schedule.batch_size // schedule.lanes))
        lane = np.minimum(self.sequence.first[:-1][self._begins_block] // length, schedule.lanes - 1)
        lanes: Integers = lane[np.cumsum(self._begins_block) - 1]
        return lanes

    @cached_property
    def _number_in_lane(self) -> Integers:
        """Number of the block of each segment of the sequence in its lane, in the order in which it is read."""
        lane = self._lane_of_block[self._begins_block]
        number, low, high = np.arange(len(lane)), *(np.searchsorted(lane, lane, side) for side in ("left", "right"))
        numbers: Integers = np.where(lane % 2, high - 1 - number, number - low)[np.cumsum(self._begins_block) - 1]
        return numbers

    @cached_property
    def _begins_block(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """True where a block begins, for each segment of the sequence."""
        blocks = self.schedule.blocks if self.order is None else self.schedule.blocks[self.order]
        begins: np.ndarray[tuple[int], np.dtype[np.bool_]] = np.diff(blocks, prepend=-1) != 0
        return begins

    def step_positions(self, begin: int, end: int, rank: int, size: int) -> StepPositions:
        """Return the samples of a rank in steps ``begin`` to ``end`` of a uniform permutation."""
        schedule = self.schedule
        shard_rows, batch_size = schedule.batch_size // size, schedule.batch_size
        positions = self.drawn(begin, min(end, schedule.full_steps), rank * shard_rows, shard_rows)
        sizes = np.full(len(positions) // shard_rows, shard_rows, np.int64)
        if schedule.left_over and end > schedule.full_steps:
            start, stop = rank_range(schedule.left_over, rank, size)
            last = self._permutation(np.arange(start, stop) + schedule.full_steps * batch_size)
            positions = np.append(positions, last)
            sizes = np.append(sizes, shard_rows if schedule.remainder == "pad" else stop - start)
        return StepPositions(positions, sizes, int(sizes.sum()))

    def drawn(self, begin: int, end: int, low: int, count: int) -> Integers:
        """Return positions ``low`` to ``low + count`` of each full batch of a uniform permutation, or in order."""
        first = np.arange(begin, end, dtype=np.int64) * self.schedule.batch_size + low
        return self._permutation((first[:, None] + np.arange(count)).reshape(-1))

    @cached_property
    def _permutation(self) -> Permutation:
        return Permutation(self.schedule.segments.total, self.schedule.seed or 0, self.number)

    def _slice(self, start: Any, count: Any) -> Runs:
        return self.sequence.slice(np.asarray(start, np.int64), np.asarray(count, np.int64))

    def in_order(self, begin: int, end: int, low: int, count: int) -> tuple[Runs, Integers]:
        """Return positions ``low`` to ``low + count`` of each batch, in the order of the files."""
        start = np.arange(begin, max(begin, end), dtype=np.int64) * self.schedule.batch_size + low
        runs = self._slice(start, np.full(len(start), count))
        return _sort(runs, np.arange(runs.total, dtype=np.int64))

    def shuffled(self, begin: int, end: int, low: int, count: int) -> tuple[Runs, Integers]:
        """Return positions ``low`` to ``low + count`` of each batch; the lanes at both ends may extend beyond them."""
        schedule = self.schedule
        if begin >= end:
            return self._slice([], []), _NO_POSITIONS
        width = schedule.batch_size // schedule.lanes  # samples that a lane contributes to a batch
        lanes = np.arange(low // width, -(-(low + count) // width))
        step, lane, start, size = self._sections(begin, end, lanes)
        runs = self._slice(start, size)
        sorted_position, destination, done = _sorted_positions(runs), np.empty(runs.total, np.int64), 0
        full, salt = int((size == size[0]).sum()), salts(schedule.seed or 0, self.number, step, lane)
        for tile in (*_tiles(0, full, size[0]), *_tiles(full, len(size), size[-1])):
            order = orders(salt[tile], int(size[tile.start]))
            shift, first = lane[tile] * width - low, (step[tile] - begin) * count
            found = _window_positions(order, width, shift, count, first).reshape(-1)
            of_tile = slice(*np.searchsorted(runs.first, (done, done + len(found))))
            destination[ranges(sorted_position[of_tile], runs.count[of_tile])] = found
            done += len(found)
        return _drop_others(sort(runs), destination)

    def _sections(self, begin: int, end: int, lanes: Integers) -> tuple[Integers, Integers, Integers, Integers]:
        """Return first step, lane, start and size of each section of the full steps ``begin`` to ``end``, int64 each.

        A *section* is the range of the sequence that one window takes from one lane; those of a window are adjacent.
        """
        schedule = self.schedule
        width = schedule.batch_size // schedule.lanes
        length = schedule.full_steps * width
        step = np.arange(begin, end, schedule.window_steps)
        step, lane = np.repeat(step, len(lanes)), np.tile(lanes, len(step))
        size = (np.minimum(step + schedule.window_steps, end) - step) * width  # smaller in the last window only
        start = lane * length + np.where(lane % 2, length - step * width - size, step * width)
        return step, lane, start, size


TILE = 1 << 14  # samples whose positions are computed in one go: the temporary arrays stay in the processor's cache
_NO_POSITIONS = np.empty(0, np.int64)


def _tiles(begin: int, end: int, size: int) -> Iterator[slice]:
    """Yield slices of the sections ``begin`` to ``end``, of ``size`` samples each, with about ``TILE`` samples."""
    count = max(1, TILE // int(size))
    return (slice(i, min(i + count, end)) for i in range(begin, end, count))


def _window_positions(order: Integers, width: int, shift: Integers, length: int, first: Integers) -> Integers:
    """Return the position in the window of each sample of some sections; -1 for samples of another rank.

    Parameters
    ----------
    order : int64[sections, n], the samples of each section in random order, counted from 0.
    width : samples of a lane in one batch.
    shift : int64[sections], where the section's lane begins in this rank's range of the batch.
    length : length of this rank's range of the batch.
    first : int64[sections], position in the window of the first step's first sample.
    """
    step, position = np.divmod(order, width) if width > 1 else (order, np.zeros_like(order))
    position += shift[:, None]
    found = step * length + position + first[:, None]
    if shift.min() < 0 or shift.max() > length - width:
        found[(position < 0) | (position >= length)] = -1
    return found


def _sorted_positions(runs: Runs) -> Integers:
    """Return where each run begins after all are sorted, int64[k]."""
    order = np.argsort(runs.start, kind="stable")
    count = runs.count[order]
    position = np.empty_like(count)
    position[order] = np.cumsum(count) - count
    return position


def _sort(runs: Runs, destination: Integers) -> tuple[Runs, Integers]:
    if (np.diff(runs.start) > 0).all():
        return merge(runs), destination
    moved = np.empty_like(destination)
    moved[ranges(_sorted_positions(runs), runs.count)] = destination
    return sort(runs), moved


def in_file_order(samples: Integers) -> tuple[Runs, Integers]:
    """Return the sorted samples, and the original position of each."""
    order = np.argsort(samples, kind="stable")
    return compress(samples[order]), order


def _drop_others(runs: Runs, destination: Integers) -> tuple[Runs, Integers]:
    """Drop the samples of other ranks: those without a destination."""
    if not len(destination) or destination.min() >= 0:
        return runs, destination
    own = destination >= 0
    return compress(ranges(runs.start, runs.count)[own]), destination[own]


def check_batch_size(batch_size: int) -> int:
    """Return a global batch size as Python's integer; raise ``PartitionError`` if it is no integer of 1 or more."""
    return whole_number(batch_size, 1, "the batch size is no number of samples", "batch_size= an integer of 1 or more")


def check_ranks(batch_size: int, size: int) -> None:
    """Raise ``PartitionError`` if ``size`` ranks do not divide a global batch size."""
    if batch_size % size:
        below, above = batch_size // size * size, -(-batch_size // size) * size
        near = " or ".join(str(n) for n in (below, above) if n)
        raise PartitionError(
            f"{size} ranks cannot share a batch of {batch_size} samples equally",
            expected="a global batch size that the number of ranks divides",
            found=f"batch_size={batch_size}",
            remedy=f"use batch_size={near}",
        )
