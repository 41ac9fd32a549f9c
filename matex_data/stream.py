"""The background reader: one pass over the data, window after window, ahead of whoever consumes it.

Every window is agreed on twice: before it is read, and before it is consumed. So a chunk that does not decode on
one rank stops all of them at the same batch, and no rank waits for another that has left. While the ranks agree they
read: what they say before they read a window is how it went so far, and what the window after that one will need.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from threading import Condition, Thread
from typing import Any

import numpy as np
from mpi4py import MPI

from matex_data.agreement import Round, Status, patience
from matex_data.course import Course
from matex_data.errors import PartitionError
from matex_data.fetch import Plan, execute, reads_aside
from matex_data.filling import Filling, Loaded
from matex_data.index import Integers
from matex_data.profile import timed

AHEAD = 1  # windows that wait for the consumer


class Stream:
    """One rank's share of an epoch, from a window on.

    Parameters
    ----------
    course : the windows.
    again : whether another pass is likely to follow: its first window is begun as this pass ends.

    Attributes
    ----------
    following : the course of the pass that has been begun ahead, if any, once this one has ended.
    """

    def __init__(self, course: Course, again: bool = False) -> None:
        self._supply = course.supply
        self._course = course
        self._again = again
        self.following: Course | None = None
        self._ready: deque[tuple[Loaded, Round]] = deque()
        self._change = Condition()
        self._stopped = self._ended = False
        self._left = False  # another rank has left before the end
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name="matex-read", daemon=True)
        _ALIVE.add(self)
        self._thread.start()

    def __iter__(self) -> Iterator[Loaded]:
        """Windows in order. Raises what any rank has failed with."""
        taken = 0
        while taken < len(self._course):
            yield self._next()
            taken += 1
        self._await_end()

    def close(self) -> None:
        """Read no more. Returns at once; the thread ends when all ranks know."""
        with self._change:
            self._stopped = True
            self._ready.clear()
            self._change.notify_all()

    def join(self, seconds: float) -> bool:
        """Wait for the thread's end; False if it has not come in that time."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _next(self) -> Loaded:
        """The next window, once all ranks have theirs."""
        with timed(self._supply.profile, "waiting"):
            with self._change:
                self._wait(lambda: bool(self._ready) or self._ended)
                window, round_ = self._ready.popleft() if self._ready else (None, None)
                self._change.notify_all()
            if round_ is not None and not round_.wait(patience()):
                raise _absent()
        if window is None or round_ is None or round_.result()[0] != Status.GO_ON:
            self._await_end()
            raise _left() if self._left else _superseded()
        return window

    def _await_end(self) -> None:
        with self._change:
            self._wait(lambda: self._ended)
            if self._error is not None:
                raise self._error

    def _wait(self, happened: Any) -> None:
        if not self._change.wait_for(happened, patience()):
            raise _absent()

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
        supply, filling, plans = self._supply, deque[Filling](), self._course.plans()
        upcoming, failure = _planned(next(plans, None))
        coming = next(plans, None)  # one after the other: a window may wait for chunks of those before it
        needs = self._needs(self._said(failure, upcoming), failure)
        wait_for = 1 if self._reads_itself() else 2
        while needs is not None and (upcoming or filling):
            ready: Filling | None = None
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
        """In the place of the window that would come now: so the threads go on decoding over the end of an epoch."""
        self._wait_for_room()
        if not self._stopped:
            self.following = self._course.next_epoch()
            self.following.begin_ahead()

    def _start(self, upcoming: Filling, needs: Integers, failure: Exception | None) -> Exception | None:
        """Read; what has gone wrong, if anything. *Collective* in collective mode."""
        self._wait_for_room()
        files = self._supply.channel.files
        try:
            if failure is not None or self._stopped:
                execute(Plan(), files, needs)  # the other ranks count on these calls
            else:
                upcoming.start(files, needs, self._supply.profile)
        except Exception as error:  # as below
            return failure or error
        return failure

    def _said(self, failure: Exception | None, following: Filling | None) -> Round:
        """Tell the other ranks how it went, and the calls that each file needs for a window. *Collective*."""
        count = len(self._supply.index.files)
        own = np.zeros(count, np.int64) if following is None else following.plan.counts(count)
        status = Status.FAILED if failure else Status.STOPPED if self._stopped else Status.GO_ON
        return self._supply.channel.agreement.begin(status, own)

    def _needs(self, round_: Round, failure: Exception | None) -> Integers | None:
        """What all ranks said together; None if one has failed or left. *Collective*."""
        status, needs = round_.result()
        if status == Status.FAILED:
            self._error = self._supply.channel.agreement.error(failure)
        self._left = status == Status.STOPPED and not self._stopped
        return needs if status == Status.GO_ON else None

    def _wait_for_room(self) -> None:
        with self._change:
            self._change.wait_for(lambda: len(self._ready) < AHEAD or self._stopped)

    def _publish(self, window: Loaded, round_: Round) -> None:
        """Hand it out; it may be consumed once the other ranks have said that theirs went well, too."""
        with self._change:
            if not self._stopped:
                self._ready.append((window, round_))
            self._change.notify_all()


def _planned(planning: Future[Filling] | None) -> tuple[Filling | None, Exception | None]:
    """The window, if there is one, and what went wrong, if anything."""
    try:
        return (planning.result() if planning else None), None
    except Exception as error:  # whatever it is, the other ranks have to know
        return None, error


def _absent() -> PartitionError:
    return PartitionError(
        f"no data came within {patience():g} s: another rank does not take part",
        remedy="pass over the data on every rank alike, or set MATEX_TIMEOUT to more seconds",
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


_ALIVE: weakref.WeakSet[Stream] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Registered after mpi4py's own handler, so it runs before MPI ends."""
    streams = list(_ALIVE)
    for stream in streams:
        stream.close()
    deadline = time.monotonic() + patience()
    for stream in streams:
        if not stream.join(max(0.0, deadline - time.monotonic())) and MPI.COMM_WORLD.size > 1:
            MPI.COMM_WORLD.Abort(1)
