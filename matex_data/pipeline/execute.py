"""Execution of a window's plan: read each call, then decode its bytes in the pool."""

from __future__ import annotations

from concurrent.futures import Future, wait

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Integers
from matex_data.io.coalesce import ReadTask
from matex_data.io.files import Files
from matex_data.machine import threads
from matex_data.pipeline.plan import ReadPlan
from matex_data.pipeline.pool import Rejected, explained, submit


def execute(plan: ReadPlan, files: Files, agreed: Integers) -> list[Future[None]]:
    """Read, and schedule the decoding of what was read. *Collective* in collective mode.

    In independent mode with two threads or more, the pool reads and decodes: one task for each call. Otherwise the
    calling thread reads, and the pool decodes meanwhile. Tasks without reads come last in the order of the plan: they
    may wait for chunks that earlier windows decode.

    Parameters
    ----------
    plan : reads of this rank.
    files : open files.
    agreed : int64[files], the maximum over the ranks of the collective calls on each file.

    Returns
    -------
    Futures of the tasks. Each raises ``DataError`` where its task fails.

    Raises
    ------
    DataError : a file cannot be read, or memory runs out. All agreed collective calls are made nevertheless.
    """
    if reads_in_pool(files):
        calls = [(number, call) for number, of_file in plan.calls.items() for call in of_file]
        return _with_tasks(plan, [submit(_read_and_decode, files, number, call, plan) for number, call in calls])
    decoding: list[Future[None]] = []
    first_error: Exception | None = None
    for number in np.flatnonzero(agreed).tolist():
        remaining = int(agreed[number])
        for call in plan.calls.get(number, []):
            try:
                scratch = plan.allocate(call)
            except Exception as error:  # the other ranks need these reads: files.read_nothing makes them
                first_error = first_error or explained(error, f"{call.scratch} bytes that are read to be decoded")
                continue
            remaining -= call.count
            read_error = _read(files, number, call, scratch)
            if read_error is None:
                decoding.append(submit(call.complete, scratch))
            first_error = first_error or read_error
        files.read_nothing(number, remaining)
    if first_error is not None:
        plan.abandon(first_error)
        for future in decoding:
            future.cancel()
        wait(decoding)
        raise first_error
    return _with_tasks(plan, decoding)


def reads_in_pool(files: Files) -> bool:
    """Return whether the threads that decode also read."""
    return not files.collective and threads() > 1


def _with_tasks(plan: ReadPlan, submitted: list[Future[None]]) -> list[Future[None]]:
    """Submit the tasks that need no bytes; fail the plan's chunks if the pool rejected a read."""
    rejection = next((future.exception() for future in submitted if isinstance(future, Rejected)), None)
    if rejection is not None:
        plan.abandon(rejection)
    return submitted + [submit(task) for task in plan.tasks]


def _read(files: Files, number: int, call: ReadTask, scratch: NDArray[np.uint8]) -> Exception | None:
    """Make all reads of a call and return the first error. *Collective* in collective mode."""
    first_error: Exception | None = None
    for ranges in call.reads:
        try:
            files.read(number, ranges.shifted(scratch.ctypes.data) if call.scratch else ranges)
        except Exception as error:
            first_error = first_error or explained(error, f"{call.nbytes} bytes that are read")
    return first_error


def _read_and_decode(files: Files, number: int, call: ReadTask, plan: ReadPlan) -> None:
    """Read and decode one call. The argument ``plan`` keeps the destination arrays alive meanwhile."""
    try:
        scratch = plan.allocate(call)
        error = _read(files, number, call, scratch)
        if error is not None:
            raise error
    except BaseException as failure:
        plan.abandon(failure)
        raise
    call.complete(scratch)
