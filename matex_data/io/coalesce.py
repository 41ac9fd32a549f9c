"""Byte ranges become few large reads. Pure functions: no files, no MPI."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from matex_data._types import Bytes, Integers

OnComplete = Callable[[Bytes], None]

CALL_BYTES = 32 << 20  # of one call, about: several threads may share the reads of a window
DECODED_BYTES = (1 << 20, 8 << 20)  # least and most if they are to be decoded: that begins as soon as a call has ended
GAP_BYTES = 32 << 10  # between two ranges, that are read rather than skipped: a call costs as much as copying them
GAP_SHARE = 0.01  # of all that is wanted of a file; more gaps than that are not read
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

    def shifted(self, begin: int) -> Ranges:
        """The same, where addresses count from that one."""
        return Ranges(self.offset, self.nbytes, self.address + begin)

    @cached_property
    def first(self) -> Integers:
        """int64[runs], the range that begins each run of ranges that follow one another in the file."""
        if not len(self.offset):
            return self.offset
        broken = self.offset[1:] != (self.offset + self.nbytes)[:-1]
        return np.concatenate([[0], np.flatnonzero(broken) + 1]).astype(np.int64)


@dataclass(frozen=True)
class PendingRead:
    """Bytes that belong together.

    Parameters
    ----------
    offset, nbytes : int64[k], byte ranges of one file.
    address : int64[k], where they go to in memory; None: one behind the other in scratch memory.
    on_complete : what to call once they are there, with them if they are in scratch memory, else with no bytes.
    """

    offset: Integers
    nbytes: Integers
    address: Integers | None = None
    on_complete: OnComplete | None = None

    @cached_property
    def total(self) -> int:
        """Bytes in all."""
        return int(self.nbytes.sum())


@dataclass(frozen=True)
class ReadTask:
    """Reads of one file, and what can be done as soon as they have ended.

    Parameters
    ----------
    reads : in scratch memory, if there is any, addresses count from its begin.
    then : what to call with which bytes of the scratch memory.
    scratch : bytes of scratch memory.
    """

    reads: list[Ranges]
    callbacks: list[tuple[OnComplete, slice]] = field(default_factory=list)
    scratch: int = 0

    @property
    def count(self) -> int:
        """How many collective calls these are."""
        return sum(len(ranges.first) for ranges in self.reads)

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return sum(ranges.total for ranges in self.reads)

    def complete(self, scratch: Bytes) -> None:
        """Call all callbacks; raise the first error at the end: other windows wait for what the others decode."""
        first_error: Exception | None = None
        for done, some in self.callbacks:
            try:
                done(scratch[some])
            except Exception as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error


def plan_tasks(wanted: Sequence[PendingRead], parts: int = 1) -> list[ReadTask]:
    """Reads of some megabytes each, in the order of the file; with scratch memory or without, never both in one.

    Parameters
    ----------
    wanted : of one file.
    parts : calls that what is to be decoded should be shared out to, if it is much; larger ones cost less Python.
    """
    least, most = DECODED_BYTES
    share = sum(one.total for one in wanted if one.on_complete is not None) // parts
    decoded_bytes = min(most, max(least, share))
    order = sorted((i for i in range(len(wanted)) if len(wanted[i].offset)), key=lambda i: wanted[i].offset[0])
    direct = [wanted[i] for i in order if wanted[i].address is not None]
    decoded = [wanted[i] for i in order if wanted[i].address is None]
    gaps = int(GAP_SHARE * sum(one.total for one in wanted))
    return [
        *_of_groups(_groups(direct, decoded_bytes), gaps),
        *_of_groups(_groups(decoded, decoded_bytes), gaps),
    ]


def _groups(wanted: Sequence[PendingRead], decoded_bytes: int) -> list[list[PendingRead]]:
    """What is read together."""
    groups: list[list[PendingRead]] = [[]]
    size = 0
    for one in wanted:
        groups[-1].append(one)
        size += one.total
        if size >= (CALL_BYTES if one.on_complete is None else decoded_bytes):
            groups.append([])
            size = 0
    return [group for group in groups if group]


def _of_groups(groups: list[list[PendingRead]], gaps: int) -> Iterator[ReadTask]:
    """A call for each group, and more for one that is large; ``gaps`` as in ``_without_gaps``."""
    if not groups:
        return
    every = [one for group in groups for one in group]
    of = np.repeat(np.arange(len(groups)), [sum(len(one.offset) for one in group) for group in groups])
    offset, nbytes = (np.concatenate([getattr(one, name) for one in every]) for name in ("offset", "nbytes"))
    sizes = np.bincount(of, nbytes).astype(np.int64)
    addresses = [one.address for one in every if one.address is not None]
    if addresses:
        address, nowhere = np.concatenate(addresses), np.full(len(groups), _NOWHERE.ctypes.data)
    else:
        address, nowhere = np.cumsum(nbytes) - nbytes - (np.cumsum(sizes) - sizes)[of], sizes
    merged, of = _merged(Ranges(offset, nbytes, address), of, nowhere, gaps)
    ends = np.searchsorted(of, np.arange(len(groups)), side="right").tolist()
    for group, low, high, size in zip(groups, [0, *ends], ends, sizes.tolist(), strict=False):
        ranges = Ranges(merged.offset[low:high], merged.nbytes[low:high], merged.address[low:high])
        then = _then(group)
        if then:
            yield ReadTask(_limited(ranges, MOST_BYTES), then, 0 if addresses else size + GAP_BYTES)
        else:
            yield from (ReadTask([piece]) for piece in _limited(ranges, CALL_BYTES))


def _then(group: Sequence[PendingRead]) -> list[tuple[OnComplete, slice]]:
    """What to call, with which bytes of the scratch memory."""
    then, end = [], 0
    for one in group:
        begin, end = end, end + (one.total if one.address is None else 0)
        if one.on_complete is not None:
            then.append((one.on_complete, slice(begin, end)))
    return then


def _merged(ranges: Ranges, of: Integers, nowhere: Integers, gaps: int) -> tuple[Ranges, Integers]:
    """Each group in the order of the file; neighbours in the file that are neighbours in memory become one.

    Parameters
    ----------
    of : int64[k], the group of each range, ascending; comes back for the ranges that are left.
    nowhere : int64[groups], address of memory that nobody looks at.
    gaps : as in ``_without_gaps``.
    """
    order = np.lexsort((ranges.offset, of))
    columns = [ranges.offset[order], ranges.nbytes[order], ranges.address[order], of]
    offset, nbytes, address, of = _without_gaps(columns, nowhere, gaps)
    joined = (offset[1:] == (offset + nbytes)[:-1]) & (address[1:] == (address + nbytes)[:-1]) & (of[1:] == of[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    return Ranges(offset[first], np.add.reduceat(nbytes, first), address[first]), of[first]


def _without_gaps(columns: list[Integers], nowhere: Integers, gaps: int) -> list[Integers]:
    """The smallest gaps are read as well, to memory that nobody looks at, up to so many bytes in all."""
    offset, nbytes, _, of = columns
    end = (offset + nbytes)[:-1]
    gap = offset[1:] - end
    small = np.flatnonzero((gap > 0) & (gap <= GAP_BYTES) & (of[1:] == of[:-1]))
    if gap[small].sum() > gaps:
        small = small[np.argsort(gap[small], kind="stable")]
        small = np.sort(small[np.cumsum(gap[small]) <= gaps])
    if not len(small):
        return columns
    after = np.zeros(len(of), np.int64)
    after[small + 1] = 1
    joined = np.empty((len(columns), len(of) + len(small)), np.int64)
    joined[:, np.arange(len(of)) + np.cumsum(after)] = columns
    joined[:, small + 1 + np.arange(len(small))] = end[small], gap[small], nowhere[of[small]], of[small]
    return list(joined)


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
