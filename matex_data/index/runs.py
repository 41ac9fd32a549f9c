"""Ascending numbers of rows and samples: as runs of consecutive numbers, or those that a condition chose, as bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from matex_data._types import Bytes, Integers
from matex_data.locks import cached_property


@dataclass(frozen=True)
class RowSelection:
    """Rows of one file to read, and the index in the output array for each of them.

    Parameters
    ----------
    start, stop : int64[k], disjoint ranges of rows in ascending order.
    destination : int64[sum(stop - start)], the index in the output array for each row.

    Examples
    --------
    Rows 2, 3 and 7 of a file, in reverse order:

    >>> selection = RowSelection(np.array([2, 7]), np.array([4, 8]), np.array([2, 1, 0]))
    >>> selection.numbers.tolist()
    [2, 3, 7]
    """

    start: Integers
    stop: Integers
    destination: Integers

    @property
    def numbers(self) -> Integers:
        """Row numbers, int64 of the length of ``destination``, ascending.

        Examples
        --------
        >>> selection = RowSelection(np.array([2, 7]), np.array([4, 8]), np.array([2, 1, 0]))
        >>> selection.numbers.tolist()
        [2, 3, 7]
        """
        counts = self.stop - self.start
        return ranges(self.start, counts)

    def tiles(self, most: int) -> Iterator[RowSelection]:
        """Yield the selection in consecutive selections of at most ``most`` rows.

        Examples
        --------
        >>> selection = RowSelection(np.array([2, 7]), np.array([4, 8]), np.array([2, 1, 0]))
        >>> [tile.numbers.tolist() for tile in selection.tiles(2)]
        [[2, 3], [7]]
        """
        if 0 < len(self.destination) <= most:
            yield self
            return
        ends = np.cumsum(self.stop - self.start)
        for low in range(0, len(self.destination), most):
            high = min(low + most, len(self.destination))
            first, last = np.searchsorted(ends, (low, high - 1), side="right").tolist()
            start, stop = self.start[first : last + 1].copy(), self.stop[first : last + 1].copy()
            start[0] = stop[0] - (ends[first] - low)
            stop[-1] -= ends[last] - high
            yield RowSelection(start, stop, self.destination[low:high])


def ranges(start: Integers, count: Integers) -> Integers:
    """Return the concatenation of ``arange(start[i], start[i] + count[i])`` over all i.

    >>> ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    numbers: Integers = np.arange(total, dtype=np.int64) + np.repeat(start - (ends - count), count)
    return numbers


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

    @classmethod
    def between(cls, start: int, stop: int) -> Runs:
        """Return the numbers from ``start`` to ``stop``, without it."""
        return cls(np.array([start], np.int64), np.array([stop - start], np.int64))

    @cached_property
    def first(self) -> Integers:
        """Position of each run's first number in the sequence, and the length of the sequence; int64[k + 1]."""
        return np.concatenate([[0], np.cumsum(self.count)]).astype(np.int64)

    @property
    def total(self) -> int:
        """Length of the sequence."""
        return int(self.first[-1])

    @property
    def stop(self) -> Integers:
        """The number behind each run, int64[k]."""
        return self.start + self.count

    def identity(self) -> bytes:
        """Return bytes that are equal for equal ascending sequences, however they are divided into runs."""
        filled = self.count > 0
        whole = merge(Runs(self.start[filled], self.count[filled]))
        return b"".join(np.ascontiguousarray(column, "<i8").tobytes() for column in (whole.start, whole.count))

    def selection(self, destination: Integers | None = None) -> RowSelection:
        """Return the ascending numbers as rows to read to these destinations; None: one after the other, from 0."""
        return RowSelection(self.start, self.stop, np.arange(self.total) if destination is None else destination)

    def slice(self, start: Integers, count: Integers) -> Runs:
        """Return the numbers at positions ``start[i]`` to ``start[i] + count[i] - 1``, concatenated over all i."""
        request, run = self.overlaps(start, count)
        return self.common(start[request], (start + count)[request], run)

    def at(self, positions: Runs) -> Runs:
        """Return the numbers at these positions, one range of them after the other."""
        return self.slice(positions.start, positions.count)

    def part(self, start: int, stop: int) -> Runs:
        """Return the numbers at positions ``start`` to ``stop``, without it."""
        return self.at(Runs.between(start, stop))

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
        return self.start[run] + positions - self.first[run]

    def rank(self, numbers: Integers) -> Integers:
        """Return how many numbers of an ascending sequence are lower than each of ``numbers``.

        >>> Runs(np.array([2, 10]), np.array([4, 5])).rank(np.array([0, 3, 8, 99])).tolist()
        [0, 1, 4, 9]
        """
        if not len(self.start):
            return np.zeros_like(numbers)
        run = np.searchsorted(self.start, numbers, side="right") - 1
        ahead = np.clip(numbers - self.start[run], 0, self.count[run])
        return np.where(run < 0, 0, self.first[run] + ahead)


def join_runs(*sequences: Runs) -> Runs:
    """Concatenate sequences, one at least."""
    return Runs(*(np.concatenate([getattr(one, name) for one in sequences]) for name in ("start", "count")))


def merge(runs: Runs) -> Runs:
    """Return the same ascending numbers in as few runs as possible."""
    if not len(runs.start):
        return runs
    detached = np.concatenate([[True], runs.start[1:] != runs.stop[:-1]])
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
    stop = runs.stop
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


TILE = 4096  # samples whose chosen ones are counted together
_STEP = 256  # tiles that are unpacked at once


@dataclass(frozen=True, eq=False)
class Chosen:
    """Ascending numbers of samples, as `Runs` are, in a bit for each sample of the files.

    Parameters
    ----------
    bits : uint8[tiles * 512], a bit for each sample of the files, the first one highest.
    before : int64[tiles + 1], number of chosen samples in front of each tile of 4,096 samples, and of all.
    positions : of these samples among the chosen ones, ascending; None: all.

    Examples
    --------
    >>> chosen = Chosen.of(np.array([True, False, True, True]))
    >>> chosen.total, chosen.numbers(np.array([0, 2])).tolist(), chosen.rank(np.array([0, 1, 4])).tolist()
    (3, [0, 3], [0, 1, 3])
    """

    bits: Bytes
    before: Integers
    positions: Runs | None = None

    @classmethod
    def of(cls, mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Chosen:
        """Return the samples for which a mask, bool[samples], is True."""
        return cls.of_bits(np.packbits(mask))

    @classmethod
    def of_bits(cls, bits: Bytes) -> Chosen:
        """Return the samples whose bits are set."""
        tiles = -(-len(bits) * 8 // TILE)
        whole = bits
        if len(bits) % (TILE // 8):
            whole = np.zeros(tiles * TILE // 8, np.uint8)
            whole[: len(bits)] = bits
        counts = np.bitwise_count(whole.view(np.uint64)).reshape(tiles, TILE // 64).sum(axis=1, dtype=np.int64)
        return cls(whole, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))

    @property
    def total(self) -> int:
        """Number of samples."""
        return int(self.before[-1]) if self.positions is None else self.positions.total

    def identity(self) -> bytes:
        """Return 16 bytes that identify the samples."""
        digest = hashlib.blake2b(self.bits.data, digest_size=16)
        if self.positions is not None:
            digest.update(self.positions.identity())
        return digest.digest()

    def at(self, positions: Runs) -> Chosen:
        """Return those of the samples at ascending positions."""
        own = self.positions
        inner = positions if own is None else merge(own.at(positions))
        return Chosen(self.bits, self.before, inner)

    def part(self, start: int, stop: int) -> Runs:
        """Return the numbers at positions ``start`` to ``stop``, without it, as runs."""
        return self.slice(np.array([start]), np.array([stop - start]))

    def with_positions(self, positions: Runs) -> Chosen:
        """Return the samples at these ascending positions among all whose bits are set."""
        return Chosen(self.bits, self.before, positions)

    def slice(self, start: Integers, count: Integers) -> Runs:
        """Return the numbers at ascending positions ``start[i]`` to ``start[i] + count[i] - 1``, as runs."""
        if self.positions is not None:
            inner = self.positions.slice(start, count)
            start, count = inner.start, inner.count
        filled = count > 0
        start, count = start[filled], count[filled]
        if not len(start):
            return Runs(start, start)
        first = np.searchsorted(self.before, start, side="right") - 1
        last = np.searchsorted(self.before, start + count - 1, side="right") - 1
        _, tiles = intersect(first, last - first + 1)
        tiles = tiles[(np.diff(tiles, prepend=-1) > 0) & (self.before[tiles + 1] > self.before[tiles])]
        parts: list[Runs] = []
        for low in range(0, len(tiles), _STEP):  # all at once would be 25 bytes for each chosen sample
            group = tiles[low : low + _STEP]
            of_first, of_last = np.searchsorted(last, group[0]), np.searchsorted(first, group[-1], side="right")
            begin = np.maximum(start[of_first:of_last], self.before[group[0]])
            end = np.minimum((start + count)[of_first:of_last], self.before[group[-1] + 1])
            chosen, ahead = self._of_tiles(group)
            index = np.searchsorted(group, np.maximum(first[of_first:of_last], group[0]))
            parts.append(compress(chosen[ranges(begin - ahead[index], end - begin)]))
        return parts[0] if len(parts) == 1 else merge(join_runs(*parts))

    def numbers(self, positions: Integers) -> Integers:
        """Return the numbers at these positions, int64 of the same length."""
        different, inverse = np.unique(positions, return_inverse=True)
        runs = self.slice(different, np.ones_like(different))
        return runs.numbers(np.arange(len(different)))[inverse.reshape(positions.shape)]

    def rank(self, numbers: Integers) -> Integers:
        """Return how many of the samples have a lower number than each of ``numbers``, int64 of the same length."""
        tile, rest = np.divmod(np.minimum(numbers, len(self.bits) * 8), TILE)
        lower = self.before[tile].copy()
        inner = np.flatnonzero(rest)
        for low in range(0, len(inner), _STEP):
            group = inner[low : low + _STEP]
            rows = self.bits.reshape(-1, TILE // 8)[tile[group]]
            counts = np.cumsum(np.unpackbits(rows, axis=1), axis=1, dtype=np.int32)
            lower[group] += counts[np.arange(len(group)), rest[group] - 1]
        return lower if self.positions is None else self.positions.rank(lower)

    def tiles(self) -> Iterator[Runs]:
        """Yield all numbers as runs, none of which continues the one before, some thousands at a time."""
        step, pending = _STEP * TILE, Runs(np.empty(0, np.int64), np.empty(0, np.int64))
        for low in range(0, self.total, step):
            runs = self.part(low, min(low + step, self.total))
            runs = merge(join_runs(pending, runs))
            yield Runs(runs.start[:-1], runs.count[:-1])
            pending = Runs(runs.start[-1:], runs.count[-1:])
        if len(pending.start):
            yield pending

    def _of_tiles(self, tiles: Integers) -> tuple[Integers, Integers]:
        """Return the numbers of all chosen samples of some tiles, and the number of others in front of each tile."""
        tile, inner = np.nonzero(np.unpackbits(self.bits.reshape(-1, TILE // 8)[tiles], axis=1))
        counts = self.before[tiles + 1] - self.before[tiles]
        return tiles[tile] * TILE + inner, self.before[tiles] - (np.cumsum(counts) - counts)


Samples = Runs | Chosen
"""Ascending numbers of samples."""


def within(samples: Samples, runs: Runs) -> Samples:
    """Return those of the samples that are among ascending runs of numbers.

    >>> samples = Runs(np.array([2, 10]), np.array([4, 5]))
    >>> found = within(samples, Runs(np.array([0, 4]), np.array([3, 8])))
    >>> found.start.tolist(), found.count.tolist()
    ([2, 4, 10], [1, 2, 2])
    """
    low, high = (samples.rank(edge) for edge in (runs.start, runs.stop))
    filled = high > low
    return samples.at(Runs(low[filled], (high - low)[filled]))


def neighbours(sizes: Integers, group_size: float) -> list[Integers]:
    """Return the positions of neighbours in groups whose sizes are about ``group_size`` in sum.

    Examples
    --------
    >>> [positions.tolist() for positions in neighbours(np.array([3, 3, 3, 9, 1]), 6)]
    [[0, 1], [2, 3], [4]]
    """
    group = (np.cumsum(sizes) - sizes) // group_size
    return np.split(np.arange(len(sizes)), np.flatnonzero(np.diff(group)) + 1) if len(sizes) else []
