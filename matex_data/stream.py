"""The background reader: one pass over the data, window after window, ahead of whoever consumes it.

Every window is agreed on twice: before it is read, and before it is handed out. So a chunk that does not decode on
one rank stops all of them at the same batch, and no rank waits for another that has left.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections import deque
from collections.abc import Iterator
from threading import Condition, Thread
from typing import Any

import numpy as np
from mpi4py import MPI

from matex_data.agreement import Status, patience
from matex_data.course import Course
from matex_data.errors import PartitionError
from matex_data.fetch import reads_aside
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
        self._ready: deque[Loaded] = deque()
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
        with self._change:
            with timed(self._supply.profile, "waiting"):
                self._wait(lambda: bool(self._ready) or self._ended)
            if self._error is not None:
                raise self._error
            if not self._ready:
                raise _left() if self._left else _superseded()
            window = self._ready.popleft()
            self._change.notify_all()
        return window

    def _await_end(self) -> None:
        with self._change:
            self._wait(lambda: self._ended)
            if self._error is not None:
                raise self._error

    def _wait(self, happened: Any) -> None:
        if not self._change.wait_for(happened, patience()):
            raise PartitionError(
                f"no data came within {patience():g} s: another rank does not take part",
                remedy="pass over the data on every rank alike, or set MATEX_TIMEOUT to more seconds",
            )

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
        """While one window is being decoded the next is read; what is handed out has been decoded on all ranks."""
        supply, filling, plans = self._supply, deque[Filling](), self._course.plans()
        planning = next(plans, None)
        failure: BaseException | None = None
        # Where this thread has to read, the first window is handed out before that: nobody waits for the second one.
        wait_for = 2 if reads_aside(supply.channel.files) else 1
        while planning or filling:
            upcoming = ready = None
            try:
                if planning and failure is None:
                    upcoming = planning.result()
                if failure is None and len(filling) >= (wait_for if upcoming else 1):
                    filling[0].finish(supply.profile)
                    ready, wait_for = filling.popleft(), 2
            except Exception as error:  # whatever it is, the other ranks have to know
                failure = error
            needs = self._agreed(failure, upcoming)
            if ready is not None and self._error is None:
                self._publish(ready.loaded)
            if needs is None:
                return
            if upcoming is not None:
                planning = next(plans, None)
                filling.append(upcoming)
                failure = self._start(upcoming, needs)
            elif filling and self._again:
                self._begin_next_pass()

    def _begin_next_pass(self) -> None:
        """In the place of the window that would come now: so the threads go on decoding over the end of an epoch."""
        self._wait_for_room()
        if not self._stopped:
            self.following = self._course.next_epoch()
            self.following.begin_ahead()

    def _start(self, upcoming: Filling, needs: Integers) -> Exception | None:
        """Read; what went wrong, if anything. *Collective* in collective mode."""
        self._wait_for_room()
        try:
            upcoming.start(self._supply.channel.files, needs, self._supply.profile)
        except Exception as error:  # as above
            return error
        return None

    def _agreed(self, failure: BaseException | None, upcoming: Filling | None) -> Integers | None:
        """Calls that each file needs for the next window; None if a rank has failed or left. *Collective*."""
        count = len(self._supply.index.files)
        own = np.zeros(count, np.int64) if upcoming is None else upcoming.plan.counts(count)
        status = Status.FAILED if failure else Status.STOPPED if self._stopped else Status.GO_ON
        agreement = self._supply.channel.agreement
        status, needs = agreement.reach(status, own)
        if status == Status.FAILED:
            self._error = agreement.error(failure)
        self._left = status == Status.STOPPED and not self._stopped
        return needs if status == Status.GO_ON else None

    def _wait_for_room(self) -> None:
        with self._change:
            self._change.wait_for(lambda: len(self._ready) < AHEAD or self._stopped)

    def _publish(self, window: Loaded) -> None:
        with self._change:
            if not self._stopped:
                self._ready.append(window)
            self._change.notify_all()


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
