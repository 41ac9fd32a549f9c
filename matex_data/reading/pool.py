"""Pools of threads that read, and that plan and decode. They serve all data sets of the process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from os import register_at_fork
from threading import local
from typing import Any

from matex_data.errors import PartitionError
from matex_data.index.cache import GivenUp
from matex_data.locks import Lock
from matex_data.machine import launched_rank, out_of_memory, reading_threads, threads
from matex_data.mpi.processes import is_child_process


class StoragePool(ThreadPoolExecutor):
    """Threads that wait for the storage, and the reads whose bytes are decoded by others.

    As many of these reads are under way as there are threads, each until its bytes are decoded: no more bytes wait in
    memory. The others begin in their order. No thread waits for them.
    """

    def __init__(self) -> None:
        self._allowed = reading_threads()
        super().__init__(self._allowed, thread_name_prefix="matex-storage")
        self._reads: deque[Callable[[], bool]] = deque()
        self._changing = Lock()

    def begin(self, start: Callable[[], bool]) -> None:
        """Start a read, at once or after those before it; ``start`` returns False if it has failed already."""
        with self._changing:
            self._reads.append(start)
        self._start()

    def end(self) -> None:
        """Start the next read in place of one whose bytes are decoded."""
        with self._changing:
            self._allowed += 1
        self._start()

    def _start(self) -> None:
        """Start as many reads as are allowed."""
        while True:
            with self._changing:
                if not self._allowed or not self._reads:
                    return
                self._allowed -= 1
                start = self._reads.popleft()
            if not start():
                with self._changing:
                    self._allowed += 1


@cache
def decoders() -> ThreadPoolExecutor:
    """Return the threads that use the cores."""
    return ThreadPoolExecutor(threads(), thread_name_prefix="matex-decode", initializer=_begin_worker)


@cache
def readers() -> StoragePool:
    """Return the threads that wait for the storage."""
    return StoragePool()


def is_worker() -> bool:
    """Return whether this thread is one that decodes: it must not wait for the others."""
    return hasattr(_OF_THREAD, "decodes")


def _begin_worker() -> None:
    _OF_THREAD.decodes = True


_OF_THREAD = local()


for _pool in (decoders, readers):
    register_at_fork(after_in_child=_pool.cache_clear)  # a forked process has none of these threads


class Rejected(Future[Any]):
    """Future of a task that the pool did not accept."""


def submit(task: Callable[..., Any], *arguments: Any, pool: ThreadPoolExecutor | None = None) -> Future[Any]:
    """Schedule ``task(*arguments)`` in a pool, by default that of the decoders, and return its future.

    The future fails with ``OutOfMemory`` if the task runs out of memory. It is a ``Rejected`` one, failed already, if
    the pool cannot start a thread (``OutOfMemory``) or has shut down with the interpreter (``PartitionError``).
    """
    try:
        return (pool or decoders()).submit(_run, task, *arguments)
    except RuntimeError as error:
        failure = explained(error, "a thread that decodes")
        if failure is error:
            failure = PartitionError(
                "the program of a rank has ended in the middle of an epoch",
                remedy="take the same number of batches on every rank",
            )
        failure.__cause__ = error
        rejected = Rejected()
        rejected.set_exception(failure)
        return rejected


def pass_on(source: Future[None], target: Future[None]) -> None:
    """Complete a future with the outcome of another one, once it has one."""

    def copy(ended: Future[None]) -> None:  # without ``source``, which would keep itself alive
        error = ended.exception()
        if error is None:
            target.set_result(None)
        else:
            target.set_exception(error)

    source.add_done_callback(copy)


def first_error(futures: Collection[Future[Any]]) -> Exception | None:
    """Wait for all futures, and return the first error; one of a chunk that was given up is the last choice."""
    wait(futures)  # wakes this thread once, not once for each future
    errors = [error for future in futures if (error := future.exception()) is not None]
    first = next((error for error in errors if not isinstance(error, GivenUp)), errors[0] if errors else None)
    if first is not None and not isinstance(first, Exception):
        raise first
    return first


def wait_for_all(futures: Collection[Future[Any]]) -> None:
    """Wait for all futures. Raise the first error."""
    error = first_error(futures)
    if error is not None:
        raise error


def _run(task: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return task(*arguments)
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        failure = explained(error, "samples that are read and decoded")
        if failure is error:
            raise
        raise failure from error


def explained(error: Exception, purpose: str) -> Exception:
    """Return ``OutOfMemory`` if ``error`` means that no memory was left for ``purpose``, else ``error`` itself.

    It asks MPI for nothing: a thread whose caller was interrupted may get here after ``MPI_Finalize``.
    """
    launched = launched_rank()
    rank = launched.rank if launched else 0
    return out_of_memory(error, None if is_child_process() else rank, purpose) or error
