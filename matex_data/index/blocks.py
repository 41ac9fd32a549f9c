"""Rows that are wanted, block by block of a file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from matex_data._types import Integers
from matex_data.index.model import RowSelection, ranges
from matex_data.index.runs import Runs, intersect
from matex_data.index.scatter import RowIndices, are_consecutive


@dataclass(frozen=True)
class Blocks:
    """The blocks of which any rows are wanted.

    Columns, and no object for each block: the threads that decode make what they need of them, each for its blocks.

    Parameters
    ----------
    number : int64[n], which blocks, ascending.
    runs : the rows, cut where blocks end.
    entered : int64[n + 1], the first run of each block, and how many runs there are.
    destination : int64[rows], the receiving index of each row.
    """

    number: Integers
    runs: Runs
    entered: Integers
    destination: Integers

    @cached_property
    def first(self) -> Integers:
        """int64[n + 1], position of each block's first row among those that are wanted, and their number."""
        return self.runs.first[self.entered]

    @property
    def count(self) -> Integers:
        """int64[n], how many rows of each block are wanted."""
        return np.diff(self.first)

    def rows(self, i: int, begin: int = 0) -> RowIndices:
        """The rows that are wanted of the i-th block, counted from ``begin``; a slice if they are neighbours."""
        low, high = self.entered[i], self.entered[i + 1]
        if high - low > 1:
            return ranges(self.runs.start[low:high] - begin, self.runs.count[low:high])
        start = int(self.runs.start[low]) - begin
        return slice(start, start + int(self.runs.count[low]))

    def destinations(self, i: int) -> RowIndices:
        """Where these rows go; a slice if that is one behind the other."""
        destination = self.destination[self.first[i] : self.first[i + 1]]
        return slice(int(destination[0]), int(destination[-1]) + 1) if are_consecutive(destination) else destination

    def select(self, some: Integers) -> Blocks:
        """Of the blocks with these ascending positions alone."""
        several = np.diff(self.entered)[some]
        of_runs = ranges(self.entered[some], several)
        runs = Runs(self.runs.start[of_runs], self.runs.count[of_runs])
        destination = self.destination[ranges(self.first[some], self.count[some])]
        return Blocks(self.number[some], runs, np.append(0, np.cumsum(several)), destination)


def even_blocks(rows: RowSelection, depth: int) -> Blocks:
    """By blocks of ``depth`` rows."""
    first, last = rows.start // depth, (rows.stop - 1) // depth
    of, number = intersect(first, last - first + 1)
    return _blocks(rows, of, number, number * depth, number * depth + depth)


def uneven_blocks(rows: RowSelection, borders: Integers) -> Blocks:
    """By blocks that begin at the ascending ``borders``, of which the last one is where the last block ends."""
    first, last = (np.searchsorted(borders, row, side="right") - 1 for row in (rows.start, rows.stop - 1))
    of, number = intersect(first, last - first + 1)
    return _blocks(rows, of, number, borders[number], borders[number + 1])


def _blocks(rows: RowSelection, of: Integers, number: Integers, begin: Integers, end: Integers) -> Blocks:
    """Of rows whose run ``of[i]`` reaches into block ``number[i]``, which has the rows ``begin[i]`` to ``end[i]``."""
    start, stop = np.maximum(rows.start[of], begin), np.minimum(rows.stop[of], end)
    entered = np.flatnonzero(np.diff(number, prepend=-1))
    return Blocks(number[entered], Runs(start, stop - start), np.append(entered, len(number)), rows.destination)
