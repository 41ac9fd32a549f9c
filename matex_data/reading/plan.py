"""Plan of the reads of one window: byte ranges, grouped into large reads, and the decoding after each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Integers
from matex_data.errors import DataError
from matex_data.index import table
from matex_data.index.blocks import by_part
from matex_data.index.cache import Chunk, ChunkCache
from matex_data.index.layout import EMPTY, ReadRequest, call_after_last
from matex_data.index.model import Finish, Index, Wanted
from matex_data.index.runs import Runs
from matex_data.io.coalesce import ReadTask, plan_tasks
from matex_data.machine import tasks_of_window, threads
from matex_data.reading.buffers import BufferPool

Arrays = dict[str, NDArray[Any]]
NO_BYTES = np.empty(0, np.uint8)
MOST_COPYING = 4
"""Tasks of a window that copy rows of the page cache: each takes the interpreter's lock for every few microseconds of
copying. With 16 cores 16 threads copied 62,000 images of 48 KB a second, and four of them 140,000."""


@dataclass
class ReadPlan:
    """Reads of one window.

    Parameters
    ----------
    tasks : read tasks by file number.
    fetched : pairs of a function that reads by itself and one to call then.
    completions : functions to call that need no bytes, each with the chunk after which it is called, or None.
    unread : numbers of files with such functions only: their layouts may read them.
    memory : arrays that receive the bytes; the plan keeps them alive until all reads are complete.
    chunks : cache of this window, which owns the chunks that these reads decode for others, too.
    scratch : buffers for bytes that have to be decoded.
    """

    tasks: dict[int, list[ReadTask]] = field(default_factory=dict)
    fetched: list[tuple[Callable[[], None], Callable[[], None]]] = field(default_factory=list)
    completions: list[tuple[Chunk | None, Callable[[], None]]] = field(default_factory=list)
    unread: tuple[int, ...] = ()
    memory: list[NDArray[Any]] = field(default_factory=list)
    chunks: ChunkCache | None = None
    scratch: BufferPool = field(default_factory=BufferPool)

    def allocate(self, task: ReadTask) -> NDArray[np.uint8]:
        """Return scratch memory for a task, uint8; empty if it reads directly into the arrays."""
        return self.scratch.bytes(task.scratch) if task.scratch else NO_BYTES

    def give_up(self) -> None:
        """Let others read the chunks that this window has not decoded."""
        if self.chunks is not None:
            self.chunks.give_up()


def plan_reads(
    index: Index, runs: Runs, destination: Integers, arrays: Arrays, chunks: ChunkCache, scratch: BufferPool
) -> ReadPlan:
    """Plan the reads that fill ``arrays[name][destination[i]]`` with the i-th sample of ``runs``, for every field.

    Parameters
    ----------
    runs : samples in ascending order, numbered over all files.
    destination : int64[runs.total], a row of the arrays for each sample.
    arrays : field name -> array that receives the rows.
    scratch : buffers for bytes that have to be decoded.
    """
    plan = ReadPlan(memory=list(arrays.values()), chunks=chunks.of_window(), scratch=scratch)
    try:
        _fill(plan, index, runs, destination, arrays)
    except BaseException:
        plan.give_up()
        raise
    return plan


def _fill(plan: ReadPlan, index: Index, runs: Runs, destination: Integers, arrays: Arrays) -> None:
    """Add the reads to an empty plan; see `plan_reads`."""
    reads = _Reads(plan)
    finish = reads.plan(index, Wanted(runs, destination, arrays), 0)
    requests = reads.requests
    if finish is not None:
        requests = requests or [(0, ReadRequest(EMPTY, EMPTY))]
        last = call_after_last([request for _, request in requests], finish)
        requests = [(number, request) for (number, _), request in zip(requests, last, strict=True)]
    pending: dict[int, list[ReadRequest]] = {}
    for number, request in requests:
        on_complete = request.on_complete
        if request.total:
            pending.setdefault(number, []).append(request)
        elif on_complete is not None and request.fetch is not None:
            plan.fetched.append((request.fetch, partial(on_complete, NO_BYTES)))
        elif on_complete is not None:
            plan.completions.append((request.after, partial(on_complete, NO_BYTES)))
    plan.unread = tuple({number: None for number, _ in requests if number not in pending})
    copying = min(2 * threads(), MOST_COPYING)
    plan.tasks = plan_tasks(pending, tasks_of_window(), copying)


class _Reads:
    """Reads of the files from which samples are made, each with the number of its file among ``Index.sources``.

    Parameters
    ----------
    plan : of the window.
    """

    def __init__(self, plan: ReadPlan) -> None:
        assert plan.chunks is not None
        self._chunks = plan.chunks
        self.requests: list[tuple[int, ReadRequest]] = []

    def plan(self, index: Index, wanted: Wanted, first_file: int) -> Finish | None:
        """Add the reads of some samples; return what makes these of what was read."""
        made = index.made
        if made is None:
            self._add(index, wanted, first_file)
            return None

        def read(number: int, of_base: Wanted) -> Finish | None:
            before = sum(len(base.sources) for base in made.bases[:number])
            return self.plan(made.bases[number], of_base, first_file + before)

        return made.plan(wanted, read, self._chunks.epoch)

    def _add(self, index: Index, wanted: Wanted, first_file: int) -> None:
        if not wanted.arrays:
            return
        rows = wanted.runs.selection(wanted.destination)
        for number, of_file in by_part(rows, index.first_row):
            path, layouts = index.files.paths[number], index.files[number].layouts
            for name, request in table.plan_reads(layouts, of_file, wanted.arrays, self._chunks):
                complete = request.on_complete
                located = request.calling(partial(_complete, complete, path, name)) if complete else request
                self.requests.append((first_file + number, located))


def _complete(
    complete: Callable[[NDArray[np.uint8]], None], path: str, field: str | None, data: NDArray[np.uint8]
) -> None:
    """Call ``complete(data)``; add the file and the field to its error."""
    try:
        complete(data)
    except DataError as error:
        error.at(path, field)
        raise
