"""Execution of a read plan: read the bytes of each task, then decode them in the pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial

import numpy as np
from numpy.typing import NDArray

from matex_data.errors import DataError, DecodeError
from matex_data.index.cache import Chunk
from matex_data.index.layout import Countdown
from matex_data.io.coalesce import ReadTask, call_all, divide_tasks
from matex_data.io.collective import CollectiveFiles
from matex_data.io.files import Files
from matex_data.locks import shielded
from matex_data.machine import tasks_of_window
from matex_data.reading.plan import NO_BYTES, ReadPlan
from matex_data.reading.pool import Rejected, explained, first_error, is_worker, pass_on, readers, submit

GROUP_BYTES = 256 << 10  # of the tasks of a group, at most, unless one has more
FileTask = tuple[int, ReadTask]  # with the number of its file


def execute(plan: ReadPlan, files: Files) -> list[Future[None]]:
    """Read, and schedule the decoding of what was read. *Collective* in collective mode.

    In independent mode threads of their own read, and the pool decodes the bytes of a task once they are there; what is
    in the page cache is read by the threads that decode it. In collective mode the calling thread reads, and the pool
    decodes meanwhile. Completions that need a chunk that another window decodes are scheduled when it is done: no
    thread waits for it.

    Parameters
    ----------
    plan : reads of this rank.

    Returns
    -------
    Futures of the scheduled functions. Each raises ``DataError`` if its function fails.

    Raises
    ------
    DataError : a file cannot be read, or memory runs out. All collective reads are made nevertheless.
    """
    try:
        if files.collective is not None:
            futures = _read_collectively(plan, files.collective)
        else:
            files.check(plan.unread)
            futures = _schedule_tasks(plan, files)
        futures = _with_completions(plan, futures)
    except BaseException:
        plan.give_up()
        raise
    left = Countdown(len(futures), plan.give_up)  # what has failed to decode
    for future in futures:
        future.add_done_callback(lambda _: left.complete(None, NO_BYTES))
    return futures


def _read_collectively(plan: ReadPlan, files: CollectiveFiles) -> list[Future[None]]:
    """Make the reads of this rank among those of the others, and schedule the decoding of each. *Collective*."""
    decoding: list[Future[None]] = []

    def decode(task: ReadTask, scratch: NDArray[np.uint8]) -> None:
        decoding.append(submit(_complete, plan, task.complete, scratch))

    failure = files.read(plan.tasks, plan.allocate, decode)
    if failure is not None:
        for future in decoding:
            future.cancel()
        wait(decoding)
        raise explained(failure, "the bytes that are read")
    return decoding


def run(plan: ReadPlan, files: Files) -> Exception | None:
    """Read and decode, and return the first error once nothing is under way. *Collective* in collective mode."""
    return shielded(_run, plan, files)


def _run(plan: ReadPlan, files: Files) -> Exception | None:
    try:
        if not is_worker():
            return first_error(execute(plan, files))
        _run_here(plan, files)
    except DataError as error:
        return error
    return None


def _run_here(plan: ReadPlan, files: Files) -> None:
    """Read and decode in this thread, a worker of the pool, in which a function of ``map`` takes samples."""
    files.check(plan.unread)
    for number, tasks in plan.tasks.items():
        for task in tasks:
            _read_and_decode(plan, files, (number, task))
    for fetch, completion in plan.fetched:
        fetch()
        completion()
    for _, completion in plan.completions:  # the chunks that they need are decoded: nobody shares the cache of the plan
        completion()


def _with_completions(plan: ReadPlan, submitted: list[Future[None]]) -> list[Future[None]]:
    """Schedule the completions that need no bytes. Give up the plan's chunks if the pool has rejected a read."""
    if any(isinstance(future, Rejected) for future in submitted):
        plan.give_up()
    fetched = [_Read(plan, fetch, completion).schedule() for fetch, completion in plan.fetched]
    return submitted + fetched + [_schedule_after(chunk, plan, action) for chunk, action in plan.completions]


def _schedule_after(chunk: Chunk | None, plan: ReadPlan, action: Callable[[], None]) -> Future[None]:
    """Schedule a completion, once the chunk that it needs is done; return its future."""
    if chunk is None or chunk.done:
        return submit(_complete, plan, action)
    completed: Future[None] = Future()
    chunk.when_done(lambda: pass_on(submit(_complete, plan, action), completed))
    return completed


def _read(files: Files, number: int, task: ReadTask, scratch: NDArray[np.uint8]) -> None:
    """Make all reads of a task."""
    try:
        files.read(number, task.into(scratch))
    except Exception as error:
        raise explained(error, f"{task.total} bytes that are read") from error.__cause__


def _fetch(plan: ReadPlan, fetch: Callable[[], None]) -> None:
    """Read. If that fails, others read the chunks of the plan that are not decoded."""
    try:
        fetch()
    except BaseException:
        plan.give_up()
        raise


def _complete(plan: ReadPlan, action: Callable[..., None], *arguments: NDArray[np.uint8]) -> None:
    """Call a function of a plan. If it fails but for damaged data, others read the chunks that are not decoded."""
    try:
        action(*arguments)
    except DecodeError:  # other functions of the plan go on to decode chunks
        raise
    except BaseException:
        plan.give_up()
        raise


class _Read:
    """Bytes on their way from the storage to the pool that decodes.

    Parameters
    ----------
    plan : of the window; it keeps the destination arrays alive.
    fetch : reads.
    complete : decodes what was read.
    """

    def __init__(self, plan: ReadPlan, fetch: Callable[[], None], complete: Callable[[], None]) -> None:
        self.plan, self.fetch, self.complete = plan, fetch, complete
        self._pool = readers()
        self._ended: Future[None] = Future()

    @classmethod
    def of_tasks(cls, plan: ReadPlan, files: Files, tasks: Sequence[FileTask]) -> _Read:
        """Return the read of tasks, one after the other."""
        memory: deque[NDArray[np.uint8]] = deque()

        def fetch() -> None:
            for number, task in tasks:
                memory.append(plan.allocate(task))
                _read(files, number, task, memory[-1])

        def complete() -> None:  # the memory of a task is free once the task is complete
            call_all(partial(task.complete, memory.popleft()) for _, task in tasks)

        return cls(plan, fetch, complete)

    def schedule(self) -> Future[None]:
        """Schedule the read in a thread of the storage, and return the future of its decoding."""
        self._pool.begin(self._start)
        return self._ended

    def _start(self) -> bool:
        started = submit(_fetch, self.plan, self.fetch, pool=self._pool)
        if isinstance(started, Rejected):
            pass_on(started, self._ended)
            return False
        started.add_done_callback(self._decode)
        return True

    def _decode(self, fetched: Future[None]) -> None:
        """Schedule the decoding of what was read; in the thread of the storage."""
        decoded = submit(_complete, self.plan, self.complete) if fetched.exception() is None else fetched
        decoded.add_done_callback(lambda _: self._pool.end())
        pass_on(decoded, self._ended)


def _schedule_tasks(plan: ReadPlan, files: Files) -> list[Future[None]]:
    """Schedule the tasks of all files: with the threads of the storage, unless they would not wait for it.

    What is in the page cache is copied by as many threads as there are cores, in few tasks. More of them wake each
    other, and displace each other's memory from the cache of the processor: contiguous rows took 1.4 times as long.
    """
    workers = tasks_of_window()
    futures: list[Future[None]] = []
    waiting: list[FileTask] = []
    for number, tasks in plan.tasks.items():
        if files.are_cached(number, tasks):
            futures += [submit(_read_and_decode, plan, files, (number, task)) for task in tasks]
        else:
            waiting += [(number, task) for task in divide_tasks(tasks, workers)]
    for group in _groups(waiting, max(1, len(waiting) // (8 * workers))):
        if any(task.callbacks for _, task in group):
            futures.append(_Read.of_tasks(plan, files, group).schedule())
        else:
            futures.append(submit(_read_directly, plan, files, group, pool=readers()))
    return futures


def _groups(tasks: Sequence[FileTask], most: int) -> Iterator[list[FileTask]]:
    """Yield tasks in groups, each of which one thread reads and one decodes: small ones take less time than a future.
    ``most``: tasks of a group.
    """
    group: list[FileTask] = []
    size = 0
    for number, task in tasks:
        size += task.total
        if group and (len(group) == most or size > GROUP_BYTES):
            yield group
            group, size = [], task.total
        group.append((number, task))
    if group:
        yield group


def _read_and_decode(plan: ReadPlan, files: Files, task: FileTask) -> None:
    """Make the reads of a task, and decode at once what they brought into the cache of the processor."""
    read = _Read.of_tasks(plan, files, [task])
    _fetch(plan, read.fetch)
    _complete(plan, read.complete)


def _read_directly(plan: ReadPlan, files: Files, tasks: Sequence[FileTask]) -> None:
    """Make the reads of tasks to final destinations. The argument ``plan`` keeps these arrays alive meanwhile."""
    for number, task in tasks:
        _fetch(plan, partial(_read, files, number, task, NO_BYTES))
