"""An uncaught error on one rank ends the job, instead of leaving the others waiting."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from matex_data.mpi.processes import is_child_process, note_rank

if TYPE_CHECKING:
    from mpi4py import MPI

TOGETHER = 1.5
"""Seconds in which the other ranks may fail, too; then this one ends the job alone."""
WRITING = 0.2
"""Seconds that the launcher has to pass on the last lines of a rank before the job ends."""
FORCE = 5.0
"""Seconds after which a process that failed together with all others ends by force."""

_guard: list[MPI.Intracomm] = []
_exit = os._exit
_own_stderr: list[int] = []
"""File descriptor of the stderr of this process, while it is muted."""
_last: list[tuple[int, str]] = []
"""Exit code and message with which this program ends."""
_ends_late: list[bool] = []
"""Not empty: this program ends the job after its exit handlers."""


def install() -> None:
    """From now on an uncaught error ends the job, if it has several ranks."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        return _end(kind, error, trace) if _several_ranks() else previous(kind, error, trace)

    sys.excepthook = hook


def connect(comm: MPI.Intracomm) -> None:
    """Print an error that all ranks fail with once; otherwise each prints its own. *Collective* at first."""
    note_rank()
    if not _guard:
        _guard.append(comm.Dup())


def exit_with(code: int, message: str = "") -> None:
    """End this process with that exit code; if it is not 0 and others go on, end them, too. *Collective* if 0.

    Parameters
    ----------
    message : for stderr, once if all ranks end with it.
    """
    if code and _several_ranks():
        _last[:] = [(code, message)]
        if not _ends_late:
            _end_late()
    elif message:
        sys.stderr.write(f"{message}\n")
    sys.exit(code)


def run_exit_handlers_first() -> None:
    """Let ``exit_with`` end the job after all that the program registers with ``atexit`` from now on."""
    _ends_late.append(True)
    atexit.register(_end_late)


def _end_late() -> None:
    if _last and _several_ranks():
        code, message = _last.pop()
        _end_with(code, message=message)


def mute_stderr() -> int:
    """Let this process write nothing to stderr but errors that end it; return the file descriptor for those."""
    sys.stderr.flush()
    _own_stderr.append(os.dup(2))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)
    os.close(silence)
    return _own_stderr[0]


@contextmanager
def stderr() -> Iterator[None]:
    """Context manager: what this process writes to stderr is seen."""
    if not _own_stderr:
        yield
        return
    sys.stderr.flush()
    silence = os.dup(2)
    os.dup2(_own_stderr[0], 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(silence, 2)
        os.close(silence)


def unmute_stderr() -> None:
    """Undo ``mute_stderr``: this process is about to say why it ends."""
    if _own_stderr:
        sys.stderr.flush()
        os.dup2(_own_stderr.pop(), 2)


def replace_exit() -> None:
    """Let ``os._exit`` of one rank end the job, with an exit code that is not 0: MPI would not hear of it."""
    original, process = os._exit, os.getpid()

    def end(status: int) -> NoReturn:
        if os.getpid() == process and _several_ranks():
            _end_with(status, "it called os._exit")
        original(status)

    os._exit = end


def _end_with(code: int, reason: str = "", message: str = "") -> NoReturn:
    """End this process with that exit code, and with all others if they do not come here soon."""
    together = bool(_guard) and _all_come(_guard[0])
    alike = together and len(set(_guard[0].allgather(message))) == 1
    if message and not (alike and _guard[0].rank > 0):
        unmute_stderr()
        sys.stderr.write(f"{message}\n")
    if not together:
        abort_job(f"this rank ends the job, since it goes alone: {reason}" if reason else "", code or 1)
    _leave(_guard[0], code)


def _several_ranks() -> bool:
    if is_child_process() or "mpi4py.MPI" not in sys.modules:
        return False
    from matex_data.mpi.library import MPI

    return MPI.Is_initialized() and not MPI.Is_finalized() and MPI.COMM_WORLD.size > 1


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> NoReturn:
    from matex_data.mpi.library import MPI

    text = "".join(traceback.format_exception(kind, error, trace))
    comm = _guard[0] if _guard else MPI.COMM_WORLD
    unmute_stderr()
    together = bool(_guard) and _all_come(comm)
    alike = together and len(set(comm.allgather((kind.__qualname__, str(error))))) == 1
    if comm.rank == 0 or not alike:
        ranks = f"all {comm.size} ranks" if alike else f"rank {comm.rank} of {comm.size}"
        sys.stderr.write(f"\n---- uncaught error on {ranks}:\n{text}")
    if together:
        _leave(comm, 1)
    if not _guard:
        time.sleep(TOGETHER)  # for the others' errors
    abort_job()


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _all_come(comm: MPI.Intracomm) -> bool:
    """Return whether all ranks come here within a short time."""
    from matex_data.mpi.deadlines import poll

    request = comm.Ibarrier()
    return poll(lambda: bool(request.Test()), TOGETHER)


def abort_job(reason: str = "", code: int = 1) -> NoReturn:
    """End this process and all other ranks, with the reason on stderr."""
    from matex_data.mpi.library import MPI

    unmute_stderr()
    if reason:
        sys.stderr.write(f"\n---- {reason}\n")
    _flush()
    time.sleep(WRITING)
    MPI.COMM_WORLD.Abort(code)
    _exit(code)  # some MPI libraries come back from there


def _leave(comm: MPI.Intracomm, code: int) -> NoReturn:
    """End this process, together with all others."""
    from matex_data.mpi import deadlines
    from matex_data.mpi.library import MPI

    _flush()
    threading.Thread(target=_end_by_force, args=(code,), daemon=True).start()
    comm.Barrier()
    deadlines.stop()
    MPI.Finalize()
    _exit(code)


def _end_by_force(code: int) -> None:
    time.sleep(FORCE)
    _exit(code)
