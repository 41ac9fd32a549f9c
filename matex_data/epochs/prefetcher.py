"""Background thread of one rank that reads the windows of an epoch ahead of the consumer.

The ranks agree twice on every window: before it is read, and before it is consumed. So a chunk that cannot be decoded
on one rank stops all ranks at the same batch, and no rank waits for another one that has left the epoch. The ranks read
a window while the round that ends the one before it is under way.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from enum import IntEnum
from threading import Thread

from matex_data.epochs.window import EpochReader, LoadedWindow, PendingWindow
from matex_data.errors import DataError, PartitionError
from matex_data.locks import Condition
from matex_data.mpi import communicator, deadlines
from matex_data.mpi.abort import abort_job
from matex_data.mpi.activity import READ_AHEAD, meeting
from matex_data.mpi.communicator import PendingMaximum
from matex_data.mpi.library import MPI
from matex_data.mpi.polling import poll
from matex_data.mpi.processes import is_child_process

QUEUED = 1  # loaded windows that wait for the consumer, at most
EXIT_TIMEOUT = 5.0  # seconds to end an epoch after all ranks have reached the end of their programs


class Status(IntEnum):
    """Status of a rank. All ranks act on the highest status among them."""

    CONTINUE = 0
    STOP = 1
    FAILED = 2


class Prefetcher:
    """Iterator over the loaded windows of one rank, read by a background thread.

    The thread starts with the iteration, so that who iterates can close it from then on, whatever interrupts the start.

    Parameters
    ----------
    reader : windows of the epoch.
    """

    def __init__(self, reader: EpochReader) -> None:
        self._reader = reader
        self._context = reader.context
        self._session = reader.context.session
        self._ready: deque[tuple[LoadedWindow, PendingMaximum]] = deque()
        self._change = Condition()
        self._stopped = self._begun = self._ended = False
        self._abandoned = False  # another rank has left before the end
        self._error: BaseException | None = None
        self._process = os.getpid()
        self._thread = Thread(target=self._run, name=READ_AHEAD, daemon=True)

    def _begin(self) -> None:
        """Start the thread."""
        _ALIVE.add(self)
        self._session.closers.add(self)
        try:
            self._thread.start()
        except RuntimeError as error:  # no memory for a thread; the other ranks wait for this rank's first round
            self._ended = True
            _ALIVE.discard(self)
            self._session.closers.discard(self)
            self._agree(self._begin_round(error), error)
            raise self._error or error from error

    def __iter__(self) -> Iterator[LoadedWindow]:
        """Yield the windows in order. Raise the first error of any rank. Once."""
        self._begin()
        for _ in range(len(self._reader)):
            yield self._next()
        self._wait_for_end()

    def close(self) -> None:
        """Stop reading. Return at once; the thread ends after the ranks have agreed."""
        if self._process != os.getpid():
            return
        with self._change:
            self._stopped = True
            self._ready.clear()
            self._change.notify_all()

    def join(self) -> None:
        """Wait until the thread of a closed epoch ends, which it does when all ranks have left the epoch.

        Raises
        ------
        PartitionError : a rank does not leave it in time.
        """
        if self._process == os.getpid():
            self._session.comm.wait_until(self._ended_within)

    def _ended_within(self, seconds: float) -> bool:
        if not self._begun:  # an interrupt came before
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _next(self) -> LoadedWindow:
        """Return the next window, after all ranks have loaded theirs."""
        with self._context.profile.timed("waiting"):
            self._wait(lambda: bool(self._ready) or self._ended)
            with self._change:
                window, round_ = self._ready.popleft() if self._ready else (None, None)
                self._change.notify_all()
            loaded = round_ is not None and int(round_.wait()[0]) == Status.CONTINUE
        if window is None or not loaded:
            self._wait_for_end()
            raise _abandoned() if self._abandoned else _superseded()
        return window

    def _wait_for_end(self) -> None:
        self._wait(lambda: self._ended)
        if self._error is not None:
            raise self._error

    def _wait(self, condition: Callable[[], bool]) -> None:
        if self._process != os.getpid():
            raise _forked()

        def within(seconds: float) -> bool:
            with self._change:
                return self._change.wait_for(condition, seconds)

        if not within(0.0):
            comm = self._session.comm
            with meeting(comm.liveness):  # of this rank's own thread, which others keep waiting
                comm.wait_until(within)

    def _run(self) -> None:
        try:
            with self._change:
                self._begun = not self._stopped
            if self._begun:
                self._read_all()
        except BaseException as error:  # the consumer raises it
            self._error = self._error or error
        finally:
            with self._change:
                self._ended = True
                self._change.notify_all()
            _ALIVE.discard(self)

    def _read_all(self) -> None:
        """Read each window while the window before it is decoded, and publish the one before that."""
        self._session.files.renew()  # each epoch checks files anew; before a window is planned, which may begin to read
        planned, loading = self._reader.windows(), deque[PendingWindow]()
        upcoming, error = _result(next(planned, None))
        error = error or self._context.changed_file()
        next_plan = next(planned, None)  # one after the other: a window may wait for chunks of earlier ones
        going = self._agree(self._begin_round(error), error)
        # Where this thread reads, it publishes the first window before it reads the second one.
        depth = 2 if self._session.files.collective is None else 1
        while going and (upcoming or loading):
            ready: PendingWindow | None = None
            following, error = (None, error) if error else _result(next_plan)
            next_plan = next(planned, None)
            try:
                if error is None and len(loading) >= (depth if upcoming else 1):
                    loading[0].wait(self._context.profile)
                    ready, depth = loading.popleft(), 2
            except Exception as failure:  # of any kind: the other ranks have to raise it
                error = failure
            round_ = self._begin_round(error)
            if ready is not None:
                self._publish(ready.loaded, round_)
            if upcoming is not None:
                error = self._start(upcoming, error)
                loading.append(upcoming)
            upcoming, going = following, self._agree(round_, error)
        if going:
            self._reader.finish()
        self._session.files.renew()  # between epochs no file of this rank alone is open

    def _start(self, window: PendingWindow, error: Exception | None) -> Exception | None:
        """Start to load a window, after an error only if the others need this rank; return the first error.

        *Collective*.
        """
        with self._change:
            self._change.wait_for(lambda: len(self._ready) < QUEUED or self._stopped)
        files = self._session.files
        try:
            if (error is None and not self._stopped) or window.exchanges or files.collective is not None:
                window.start(files, self._context.profile)
        except Exception as failure:  # of any kind: the other ranks have to raise it
            return error or failure
        return error

    def _begin_round(self, error: Exception | None) -> PendingMaximum:
        """Send this rank's status to the other ranks. *Collective*."""
        status = Status.FAILED if error else Status.STOP if self._stopped else Status.CONTINUE
        return self._session.status.start_maximum([status])

    def _agree(self, round_: PendingMaximum, error: Exception | None) -> bool:
        """Return whether all ranks go on; False after an error, which is kept, or the end of a rank."""
        status = int(round_.result()[0])
        if status == Status.FAILED:
            first = self._session.status.first_error(error)
            self._error = first or DataError("a rank reported a failure, but no error")
        self._abandoned = status == Status.STOP and not self._stopped
        return status == Status.CONTINUE

    def _publish(self, window: LoadedWindow, round_: PendingMaximum) -> None:
        """Queue a window. The consumer takes it once ``round_`` shows that all ranks have loaded theirs."""
        with self._change:
            if not self._stopped:
                self._ready.append((window, round_))
            self._change.notify_all()


def _result(future: Future[PendingWindow] | None) -> tuple[PendingWindow | None, Exception | None]:
    """Return the planned window, if there is one, and the error of planning it."""
    try:
        return (future.result() if future else None), None
    except Exception as error:  # of any kind: the other ranks have to raise it
        return None, error


def _forked() -> PartitionError:
    return PartitionError(
        "this process was forked in the middle of an epoch, which only its parent process can continue",
        remedy="begin a new epoch in the process that iterates: for batch in data.batches(...)",
    )


def _abandoned() -> PartitionError:
    return PartitionError(
        "another rank has left this epoch before its end",
        remedy="take the same number of batches on every rank",
    )


def _superseded() -> PartitionError:
    return PartitionError(
        "this epoch was closed, or ended when the next epoch of the same batches began",
        remedy="finish one epoch before the next one, or call data.batches(...) again for a second iterator",
    )


_ALIVE: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End all epochs that the program has left, before MPI ends. mpi4py registered its own handler earlier."""
    if is_child_process() or MPI.Is_finalized():
        return
    for prefetcher in list(_ALIVE):
        prefetcher.close()
    deadlines.leave()
    if not poll(lambda: not communicator.has_pending(), EXIT_TIMEOUT) and MPI.COMM_WORLD.size > 1:
        abort_job("the job ends with an error: a rank has begun an epoch that others have not")
    for prefetcher in list(_ALIVE):
        prefetcher.join()
