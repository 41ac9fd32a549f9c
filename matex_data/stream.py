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
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Any

import numpy as np
from mpi4py import MPI

from matex_data.agreement import Status, patience
from matex_data.buffers import Pool
from matex_data.cache import ChunkCache
from matex_data.channels import Channel
from matex_data.collective import Files
from matex_data.errors import PartitionError
from matex_data.fetch import Arrays, Plan, execute, plan
from matex_data.index import Index, Integers
from matex_data.partition import Epoch, Window

AHEAD = 1  # windows that wait for the consumer


@dataclass
class Profile:
    """Where the time of the passes went, in seconds on this rank, and what they brought."""

    reading: float = 0.0
    decoding: float = 0.0
    waiting: float = 0.0
    elapsed: float = 0.0
    samples: int = 0
    bytes: int = 0


@dataclass(eq=False)
class Supply:
    """What the passes over some batches read with, one pass after the other.

    Parameters
    ----------
    channel : communicator and open files, for these passes alone.
    index : of the data set.
    pool : memory of the windows.
    cache_bytes : decoded chunks that are kept, in bytes.
    profile : of all passes.
    """

    channel: Channel
    index: Index
    pool: Pool
    cache_bytes: int
    profile: Profile

    def __post_init__(self) -> None:
        self.channel.serve(self)


@dataclass
class Loaded:
    """A window whose rows are in memory."""

    arrays: Arrays
    sizes: Integers
    padded: int  # rows at the end that are padding


class Stream:
    """One rank's share of an epoch, from a window on.

    Parameters
    ----------
    supply : what it reads with.
    epoch : order of the samples.
    start : step to start with.
    together : steps that are read together; whole windows of the schedule.
    """

    def __init__(self, supply: Supply, epoch: Epoch, start: int, together: int) -> None:
        self._supply = supply
        self._epoch = epoch
        self._begins = range(start, epoch.schedule.steps, together)
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
        while taken < len(self._begins):
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
        begin = time.perf_counter()
        with self._change:
            self._wait(lambda: bool(self._ready) or self._ended)
            if self._error is not None:
                raise self._error
            if not self._ready:
                raise _left() if self._left else _superseded()
            window = self._ready.popleft()
            self._change.notify_all()
        self._supply.profile.waiting += time.perf_counter() - begin
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
        supply = self._supply
        agreement, chunks = supply.channel.agreement, ChunkCache(supply.cache_bytes)
        count = len(supply.index.files)
        filling: Filling | None = None
        failure: BaseException | None = None
        for begin in [*self._begins, None]:
            upcoming: Filling | None = None
            needs = np.zeros(count, np.int64)
            try:
                if begin is not None and failure is None:
                    upcoming = self._planned(begin, chunks)
                    needs = upcoming.plan.counts(count)
                if filling is not None and failure is None:
                    filling.finish(supply.profile)
            except Exception as error:  # whatever it is, the other ranks have to know
                failure = error
            status = Status.FAILED if failure else Status.STOPPED if self._stopped else Status.GO_ON
            status, needs = agreement.reach(status, needs)
            if status == Status.FAILED:
                self._error = agreement.error(failure)
                return
            if filling is not None:
                self._publish(filling.loaded)
            if status == Status.STOPPED:
                self._left = not self._stopped
                return
            filling = upcoming
            if filling is not None:
                self._wait_for_room()
                try:
                    filling.start(supply.channel.files, needs, supply.profile)
                except Exception as error:  # as above
                    failure = error

    def _planned(self, begin: int, chunks: ChunkCache) -> Filling:
        comm, index, pool = self._supply.channel.comm, self._supply.index, self._supply.pool
        end = min(begin + self._begins.step, self._epoch.schedule.steps)
        window = self._epoch.window(begin, end, comm.rank, comm.size)
        arrays = pool.arrays(list(index.fields.values()), window.rows)
        padded = window.rows - window.runs.total
        blank(arrays, window.runs.total)
        work = plan(index, window.runs, window.place, arrays, chunks, pool)
        return Filling(window, Loaded(arrays, window.sizes, padded), work)

    def _wait_for_room(self) -> None:
        with self._change:
            self._change.wait_for(lambda: len(self._ready) < AHEAD or self._stopped)

    def _publish(self, window: Loaded) -> None:
        with self._change:
            if not self._stopped:
                self._ready.append(window)
            self._change.notify_all()


@dataclass
class Filling:
    """A window that is being read and decoded."""

    window: Window
    loaded: Loaded
    plan: Plan
    decoding: list[Future[None]] = field(default_factory=list)

    def start(self, files: Files, agreed: Integers, profile: Profile) -> None:
        """Read, and start to decode. *Collective* in collective mode."""
        begin = time.perf_counter()
        self.decoding = execute(self.plan, files, agreed)
        profile.reading += time.perf_counter() - begin
        profile.samples += self.window.runs.total
        profile.bytes += sum(call.ranges.total for calls in self.plan.calls.values() for call in calls)
        self.plan = Plan({}, [])  # lets go of the scratch memory

    def finish(self, profile: Profile) -> None:
        """Wait until all is decoded; raise what failed."""
        begin = time.perf_counter()
        for future in self.decoding:
            future.result()
        profile.decoding += time.perf_counter() - begin


def blank(arrays: Arrays, begin: int) -> None:
    """Padding from that row on: zeros, or empty strings."""
    for array in arrays.values():
        if begin < len(array):
            array[begin:] = b"" if array.dtype == object else np.zeros((), array.dtype)


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
