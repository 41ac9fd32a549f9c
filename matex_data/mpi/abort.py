"""End the whole job when one rank fails, instead of leaving the other ranks in a wait.

The first data set, training or ``matex run`` calls ``install``, which sets an exception hook. A rank that fails alone
prints its traceback and calls ``MPI_Abort``. If all ranks fail with the same error within ``GRACE`` seconds, rank 0
prints it once and every rank exits by itself.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import TracebackType
from typing import Any, NoReturn

from matex_data.errors import DataError, traceback_text
from matex_data.mpi.library import MPI
from matex_data.mpi.liveness import all_threads, stop_threads
from matex_data.mpi.polling import poll
from matex_data.mpi.processes import is_child_process

GRACE = 1.5
"""Seconds that a failed rank waits for the other ranks to fail as well, before it aborts the job."""
FLUSH_TIME = 0.2
"""Seconds between the last output of a rank and ``MPI_Abort``, in which the launcher forwards the output."""
KILL_TIME = 5.0
"""Seconds that ``MPI_Finalize`` may take after an error on all ranks."""
ABORT_TIME = 2.0
"""Seconds that ``MPI_Abort`` may take until a rank exits by itself."""

_comms: list[MPI.Intracomm] = []
_exit = os._exit
_visible_stderr: list[int] = []
"""Duplicate of the file descriptor of stderr, while stderr is muted."""
_requested_exit: list[tuple[int, str]] = []
"""Exit code and message of ``exit_with``."""
_exit_registered: list[bool] = []
"""Not empty: an exit handler ends the job after those of the program."""
_before_end: list[Callable[[], None]] = []


@cache
def install() -> None:
    """Set an exception hook that ends the job if it has several ranks. Once in a process."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        if _is_parallel():
            _fail(kind, error)
        if isinstance(error, DataError) and previous is sys.__excepthook__:
            return sys.stderr.write(traceback_text(error))
        return previous(kind, error, trace)

    sys.excepthook = hook


def end_without_hook() -> None:
    """End the job after an uncaught error before ``install`` has set the hook; do nothing afterwards."""
    if not install.cache_info().currsize and _is_parallel():
        time.sleep(GRACE)  # the other ranks may print errors of their own
        abort_job("this rank aborts the job, since the error above has ended its program")


def connect(duplicate: Callable[[], MPI.Intracomm]) -> None:
    """Let ranks compare their errors, to print an error of all ranks once. *Collective*.

    Parameters
    ----------
    duplicate : makes a communicator of these ranks.
    """
    if not _comms:
        _comms.append(duplicate())


def call_before_end(function: Callable[[], None]) -> None:
    """Call a function before an error ends the job, when handlers of ``atexit`` are not. It must not wait.

    A rank that ends the job calls it twice.
    """
    _before_end.append(function)


def prepare_end() -> None:
    """Call the functions of ``call_before_end``, on every rank that learns of the end."""
    for function in _before_end:
        with suppress(Exception):
            function()


def exit_with(code: int, message: str = "") -> None:
    """Exit with a code, on all ranks if it is not 0. *Collective* if 0.

    Parameters
    ----------
    code : exit code of the process.
    message : text for stderr, printed once if all ranks have the same.
    """
    if code and _is_parallel():
        _requested_exit[:] = [(code, message)]
        if not _exit_registered:
            _end_at_exit()
    elif message:
        sys.stderr.write(f"{message}\n")
    sys.exit(code)


def exit_requested() -> bool:
    """Return whether this rank is about to end the job with an error, after its exit handlers."""
    return bool(_requested_exit)


def run_exit_handlers_first() -> None:
    """Let ``exit_with`` end the job after the ``atexit`` handlers that the program registers from now on."""
    _exit_registered.append(True)
    atexit.register(_end_at_exit)


def _end_at_exit() -> None:
    if _requested_exit and _is_parallel():
        code, message = _requested_exit.pop()
        _end(code, message, lambda ranks: message and f"{message}\n")


def mute_stderr() -> int:
    """Discard what this process writes to stderr, except fatal errors; return a file descriptor of the real stderr."""
    sys.stderr.flush()
    _visible_stderr.append(os.dup(2))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    return _visible_stderr[0]


@contextmanager
def stderr() -> Iterator[None]:
    """Context manager: unmute stderr for a while."""
    if not _visible_stderr:
        yield
        return
    sys.stderr.flush()
    null = os.dup(2)
    os.dup2(_visible_stderr[0], 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(null, 2)
        os.close(null)


def unmute_stderr() -> None:
    """Undo ``mute_stderr``, before the error that ends the process."""
    if _visible_stderr:
        sys.stderr.flush()
        os.dup2(_visible_stderr.pop(), 2)


def replace_exit() -> None:
    """Make ``os._exit`` of one rank end the job with a nonzero exit code, since MPI does not notice it."""
    original, process = os._exit, os.getpid()

    def exit_job(status: int) -> NoReturn:
        if os.getpid() == process and _is_parallel():
            _end(status, "", lambda ranks: "", "it called os._exit")
        original(status)

    os._exit = exit_job


def _end(code: int, key: object, text: Callable[[str], str], reason: str = "") -> NoReturn:
    """Print a text and exit with a code; abort the job if another rank does not end within ``GRACE`` seconds.

    Parameters
    ----------
    code : exit code.
    key : if all ranks end with the same, rank 0 alone prints the text.
    text : returns the text for stderr, given the ranks that it is of.
    reason : cause of an abort.
    """
    comm = _comms[0] if _comms else MPI.COMM_WORLD
    all_end = bool(_comms) and _all_arrive(comm)
    same = all_end and len(set(comm.allgather(key))) == 1
    told = text(f"all {comm.size} ranks" if same else f"rank {comm.rank} of {comm.size}")
    if told and not (same and comm.rank > 0):
        unmute_stderr()
        sys.stderr.write(told)
    if all_end:
        _finalize(comm, code)
    if not _comms:
        time.sleep(GRACE)  # the other ranks may print errors of their own
    abort_job(f"this rank aborts the job, as the only one that ends: {reason}" if reason else "", code or 1)


def _is_parallel() -> bool:
    if is_child_process() or not MPI.Is_initialized() or MPI.Is_finalized():
        return False
    return MPI.COMM_WORLD.size > 1


def exit_code(kind: type[BaseException]) -> int:
    """Return the exit code of a process that an uncaught error ends."""
    return 128 + signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1


def _fail(kind: type[BaseException], error: BaseException) -> NoReturn:
    """Print an uncaught error and end the job."""
    text = traceback_text(error)
    key = kind.__qualname__, str(error)
    _end(exit_code(kind), key, lambda ranks: f"\n---- uncaught error on {ranks}:\n{text}")


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _all_arrive(comm: MPI.Intracomm) -> bool:
    """Return whether all ranks make this call within ``GRACE`` seconds."""
    request = comm.Ibarrier()
    return poll(lambda: bool(request.Test()), GRACE)


def abort_job(reason: str = "", code: int = 1) -> NoReturn:
    """Print the reason to stderr and end all ranks with ``MPI_Abort``."""
    unmute_stderr()
    if reason:
        sys.stderr.write(f"\n---- {reason}\n")
    _flush()
    for liveness in all_threads():
        liveness.announce_end()
    time.sleep(FLUSH_TIME)
    threading.Thread(target=_exit_later, args=(code, ABORT_TIME), daemon=True).start()
    prepare_end()
    MPI.COMM_WORLD.Abort(code)
    _exit(code)  # MPI_Abort returns in some libraries


def end_after_death(rank: int, first: bool) -> None:
    """End the job, as the process of another rank has died; return at once.

    Parameters
    ----------
    rank : the rank that has died.
    first : this rank tells it, as a neighbour; others end by themselves where ``MPI_Abort`` does not end them.
    """
    threading.Thread(target=_end_after_death, args=(rank, first), daemon=True).start()


def _end_after_death(rank: int, first: bool) -> None:
    time.sleep(GRACE)  # programs may end by os._exit on all ranks
    if MPI.Is_finalized():
        return
    world = MPI.COMM_WORLD
    if not first:
        _exit_later(1, ABORT_TIME)
    abort_job(
        f"rank {world.rank} of {world.size} ends the job: the process of rank {rank} has died without a message\n"
        "  expected: all ranks run until the end of their programs\n"
        f"  found: the system has closed the connection of rank {rank}\n"
        "  remedy: look in the log of the scheduler and of the system (dmesg) whether it was killed for its memory, "
        "or by hand; or it crashed, or called os._exit"
    )


def _finalize(comm: MPI.Intracomm, code: int) -> NoReturn:
    """Finalize MPI and exit. *Collective*."""
    _flush()
    threading.Thread(target=_exit_later, args=(code,), daemon=True).start()
    _ignore_signals()
    comm.Barrier()
    prepare_end()
    stop_threads()
    MPI.Finalize()
    _exit_of_c(code)


def _ignore_signals() -> None:
    """Ignore signals from now on: once a rank has exited, ``srun -K1`` sends SIGTERM to those that are about to."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)


def _exit_of_c(code: int) -> NoReturn:
    """Exit by ``exit`` of C, with its exit handlers, and without those of Python.

    MPICH 5 takes leave of its launcher in such a handler. After ``os._exit`` the launcher kills other ranks, and may
    return their 9 instead of the code: 12 of 42 times with 4 ranks on 2 cores, and never by this way.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    faulthandler.dump_traceback_later(KILL_TIME, exit=True, file=nowhere)  # a thread of C: Python's would need the lock
    ctypes.PyDLL(None).exit(code)  # holds Python's lock, so that no thread runs Python meanwhile
    _exit(code)


def _exit_later(code: int, seconds: float = KILL_TIME) -> None:
    time.sleep(seconds)
    _exit(code)
