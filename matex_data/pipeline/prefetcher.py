"""The background reader: one pass over the data, window after window, ahead of whoever consumes it.

Every window is agreed on twice: before it is read, and before it is consumed. So a chunk that does not decode on
one rank stops all of them at the same batch, and no rank waits for another that has left. While the ranks agree they
read: what they say before they read a window is how it went so far, and what the window after that one will need.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from threading import Condition, Thread
from typing import Protocol

import numpy as np

from matex_data._types import Integers
from matex_data.errors import PartitionError
from matex_data.mpi import communicator, deadlines
from matex_data.mpi.abort import abort_job
from matex_data.mpi.communicator import PendingMaximum
from matex_data.mpi.library import MPI
from matex_data.mpi.processes import is_child_process
from matex_data.mpi.status import Status, split_result
from matex_data.pipeline.execute import reads_aside
from matex_data.pipeline.window import LoadedWindow, PendingWindow, ReadContext

AHEAD = 1  # windows that wait for the consumer
END_TIME = 5.0  # seconds that a pass has to end once all ranks have come to the end of their programs


class Passage(Protocol):
    """Windows of one pass: ``Course`` reads them, ``Exchanges`` gets them from the memory of the ranks."""

    supply: ReadContext
    number: int
    begins: range

    def __len__(self) -> int:
        """Return how many windows there are."""

    def plans(self) -> Iterator[Future[PendingWindow]]:
        """Yield the windows; the next one is planned once it is asked for."""

    def begin_ahead(self) -> None:
        """Begin the first window."""

    def next_epoch(self) -> Passage:
        """Return the windows of the whole next epoch."""


class Prefetcher:
    """One rank's share of an epoch, from a window on.

    Parameters
    ----------
    course : the windows.
    again : whether another pass is likely to follow: its first window is begun as this pass ends.

    Attributes
    ----------
    following : the course of the pass that has been begun ahead, if any, once this one has ended.
    """

    def __init__(self, course: Passage, again: bool = False) -> None:
        self._supply = course.supply
        self._course = course
        self._again = again
        self.following: Passage | None = None
        self._ready: deque[tuple[LoadedWindow, PendingMaximum]] = deque()
        self._change = Condition()
        self._stopped = self._ended = False
        self._left = False  # another rank has left before the end
        self._error: BaseException | None = None
        self._process = os.getpid()
        self._thread = Thread(target=self._run, name="matex-read", daemon=True)
        _ALIVE.add(self)
        self._supply.channel.closers.add(self)
        try:
            self._thread.start()
        except RuntimeError as failure:  # no memory for a thread: the other ranks wait for what this one says first
            self._ended = True
            _ALIVE.discard(self)
            self._supply.channel.closers.discard(self)
            self._needs(self._said(failure, None), failure)
            raise self._error or failure from failure

    def __iter__(self) -> Iterator[LoadedWindow]:
        """Windows in order. Raises what any rank has failed with."""
        taken = 0
        while taken < len(self._course):
            yield self._next()
            taken += 1
        self._await_end()

    def close(self) -> None:
        """Read no more. Returns at once; the thread ends when all ranks know."""
        if self._process != os.getpid():
            return
        with self._change:
            self._stopped = True
            self._ready.clear()
            self._change.notify_all()

    def join(self) -> None:
        """Wait for the thread's end, which comes when all ranks have left this pass.

        Raises
        ------
        PartitionError : a rank does not leave it.
        """
        if self._process == os.getpid():
            self._supply.channel.comm.wait_until(self._ended_within)
            self._thread.join()

    def _ended_within(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _next(self) -> LoadedWindow:
        """The next window, once all ranks have theirs."""
        if self._process != os.getpid():
            raise _forked()
        with self._supply.profile.timed("waiting"):
            self._wait(lambda: bool(self._ready) or self._ended)
            with self._change:
                window, round_ = self._ready.popleft() if self._ready else (None, None)
                self._change.notify_all()
            went_well = round_ is not None and split_result(round_.wait())[0] == Status.CONTINUE
        if window is None or not went_well:
            self._await_end()
            raise _left() if self._left else _superseded()
        return window

    def _await_end(self) -> None:
        self._wait(lambda: self._ended)
        if self._error is not None:
            raise self._error

    def _wait(self, happened: Callable[[], bool]) -> None:
        def within(seconds: float) -> bool:
            with self._change:
                return self._change.wait_for(happened, seconds)

        if not within(0.0):
            self._supply.channel.comm.wait_until(within)

    def _run(self) -> None:
        try:
            self._read_all()
        except BaseException as error:  # nobody else would ever hear of it: this is a thread
            self._error = self._error or error
        finally:
            with self._change:
                self._ended = True
                self._change.notify_all()
            _ALIVE.discard(self)

    def _read_all(self) -> None:
        """While one window is being decoded the next is read; what is handed out has been decoded."""
        supply, filling, plans = self._supply, deque[PendingWindow](), self._course.plans()
        upcoming, failure = _planned(next(plans, None))
        failure = failure or supply.changed()
        coming = next(plans, None)  # one after the other: a window may wait for chunks of those before it
        needs = self._needs(self._said(failure, upcoming), failure)
        wait_for = 1 if self._reads_itself() else 2
        while needs is not None and (upcoming or filling):
            ready: PendingWindow | None = None
            following, failure = (None, failure) if failure else _planned(coming)
            coming = next(plans, None)
            try:
                if failure is None and len(filling) >= (wait_for if upcoming else 1):
                    filling[0].finish(supply.profile)
                    ready, wait_for = filling.popleft(), 2
            except Exception as error:  # as below
                failure = error
            round_ = self._said(failure, following)
            if ready is not None:
                self._publish(ready.loaded, round_)
            if upcoming is not None:
                failure = self._start(upcoming, needs, failure)
                filling.append(upcoming)
            elif filling and self._again:
                self._begin_next_pass()
            upcoming, needs = following, self._needs(round_, failure)

    def _reads_itself(self) -> bool:
        """Whether this thread has to read; then the first window is handed out before it reads the second one.

        Several ranks have to do so alike, even if they have different numbers of threads.
        """
        files = self._supply.channel.files
        return files.collective or (self._supply.channel.comm.size == 1 and not reads_aside(files))

    def _begin_next_pass(self) -> None:
        """Start the first window of the next epoch, so that the threads go on decoding over the end of an epoch."""
        self._wait_for_room()
        if not self._stopped:
            self.following = self._course.next_epoch()
            self.following.begin_ahead()

    def _start(self, upcoming: PendingWindow, needs: Integers, failure: Exception | None) -> Exception | None:
        """Read; what has gone wrong, if anything. *Collective* in collective mode."""
        self._wait_for_room()
        files = self._supply.channel.files
        try:
            if failure is not None or self._stopped:
                upcoming.stand_in(files, needs)  # the other ranks count on these calls
            else:
                upcoming.start(files, needs, self._supply.profile)
        except Exception as error:  # as below
            return failure or error
        return failure

    def _said(self, failure: Exception | None, following: PendingWindow | None) -> PendingMaximum:
        """Tell the other ranks how it went, and the calls that each file needs for a window. *Collective*."""
        count = len(self._supply.index.files)
        own = np.zeros(count, np.int64) if following is None else following.counts(count)
        status = Status.FAILED if failure else Status.STOP if self._stopped else Status.CONTINUE
        return self._supply.channel.status_exchange.start(status, own)

    def _needs(self, round_: PendingMaximum, failure: Exception | None) -> Integers | None:
        """What all ranks said together; None if one has failed or left. *Collective*."""
        status, needs = split_result(round_.result())
        if status == Status.FAILED:
            self._error = self._supply.channel.status_exchange.first_error(failure)
        self._left = status == Status.STOP and not self._stopped
        return needs if status == Status.CONTINUE else None

    def _wait_for_room(self) -> None:
        with self._change:
            self._change.wait_for(lambda: len(self._ready) < AHEAD or self._stopped)

    def _publish(self, window: LoadedWindow, round_: PendingMaximum) -> None:
        """Hand it out; it may be consumed once the other ranks have said that theirs went well, too."""
        with self._change:
            if not self._stopped:
                self._ready.append((window, round_))
            self._change.notify_all()


def _planned(planning: Future[PendingWindow] | None) -> tuple[PendingWindow | None, Exception | None]:
    """The window, if there is one, and what went wrong, if anything."""
    try:
        return (planning.result() if planning else None), None
    except Exception as error:  # whatever it is, the other ranks have to know
        return None, error


def _forked() -> PartitionError:
    return PartitionError(
        "this process was forked in the middle of a pass over the data, which has stayed with its parent",
        remedy="begin a pass of its own in the process that iterates: for batch in data.batches(...)",
    )


def _left() -> PartitionError:
    return PartitionError(
        "another rank has left the pass over the data before its end",
        remedy="take the same number of batches on every rank",
    )


def _superseded() -> PartitionError:
    return PartitionError(
        "this pass has ended, because another one over the same batches was begun or it was closed",
        remedy="finish one pass before the next, or ask the data set for batches a second time",
    )


_ALIVE: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End the passes that the program has left, before MPI ends: mpi4py has registered its own handler before."""
    if is_child_process() or MPI.Is_finalized():
        return
    for stream in list(_ALIVE):
        stream.close()
    deadlines.leave()
    if not deadlines.poll(lambda: not communicator.has_pending(), END_TIME) and MPI.COMM_WORLD.size > 1:
        abort_job("the job ends with an error: a rank has begun a pass over data that others have not")
    for stream in list(_ALIVE):
        stream.join()
