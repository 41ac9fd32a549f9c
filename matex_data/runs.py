"""Stretches of integers: the samples of a part of the data, in few numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from matex_data.index import Integers, ranges


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

    def between(self, start: Integers, count: Integers) -> Runs:
        """The numbers at positions ``start[i], ... start[i]+count[i]-1``, for every i in turn."""
        first = np.searchsorted(self.first, start, side="right") - 1
        last = np.searchsorted(self.first, start + count - 1, side="right") - 1
        pieces = np.where(count > 0, last - first + 1, 0)
        run = ranges(first, pieces)
        asked = np.repeat(np.arange(len(start)), pieces)
        low = np.maximum(start[asked], self.first[run])
        high = np.minimum((start + count)[asked], self.first[run + 1])
        return Runs(self.start[run] + low - self.first[run], high - low)


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


def cut(runs: Runs, borders: Integers) -> Runs:
    """The same numbers, cut wherever one of the ascending ``borders`` lies within a run."""
    inside = borders[(borders > (runs.start[0] if len(runs.start) else 0))]
    run = np.searchsorted(runs.start, inside, side="right") - 1
    inside = inside[(run >= 0) & (inside < (runs.start + runs.count)[run])] if len(runs.start) else inside[:0]
    start = np.sort(np.concatenate([runs.start, inside]), kind="stable")  # two ascending parts: merged at once
    start = start[np.flatnonzero(np.diff(start, prepend=-1))]
    run = np.searchsorted(runs.start, start, side="right") - 1
    end = np.minimum(np.append(start[1:], np.iinfo(np.int64).max), (runs.start + runs.count)[run])
    return Runs(start, end - start)


def compress(numbers: Integers) -> Runs:
    """Runs of ascending numbers."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    first = np.concatenate([[0], breaks]).astype(np.int64)[: len(numbers)]
    return Runs(numbers[first], np.diff(np.append(first, len(numbers))))
