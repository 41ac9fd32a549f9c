"""Choose the sizes of blocks, lanes and windows from the data and the batch size, never from the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Integers
from matex_data.index.files import LayoutFacts
from matex_data.index.model import Index
from matex_data.index.runs import Chosen, Runs, Samples, cut, ranges
from matex_data.sampling.schedule import Schedule
from matex_data.words import counted

BLOCK_BYTES = (64 << 10, 256 << 10)
"""Least and most of a block where any row can be read alone: large enough to read fast, small enough to mix well."""
LARGE_BLOCK_BYTES, LARGE_BLOCKS = 1 << 20, 1 << 20
"""Most of a block of a data set with so many of them: file systems of clusters are slow for smaller reads."""
LEAST_BLOCKS = 1024  # of a data set of which any row can be read alone
MOST_BLOCKS = 1 << 21
MOST_LANES = 1 << 16
WINDOW_LIMIT = 128 << 20  # of a window over all ranks, if neither the batch nor the data set is large
DATASET_FRACTION = 256  # of the bytes of a data set that a window may have: some six windows are in memory
BATCH_FRACTION = 2  # of the samples of a batch that have a block of their own, if windows grow: a ratio below 2
KEPT_WINDOWS = 4  # of whose size the blocks are that all ranks keep to read the lanes, where these are no samples yet
WINDOW_BYTES = 8 << 20  # least window: a few of this size stay in the processor's cache
BATCH_BLOCKS = 2  # blocks of a window for each sample of a batch, if the limit on its bytes allows
POSITION_BYTES = 16  # of a sample: where it lies and goes; a smaller one counts as much, where no order depends on it
CHOSEN_BYTES = 64  # of a sample that a condition chose: most of them are runs of their own
WINDOW_BLOCKS = 512  # least blocks of a window, if half of the limit on its bytes allows


def choose_lanes(batch_size: int, limit: int) -> int:
    """Return a divisor of the batch size near ``limit``, at most that, with many divisors: ranks divide the lanes.

    >>> choose_lanes(256, 100), choose_lanes(60, 100)
    (64, 60)
    """
    divisors = [d for d in range(1, min(batch_size, limit, MOST_LANES) + 1) if batch_size % d == 0]
    largest = divisors[-1]
    return max((d for d in divisors if 2 * d > largest), key=lambda d: (_divisor_count(d), d))


def _divisor_count(number: int) -> int:
    return sum(number % d == 0 for d in range(1, number + 1))


def make_schedule(
    samples: Samples,
    borders: Integers,
    batch_size: int,
    row_bytes: int,
    window_bytes: int | None,
    *,
    seed: int | None,
    remainder: str,
    uniform: bool = False,
    least_window_bytes: int = WINDOW_BYTES,
    kept_bytes: int = 0,
) -> Schedule:
    """Return a schedule with lanes and windows chosen from the data and the batch size.

    Parameters
    ----------
    samples : of the data set, in the order of the files.
    borders : int64[k], first sample of each block, ascending.
    batch_size : samples of a global batch, 1 or more.
    row_bytes : bytes of a sample in memory.
    window_bytes : most bytes of a window, over all ranks; it holds at least one step, and a block of every lane. None:
        from the data and the batch size, see `most_window_bytes`.
    seed : of the shuffle, or None.
    remainder : treatment of the samples that do not fill a batch: "drop", "pad" or "keep".
    uniform : draw batches from all samples with equal probability.
    least_window_bytes : of a window, unless ``window_bytes`` is less.
    kept_bytes : memory for a sample that a rank keeps while it reads the block of it, such as an archive that holds
        compressed images; 0: the samples themselves.
    """
    chosen = samples if isinstance(samples, Chosen) else None
    if chosen is not None:  # the order is one of positions: to have a run of samples for each would take gigabytes
        samples, borders = Runs.between(0, chosen.total), np.unique(chosen.rank(borders))
    assert isinstance(samples, Runs)
    if uniform:
        blocks = np.zeros(len(samples.start), np.int64)
        return Schedule(samples, batch_size, 1, 1, seed, blocks, remainder, uniform=True, chosen=chosen)
    segments = cut(samples, borders)
    if len(samples.start) == 1:  # each segment is a block: few temporary arrays for maybe millions of them
        blocks = np.arange(len(segments.start))
    else:
        block = np.searchsorted(borders, segments.start, side="right")
        blocks = np.cumsum(np.diff(block, prepend=block[:1]) > 0)
    count = int(blocks.max(initial=0)) + 1
    row_bytes = max(1, row_bytes)
    block_bytes = max(1, segments.total * row_bytes // count)
    if window_bytes is None and seed is None:
        window_bytes = WINDOW_LIMIT
    elif window_bytes is None:
        most_bytes = most_window_bytes(batch_size, row_bytes, segments.total * row_bytes)
        window_bytes = max(WINDOW_LIMIT, min(most_bytes, batch_size * block_bytes // BATCH_FRACTION))
    needed, better = BATCH_BLOCKS * batch_size * block_bytes, WINDOW_BLOCKS * block_bytes
    window_bytes = min(window_bytes, max(least_window_bytes, needed, min(better, window_bytes // 2)))
    lanes = 1
    if seed is not None:
        kept = segments.total * kept_bytes // count
        held = KEPT_WINDOWS * window_bytes // (2 * kept) if kept else window_bytes // (2 * block_bytes)
        lanes = choose_lanes(batch_size, max(1, min(count, held)))
    held_bytes = max(row_bytes, position_bytes(chosen or samples)) if seed is None else row_bytes
    most = max(1, window_bytes // (batch_size * held_bytes))
    blocks = blocks.astype(np.int64, copy=False)
    schedule = Schedule(segments, batch_size, lanes, most, seed, blocks, remainder, chosen=chosen)
    return replace(schedule, window_steps=_even(schedule.steps, most))


def position_bytes(samples: Samples) -> int:
    """Return the bytes of a sample's position, about, while it is read: a smaller sample counts as much."""
    return CHOSEN_BYTES if isinstance(samples, Chosen) else POSITION_BYTES


def most_window_bytes(batch_size: int, row_bytes: int, total_bytes: int) -> int:
    """Return the most bytes of a window over all ranks, if the user sets no limit.

    A window may have two batches, since any number of ranks has to hold one, or a small fraction of the data set. The
    number of ranks does not matter, so that the order is equal on any.

    >>> most_window_bytes(64, 1000, 10**9) == WINDOW_LIMIT
    True
    >>> most_window_bytes(64, 1000, 10**12), most_window_bytes(65536, 10_000, 10**10)
    (3906250000, 1310720000)
    """
    return max(WINDOW_LIMIT, 2 * batch_size * row_bytes, total_bytes // DATASET_FRACTION)


def window_blocks(batch_size: int) -> int:
    """Return the number of blocks that a window should have, if the limit on its bytes allows."""
    return max(WINDOW_BLOCKS, BATCH_BLOCKS * batch_size)


def _even(steps: int, most: int) -> int:
    """Return the steps of a window, at most ``most``: as few windows as possible, of about equal length."""
    return -(-steps // -(-steps // most)) if steps else most


def choose_block_bytes(batch_size: int, window_bytes: int, total_bytes: int) -> int:
    """Return the size of a block where any row can be read alone, so that half a window holds `window_blocks`.

    Parameters
    ----------
    batch_size : samples of a global batch.
    window_bytes : most bytes of a window, over all ranks.
    total_bytes : of the data set.
    """
    least, most = BLOCK_BYTES
    most = max(most, min(LARGE_BLOCK_BYTES, total_bytes // LARGE_BLOCKS))
    return min(total_bytes // LEAST_BLOCKS, most, max(least, window_bytes // (2 * window_blocks(batch_size))))


def choose_least_window(index: Index) -> int:
    """Return the least bytes of a window: none of files with a sample each, for which the first batch would wait."""
    return 0 if any(facts.separate.any() for facts in index.files.facts.values()) else WINDOW_BYTES


def choose_block_rows(depths: NDArray[Any], row_bytes: NDArray[Any], total_rows: int, block_bytes: int) -> int:
    """Return the rows of a block: a multiple of the chunk depth, neither too small to read nor too large to mix well.

    Parameters
    ----------
    depths : int64[fields], rows of a chunk of each field; 1 if any row can be read alone.
    row_bytes : int64[fields], bytes of a row of each field.
    total_rows : of the data set.
    block_bytes : target size of a block, in bytes; chunks may be larger.
    """
    row = max(1, int(row_bytes.sum()))
    target = max(block_bytes, total_rows * row // MOST_BLOCKS)
    deepest, dominant = int(depths.max()), int(depths[np.argmax(row_bytes)])
    depth = deepest if deepest * row <= target and total_rows // deepest >= 256 else dominant
    return depth * max(1, target // (depth * row))


def block_borders(index: Index, block_bytes: int) -> Integers:
    """Return the first sample of every block of every file, int64[n].

    Parameters
    ----------
    index : of the data set.
    block_bytes : target size of a block, in bytes, where any row can be read alone or chunks are smaller.
    """
    rows, first = index.files.rows, index.first_row[:-1]
    filled = np.flatnonzero(rows)
    if not len(filled):
        return np.empty(0, np.int64)
    row_bytes = np.array([index.row_bytes(name) for name in index.fields] or [1])
    facts = [index.files.facts[name] for name in index.fields]
    dominant = int(np.argmax(row_bytes))
    single = np.zeros(len(rows), bool)  # files of which no blocks of the layout are put together
    if len(index) <= MOST_BLOCKS:
        single |= np.logical_or.reduce([of_field.separate for of_field in facts]) if facts else False
    uneven = facts[dominant].uneven if facts else single
    steps = _block_rows(facts, row_bytes, len(index), block_bytes, len(rows))
    if single.any():
        steps[single] = _block_rows(facts, row_bytes, len(index), 0, len(rows))[single]
    even = filled[~uneven[filled]]
    if len(filled) == 1 == len(even):
        return np.arange(first[even[0]], index.first_row[even[0] + 1], steps[even[0]], dtype=np.int64)
    count = -(-rows[even].astype(np.int64) // steps[even])
    borders = [np.repeat(first[even], count) + ranges(np.zeros_like(count), count) * np.repeat(steps[even], count)]
    least = choose_block_rows(np.ones_like(row_bytes), row_bytes, len(index), block_bytes)
    for number in filled[uneven[filled]].tolist():
        of_file = index.files[number].layouts[list(index.fields)[dominant]].borders()
        assert of_file is not None
        chosen = of_file if single[number] else of_file[np.flatnonzero(np.diff(of_file // least, prepend=-1))]
        borders.append(first[number] + chosen)
    return borders[0] if len(borders) == 1 else np.sort(np.concatenate(borders))


def _block_rows(
    facts: Sequence[LayoutFacts], row_bytes: NDArray[Any], total_rows: int, block_bytes: int, files: int
) -> Integers:
    """Return the rows of a block of each file, int64[files], chosen once for all files with equal chunks."""
    if not facts:
        return np.full(files, choose_block_rows(np.array([1]), row_bytes, total_rows, block_bytes))
    if all(of_field.block_rows.strides == (0,) for of_field in facts):
        depths = np.array([[of_field.block_rows[0] for of_field in facts]], np.int64)
        return np.full(files, choose_block_rows(depths[0], row_bytes, total_rows, block_bytes))
    depths = np.stack([of_field.block_rows for of_field in facts], axis=1).astype(np.int64)
    different, number = np.unique(depths, axis=0, return_inverse=True)
    chosen = [choose_block_rows(depth, row_bytes, total_rows, block_bytes) for depth in different]
    return np.array(chosen, np.int64)[number.reshape(-1)]


@dataclass(frozen=True)
class ShuffleQuality:
    """Measure of the shuffle: how well the batches of an epoch represent sorted data.

    Parameters
    ----------
    batch_size : samples of a global batch.
    blocks : number of blocks of the data set; the samples of a block are adjacent in a file and read in one go.
    block_bytes : mean size of a block in memory, in bytes.
    blocks_per_window : number of blocks that a window mixes.
    lanes : number of positions in the sequence of blocks that each batch is drawn from.
    samples_per_window : number of samples that a window shuffles.
    ratio : standard deviation of a class's fraction of a batch, relative to uniform sampling, if each block holds a
        single class. 1: as good as a shuffle of all samples; larger: worse.
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
        """Advice that brings the ratio closer to 1, as text."""
        return (
            f"Store smaller chunks, open the files with {self._window} (several such windows are in memory, over all "
            'ranks) or, where rows are read one by one, with smaller block_bytes=, or use shuffle="global"'
        )

    @property
    def _window(self) -> str:
        """The option for windows that mix enough blocks, or all that there are."""
        blocks = min(window_blocks(self.batch_size), self.blocks)
        return f"window_bytes={-(-blocks * self.block_bytes // (1 << 20))} << 20"

    @property
    def remedy_for_windows(self) -> str:
        """Advice of the same kind for windows of consecutive rows, whose blocks have to be several windows long."""
        return (
            "Neighbouring windows share rows, and are read as one block. Open the files with "
            f"{self._window} (several times as much is in memory, over all ranks), with a larger "
            'stride= or a smaller batch_size, or use shuffle="global", which keeps every window in memory'
        )

    def __str__(self) -> str:
        return (
            f"{self.blocks_per_window:,} of {self.blocks:,} blocks a window ({self.samples_per_window:,} samples), "
            f"{counted(self.lanes, 'lane')}; the share of a class in a batch of {self.batch_size:,} varies "
            f"{self.ratio:.2f} times as much as if drawn from all samples"
        )


def estimate_quality(schedule: Schedule, row_bytes: int) -> ShuffleQuality:
    """Return the shuffle quality of a schedule with a seed.

    The ratio is that of sampling without replacement in two stages: blocks of one class each for a window, then samples
    of the window for a batch, equally many from each lane. ``docs/shuffling.md`` derives the formula.

    Parameters
    ----------
    schedule : with a seed.
    row_bytes : bytes of a sample in memory.
    """
    n, lanes, total = schedule.batch_size, schedule.lanes, max(1, schedule.segments.total)
    if schedule.uniform:
        return ShuffleQuality(n, total, row_bytes, total, 1, total, 1.0)
    blocks = int(schedule.blocks.max(initial=0)) + 1
    rows = min(total, schedule.window_steps * n)
    mixed = min(float(blocks), max(blocks * rows / total, float(lanes)))
    between = n * (1 / mixed - 1 / blocks)
    rest = 1 - (n / lanes - 1) / max(1.0, rows / lanes - 1)
    within = max(0.0, 1 - lanes / mixed + 1 / blocks) * max(0.0, rest)
    ratio = float(np.sqrt(between + within))
    return ShuffleQuality(n, blocks, total * row_bytes // blocks, round(mixed), lanes, rows, ratio)
