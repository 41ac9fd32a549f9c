"""Byte ranges become few large reads. Pure functions: no files, no MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from matex_data.index import Integers

CALL_BYTES = 32 << 20  # of one call, about: several threads may share the reads of a window
DECODED_BYTES = 1 << 20  # the same if they are to be decoded: that begins as soon as a call has ended
GAP_BYTES = 4096  # between two ranges, that are read rather than skipped
GAP_SHARE = 0.02  # of the bytes that are wanted; more gaps than that are not read
MOST_BYTES = 1 << 30  # of one call at most; several MPI libraries count bytes in 32 bits

_NOWHERE = np.empty(GAP_BYTES, np.uint8)


@dataclass(frozen=True)
class Ranges:
    """Byte ranges of one file and the memory they go to.

    Parameters
    ----------
    offset, nbytes, address : int64[k]; ``address`` of the first byte in memory.
    """

    offset: Integers
    nbytes: Integers
    address: Integers

    @property
    def total(self) -> int:
        """Bytes in all."""
        return int(self.nbytes.sum())

    @cached_property
    def first(self) -> Integers:
        """int64[runs], the range that begins each run of ranges that follow one another in the file."""
        if not len(self.offset):
            return self.offset
        broken = self.offset[1:] != (self.offset + self.nbytes)[:-1]
        return np.concatenate([[0], np.flatnonzero(broken) + 1]).astype(np.int64)


@dataclass(frozen=True)
class Call:
    """Reads of one file, and what can be done as soon as they have ended."""

    reads: list[Ranges]
    then: list[Callable[[], None]] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many collective calls these are."""
        return sum(len(ranges.first) for ranges in self.reads)

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return sum(ranges.total for ranges in self.reads)


def calls(wanted: Sequence[tuple[Ranges, Callable[[], None] | None]]) -> list[Call]:
    """Reads of some megabytes each, in the order of the file.

    Parameters
    ----------
    wanted : ranges that belong together, and what to call when they all are in memory.
    """
    order = sorted((i for i in range(len(wanted)) if len(wanted[i][0].offset)), key=lambda i: wanted[i][0].offset[0])
    result: list[Call] = []
    group: list[int] = []
    size = 0
    for i in order:
        group.append(i)
        size += wanted[i][0].total
        if size >= (CALL_BYTES if wanted[i][1] is None else DECODED_BYTES):
            result += _read_together([wanted[k] for k in group])
            group, size = [], 0
    return result + (_read_together([wanted[k] for k in group]) if group else [])


def _read_together(group: Sequence[tuple[Ranges, Callable[[], None] | None]]) -> list[Call]:
    columns = [np.concatenate([getattr(r, name) for r, _ in group]) for name in ("offset", "nbytes", "address")]
    then = [done for _, done in group if done is not None]
    merged = _merged(Ranges(*columns))
    if then:
        return [Call(_limited(merged, MOST_BYTES), then)]
    return [Call([part]) for part in _limited(merged, CALL_BYTES)]


def _merged(ranges: Ranges) -> Ranges:
    """In the order of the file; neighbours in the file that are neighbours in memory become one."""
    order = np.argsort(ranges.offset, kind="stable")
    offset, nbytes, address = ranges.offset[order], ranges.nbytes[order], ranges.address[order]
    offset, nbytes, address = _without_gaps(offset, nbytes, address)
    joined = (offset[1:] == (offset + nbytes)[:-1]) & (address[1:] == (address + nbytes)[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    return Ranges(offset[first], np.add.reduceat(nbytes, first), address[first])


def _without_gaps(offset: Integers, nbytes: Integers, address: Integers) -> tuple[Integers, Integers, Integers]:
    """Small gaps are read as well, to memory that nobody looks at: one long read costs less than two short ones."""
    end = (offset + nbytes)[:-1]
    gap = offset[1:] - end
    small = np.flatnonzero((gap > 0) & (gap <= GAP_BYTES))
    if not len(small) or gap[small].sum() > GAP_SHARE * nbytes.sum():
        return offset, nbytes, address
    columns = ((offset, end[small]), (nbytes, gap[small]), (address, np.full(len(small), _NOWHERE.ctypes.data)))
    filled = [np.insert(column, small + 1, values) for column, values in columns]
    return filled[0], filled[1], filled[2]


def _limited(ranges: Ranges, most: int) -> list[Ranges]:
    """Cut into parts of about ``most`` bytes, and never of twice as many."""
    if ranges.total <= most:
        return [ranges]
    pieces = -(-ranges.nbytes // most)
    of = np.repeat(np.arange(len(pieces)), pieces)
    within = (np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * most
    nbytes = np.minimum(ranges.nbytes[of] - within, most)
    part = (np.cumsum(nbytes) - nbytes) // most
    cuts = np.flatnonzero(np.diff(part)) + 1
    columns = (ranges.offset[of] + within, nbytes, ranges.address[of] + within)
    return [Ranges(*columns) for columns in zip(*(np.split(column, cuts) for column in columns), strict=True)]
