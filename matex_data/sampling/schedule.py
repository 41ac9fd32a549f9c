"""Who gets which sample when: pure functions of integers. No MPI, no files.

One epoch is a sequence of all samples: the blocks of the files, permuted if they are to be shuffled. The sequence is
cut into *lanes* of equal length; global batch k takes the next ``batch_size / lanes`` samples of every lane. A rank
owns neighbouring positions of the batch, hence neighbouring lanes, hence one stretch of the sequence: it reads its
own share, and nothing is exchanged. Samples are shuffled within a *window*: the part of each lane that serves a
number of whole steps. Every other lane is walked backwards: neighbours then reach the block that they
share at the same time. Nothing of this depends on the number of ranks, so the global batches do not either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from matex_data._types import Integers
from matex_data.errors import PartitionError
from matex_data.index.model import ranges
from matex_data.index.runs import Runs, compress, join, merge
from matex_data.sampling.permutation import Permutation, generator, orders, salts

REMAINDERS = ("drop", "pad", "keep")


def rank_range(total: int, rank: int, size: int) -> tuple[int, int]:
    """First and last-plus-one of a rank's part of ``total`` things; the first ranks get one more."""
    each, more = divmod(total, size)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


@dataclass(frozen=True)
class Window:
    """The samples that one rank reads together.

    Parameters
    ----------
    runs : the samples, in ascending order.
    destination : int64[runs.total], where each goes in the window.
    sizes : int64[steps], how many samples each step takes from the window, one behind the other.
    rows : length of the window; more than the samples where the last batch is padded.
    """

    runs: Runs
    destination: Integers
    sizes: Integers
    rows: int


@dataclass(frozen=True)
class StepPositions:
    """Samples that one rank gets in some steps.

    Parameters
    ----------
    positions : int64[samples], where each is among the samples of the data set, in the order of the batches.
    sizes : int64[steps], how many samples each step takes, one behind the other.
    rows : sum of the sizes; more than the samples where the last batch is padded.
    """

    positions: Integers
    sizes: Integers
    rows: int


@dataclass(frozen=True)
class Schedule:
    """The global batches of every epoch.

    Parameters
    ----------
    pieces : the samples of the data set in the order of the files, cut where blocks end.
    batch_size : samples of a global batch.
    lanes : a divisor of ``batch_size``; 1 if nothing is shuffled.
    window_steps : steps that are shuffled together.
    seed : of the shuffle; None: the order of the files.
    blocks : int64[pieces], which block each piece belongs to, from 0 on without gaps.
    remainder : what becomes of the samples that do not fill a batch: "drop", "pad" or "keep".
    blocks_stay : the blocks have the same order in every epoch, so that a rank always has the same samples.
    uniform : batches are drawn from all samples alike; there are no lanes and windows then.
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

    @property
    def full_steps(self) -> int:
        """Batches that are full."""
        return self.segments.total // self.batch_size

    @property
    def left_over(self) -> int:
        """Samples of the last batch, if it is not full and not dropped."""
        return 0 if self.remainder == "drop" else self.segments.total % self.batch_size

    @property
    def steps(self) -> int:
        """Batches of an epoch, the same on every rank."""
        return self.full_steps + (self.left_over > 0)

    def epoch(self, number: int) -> EpochOrder:
        """The order of one epoch, counted from 0."""
        if self.seed is None or self.uniform:
            return EpochOrder(self, self.segments, number)
        # Pieces of one block stay together, or several ranks would have to read it.
        key = 0 if self.fixed_block_order else number
        order = generator(self.seed, key).permutation(int(self.blocks.max(initial=-1)) + 1)
        if len(order) < len(self.blocks):
            order = np.argsort(order[self.blocks], kind="stable")
        return EpochOrder(self, Runs(self.segments.start[order], self.segments.count[order]), number)


@dataclass(frozen=True)
class EpochOrder:
    """One pass over the samples: ``sequence`` is the permuted order that the lanes are cut from."""

    schedule: Schedule
    sequence: Runs
    number: int

    def window(self, begin: int, end: int, rank: int, size: int) -> Window:
        """What a rank needs for steps ``begin`` to ``end``; ``begin`` is a multiple of ``window_steps``."""
        plan = self.schedule
        if plan.uniform:
            own = self.step_positions(begin, end, rank, size)
            runs, destination = _in_file_order(self.sequence.numbers(own.positions))
            return Window(runs, destination, own.sizes, own.rows)
        full = min(end, plan.full_steps)
        each = plan.batch_size // size
        sizes = np.full(max(0, full - begin), each, np.int64)
        rows = each * len(sizes)
        if plan.seed is None:
            runs, destination = self._in_order(begin, full, rank * each, each)
        else:
            runs, destination = self._shuffled(begin, full, rank * each, each)
        if plan.left_over and end > plan.full_steps:
            start, stop = rank_range(plan.left_over, rank, size)
            last = self._between([plan.full_steps * plan.batch_size + start], [stop - start])
            runs, destination = _sorted(
                join(runs, last), np.concatenate([destination, np.arange(rows, rows + stop - start)])
            )
            sizes = np.append(sizes, each if plan.remainder == "pad" else stop - start)
            rows += int(sizes[-1])
        return Window(runs, destination, sizes, rows)

    def step_positions(self, begin: int, end: int, rank: int, size: int) -> StepPositions:
        """Return what a rank gets in steps ``begin`` to ``end`` of a uniform permutation of all samples."""
        plan = self.schedule
        each = plan.batch_size // size
        first = np.arange(begin, max(begin, min(end, plan.full_steps)), dtype=np.int64) * plan.batch_size + rank * each
        ranks = (first[:, None] + np.arange(each)).reshape(-1)
        sizes = np.full(len(first), each, np.int64)
        if plan.left_over and end > plan.full_steps:
            start, stop = rank_range(plan.left_over, rank, size)
            ranks = np.append(ranks, np.arange(start, stop) + plan.full_steps * plan.batch_size)
            sizes = np.append(sizes, each if plan.remainder == "pad" else stop - start)
        return StepPositions(self._permutation(ranks), sizes, int(sizes.sum()))

    @cached_property
    def _permutation(self) -> Permutation:
        return Permutation(self.schedule.segments.total, self.schedule.seed or 0, self.number)

    def _between(self, start: Any, count: Any) -> Runs:
        return self.sequence.slice(np.asarray(start, np.int64), np.asarray(count, np.int64))

    def _in_order(self, begin: int, end: int, low: int, each: int) -> tuple[Runs, Integers]:
        start = np.arange(begin, max(begin, end), dtype=np.int64) * self.schedule.batch_size + low
        runs = self._between(start, np.full(len(start), each))
        return _sorted(runs, np.arange(runs.total, dtype=np.int64))

    def _shuffled(self, begin: int, end: int, low: int, each: int) -> tuple[Runs, Integers]:
        """Positions ``low`` to ``low + each`` of each batch; a lane at their border is shared with another rank."""
        plan = self.schedule
        width = plan.batch_size // plan.lanes  # samples that a lane gives to one batch
        length = plan.full_steps * width
        step = np.arange(begin, end, plan.window_steps)
        if not len(step):
            return self._between([], []), NOWHERE
        # A part is what one window takes from one lane; only the last window may take less.
        lanes = np.arange(low // width, -(-(low + each) // width))
        step, lane = np.repeat(step, len(lanes)), np.tile(lanes, len(step))
        take = (np.minimum(step + plan.window_steps, end) - step) * width
        start = lane * length + np.where(lane % 2, length - step * width - take, step * width)
        runs = self._between(start, take)
        arrived, destination, done = _arrivals(runs), np.empty(runs.total, np.int64), 0
        full, salt = int((take == take[0]).sum()), salts(plan.seed or 0, self.number, step, lane)
        for some in (*_tiles(0, full, take[0]), *_tiles(full, len(take), take[-1])):
            mixed = orders(salt[some], int(take[some.start]))
            shift, first = lane[some] * width - low, (step[some] - begin) * each
            places = _places(mixed, width, shift, each, first).reshape(-1)
            parts = slice(*np.searchsorted(runs.first, (done, done + len(places))))
            destination[ranges(arrived[parts], runs.count[parts])] = places
            done += len(places)
        return _placed(_ascending(runs), destination)


TILE = 1 << 14  # samples whose places are found together: the arrays on the way stay in the processor's cache
NOWHERE = np.empty(0, np.int64)


def _tiles(begin: int, end: int, take: int) -> Iterator[slice]:
    """Parts ``begin`` to ``end``, of ``take`` samples each, some at a time."""
    several = max(1, TILE // int(take))
    return (slice(i, min(i + several, end)) for i in range(begin, end, several))


def _places(mixed: Integers, width: int, shift: Integers, each: int, first: Integers) -> Integers:
    """Places of the samples of some parts in the window; -1 for those that belong to another rank.

    Parameters
    ----------
    mixed : int64[parts, n], the samples of each part in random order, counted from 0.
    width : samples of a lane in one batch.
    shift : int64[parts], where they begin in this rank's part of the batch.
    each : samples of this rank's part.
    first : int64[parts], destination of the first sample of the first step.
    """
    step, position = np.divmod(mixed, width) if width > 1 else (mixed, np.zeros_like(mixed))
    position += shift[:, None]
    places = step * each + position + first[:, None]
    if shift.min() < 0 or shift.max() > each - width:
        places[(position < 0) | (position >= each)] = -1
    return places


def _arrivals(runs: Runs) -> Integers:
    """int64[k], where each run begins once all are in ascending order."""
    order = np.argsort(runs.start, kind="stable")
    count = runs.count[order]
    arrived = np.empty_like(count)
    arrived[order] = np.cumsum(count) - count
    return arrived


def _ascending(runs: Runs) -> Runs:
    order = np.argsort(runs.start, kind="stable")
    return merge(Runs(runs.start[order], runs.count[order]))


def _sorted(runs: Runs, destination: Integers) -> tuple[Runs, Integers]:
    """The same samples and their places in ascending order of the samples."""
    moved = np.empty_like(destination)
    moved[ranges(_arrivals(runs), runs.count)] = destination
    return _ascending(runs), moved


def _in_file_order(samples: Integers) -> tuple[Runs, Integers]:
    """Return the samples in ascending order, and the destination of each, which is where it was."""
    order = np.argsort(samples, kind="stable")
    return compress(samples[order]), order


def _placed(runs: Runs, destination: Integers) -> tuple[Runs, Integers]:
    """Without the samples that have no destination here."""
    if not len(destination) or destination.min() >= 0:
        return runs, destination
    here = destination >= 0
    return compress(ranges(runs.start, runs.count)[here]), destination[here]


def check_ranks(batch_size: int, size: int) -> None:
    """Raises ``PartitionError`` if the ranks cannot share the global batch equally."""
    if batch_size % size:
        below, above = batch_size // size * size, -(-batch_size // size) * size
        near = " or ".join(str(n) for n in (below, above) if n)
        raise PartitionError(
            f"{size} ranks cannot share a batch of {batch_size} samples equally",
            expected="a global batch size that the number of ranks divides",
            found=f"batch_size={batch_size}",
            remedy=f"use batch_size={near}",
        )
