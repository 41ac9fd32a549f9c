"""Execution of a read plan: read the bytes of each task, then decode them in the pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Event

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Integers
from matex_data.errors import DataError
from matex_data.io.coalesce import ReadTask, divide_tasks
from matex_data.io.files import Files
from matex_data.locks import Lock
from matex_data.machine import tasks_of_window
from matex_data.reading.plan import NO_BYTES, ReadPlan
from matex_data.reading.pool import Rejected, explained, readers, submit

_IN_ORDER = Lock()


def execute(plan: ReadPlan, files: Files, agreed: Integers) -> list[Future[None]]:
    """Read, and schedule the decoding of what was read. *Collective* in collective mode.

    In independent mode threads of their own read, and the decoding of a task waits for its bytes; what is in the page
    cache is read by the threads that decode it. In collective mode the calling thread reads. The pool decodes
    meanwhile, in the order of the tasks. Completions without reads are scheduled last: they may wait for chunks that
    earlier windows decode.

    Parameters
    ----------
    plan : reads of this rank.
    files : open files.
    agreed : int64[files], the number of collective reads of each file: the maximum over the ranks; empty without such
        reads.

    Returns
    -------
    Futures of the scheduled functions. Each raises ``DataError`` if its function fails.

    Raises
    ------
    DataError : a file cannot be read, or memory runs out. All agreed collective reads are made nevertheless.
    """
    try:
        files.check(plan.unread)
    except DataError as error:
        plan.abandon(error)
        raise
    if not files.collective:
        scheduled = [_schedule_tasks(files, number, tasks, plan) for number, tasks in plan.tasks.items()]
        return _with_completions(plan, [future for of_file in scheduled for future in of_file])
    decoding: list[Future[None]] = []
    failure: Exception | None = None
    for number in np.flatnonzero(agreed).tolist():
        remaining = int(agreed[number])
        for task in plan.tasks.get(number, []):
            try:
                scratch = plan.allocate(task)
            except Exception as error:  # the other ranks need these reads: files.read_nothing makes them
                failure = failure or explained(error, f"{task.scratch} bytes that are read to be decoded")
                continue
            remaining -= task.count
            read_error = _read(files, number, task, scratch)
            if read_error is None:
                decoding.append(submit(_complete, plan, task.complete, scratch))
            failure = failure or read_error
        files.read_nothing(number, remaining)
    if failure is not None:
        plan.abandon(failure)
        for future in decoding:
            future.cancel()
        wait(decoding)
        raise failure
    return _with_completions(plan, decoding)


def run(plan: ReadPlan, files: Files, agreed: Integers) -> Exception | None:
    """Read and decode, and return the first error once nothing is under way. *Collective* in collective mode."""
    try:
        futures = execute(plan, files, agreed)
    except DataError as error:
        return error
    return first_error(futures)


def first_error(futures: list[Future[None]]) -> Exception | None:
    """Wait for all futures, and return the first error."""
    wait(futures)
    return next((e for e in (future.exception() for future in futures) if isinstance(e, Exception)), None)


def _with_completions(plan: ReadPlan, submitted: list[Future[None]]) -> list[Future[None]]:
    """Schedule the completions that need no bytes. Fail the plan's chunks if the pool has rejected a read."""
    rejection = next((future.exception() for future in submitted if isinstance(future, Rejected)), None)
    if rejection is not None:
        plan.abandon(rejection)
    fetched = [_schedule(_Fetch(plan, fetch, completion)) for fetch, completion in plan.fetched]
    return submitted + fetched + [submit(_complete, plan, completion) for completion in plan.completions]


def _read(files: Files, number: int, task: ReadTask, scratch: NDArray[np.uint8]) -> Exception | None:
    """Make all reads of a task and return the error. *Collective* in collective mode."""
    try:
        files.read(number, task.into(scratch))
    except Exception as error:
        return explained(error, f"{task.total} bytes that are read")
    return None


def _complete(plan: ReadPlan, action: Callable[..., None], *arguments: NDArray[np.uint8]) -> None:
    """Call a function of a plan. If memory runs out, fail the chunks of the plan: others would wait for them for ever.

    A chunk that does not decode fails by itself.
    """
    try:
        action(*arguments)
    except DataError:
        raise
    except BaseException as error:
        plan.abandon(error)
        raise


class _Read(ABC):
    """Bytes on their way from the storage to the pool that decodes.

    The thread that reads them waits until they are decoded, so that no more bytes wait in memory than those of a task
    for each of these threads. They begin in the order in which they were scheduled: the one to be decoded next is never
    kept waiting by a later one.

    Parameters
    ----------
    plan : of the window; it keeps the destination arrays alive.
    """

    def __init__(self, plan: ReadPlan) -> None:
        self.plan = plan
        self.arrived: Future[None] = Future()
        self.decoded = Event()

    @abstractmethod
    def fetch(self) -> None:
        """Read."""

    @abstractmethod
    def complete(self) -> None:
        """Decode what was read."""

    def run(self) -> None:
        """Read, and wait until the bytes are decoded; in a thread of the storage."""
        try:
            self.fetch()
        except BaseException as error:
            self.arrived.set_exception(error)
        else:
            self.arrived.set_result(None)
        self.decoded.wait()

    def decode(self) -> None:
        """Decode once the bytes are there; raise the error of reading or decoding them."""
        try:
            self.arrived.result()
        except BaseException as error:
            self.plan.abandon(error)
            raise
        _complete(self.plan, self.complete)


class _TaskRead(_Read):
    """Read of a task."""

    def __init__(self, plan: ReadPlan, files: Files, number: int, task: ReadTask) -> None:
        super().__init__(plan)
        self._files, self._number, self._task = files, number, task
        self._scratch = NO_BYTES

    def fetch(self) -> None:
        self._scratch = self.plan.allocate(self._task)
        error = _read(self._files, self._number, self._task, self._scratch)
        if error is not None:
            raise error

    def complete(self) -> None:
        scratch, self._scratch = self._scratch, NO_BYTES  # the memory is free once the task is complete
        self._task.complete(scratch)


class _Fetch(_Read):
    """Read by a function of a layout."""

    def __init__(self, plan: ReadPlan, fetch: Callable[[], None], completion: Callable[[], None]) -> None:
        super().__init__(plan)
        self._fetch, self._completion = fetch, completion

    def fetch(self) -> None:
        self._fetch()

    def complete(self) -> None:
        self._completion()


def _schedule_tasks(files: Files, number: int, tasks: list[ReadTask], plan: ReadPlan) -> list[Future[None]]:
    """Schedule the tasks of a file: with the threads of the storage, unless they would not wait for it.

    What is in the page cache is copied by as many threads as there are cores, in few tasks. More of them wake each
    other, and displace each other's memory from the cache of the processor: contiguous rows took 1.4 times as long.
    """
    if files.are_cached(number, tasks):
        return [submit(_read_and_decode, files, number, task, plan) for task in tasks]
    return [_schedule_task(files, number, task, plan) for task in divide_tasks(tasks, tasks_of_window())]


def _schedule_task(files: Files, number: int, task: ReadTask, plan: ReadPlan) -> Future[None]:
    if task.callbacks:
        return _schedule(_TaskRead(plan, files, number, task))
    return submit(_read_directly, files, number, task, plan, pool=readers())


def _read_and_decode(files: Files, number: int, task: ReadTask, plan: ReadPlan) -> None:
    """Make the reads of a task, and decode at once what they brought into the cache of the processor."""
    read = _TaskRead(plan, files, number, task)
    try:
        read.fetch()
    except BaseException as error:
        plan.abandon(error)
        raise
    _complete(plan, read.complete)


def _read_directly(files: Files, number: int, task: ReadTask, plan: ReadPlan) -> None:
    """Make the reads of a task to final destinations. The argument ``plan`` keeps these arrays alive meanwhile."""
    error = _read(files, number, task, NO_BYTES)
    if error is not None:
        plan.abandon(error)
        raise error


def _schedule(read: _Read) -> Future[None]:
    """Schedule a read in a thread of the storage, and its decoding; return the future of the latter.

    Both pools get all reads in one order. Otherwise the threads that decode might wait for bytes whose reading waits
    for a thread that decodes.
    """
    with _IN_ORDER:
        started = submit(read.run, pool=readers())
        decoding = submit(read.decode)
    if isinstance(started, Rejected):
        error = started.exception()
        assert error is not None
        read.arrived.set_exception(error)
    decoding.add_done_callback(lambda _: read.decoded.set())  # also if it is cancelled
    return decoding
