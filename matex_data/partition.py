"""Who gets which sample when: pure functions of integers. No MPI, no files.

One epoch is a sequence of all samples: the blocks of the files, permuted if they are to be shuffled. The sequence is
cut into *lanes* of equal length; global batch k takes the next ``batch_size / lanes`` samples of every lane. A rank
owns neighbouring positions of the batch, hence neighbouring lanes, hence one stretch of the sequence: it reads its
own share, and nothing is exchanged. Samples are shuffled within a *window*: the part of each lane that is read
together, a number of whole steps. Every other lane is walked backwards: neighbours then reach the block that they
share at the same time. Nothing of this depends on the number of ranks, so the global batches do not either.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matex_data.errors import PartitionError
from matex_data.index import Integers, ranges
from matex_data.runs import Runs, compress, cut, join, merge

MOST_LANES = 256
REMAINDERS = ("drop", "pad", "keep")


def share(total: int, rank: int, size: int) -> tuple[int, int]:
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
    place : int64[runs.total], where each goes in the window.
    sizes : int64[steps], how many samples each step takes from the window, one behind the other.
    rows : length of the window; more than the samples where the last batch is padded.
    """

    runs: Runs
    place: Integers
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
    window_steps : steps that are read together.
    seed : of the shuffle; None: the order of the files.
    blocks : int64[pieces], which block each piece belongs to, from 0 on.
    remainder : what becomes of the samples that do not fill a batch: "drop", "pad" or "keep".
    """

    pieces: Runs
    batch_size: int
    lanes: int
    window_steps: int
    seed: int | None
    blocks: Integers
    remainder: str = "drop"

    @property
    def full_steps(self) -> int:
        """Batches that are full."""
        return self.pieces.total // self.batch_size

    @property
    def left_over(self) -> int:
        """Samples of the last batch, if it is not full and not dropped."""
        return 0 if self.remainder == "drop" else self.pieces.total % self.batch_size

    @property
    def steps(self) -> int:
        """Batches of an epoch, the same on every rank."""
        return self.full_steps + (self.left_over > 0)

    @property
    def windows(self) -> int:
        """Windows of an epoch, the same on every rank."""
        return -(-self.steps // self.window_steps)

    def epoch(self, number: int) -> Epoch:
        """The order of one epoch, counted from 0."""
        if self.seed is None:
            return Epoch(self, self.pieces, number)
        # Pieces of one block stay together, or several ranks would have to read it.
        places = _generator(self.seed, number).permutation(int(self.blocks.max(initial=-1)) + 1)
        order = np.argsort(places[self.blocks], kind="stable")
        return Epoch(self, Runs(self.pieces.start[order], self.pieces.count[order]), number)


@dataclass(frozen=True)
class Epoch:
    """One pass over the samples: ``sequence`` is the permuted order that the lanes are cut from."""

    schedule: Schedule
    sequence: Runs
    number: int

    def window(self, number: int, rank: int, size: int) -> Window:
        """What a rank reads for steps ``number * window_steps`` and on."""
        plan = self.schedule
        begin = number * plan.window_steps
        end = min(begin + plan.window_steps, plan.full_steps)
        each = plan.batch_size // size
        if plan.seed is None:
            runs, place = self._in_order(begin, end, rank * each, each)
        else:
            runs, place = self._shuffled(begin, end, rank * each, each)
        sizes = np.full(max(0, end - begin), each, np.int64)
        rows = each * len(sizes)
        if plan.left_over and begin + plan.window_steps > plan.full_steps:
            start, stop = share(plan.left_over, rank, size)
            last = self._between([plan.full_steps * plan.batch_size + start], [stop - start])
            runs, place = join(runs, last), np.concatenate([place, np.arange(rows, rows + stop - start)])
            sizes = np.append(sizes, each if plan.remainder == "pad" else stop - start)
            rows += int(sizes[-1])
        return _sorted(runs, place, sizes, rows)

    def _between(self, start: Any, count: Any) -> Runs:
        return self.sequence.between(np.asarray(start, np.int64), np.asarray(count, np.int64))

    def _in_order(self, begin: int, end: int, low: int, each: int) -> tuple[Runs, Integers]:
        start = np.arange(begin, max(begin, end), dtype=np.int64) * self.schedule.batch_size + low
        runs = self._between(start, np.full(len(start), each))
        return runs, np.arange(runs.total, dtype=np.int64)

    def _shuffled(self, begin: int, end: int, low: int, each: int) -> tuple[Runs, Integers]:
        """Positions ``low`` to ``low + each`` of each batch; a lane at their border is shared with another rank."""
        plan = self.schedule
        width = plan.batch_size // plan.lanes  # samples that a lane gives to one batch
        lanes = range(low // width, -(-(low + each) // width))
        length, take = plan.full_steps * width, max(0, end - begin) * width
        starts = [lane * length + (length - begin * width - take if lane % 2 else begin * width) for lane in lanes]
        runs = self._between(starts, [take] * len(lanes))
        place = np.empty((len(lanes), take), np.int64)
        for i, lane in enumerate(lanes):
            mixed = _generator(plan.seed, self.number, begin, lane).permutation(take)
            step, position = np.divmod(mixed, width)
            position += lane * width - low
            place[i] = np.where((position >= 0) & (position < each), step * each + position, -1)
        return runs, place.reshape(-1)


def _generator(*key: int | None) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([k or 0 for k in key])))


def _sorted(runs: Runs, place: Integers, sizes: Integers, rows: int) -> Window:
    """The same samples in ascending order, without those that have no place here."""
    order = np.argsort(runs.start, kind="stable")
    place = place[ranges(runs.first[:-1][order], runs.count[order])]
    runs = Runs(runs.start[order], runs.count[order])
    if len(place) and place.min() < 0:
        numbers = ranges(runs.start, runs.count)[place >= 0]
        place = place[place >= 0]
        runs = compress(numbers)
    return Window(runs, place, sizes, rows)


def split(runs: Runs, fractions: tuple[float, ...], seed: int | None) -> tuple[Runs, ...]:
    """Disjoint parts that cover all samples; part i has ``fractions[i]`` of them, up to rounding.

    Without a seed the parts follow one another. With one they are drawn at random: sample by sample of up to some
    thousands, else in runs of neighbours, so that a part of a large file can still be read in large pieces.

    Raises
    ------
    PartitionError : the fractions are negative or do not sum to 1.
    """
    if not fractions or min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-6:
        raise PartitionError(
            "the parts of a split must sum to 1", expected="for example split(0.9, 0.1)", found=fractions
        )
    total = runs.total
    ends = [0, *(round(total * sum(fractions[: i + 1])) for i in range(len(fractions) - 1)), total]
    sequence = runs if seed is None else _drawn(runs, seed)
    parts = []
    for low, high in pairwise(ends):
        part = sequence.between(np.array([low]), np.array([high - low]))
        order = np.argsort(part.start)
        parts.append(merge(Runs(part.start[order], part.count[order])))
    return tuple(parts)


def _drawn(runs: Runs, seed: int) -> Runs:
    unit = max(1, runs.total // 4096)
    starts = np.arange(0, runs.total, unit, dtype=np.int64)
    counts = np.minimum(unit, runs.total - starts)
    order = _generator(seed).permutation(len(starts))
    return runs.between(starts[order], counts[order])


def lanes_for(batch_size: int, limit: int) -> int:
    """A divisor of the batch size, at most ``limit``: near it, and with many divisors, as ranks have to share it."""
    divisors = [d for d in range(1, min(batch_size, limit, MOST_LANES) + 1) if batch_size % d == 0]
    largest = divisors[-1]
    return max((d for d in divisors if 2 * d > largest), key=lambda d: (_divisor_count(d), d))


def _divisor_count(number: int) -> int:
    return sum(number % d == 0 for d in range(1, number + 1))


def schedule(
    samples: Runs,
    borders: Integers,
    batch_size: int,
    row_bytes: int,
    window_bytes: int,
    *,
    seed: int | None,
    remainder: str,
) -> Schedule:
    """Lanes and windows that follow from the data and the batch size alone.

    Parameters
    ----------
    samples : of the data set, in the order of the files.
    borders : int64[k], first sample of every block, ascending.
    batch_size : samples of a global batch.
    row_bytes : bytes of a sample in memory.
    window_bytes : bytes of a window over all ranks, at most (but one step, and one block of every lane).
    seed : of the shuffle, or None.
    remainder : "drop", "pad" or "keep".

    Raises
    ------
    PartitionError : a batch size below 1, an unknown remainder.
    """
    if batch_size < 1:
        raise PartitionError("the batch size must be at least 1", found=batch_size)
    if remainder not in REMAINDERS:
        raise PartitionError("no such way to treat the last batch", expected=REMAINDERS, found=repr(remainder))
    pieces = cut(samples, borders)
    _, blocks = np.unique(np.searchsorted(borders, pieces.start, side="right"), return_inverse=True)
    count = int(blocks.max(initial=0)) + 1
    row_bytes = max(1, row_bytes)
    total_bytes = pieces.total * row_bytes
    window_bytes = min(window_bytes, max(16 << 20, total_bytes // 8))
    block_bytes = max(1, total_bytes // count)
    lanes = 1
    if seed is not None:
        lanes = lanes_for(batch_size, max(1, min(count, window_bytes // (2 * block_bytes))))
    steps = max(1, window_bytes // (batch_size * row_bytes))
    return Schedule(pieces, batch_size, lanes, steps, seed, blocks.astype(np.int64), remainder)


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


def block_rows_for(depths: NDArray[Any], row_bytes: NDArray[Any], total_rows: int) -> int:
    """Rows of a block: what a file's chunks suggest, and neither too small to read nor too large to shuffle.

    Parameters
    ----------
    depths : int64[fields], rows of a chunk of each field; 1 where any row can be read alone.
    row_bytes : int64[fields], bytes of a row of each.
    total_rows : of the data set.
    """
    row = max(1, int(row_bytes.sum()))
    total = total_rows * row
    target = max(min(total // 2048, 256 << 10), total >> 20)
    deepest, dominant = int(depths.max()), int(depths[np.argmax(row_bytes)])
    depth = deepest if deepest * row <= 4 << 20 and total_rows // deepest >= 256 else dominant
    return depth * max(1, target // (depth * row))
