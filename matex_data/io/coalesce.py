"""Coalesce byte ranges into few large reads. Pure functions, without files or MPI."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from matex_data._types import Bytes, Integers
from matex_data.locks import cached_property

OnComplete = Callable[[Bytes], None]

TASK_BYTES = 32 << 20  # size of a task that needs no decoding: several threads read the tasks of a window
DECODED_BYTES = (1 << 20, 8 << 20)  # least and largest size of a task to decode, which starts after all its reads
GAP_BYTES = 32 << 10  # largest gap to read instead of skipping it: a system call costs as much as copying these bytes
GAP_FRACTION = 0.01  # largest fraction of the requested bytes of a file to read in gaps
MOST_BYTES = 1 << 30  # of one MPI call; several MPI libraries count bytes in 32 bits

_DISCARDED = np.empty(GAP_BYTES, np.uint8)


@dataclass(frozen=True)
class Ranges:
    """Byte ranges of one file, and their destinations in memory.

    Parameters
    ----------
    offset : int64[k], first byte in the file.
    nbytes : int64[k], lengths in bytes.
    address : int64[k], address of the destination.
    """

    offset: Integers
    nbytes: Integers
    address: Integers

    @property
    def total(self) -> int:
        """Return the number of bytes of all ranges."""
        return int(self.nbytes.sum())

    def shifted(self, begin: int) -> Ranges:
        """Return ranges with addresses relative to ``begin`` in place of 0."""
        return Ranges(self.offset, self.nbytes, self.address + begin)

    @cached_property
    def first(self) -> Integers:
        """Return int64[runs], the first range of each run of ranges that are adjacent in the file."""
        if not len(self.offset):
            return self.offset
        gap = self.offset[1:] != (self.offset + self.nbytes)[:-1]
        return np.concatenate([[0], np.flatnonzero(gap) + 1]).astype(np.int64)


@dataclass(frozen=True)
class PendingRead:
    """Byte ranges to read, and a callback for their content.

    Parameters
    ----------
    offset, nbytes : int64[k], byte ranges of one file.
    address : int64[k], destinations in memory; None: consecutive bytes of scratch memory.
    on_complete : called after the read, with the bytes in scratch memory, or with no bytes if there is ``address``.
    """

    offset: Integers
    nbytes: Integers
    address: Integers | None = None
    on_complete: OnComplete | None = None

    @cached_property
    def total(self) -> int:
        """Return the number of bytes of all ranges."""
        return int(self.nbytes.sum())


@dataclass(frozen=True)
class ReadTask:
    """Reads of one file, and the callbacks after them.

    Parameters
    ----------
    reads : ranges to read; with scratch memory, their addresses are relative to it.
    callbacks : functions, and the bytes of the scratch memory to call them with.
    scratch : size of the scratch memory in bytes; 0: none.
    """

    reads: list[Ranges]
    callbacks: list[tuple[OnComplete, slice]] = field(default_factory=list)
    scratch: int = 0

    @property
    def count(self) -> int:
        """Return the number of read calls."""
        return sum(len(ranges.first) for ranges in self.reads)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of all reads."""
        return sum(ranges.total for ranges in self.reads)

    def complete(self, scratch: Bytes) -> None:
        """Call all callbacks, then raise the first error: other windows may need chunks that later callbacks decode."""
        first_error: Exception | None = None
        for on_complete, selected in self.callbacks:
            try:
                on_complete(scratch[selected])
            except Exception as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error


def plan_tasks(reads: Sequence[PendingRead], workers: int = 1) -> list[ReadTask]:
    """Coalesce reads of one file into tasks of some megabytes, in file order.

    A task reads either to scratch memory or to final destinations, never to both.

    Parameters
    ----------
    reads : of one file.
    workers : number of tasks into which to divide the bytes to decode, within ``DECODED_BYTES`` for each task.
    """
    least, most = DECODED_BYTES
    decoded_bytes = sum(read.total for read in reads if read.on_complete is not None) // workers
    decoded_bytes = min(most, max(least, decoded_bytes))
    order = sorted((i for i in range(len(reads)) if len(reads[i].offset)), key=lambda i: reads[i].offset[0])
    direct = [reads[i] for i in order if reads[i].address is not None]
    decoded = [reads[i] for i in order if reads[i].address is None]
    gap_bytes = int(GAP_FRACTION * sum(read.total for read in reads))
    return [
        *_tasks(_groups(direct, decoded_bytes), gap_bytes),
        *_tasks(_groups(decoded, decoded_bytes), gap_bytes),
    ]


def _groups(reads: Sequence[PendingRead], decoded_bytes: int) -> list[list[PendingRead]]:
    """Return the reads of each task."""
    groups: list[list[PendingRead]] = [[]]
    size = 0
    for read in reads:
        groups[-1].append(read)
        size += read.total
        if size >= (TASK_BYTES if read.on_complete is None else decoded_bytes):
            groups.append([])
            size = 0
    return [group for group in groups if group]


def _tasks(groups: list[list[PendingRead]], gap_bytes: int) -> Iterator[ReadTask]:
    """Yield a task for each group; several for a large one without callbacks."""
    if not groups:
        return
    reads = [read for group in groups for read in group]
    group_of = np.repeat(np.arange(len(groups)), [sum(len(read.offset) for read in group) for group in groups])
    offset, nbytes = (np.concatenate([getattr(read, name) for read in reads]) for name in ("offset", "nbytes"))
    sizes = np.bincount(group_of, nbytes).astype(np.int64)
    addresses = [read.address for read in reads if read.address is not None]
    if addresses:
        address, discarded = np.concatenate(addresses), np.full(len(groups), _DISCARDED.ctypes.data)
    else:  # gaps go behind the other bytes of the scratch memory
        address, discarded = np.cumsum(nbytes) - nbytes - (np.cumsum(sizes) - sizes)[group_of], sizes
    merged, group_of = _merge(Ranges(offset, nbytes, address), group_of, discarded, gap_bytes)
    ends = np.searchsorted(group_of, np.arange(len(groups)), side="right").tolist()
    for group, low, high, size in zip(groups, [0, *ends], ends, sizes.tolist(), strict=False):
        ranges = Ranges(merged.offset[low:high], merged.nbytes[low:high], merged.address[low:high])
        callbacks = _callbacks(group)
        if callbacks:
            yield ReadTask(_split(ranges, MOST_BYTES), callbacks, 0 if addresses else size + GAP_BYTES)
        else:
            yield from (ReadTask([segment]) for segment in _split(ranges, TASK_BYTES))


def _callbacks(group: Sequence[PendingRead]) -> list[tuple[OnComplete, slice]]:
    """Return the callbacks of a task, and the bytes of its scratch memory for each."""
    callbacks, end = [], 0
    for read in group:
        begin, end = end, end + (read.total if read.address is None else 0)
        if read.on_complete is not None:
            callbacks.append((read.on_complete, slice(begin, end)))
    return callbacks


def _merge(ranges: Ranges, group_of: Integers, discarded: Integers, gap_bytes: int) -> tuple[Ranges, Integers]:
    """Sort each group by offset, and merge ranges that are adjacent in the file and in memory.

    Parameters
    ----------
    ranges : of all groups.
    group_of : int64[k], group of each range, ascending.
    discarded : int64[groups], address for bytes of gaps.
    gap_bytes : largest number of bytes to read in gaps.

    Returns
    -------
    merged : the ranges after the merge.
    group_of : group of each of them.
    """
    order = np.lexsort((ranges.offset, group_of))
    columns = [ranges.offset[order], ranges.nbytes[order], ranges.address[order], group_of]
    offset, nbytes, address, group_of = _fill_gaps(columns, discarded, gap_bytes)
    adjacent = (offset[1:] == (offset + nbytes)[:-1]) & (address[1:] == (address + nbytes)[:-1])
    adjacent &= group_of[1:] == group_of[:-1]
    first = np.flatnonzero(np.concatenate([[True], ~adjacent]))
    return Ranges(offset[first], np.add.reduceat(nbytes, first), address[first]), group_of[first]


def _fill_gaps(columns: list[Integers], discarded: Integers, gap_bytes: int) -> list[Integers]:
    """Insert ranges for the smallest gaps, up to ``gap_bytes`` in total. Parameters as of ``_merge``."""
    offset, nbytes, _, group_of = columns
    end = (offset + nbytes)[:-1]
    gap = offset[1:] - end
    small = np.flatnonzero((gap > 0) & (gap <= GAP_BYTES) & (group_of[1:] == group_of[:-1]))
    if gap[small].sum() > gap_bytes:
        small = small[np.argsort(gap[small], kind="stable")]
        small = np.sort(small[np.cumsum(gap[small]) <= gap_bytes])
    if not len(small):
        return columns
    inserted = np.zeros(len(group_of), np.int64)
    inserted[small + 1] = 1
    filled = np.empty((len(columns), len(group_of) + len(small)), np.int64)
    filled[:, np.arange(len(group_of)) + np.cumsum(inserted)] = columns
    filled[:, small + 1 + np.arange(len(small))] = end[small], gap[small], discarded[group_of[small]], group_of[small]
    return list(filled)


def _split(ranges: Ranges, most: int) -> list[Ranges]:
    """Split ranges into lists of about ``most`` bytes, and less than twice as many."""
    if ranges.total <= most:
        return [ranges]
    counts = -(-ranges.nbytes // most)
    source = np.repeat(np.arange(len(counts)), counts)
    begin = (np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
    nbytes = np.minimum(ranges.nbytes[source] - begin, most)
    list_of = (np.cumsum(nbytes) - nbytes) // most
    cuts = np.flatnonzero(np.diff(list_of)) + 1
    columns = (ranges.offset[source] + begin, nbytes, ranges.address[source] + begin)
    return [Ranges(*columns) for columns in zip(*(np.split(column, cuts) for column in columns), strict=True)]
