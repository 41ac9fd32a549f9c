"""How large blocks, lanes and windows are: it follows from the data and the batch size, not from the ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Integers
from matex_data.errors import PartitionError
from matex_data.index.model import Index
from matex_data.index.runs import Runs, cut
from matex_data.sampling.schedule import REMAINDERS, Schedule

BLOCK_BYTES = (64 << 10, 256 << 10)
"""Least and most of a block of rows that could be read one by one: cheap to read, small enough to mix."""
LEAST_BLOCKS = 1024  # of a data set whose rows can be read one by one
MOST_BLOCKS = 1 << 21
MOST_LANES = 4096
WINDOW_BYTES = 8 << 20  # shuffled together at least: a few such windows stay in the processor's cache
BATCH_BLOCKS = 2  # shuffled together for each sample of a batch, if they fit into the bytes that are allowed
WINDOW_BLOCKS = 512  # shuffled together at least, if they fit into half of the bytes that are allowed


def choose_lanes(batch_size: int, limit: int) -> int:
    """A divisor of the batch size, at most ``limit``: near it, and with many divisors, as ranks have to share it."""
    divisors = [d for d in range(1, min(batch_size, limit, MOST_LANES) + 1) if batch_size % d == 0]
    largest = divisors[-1]
    return max((d for d in divisors if 2 * d > largest), key=lambda d: (_divisor_count(d), d))


def _divisor_count(number: int) -> int:
    return sum(number % d == 0 for d in range(1, number + 1))


def make_schedule(
    samples: Runs,
    borders: Integers,
    batch_size: int,
    row_bytes: int,
    window_bytes: int,
    *,
    seed: int | None,
    remainder: str,
    uniform: bool = False,
) -> Schedule:
    """Lanes and windows that follow from the data and the batch size alone.

    Parameters
    ----------
    samples : of the data set, in the order of the files.
    borders : int64[k], first sample of every block, ascending.
    batch_size : samples of a global batch.
    row_bytes : bytes of a sample in memory.
    window_bytes : what is shuffled together, over all ranks, at most (but one step, and a block of every lane).
    seed : of the shuffle, or None.
    remainder : "drop", "pad" or "keep".
    uniform : draw batches from all samples alike.

    Raises
    ------
    PartitionError : a batch size below 1, an unknown remainder.
    """
    if batch_size < 1:
        raise PartitionError("the batch size must be at least 1", found=batch_size)
    if remainder not in REMAINDERS:
        raise PartitionError("no such way to treat the last batch", expected=REMAINDERS, found=repr(remainder))
    if uniform:
        return Schedule(
            samples, batch_size, 1, 1, seed, np.zeros(len(samples.start), np.int64), remainder, uniform=True
        )
    segments = cut(samples, borders)
    if len(samples.start) == 1:  # each piece is a block: no more arrays than needed, of maybe millions
        blocks = np.arange(len(segments.start))
    else:
        block = np.searchsorted(borders, segments.start, side="right")
        blocks = np.cumsum(np.diff(block, prepend=block[:1]) > 0)
    count = int(blocks.max(initial=0)) + 1
    row_bytes = max(1, row_bytes)
    block_bytes = max(1, segments.total * row_bytes // count)
    needed, better = BATCH_BLOCKS * batch_size * block_bytes, WINDOW_BLOCKS * block_bytes
    window_bytes = min(window_bytes, max(WINDOW_BYTES, needed, min(better, window_bytes // 2)))
    lanes = 1
    if seed is not None:
        lanes = choose_lanes(batch_size, max(1, min(count, window_bytes // (2 * block_bytes))))
    most = max(1, window_bytes // (batch_size * row_bytes))
    plan = Schedule(segments, batch_size, lanes, most, seed, blocks.astype(np.int64, copy=False), remainder)
    return replace(plan, window_steps=_even(plan.steps, most))


def window_blocks(batch_size: int) -> int:
    """Return how many blocks a window has, if they fit into the bytes that are allowed."""
    return max(WINDOW_BLOCKS, BATCH_BLOCKS * batch_size)


def _even(steps: int, most: int) -> int:
    """Return the steps of a window, at most so many: as few windows as there can be, of about the same length."""
    return -(-steps // -(-steps // most)) if steps else most


def choose_block_bytes(batch_size: int, window_bytes: int, total_bytes: int) -> int:
    """Return the bytes of a block of rows that could be read one by one: half of a window has blocks enough."""
    least, most = BLOCK_BYTES
    return min(total_bytes // LEAST_BLOCKS, most, max(least, window_bytes // (2 * window_blocks(batch_size))))


def choose_block_rows(depths: NDArray[Any], row_bytes: NDArray[Any], total_rows: int, block_bytes: int) -> int:
    """Return the rows of a block: what a file's chunks suggest, neither too small to read nor too large to shuffle.

    Parameters
    ----------
    depths : int64[fields], rows of a chunk of each field; 1 where any row can be read alone.
    row_bytes : int64[fields], bytes of a row of each.
    total_rows : of the data set.
    block_bytes : of a block, about, unless chunks are larger.
    """
    row = max(1, int(row_bytes.sum()))
    target = max(block_bytes, total_rows * row // MOST_BLOCKS)
    deepest, dominant = int(depths.max()), int(depths[np.argmax(row_bytes)])
    depth = deepest if deepest * row <= target and total_rows // deepest >= 256 else dominant
    return depth * max(1, target // (depth * row))


def block_borders(index: Index, block_bytes: int) -> Integers:
    """Return int64[n], the first sample of every block of every file.

    Parameters
    ----------
    index : of the data set.
    block_bytes : of a block, about, where rows can be read one by one or chunks are smaller.
    """
    row_bytes = np.array([field.row_bytes for field in index.fields.values()] or [1])
    borders: list[Integers] = []
    for file, first in zip(index.files, index.first_row.tolist(), strict=False):
        parts = [file.layouts[name] for name in index.fields]
        uneven = parts[int(np.argmax(row_bytes))].borders() if parts else None
        if uneven is not None and file.rows:
            step = choose_block_rows(np.ones_like(row_bytes), row_bytes, len(index), block_bytes)
            borders.append(first + uneven[np.flatnonzero(np.diff(uneven // step, prepend=-1))])
            continue
        depths = np.array([part.block_rows for part in parts] or [1])
        step = choose_block_rows(depths, row_bytes, len(index), block_bytes) if file.rows else 1
        borders.append(np.arange(first, first + file.rows, step, dtype=np.int64))
    if len(borders) == 1:
        return borders[0]
    return np.concatenate(borders) if borders else np.empty(0, np.int64)


@dataclass(frozen=True)
class ShuffleQuality:
    """Figures of how well the batches of one epoch represent data that are sorted.

    Parameters
    ----------
    batch_size : samples of a global batch.
    blocks : of the data set: neighbours in the files, that are read together.
    block_bytes : of one of them in memory, on average.
    blocks_per_window : that samples are shuffled over.
    lanes : positions in the permuted blocks that each batch is drawn from.
    samples_per_window : that are shuffled together.
    ratio : standard deviation of the share that a class has in a batch, over that of uniform sampling, if each block
        holds one class: 1 is a shuffle of all samples.
    """

    batch_size: int
    blocks: int
    block_bytes: int
    blocks_per_window: int
    lanes: int
    samples_per_window: int
    ratio: float

    @property
    def remedy(self) -> str:
        """Return what the user can do for a ratio nearer to 1."""
        mebibytes = -(-window_blocks(self.batch_size) * self.block_bytes // (1 << 20))
        return (
            f"Store smaller chunks, open the files with window_bytes={mebibytes} << 20 (several such windows are "
            'in memory, over all ranks) or with smaller block_bytes=, or use shuffle="global"'
        )

    def __str__(self) -> str:
        return (
            f"{self.blocks_per_window:,} of {self.blocks:,} blocks a window ({self.samples_per_window:,} samples), "
            f"{self.lanes:,} lanes; the share of a class in a batch of {self.batch_size:,} varies "
            f"{self.ratio:.2f} times as much as if drawn from all samples"
        )


def estimate_quality(plan: Schedule, row_bytes: int) -> ShuffleQuality:
    """Return the figures of a schedule that shuffles.

    The ratio is that of drawing without replacement: blocks of one class each from all blocks to a window, and samples
    from a window to its batches, as many from each lane. ``docs/shuffling.md`` has the formula.

    Parameters
    ----------
    plan : of all epochs, with a seed.
    row_bytes : bytes of a sample in memory.
    """
    n, lanes, total = plan.batch_size, plan.lanes, max(1, plan.segments.total)
    if plan.uniform:
        return ShuffleQuality(n, total, row_bytes, total, 1, total, 1.0)
    blocks = int(plan.blocks.max(initial=0)) + 1
    rows = min(total, plan.window_steps * n)
    mixed = min(float(blocks), max(blocks * rows / total, float(lanes)))
    between = n * (1 / mixed - 1 / blocks)
    rest = 1 - (n / lanes - 1) / max(1.0, rows / lanes - 1)
    within = max(0.0, 1 - lanes / mixed + 1 / blocks) * max(0.0, rest)
    ratio = float(np.sqrt(between + within))
    return ShuffleQuality(n, blocks, total * row_bytes // blocks, round(mixed), lanes, rows, ratio)
