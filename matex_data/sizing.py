"""How large blocks, lanes and windows are: it follows from the data and the batch size, not from the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from matex_data.errors import PartitionError
from matex_data.index import Index, Integers
from matex_data.partition import REMAINDERS, Schedule
from matex_data.runs import Runs, cut

BLOCK_BYTES = 1 << 20  # of a block of rows that could be read one by one: cheap to read, small enough to mix
MOST_BLOCKS = 1 << 19
MOST_LANES = 256
WINDOW_BYTES = 8 << 20  # shuffled together at least: a few such windows stay in the processor's cache
WINDOW_BLOCKS = 32  # shuffled together at least, if they fit into the bytes that are allowed


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
    window_bytes : what is shuffled together, over all ranks, at most (but one step, and a block of every lane).
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
    block = np.searchsorted(borders, pieces.start, side="right")
    blocks = np.cumsum(np.diff(block, prepend=block[:1]) > 0)
    count = int(blocks.max(initial=0)) + 1
    row_bytes = max(1, row_bytes)
    total_bytes = pieces.total * row_bytes
    block_bytes = max(1, total_bytes // count)
    window_bytes = min(window_bytes, max(WINDOW_BYTES, WINDOW_BLOCKS * block_bytes))
    lanes = 1
    if seed is not None:
        lanes = lanes_for(batch_size, max(1, min(count, window_bytes // (2 * block_bytes))))
    steps = max(1, window_bytes // (batch_size * row_bytes))
    return Schedule(pieces, batch_size, lanes, steps, seed, blocks.astype(np.int64), remainder)


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
    target = max(min(total // 1024, BLOCK_BYTES), total // MOST_BLOCKS)
    deepest, dominant = int(depths.max()), int(depths[np.argmax(row_bytes)])
    depth = deepest if deepest * row <= 4 << 20 and total_rows // deepest >= 256 else dominant
    return depth * max(1, target // (depth * row))


def block_borders(index: Index) -> Integers:
    """int64[n], first sample of every block of every file."""
    row_bytes = np.array([field.row_bytes for field in index.fields.values()] or [1])
    borders = []
    for file, first in zip(index.files, index.first_row.tolist(), strict=False):
        parts = [file.parts[name] for name in index.fields]
        uneven = parts[int(np.argmax(row_bytes))].borders() if parts else None
        if uneven is not None and file.rows:
            step = block_rows_for(np.ones_like(row_bytes), row_bytes, len(index))
            borders.append(first + uneven[np.flatnonzero(np.diff(uneven // step, prepend=-1))])
            continue
        depths = np.array([part.block_rows for part in parts] or [1])
        step = block_rows_for(depths, row_bytes, len(index)) if file.rows else 1
        borders.append(np.arange(first, first + file.rows, step, dtype=np.int64))
    return np.concatenate(borders) if borders else np.empty(0, np.int64)
