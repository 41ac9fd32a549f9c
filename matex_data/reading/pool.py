"""Pools of threads that read, and that plan and decode. They serve all data sets of the process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from os import register_at_fork
from typing import Any, TypeVar

from matex_data.errors import PartitionError
from matex_data.machine import out_of_memory, reading_threads, threads
from matex_data.mpi.library import MPI
from matex_data.mpi.processes import is_child_process

T = TypeVar("T")


@cache
def decoders() -> ThreadPoolExecutor:
    """Return the threads that use the cores."""
    return ThreadPoolExecutor(threads(), thread_name_prefix="matex-decode")


@cache
def readers() -> ThreadPoolExecutor:
    """Return the threads that wait for the storage."""
    return ThreadPoolExecutor(reading_threads(), thread_name_prefix="matex-storage")


@cache
def joiner() -> ThreadPoolExecutor:
    """Return the thread that joins samples for the consumer, who must not wait for what is decoded ahead."""
    return ThreadPoolExecutor(1, thread_name_prefix="matex-join")


for _pool in (decoders, readers, joiner):
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


def wait_for_all(futures: Collection[Future[Any]]) -> None:
    """Wait for all futures. Raise the first error."""
    wait(futures)  # wakes this thread once, not once for each future
    for future in futures:
        future.result()


def one_ahead(functions: Sequence[Callable[[], T]]) -> Iterator[T]:
    """Yield the results of functions, each of which is called while the result of the one before is in use."""
    if len(functions) == 1:
        yield _run(functions[0])
        return
    futures = (submit(function, pool=joiner()) for function in functions)
    pending = next(futures, None)
    while pending is not None:
        following = next(futures, None)
        yield pending.result()
        pending = following


def _run(task: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return task(*arguments)
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        failure = explained(error, "samples that are read and decoded")
        if failure is error:
            raise
        raise failure from error


def explained(error: Exception, purpose: str) -> Exception:
    """Return ``OutOfMemory`` if ``error`` means that no memory was left for ``purpose``, else ``error`` itself."""
    return out_of_memory(error, None if is_child_process() else MPI.COMM_WORLD.rank, purpose) or error
