"""An uncaught error on one rank ends the job, instead of leaving the others waiting for ever."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from mpi4py import MPI

from matex_data import errors

PATIENCE = 1.5
"""Seconds in which the other ranks may fail, too; then this one ends the job alone."""
_LAST = 5.0
"""Seconds after which a process that failed together with all others ends by force."""

_guard: list[MPI.Intracomm] = []


def end_job_on_error(comm: MPI.Intracomm) -> None:
    """From now on an uncaught exception on any rank ends the job, with its traceback. *Collective* at first.

    If all ranks fail with the same error, it is printed once.
    """
    if comm.size == 1 or _guard:
        return
    _guard.append(comm.Dup())
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        if MPI.Is_finalized():
            return previous(kind, error, trace)
        return _end(_guard[0], kind, error, trace)

    sys.excepthook = hook


@contextlib.contextmanager
def readable_errors() -> Iterator[None]:
    """Raise the ``DataError`` itself where TensorFlow wraps one in its own error."""
    try:
        yield
    except Exception as error:  # of any class of TensorFlow, which is not imported here
        found = re.search(r"^matex_data\.errors\.(\w+): (.+?)\n\n", str(error), re.DOTALL | re.MULTILINE)
        if found is None or isinstance(error, errors.DataError):
            raise
        raise getattr(errors, found[1])(found[2]) from error.__cause__


def _end(comm: MPI.Intracomm, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    text = "".join(traceback.format_exception(kind, error, trace))
    together = _all_come(comm)
    alike = together and len(set(comm.allgather((kind.__qualname__, str(error))))) == 1
    if comm.rank == 0 or not alike:
        who = f"all {comm.size} ranks" if alike else f"rank {comm.rank} of {comm.size}"
        sys.stderr.write(f"\n---- uncaught error on {who}:\n{text}")
    sys.stdout.flush()
    sys.stderr.flush()
    if not together:
        comm.Abort(1)
    _leave(comm)


def leave_with(code: int) -> None:
    """End this process with that exit code; if it is not 0 and others go on, end them, too. *Collective* if 0."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code and _guard:
        if not _all_come(_guard[0]):
            _guard[0].Abort(code)
        _leave(_guard[0], code)
    sys.exit(code)


def _all_come(comm: MPI.Intracomm) -> bool:
    """Whether all ranks come here within a short time."""
    request = comm.Ibarrier()
    end = time.monotonic() + PATIENCE
    while not request.Test():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _leave(comm: MPI.Intracomm, code: int = 1) -> None:
    """End this process, together with all others."""
    threading.Thread(target=_end_by_force, args=(code,), daemon=True).start()
    comm.Barrier()
    MPI.Finalize()
    os._exit(code)


def _end_by_force(code: int) -> None:
    time.sleep(_LAST)
    os._exit(code)
