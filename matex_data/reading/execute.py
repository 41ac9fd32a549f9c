"""Execution of a read plan: read the bytes of each task, then decode them in the pool."""

from __future__ import annotations

from concurrent.futures import Future, wait

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Integers
from matex_data.errors import DataError
from matex_data.io.coalesce import ReadTask
from matex_data.io.files import Files
from matex_data.machine import threads
from matex_data.reading.plan import ReadPlan
from matex_data.reading.pool import Rejected, explained, submit


def execute(plan: ReadPlan, files: Files, agreed: Integers) -> list[Future[None]]:
    """Read, and schedule the decoding of what was read. *Collective* in collective mode.

    In independent mode with two threads or more, the pool reads and decodes. Otherwise the calling thread reads, and
    the pool decodes meanwhile. Completions without reads are scheduled last: they may wait for chunks that earlier
    windows decode.

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
    if reads_in_pool(files):
        tasks = [(number, task) for number, of_file in plan.tasks.items() for task in of_file]
        return _with_completions(plan, [submit(_read_and_decode, files, number, task, plan) for number, task in tasks])
    decoding: list[Future[None]] = []
    first_error: Exception | None = None
    for number in np.flatnonzero(agreed).tolist() if files.collective else plan.tasks:
        remaining = int(agreed[number]) if files.collective else 0
        for task in plan.tasks.get(number, []):
            try:
                scratch = plan.allocate(task)
            except Exception as error:  # the other ranks need these reads: files.read_nothing makes them
                first_error = first_error or explained(error, f"{task.scratch} bytes that are read to be decoded")
                continue
            remaining -= task.count
            read_error = _read(files, number, task, scratch)
            if read_error is None:
                decoding.append(submit(task.complete, scratch))
            first_error = first_error or read_error
        files.read_nothing(number, remaining)
    if first_error is not None:
        plan.abandon(first_error)
        for future in decoding:
            future.cancel()
        wait(decoding)
        raise first_error
    return _with_completions(plan, decoding)


def run(plan: ReadPlan, files: Files, agreed: Integers) -> Exception | None:
    """Read and decode, and return the first error once nothing is under way. *Collective* in collective mode."""
    try:
        futures = execute(plan, files, agreed)
    except DataError as error:
        return error
    wait(futures)
    return next((e for e in (future.exception() for future in futures) if isinstance(e, Exception)), None)


def reads_in_pool(files: Files) -> bool:
    """Return whether the threads that decode also read."""
    return not files.collective and threads() > 1


def _with_completions(plan: ReadPlan, submitted: list[Future[None]]) -> list[Future[None]]:
    """Schedule the completions that need no bytes. Fail the plan's chunks if the pool has rejected a read."""
    rejection = next((future.exception() for future in submitted if isinstance(future, Rejected)), None)
    if rejection is not None:
        plan.abandon(rejection)
    return submitted + [submit(completion) for completion in plan.completions]


def _read(files: Files, number: int, task: ReadTask, scratch: NDArray[np.uint8]) -> Exception | None:
    """Make all reads of a task and return the error. *Collective* in collective mode."""
    try:
        files.read(number, task.into(scratch))
    except Exception as error:
        return explained(error, f"{task.total} bytes that are read")
    return None


def _read_and_decode(files: Files, number: int, task: ReadTask, plan: ReadPlan) -> None:
    """Read and decode one task. The argument ``plan`` keeps the destination arrays alive meanwhile."""
    try:
        scratch = plan.allocate(task)
        error = _read(files, number, task, scratch)
        if error is not None:
            raise error
    except BaseException as failure:
        plan.abandon(failure)
        raise
    task.complete(scratch)
