"""Group the rows of a selection by the blocks of a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from matex_data._types import Integers
from matex_data.index.runs import RowSelection, Runs, intersect, ranges
from matex_data.index.scatter import RowIndices, are_consecutive
from matex_data.locks import cached_property


@dataclass(frozen=True)
class Blocks:
    """Selected rows, grouped by block.

    The data are columns over all blocks, since an object per block would cost more than the reads.

    Parameters
    ----------
    number : int64[n], the numbers of the blocks that hold selected rows, ascending.
    runs : the selected rows, split where blocks end.
    first_run : int64[n + 1], the first run of each block, and the number of runs.
    destination : int64[rows], the index in the output array for each row.
    """

    number: Integers
    runs: Runs
    first_run: Integers
    destination: Integers

    @cached_property
    def first(self) -> Integers:
        """Position of each block's first row among the selected rows, and their number; int64[n + 1]."""
        return self.runs.first[self.first_run]

    @property
    def count(self) -> Integers:
        """Number of selected rows of each block, int64[n]."""
        return np.diff(self.first)

    def rows(self, i: int, begin: int = 0) -> RowIndices:
        """Return the selected rows of the i-th block, relative to row ``begin``; as a slice if they are contiguous."""
        low, high = self.first_run[i], self.first_run[i + 1]
        if high - low > 1:
            return ranges(self.runs.start[low:high] - begin, self.runs.count[low:high])
        start = int(self.runs.start[low]) - begin
        return slice(start, start + int(self.runs.count[low]))

    def selection(self, i: int, begin: int) -> RowSelection:
        """Return the selected rows of the i-th block, relative to row ``begin``, as a selection of their own."""
        low, high = self.first_run[i], self.first_run[i + 1]
        start = self.runs.start[low:high] - begin
        destination = self.destination[self.first[i] : self.first[i + 1]]
        return RowSelection(start, start + self.runs.count[low:high], destination)

    def destinations(self, i: int) -> RowIndices:
        """Return the destinations of the rows of the i-th block; as a slice if they are consecutive."""
        destination = self.destination[self.first[i] : self.first[i + 1]]
        return slice(int(destination[0]), int(destination[-1]) + 1) if are_consecutive(destination) else destination

    def select(self, selected: Integers) -> Blocks:
        """Return only the blocks at these ascending positions."""
        run_count = np.diff(self.first_run)[selected]
        of_runs = ranges(self.first_run[selected], run_count)
        runs = Runs(self.runs.start[of_runs], self.runs.count[of_runs])
        destination = self.destination[ranges(self.first[selected], self.count[selected])]
        return Blocks(self.number[selected], runs, np.append(0, np.cumsum(run_count)), destination)


def even_blocks(rows: RowSelection, depth: int) -> Blocks:
    """Group by blocks of ``depth`` rows."""
    first, last = rows.start // depth, (rows.stop - 1) // depth
    run, number = intersect(first, last - first + 1)
    return _group(rows, run, number, number * depth, number * depth + depth)


def uneven_blocks(rows: RowSelection, borders: Integers) -> Blocks:
    """Group by blocks of which block i has the rows ``borders[i]`` to ``borders[i + 1]``."""
    first, last = (np.searchsorted(borders, row, side="right") - 1 for row in (rows.start, rows.stop - 1))
    run, number = intersect(first, last - first + 1)
    return _group(rows, run, number, borders[number], borders[number + 1])


def apart(rows: RowSelection) -> RowSelection:
    """Return the same rows, one after the other in an array of their own."""
    return replace(rows, destination=np.arange(len(rows.destination)))


def by_part(rows: RowSelection, first_row: Integers) -> Iterator[tuple[int, RowSelection]]:
    """Yield the number of each part that holds any of the rows, such as a file, and its rows, counted within the part.

    Parameters
    ----------
    rows : of all parts.
    first_row : int64[parts + 1], the first row of each part, and the number of rows; parts may be empty.
    """
    filled = rows.stop > rows.start
    blocks = uneven_blocks(RowSelection(rows.start[filled], rows.stop[filled], rows.destination), first_row)
    for i in np.flatnonzero(blocks.count).tolist():
        number = int(blocks.number[i])
        yield number, blocks.selection(i, int(first_row[number]))


def _group(rows: RowSelection, run: Integers, number: Integers, begin: Integers, end: Integers) -> Blocks:
    """Group rows of which run ``run[i]`` overlaps block ``number[i]``, with the rows ``begin[i]`` to ``end[i]``."""
    start, stop = np.maximum(rows.start[run], begin), np.minimum(rows.stop[run], end)
    first_run = np.flatnonzero(np.diff(number, prepend=-1))
    return Blocks(number[first_run], Runs(start, stop - start), np.append(first_run, len(number)), rows.destination)
