"""Samples that a condition has chosen, with a bit for each sample of the files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from matex_data._types import Bytes, Integers
from matex_data.index.model import ranges
from matex_data.index.runs import Runs, compress, intersect, merge

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

    def digest(self) -> bytes:
        """Return 16 bytes that identify the samples."""
        digest = hashlib.blake2b(self.bits.data, digest_size=16)
        if self.positions is not None:
            whole = merge(self.positions)
            for column in (whole.start, whole.count):
                digest.update(np.ascontiguousarray(column, "<i8").data)
        return digest.digest()

    def at(self, positions: Runs) -> Chosen:
        """Return those of the samples at ascending positions."""
        own = self.positions
        inner = positions if own is None else merge(own.at(positions))
        return Chosen(self.bits, self.before, inner)

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
        found = self._of_tiles(tiles)
        index = np.searchsorted(tiles, first)
        begin = (np.cumsum(self.before[tiles + 1] - self.before[tiles]) - self.before[tiles + 1])[index] + start
        return compress(found[ranges(begin, count)])

    def numbers(self, positions: Integers) -> Integers:
        """Return the numbers at these positions, int64 of the same length."""
        different, inverse = np.unique(positions, return_inverse=True)
        runs = self.slice(different, np.ones_like(different))
        found: Integers = runs.numbers(np.arange(len(different)))[inverse.reshape(positions.shape)]
        return found

    def rank(self, numbers: Integers) -> Integers:
        """Return how many of the samples have a lower number than each of ``numbers``, int64 of the same length."""
        tile, rest = np.divmod(np.minimum(numbers, len(self.bits) * 8), TILE)
        found = self.before[tile].copy()
        inner = np.flatnonzero(rest)
        for low in range(0, len(inner), _STEP):
            some = inner[low : low + _STEP]
            rows = self.bits.reshape(-1, TILE // 8)[tile[some]]
            counts = np.cumsum(np.unpackbits(rows, axis=1), axis=1, dtype=np.int32)
            found[some] += counts[np.arange(len(some)), rest[some] - 1]
        return found if self.positions is None else self.positions.rank(found)

    def tiles(self) -> Iterator[Runs]:
        """Yield all numbers as runs, none of which continues the one before, some thousands at a time."""
        step, pending = _STEP * TILE, Runs(np.empty(0, np.int64), np.empty(0, np.int64))
        for low in range(0, self.total, step):
            runs = self.slice(np.array([low]), np.array([min(step, self.total - low)]))
            runs = merge(Runs(np.concatenate([pending.start, runs.start]), np.concatenate([pending.count, runs.count])))
            yield Runs(runs.start[:-1], runs.count[:-1])
            pending = Runs(runs.start[-1:], runs.count[-1:])
        if len(pending.start):
            yield pending

    def _of_tiles(self, tiles: Integers) -> Integers:
        """Return the numbers of all chosen samples of some tiles, ascending."""
        rows, found = self.bits.reshape(-1, TILE // 8), [np.empty(0, np.int64)]
        for low in range(0, len(tiles), _STEP):
            some = tiles[low : low + _STEP]
            tile, inner = np.nonzero(np.unpackbits(rows[some], axis=1))
            found.append(some[tile] * TILE + inner)
        return np.concatenate(found)


Samples = Runs | Chosen
"""Ascending numbers of samples."""


def within(samples: Samples, runs: Runs) -> Samples:
    """Return those of the samples that are among ascending runs of numbers.

    >>> samples = Runs(np.array([2, 10]), np.array([4, 5]))
    >>> found = within(samples, Runs(np.array([0, 4]), np.array([3, 8])))
    >>> found.start.tolist(), found.count.tolist()
    ([2, 4, 10], [1, 2, 2])
    """
    low, high = (samples.rank(edge) for edge in (runs.start, runs.start + runs.count))
    filled = high > low
    return samples.at(Runs(low[filled], (high - low)[filled]))
