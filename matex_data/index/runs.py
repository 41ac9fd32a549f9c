"""Stretches of integers: the samples of a part of the data, in few numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from matex_data._types import Integers
from matex_data.index.model import ranges


@dataclass(frozen=True)
class Runs:
    """Disjoint stretches of integers.

    Parameters
    ----------
    start, count : int64[k].
    """

    start: Integers
    count: Integers

    @cached_property
    def first(self) -> Integers:
        """Position of each run's first number in the sequence of all, and the length of it all; int64[k + 1]."""
        return np.concatenate([[0], np.cumsum(self.count)]).astype(np.int64)

    @property
    def total(self) -> int:
        """How many numbers there are."""
        return int(self.first[-1])

    def slice(self, start: Integers, count: Integers) -> Runs:
        """The numbers at positions ``start[i], ... start[i]+count[i]-1``, for every i in turn."""
        first = np.searchsorted(self.first, start, side="right") - 1
        last = np.searchsorted(self.first, start + count - 1, side="right") - 1
        asked, run = intersect(first, np.where(count > 0, last - first + 1, 0))
        low = np.maximum(start[asked], self.first[run])
        high = np.minimum((start + count)[asked], self.first[run + 1])
        return Runs(self.start[run] + low - self.first[run], high - low)

    def numbers(self, positions: Integers) -> Integers:
        """Return the numbers at these positions of the sequence, int64 of the same length."""
        run = np.searchsorted(self.first, positions, side="right") - 1
        found: Integers = self.start[run] + positions - self.first[run]
        return found


def join(a: Runs, b: Runs) -> Runs:
    """The numbers of both, one behind the other."""
    return Runs(np.concatenate([a.start, b.start]), np.concatenate([a.count, b.count]))


def merge(runs: Runs) -> Runs:
    """The same ascending numbers in as few runs as there can be."""
    if not len(runs.start):
        return runs
    fresh = np.concatenate([[True], runs.start[1:] != (runs.start + runs.count)[:-1]])
    first = np.flatnonzero(fresh)
    return Runs(runs.start[first], np.add.reduceat(runs.count, first))


def intersect(first: Integers, several: Integers) -> tuple[Integers, Integers]:
    """Each stretch once for every block that it reaches into: which stretch, and which block.

    Parameters
    ----------
    first, several : int64[stretches], the first of these blocks, and how many there are.
    """
    return np.repeat(np.arange(len(first)), several), ranges(first, several)


def cut(runs: Runs, borders: Integers) -> Runs:
    """The same numbers, cut wherever one of the ascending ``borders`` lies within a run."""
    stop = runs.start + runs.count
    if len(stop) == 1 and runs.count[0] > 0:  # a whole data set of maybe a million blocks: in few arrays
        inner = borders[slice(*np.searchsorted(borders, (runs.start[0] + 1, stop[0])))]
        begin = np.concatenate([runs.start, inner])
        return Runs(begin, np.diff(begin, append=stop))
    first, last = (np.searchsorted(borders, number, side="right") for number in (runs.start, stop - 1))
    of, block = intersect(first, last - first + 1)
    limits = np.iinfo(np.int64)
    edges = np.concatenate([[limits.min], borders, [limits.max]])
    start = np.maximum(runs.start[of], edges[block])
    return Runs(start, np.minimum(stop[of], edges[block + 1]) - start)


def compress(numbers: Integers) -> Runs:
    """Runs of ascending numbers."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    first = np.concatenate([[0], breaks]).astype(np.int64)[: len(numbers)]
    return Runs(numbers[first], np.diff(np.append(first, len(numbers))))
