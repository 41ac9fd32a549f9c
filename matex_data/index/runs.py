"""Sequences of integers stored as runs of consecutive numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from matex_data._types import Integers
from matex_data.index.model import ranges
from matex_data.locks import cached_property


@dataclass(frozen=True)
class Runs:
    """Sequence of distinct integers, run-length encoded.

    Parameters
    ----------
    start, count : int64[k], first number and length of each run.

    Examples
    --------
    >>> runs = Runs(np.array([10, 0]), np.array([3, 2]))  # the sequence 10, 11, 12, 0, 1
    >>> runs.total
    5
    >>> runs.numbers(np.array([0, 3])).tolist()
    [10, 0]
    """

    start: Integers
    count: Integers

    @cached_property
    def first(self) -> Integers:
        """Position of each run's first number in the sequence, and the length of the sequence; int64[k + 1]."""
        return np.concatenate([[0], np.cumsum(self.count)]).astype(np.int64)

    @property
    def total(self) -> int:
        """Length of the sequence."""
        return int(self.first[-1])

    def slice(self, start: Integers, count: Integers) -> Runs:
        """Return the numbers at positions ``start[i]`` to ``start[i] + count[i] - 1``, concatenated over all i."""
        request, run = self.overlaps(start, count)
        return self.common(start[request], (start + count)[request], run)

    def at(self, positions: Runs) -> Runs:
        """Return the numbers at these positions, one range of them after the other."""
        return self.slice(positions.start, positions.count)

    def overlaps(self, start: Integers, count: Integers) -> tuple[Integers, Integers]:
        """Return each pair of a range of positions, as of ``slice``, and a run that it overlaps: their numbers."""
        first = np.searchsorted(self.first, start, side="right") - 1
        last = np.searchsorted(self.first, start + count - 1, side="right") - 1
        return intersect(first, np.where(count > 0, last - first + 1, 0))

    def common(self, start: Integers, stop: Integers, run: Integers) -> Runs:
        """Return the numbers of run ``run[i]`` at positions ``start[i]`` to ``stop[i] - 1``, one after the other."""
        low, high = np.maximum(start, self.first[run]), np.minimum(stop, self.first[run + 1])
        return Runs(self.start[run] + low - self.first[run], high - low)

    def numbers(self, positions: Integers) -> Integers:
        """Return the numbers at these positions of the sequence, int64 of the same length."""
        run = np.searchsorted(self.first, positions, side="right") - 1
        found: Integers = self.start[run] + positions - self.first[run]
        return found

    def rank(self, numbers: Integers) -> Integers:
        """Return how many numbers of an ascending sequence are lower than each of ``numbers``.

        >>> Runs(np.array([2, 10]), np.array([4, 5])).rank(np.array([0, 3, 8, 99])).tolist()
        [0, 1, 4, 9]
        """
        if not len(self.start):
            return np.zeros_like(numbers)
        run = np.searchsorted(self.start, numbers, side="right") - 1
        ahead = np.clip(numbers - self.start[run], 0, self.count[run])
        found: Integers = np.where(run < 0, 0, self.first[run] + ahead)
        return found


def join(a: Runs, b: Runs) -> Runs:
    """Concatenate two sequences."""
    return Runs(np.concatenate([a.start, b.start]), np.concatenate([a.count, b.count]))


def merge(runs: Runs) -> Runs:
    """Return the same ascending numbers in as few runs as possible."""
    if not len(runs.start):
        return runs
    detached = np.concatenate([[True], runs.start[1:] != (runs.start + runs.count)[:-1]])
    first = np.flatnonzero(detached)
    return Runs(runs.start[first], np.add.reduceat(runs.count, first))


def sort(runs: Runs) -> Runs:
    """Return the same numbers in ascending order, in as few runs as possible; no two runs overlap."""
    order = np.argsort(runs.start, kind="stable")
    return merge(Runs(runs.start[order], runs.count[order]))


def intersect(first: Integers, count: Integers) -> tuple[Integers, Integers]:
    """Return each pair of a range and a block that it overlaps, as two int64 arrays: range number and block number.

    Parameters
    ----------
    first, count : int64[ranges], the first block that each range overlaps, and the number of such blocks.

    Examples
    --------
    >>> [numbers.tolist() for numbers in intersect(np.array([0, 4]), np.array([2, 1]))]
    [[0, 0, 1], [0, 1, 4]]
    """
    return np.repeat(np.arange(len(first)), count), ranges(first, count)


def cut(runs: Runs, borders: Integers) -> Runs:
    """Split the runs at the ascending ``borders`` that lie within one."""
    stop = runs.start + runs.count
    if len(stop) == 1 and runs.count[0] > 0:  # a whole data set of maybe a million blocks: few temporary arrays
        inner = borders[slice(*np.searchsorted(borders, (runs.start[0] + 1, stop[0])))]
        begin = np.concatenate([runs.start, inner])
        return Runs(begin, np.diff(begin, append=stop))
    first, last = (np.searchsorted(borders, number, side="right") for number in (runs.start, stop - 1))
    run, block = intersect(first, last - first + 1)
    limits = np.iinfo(np.int64)
    edges = np.concatenate([[limits.min], borders, [limits.max]])
    start = np.maximum(runs.start[run], edges[block])
    return Runs(start, np.minimum(stop[run], edges[block + 1]) - start)


def compress(numbers: Integers) -> Runs:
    """Encode ascending numbers as runs."""
    if not len(numbers):
        return Runs(numbers, numbers)
    first, count = runs_where(np.diff(numbers) == 1)
    return Runs(numbers[first], count)


def runs_where(continues: np.ndarray[Any, Any]) -> tuple[Integers, Integers]:
    """Return the first element and the length of each run of a sequence of n > 0 elements.

    Parameters
    ----------
    continues : bool[n - 1], whether each element but the first belongs to the run of the one before.
    """
    first = np.concatenate([[0], np.flatnonzero(~continues) + 1]).astype(np.int64)
    return first, np.diff(np.append(first, len(continues) + 1))
