"""Coalesce byte ranges into few large reads. Pure functions, without files or MPI."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Bytes, Integers
from matex_data.index.layout import Countdown, OnComplete, ReadRequest
from matex_data.locks import cached_property

DIRECT_BYTES = (256 << 10, 32 << 20)  # least and largest size of a task that reads to final destinations
RUN_BYTES = 4 << 20  # adjacent bytes that are one read: larger runs are divided if there are few of them
DECODED_BYTES = (256 << 10, 8 << 20)  # least and largest size of a task to decode, which starts after all its reads
GAP_BYTES = 32 << 10  # largest gap to read instead of skipping it: a system call costs as much as copying these bytes
GAP_FRACTION = 0.01  # largest fraction of the requested bytes of a file to read in gaps
MOST_BYTES = 1 << 30  # of one MPI call; several MPI libraries count bytes in 32 bits

_DISCARDED = np.empty(GAP_BYTES, np.uint8)


@dataclass(frozen=True)
class ReadTask:
    """Coalesced reads of one file, and the callbacks after them.

    Parameters
    ----------
    offset : int64[k], first byte of each byte range in the file.
    nbytes : int64[k], lengths in bytes.
    address : int64[k], addresses of the destinations; with scratch memory, relative to it.
    callbacks : functions, and the bytes of the scratch memory to call them with.
    scratch : size of the scratch memory in bytes; 0: none.
    """

    offset: Integers
    nbytes: Integers
    address: Integers
    callbacks: list[tuple[OnComplete, slice]] = field(default_factory=list)
    scratch: int = 0

    @property
    def total(self) -> int:
        """Return the number of bytes of all ranges."""
        return int(self.nbytes.sum())

    @cached_property
    def first(self) -> Integers:
        """Return int64[runs], the first range of each run: adjacent in the file, and below 2 * ``MOST_BYTES``."""
        if len(self.offset) < 2:
            return np.zeros(len(self.offset), np.int64)
        end = np.cumsum(self.nbytes)
        cut = self.offset[1:] != (self.offset + self.nbytes)[:-1]
        cut |= np.diff((end - self.nbytes) // MOST_BYTES) > 0
        return np.concatenate([[0], np.flatnonzero(cut) + 1]).astype(np.int64)

    @property
    def count(self) -> int:
        """Return the number of read calls."""
        return len(self.first)

    def into(self, scratch: Bytes) -> ReadTask:
        """Return the task with the addresses of its scratch memory; itself without such memory."""
        if not self.scratch:
            return self
        return ReadTask(self.offset, self.nbytes, self.address + scratch.ctypes.data, self.callbacks, self.scratch)

    def complete(self, scratch: Bytes) -> None:
        """Call all callbacks, then raise the first error: other windows may need chunks that later callbacks decode."""
        _complete(self.callbacks, scratch)


def _complete(callbacks: Sequence[tuple[OnComplete, slice]], scratch: Bytes) -> None:
    call_all(partial(on_complete, scratch[selected]) for on_complete, selected in callbacks)


def call_all(functions: Iterable[Callable[[], None]]) -> None:
    """Call all functions, then raise the first error."""
    first_error: Exception | None = None
    for function in functions:
        try:
            function()
        except Exception as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error


def plan_tasks(
    requests: Mapping[int, Sequence[ReadRequest]], workers: int = 1, copying: int | None = None
) -> dict[int, list[ReadTask]]:
    """Coalesce requests into tasks of some megabytes, in file order; return those of each file.

    A task reads either to scratch memory or to final destinations, never to both. All files are coalesced at once:
    arrays of a few numbers for each of a thousand small files take longer than their reads.

    Parameters
    ----------
    requests : by the number of their file.
    workers : number of tasks into which to divide the bytes of a file, within ``DIRECT_BYTES`` and ``DECODED_BYTES``.
    copying : the same for those that are read to final destinations, which `divide_tasks` may divide further; None:
        ``workers``.
    """
    tasks: dict[int, list[ReadTask]] = {file: [] for file in requests}
    direct: list[_Group] = []
    decoded: list[_Group] = []
    for file, of_file in requests.items():
        ordered = sorted((request for request in of_file if len(request.offset)), key=lambda one: int(one.offset[0]))
        direct += _groups(file, [one for one in ordered if one.target is not None], DIRECT_BYTES, copying or workers)
        decoded += _groups(file, [one for one in ordered if one.target is None], DECODED_BYTES, workers)
    gap_bytes = {file: int(GAP_FRACTION * sum(one.total for one in of_file)) for file, of_file in requests.items()}
    for groups in (direct, decoded):
        for file, task in _tasks(groups, gap_bytes):
            tasks[file].append(task)
    return tasks


def divide_tasks(tasks: Sequence[ReadTask], workers: int) -> list[ReadTask]:
    """Return tasks that read the same; those that read to final destinations are divided for so many workers.

    Parameters
    ----------
    tasks : of one file.
    workers : number of tasks that are wanted, within ``DIRECT_BYTES``.

    Examples
    --------
    >>> one = ReadTask(np.array([0, 2_000_000]), np.array([1_000_000, 1_000_000]), np.array([512, 4_000_512]))
    >>> [task.nbytes.tolist() for task in divide_tasks([one], 2)]
    [[1000000], [1000000]]
    """
    total = sum(int(task.nbytes.sum()) for task in tasks if not task.scratch)
    most = _task_bytes(total, DIRECT_BYTES, workers)
    divided: list[ReadTask] = []
    for task in tasks:
        columns = [task.offset, task.nbytes, task.address]
        divided += [task] if task.scratch else _direct_tasks(columns, task.callbacks, most)
    return divided


def _task_bytes(total: int, limits: tuple[int, int], workers: int) -> int:
    """Return the size of a task in bytes, if there is a task for each worker; within the limits."""
    least, most = limits
    return min(most, max(least, total // workers))


class _Group(NamedTuple):
    """Requests of one task: the number of their file, and the bytes from which on a task is divided."""

    file: int
    requests: list[ReadRequest]
    most: int


def _groups(file: int, requests: Sequence[ReadRequest], limits: tuple[int, int], workers: int) -> Iterator[_Group]:
    most = _task_bytes(sum(request.total for request in requests), limits, workers)
    size, group = 0, _Group(file, [], most)
    for request in requests:
        group.requests.append(request)
        size += request.total
        if size >= most:
            yield group
            size, group = 0, _Group(file, [], most)
    if group.requests:
        yield group


def _tasks(groups: Sequence[_Group], gap_bytes: Mapping[int, int]) -> Iterator[tuple[int, ReadTask]]:
    """Yield a task for each group, with its file; several for a large one that reads to final destinations.
    ``gap_bytes``: of each file, the largest number of bytes to read in gaps.
    """
    if not groups:
        return
    requests = [request for group in groups for request in group.requests]
    ranges = [sum(len(request.offset) for request in group.requests) for group in groups]
    group_of = np.repeat(np.arange(len(groups)), ranges)
    offset, nbytes = (np.concatenate([getattr(request, name) for request in requests]) for name in ("offset", "nbytes"))
    sizes = np.bincount(group_of, nbytes).astype(np.int64)
    addresses = [address for request in requests if (address := request.address) is not None]
    if addresses:
        address, discarded = np.concatenate(addresses), np.full(len(groups), _DISCARDED.ctypes.data)
    else:  # gaps go behind the other bytes of the scratch memory
        address, discarded = np.cumsum(nbytes) - nbytes - (np.cumsum(sizes) - sizes)[group_of], sizes
    gaps = _Gaps(np.array([group.file for group in groups]), np.array([gap_bytes[group.file] for group in groups]))
    *merged, group_of = _merge([offset, nbytes, address, group_of], discarded, gaps)
    ends = np.searchsorted(group_of, np.arange(len(groups)), side="right").tolist()
    for group, low, high, size in zip(groups, [0, *ends], ends, sizes.tolist(), strict=False):
        columns = [column[low:high] for column in merged]
        callbacks = _callbacks(group.requests)
        if not addresses:
            offset, nbytes, address = _cut(columns, MOST_BYTES) if size > MOST_BYTES else columns
            yield group.file, ReadTask(offset, nbytes, address, callbacks, size + GAP_BYTES)
            continue
        yield from ((group.file, task) for task in _direct_tasks(columns, callbacks, group.most))


def _direct_tasks(
    columns: list[Integers], callbacks: list[tuple[OnComplete, slice]], task_bytes: int
) -> Iterator[ReadTask]:
    """Yield tasks of about so many bytes; the last one that completes calls the callbacks. Columns as of ``_cut``."""
    parts = [columns] if columns[1].sum() <= min(task_bytes, MOST_BYTES) else list(_split(columns, task_bytes))
    if callbacks and len(parts) > 1:
        countdown = Countdown(len(parts), partial(_complete, callbacks, np.empty(0, np.uint8)))
        callbacks = [(partial(countdown.complete, None), slice(0))]
    yield from (ReadTask(offset, nbytes, address, callbacks) for offset, nbytes, address in parts)


def _callbacks(group: Sequence[ReadRequest]) -> list[tuple[OnComplete, slice]]:
    """Return the callbacks of a task, and the bytes of its scratch memory for each."""
    callbacks, end = [], 0
    for request in group:
        begin, end = end, end + (request.total if request.target is None else 0)
        if request.on_complete is not None:
            callbacks.append((request.on_complete, slice(begin, end)))
    return callbacks


class _Gaps(NamedTuple):
    """Limits of what is read in gaps: int64[groups], the file of each group, and the most bytes of that file."""

    file: Integers
    most: Integers

    def chosen(self, gap: Integers, group_of: Integers) -> NDArray[np.bool_]:
        """Return which of some gaps are read: the smallest ones of each file, up to its limit."""
        file = self.file[group_of]
        order = np.lexsort((gap, file))
        total, file = np.cumsum(gap[order]), file[order]
        first = np.searchsorted(file, file)  # position of the first gap of the same file
        chosen = np.empty(len(gap), bool)
        chosen[order] = total - (total - gap[order])[first] <= self.most[group_of][order]
        return chosen


def _merge(columns: list[Integers], discarded: Integers, gaps: _Gaps) -> list[Integers]:
    """Sort each group by offset, and merge ranges that are adjacent in the file and in memory.

    Parameters
    ----------
    columns : int64[k] each: offset, number of bytes, address and group of each range; groups are ascending.
    discarded : int64[groups], address for bytes of gaps.
    gaps : those that may be read.

    Returns
    -------
    columns : after the merge.
    """
    order = np.lexsort((columns[0], columns[3]))
    offset, nbytes, address, group_of = _fill_gaps([column[order] for column in columns], discarded, gaps)
    adjacent = (offset[1:] == (offset + nbytes)[:-1]) & (address[1:] == (address + nbytes)[:-1])
    adjacent &= group_of[1:] == group_of[:-1]
    first = np.flatnonzero(np.concatenate([[True], ~adjacent]))
    return [offset[first], np.add.reduceat(nbytes, first), address[first], group_of[first]]


def _fill_gaps(columns: list[Integers], discarded: Integers, gaps: _Gaps) -> list[Integers]:
    """Insert ranges for the smallest gaps. Parameters as of ``_merge``."""
    offset, nbytes, _, group_of = columns
    end = (offset + nbytes)[:-1]
    gap = offset[1:] - end
    small = np.flatnonzero((gap > 0) & (gap <= GAP_BYTES) & (group_of[1:] == group_of[:-1]))
    small = small[gaps.chosen(gap[small], group_of[small])]
    if not len(small):
        return columns
    inserted = np.zeros(len(group_of), np.int64)
    inserted[small + 1] = 1
    filled = np.empty((len(columns), len(group_of) + len(small)), np.int64)
    filled[:, np.arange(len(group_of)) + np.cumsum(inserted)] = columns
    filled[:, small + 1 + np.arange(len(small))] = end[small], gap[small], discarded[group_of[small]], group_of[small]
    return list(filled)


def _cut(columns: list[Integers], most: int) -> list[Integers]:
    """Cut ranges of more than ``most`` bytes. Columns: offset, number of bytes and address of each range."""
    offset, nbytes, address = columns
    counts = -(-nbytes // most)
    if len(counts) == counts.sum():
        return columns
    source = np.repeat(np.arange(len(counts)), counts)
    begin = (np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
    return [offset[source] + begin, np.minimum(nbytes[source] - begin, most), address[source] + begin]


def _split(columns: list[Integers], most: int) -> Iterator[list[Integers]]:
    """Yield the ranges in lists of about ``most`` bytes; no short run is cut. Columns as of ``_cut``."""
    largest = min(max(most, RUN_BYTES), MOST_BYTES)
    columns = _cut(columns, largest)
    offset, nbytes, _ = columns
    begin = np.cumsum(nbytes) - nbytes
    starts = np.concatenate([[True], offset[1:] != (offset + nbytes)[:-1]])
    section = (begin - begin[starts][np.cumsum(starts) - 1]) // largest
    starts[1:] |= np.diff(section) > 0
    read = np.flatnonzero(starts)
    cuts = read[1:][np.diff(begin[read] // most) > 0]
    yield from (list(segment) for segment in zip(*(np.split(column, cuts) for column in columns), strict=True))
