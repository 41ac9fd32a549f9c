"""One window: what its samples need becomes reads, and the bytes become rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache, partial
from os import register_at_fork
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Integers
from matex_data.errors import DataError, PartitionError
from matex_data.index import table
from matex_data.index.cache import ChunkCache
from matex_data.index.model import Index, ReadRequest, RowSelection, call_after_last
from matex_data.index.runs import Runs
from matex_data.io.coalesce import PendingRead, ReadTask, plan_tasks
from matex_data.io.files import Files
from matex_data.machine import out_of_memory, threads
from matex_data.mpi.library import MPI
from matex_data.mpi.processes import is_child_process
from matex_data.pipeline.buffers import BufferPool

Arrays = dict[str, NDArray[Any]]
CALLS = 2  # of a window for each thread that decodes, if there is much to decode
_NOTHING = np.empty(0, np.uint8)


@cache
def decoders() -> ThreadPoolExecutor:
    """The threads of this process that decode; they serve every data set."""
    return ThreadPoolExecutor(threads(), thread_name_prefix="matex-decode")


register_at_fork(after_in_child=decoders.cache_clear)  # the child has none of these threads


class _Refused(Future[Any]):
    """Failed before it began."""


def submit(task: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Return the future of a call by one of the threads that decode.

    It fails with ``OutOfMemory`` where memory runs out, and at once if there is no thread for it: none can be started,
    or the program is ending.
    """
    try:
        return decoders().submit(_called, task, *arguments)
    except RuntimeError as error:
        refused = _Refused()
        failure = _explained(error, "a thread that decodes")
        if failure is error:
            failure = PartitionError(
                "the program of a rank has ended in the middle of a pass over the data",
                remedy="take the same number of batches on every rank",
            )
        failure.__cause__ = error
        refused.set_exception(failure)
        return refused


def _called(task: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return task(*arguments)
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        failure = _explained(error, "samples that are read and decoded")
        if failure is error:
            raise
        raise failure from error


def _explained(error: Exception, what: str) -> Exception:
    """Return ``OutOfMemory`` if ``error`` says that ``what`` found no memory, else the error itself."""
    return out_of_memory(error, None if is_child_process() else MPI.COMM_WORLD.rank, what) or error


@dataclass
class Plan:
    """Reads of one window.

    Parameters
    ----------
    calls : by file number.
    at_once : what needs no reading.
    memory : where the bytes go; it has to live until they are there.
    chunks : where other windows wait for what is decoded here.
    pool : scratch memory for bytes that have to be decoded.
    """

    calls: dict[int, list[ReadTask]] = field(default_factory=dict)
    at_once: list[Callable[[], None]] = field(default_factory=list)
    memory: list[NDArray[Any]] = field(default_factory=list)
    chunks: ChunkCache | None = None
    pool: BufferPool = field(default_factory=BufferPool)

    def counts(self, files: int) -> Integers:
        """int64[files]: how many collective calls each file needs."""
        counts = np.zeros(files, np.int64)
        for number, needed in self.calls.items():
            counts[number] = sum(call.count for call in needed)
        return counts

    def scratch(self, call: ReadTask) -> NDArray[np.uint8]:
        """Memory for what the call reads to be decoded; none where it reads straight to the windows."""
        return self.pool.bytes(call.scratch) if call.scratch else _NOTHING

    def abandon(self, error: BaseException) -> None:
        """Fail the chunks that other windows wait for."""
        if self.chunks is not None:
            self.chunks.fail_pending(error)


def plan(index: Index, runs: Runs, destination: Integers, arrays: Arrays, chunks: ChunkCache, pool: BufferPool) -> Plan:
    """What to read so that ``arrays[field][destination[i]]`` becomes the i-th number of ``runs``, for every field.

    Parameters
    ----------
    index : of the data set.
    runs : samples in ascending order, numbered over all files.
    destination : int64[runs.total].
    arrays : receive the rows.
    chunks : decoded chunks that are still wanted.
    pool : memory for bytes that have to be decoded.
    """
    requests = [
        (number, name, request)
        for number, rows in _by_file(index, runs, destination)
        for name, request in table.plan_reads(index.files[number].layouts, rows, arrays, chunks)
    ]
    if index.post_process is not None:
        after = call_after_last(
            [request for _, _, request in requests], partial(index.post_process, arrays, destination)
        )
        requests = [(number, name, last) for (number, name, _), last in zip(requests, after, strict=True)]
    wanted: dict[int, list[PendingRead]] = {}
    result = Plan(memory=list(arrays.values()), chunks=chunks, pool=pool)
    for number, name, request in requests:
        done = partial(_finish, request.on_complete, index.files[number].path, name) if request.on_complete else None
        reading = PendingRead(request.offset, request.nbytes, _address(request), done)
        if reading.total:
            wanted.setdefault(number, []).append(reading)
        elif done is not None:
            result.at_once.append(partial(done, _NOTHING))
    result.calls = {number: plan_tasks(of_file, CALLS * threads()) for number, of_file in wanted.items()}
    return result


def _address(request: ReadRequest) -> Integers | None:
    if request.target is None:
        return None
    at = np.cumsum(request.nbytes) - request.nbytes if request.at is None else request.at
    address: Integers = request.target.ctypes.data + at
    return address


def execute(plan: Plan, files: Files, agreed: Integers) -> list[Future[None]]:
    """Read, and make rows of what was read. *Collective* in collective mode.

    Several threads read and decode one call each. Where the ranks read together, or there is one thread only, the
    calls are made here and now, and that thread decodes meanwhile. What needs no reading comes last: it may wait for
    chunks that were wanted before, and the threads begin everything in this order.

    Parameters
    ----------
    plan : of this rank.
    files : to read from.
    agreed : int64[files], the largest number of collective calls that any rank needs of each file.

    Returns
    -------
    What the threads do; each future raises ``DataError`` where it fails.

    Raises
    ------
    DataError : a file cannot be read, or there is no memory. Every call has been entered all the same.
    """
    started: list[Future[None]] = []
    if reads_aside(files):
        for number, calls in plan.calls.items():
            started += [submit(_read_and_finish, files, number, call, plan) for call in calls]
        return _with_at_once(plan, started)
    failure: Exception | None = None
    for number in np.flatnonzero(agreed).tolist():
        left = int(agreed[number])
        for call in plan.calls.get(number, []):
            try:
                scratch = plan.scratch(call)
            except Exception as error:  # the other ranks count on its reads: they are entered below
                failure = failure or _explained(error, f"{call.scratch} bytes that are read to be decoded")
                continue
            left -= call.count
            unread = _read(files, number, call, scratch)
            if unread is None:
                started.append(submit(call.complete, scratch))
            failure = failure or unread
        files.read_nothing(number, left)
    if failure is not None:
        plan.abandon(failure)
        for future in started:
            future.cancel()
        wait(started)
        raise failure
    return _with_at_once(plan, started)


def _with_at_once(plan: Plan, started: list[Future[None]]) -> list[Future[None]]:
    """Begin what needs no reading; chunks for whose decoding there is no thread fail."""
    refused = next((future.exception() for future in started if isinstance(future, _Refused)), None)
    if refused is not None:
        plan.abandon(refused)
    return started + [submit(done) for done in plan.at_once]


def reads_aside(files: Files) -> bool:
    """Whether the threads that decode also read; else whoever wants the data reads by itself."""
    return not files.collective and threads() > 1


def _read(files: Files, number: int, call: ReadTask, scratch: NDArray[np.uint8]) -> Exception | None:
    """Return what went wrong first, if anything. *Collective* in collective mode: every read is entered."""
    failure: Exception | None = None
    for ranges in call.reads:
        try:
            files.read(number, ranges.shifted(scratch.ctypes.data) if call.scratch else ranges)
        except Exception as error:
            failure = failure or _explained(error, f"{call.nbytes} bytes that are read")
    return failure


def _read_and_finish(files: Files, number: int, call: ReadTask, plan: Plan) -> None:
    """The memory of the plan has to live as long as this writes to it. Scratch memory is that which was free last."""
    try:
        scratch = plan.scratch(call)
        failure = _read(files, number, call, scratch)
        if failure is not None:
            raise failure
    except BaseException as error:
        plan.abandon(error)
        raise
    call.complete(scratch)


def _by_file(index: Index, runs: Runs, destination: Integers) -> Iterator[tuple[int, RowSelection]]:
    """The samples of each file that has some, numbered within the file."""
    if not len(runs.start):
        return
    stop = runs.start + runs.count
    low, high = np.searchsorted(index.first_row, [runs.start[0], stop[-1] - 1], side="right") - 1
    for number in range(int(low), int(high) + 1):
        begin, end = index.first_row[number], index.first_row[number + 1]
        some = slice(np.searchsorted(stop, begin, side="right"), np.searchsorted(runs.start, end, side="left"))
        inside = np.maximum(runs.start[some], begin), np.minimum(stop[some], end)
        total = int((inside[1] - inside[0]).sum())
        if total:
            first = int(runs.first[some.start] + inside[0][0] - runs.start[some.start])
            yield number, RowSelection(inside[0] - begin, inside[1] - begin, destination[first : first + total])


def _finish(finish: Callable[[NDArray[np.uint8]], None], path: str, field: str | None, data: NDArray[np.uint8]) -> None:
    try:
        finish(data)
    except DataError as error:
        raise error.at(path, field) from error
