"""One rank of a test pool: receives tasks from a socket, and runs each with a communicator of its own.

A rank that waits for a task blocks on the socket: MPI implementations spin while they wait, on cores that others need.
Started by ``tests/support/ranks.py`` as ``mpiexec -n P python -m tests.support.rank_worker FOLDER``.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import IO, Any

from mpi4py import MPI

from tests.support import contexts, shared_memory

GRACE = 30.0
"""Seconds after the time limit of a task at which a rank ends itself, if the parent has not killed it before."""


@dataclass(frozen=True)
class Answer:
    """Outcome of a task on one rank: the pickled value, or the pickled exception and its traceback."""

    payload: bytes
    traceback: str | None = None

    @property
    def failed(self) -> bool:
        """Return whether the task raised an exception."""
        return self.traceback is not None


def main(folder: Path) -> None:
    """Serve tasks until the parent closes its end of the socket."""
    world = MPI.COMM_WORLD
    world.Barrier()  # before the parent accepts the ranks one by one
    shared_memory.unlink()  # ranks may be killed
    _write_output_to(folder / f"rank{world.rank}.out")
    faulthandler.enable()  # a process that crashes says where
    stacks = folder / f"rank{world.rank}.stacks"
    key = bytes.fromhex(os.environ.pop("MATEX_POOL_KEY"))
    with stacks.open("w") as file, Client(str(folder / "socket"), authkey=key) as parent:
        parent.send((world.rank, os.getpid()))
        _serve(world, parent, file)


def _serve(world: MPI.Intracomm, parent: Connection[Any, Any], stacks: IO[str]) -> None:
    while True:
        try:
            timeout, test, task = parent.recv()
        except (EOFError, OSError):
            return
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)  # a task may have taken the signal
        faulthandler.dump_traceback_later(timeout + GRACE, exit=True)
        contexts.switch(test)
        answer = _answer(world, task)
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        parent.send(answer)


def _answer(world: MPI.Intracomm, task: bytes) -> Answer:
    comm = world.Dup()  # messages that a test leaves behind do not reach the next one
    try:
        function, args, kwargs = pickle.loads(task)
        return Answer(pickle.dumps(function(comm, *args, **kwargs)))
    except BaseException as error:  # SystemExit is an outcome, too
        return Answer(_pickled(error), traceback.format_exc())
    finally:
        comm.Free()


def _pickled(error: BaseException) -> bytes:
    try:
        payload = pickle.dumps(error)
        pickle.loads(payload)
    except Exception:  # pickling calls methods of any class
        return pickle.dumps(RuntimeError(f"{type(error).__qualname__}: {error}"))
    return payload


def _write_output_to(path: Path) -> None:
    with path.open("ab") as file:  # the parent truncates the file between tasks
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


if __name__ == "__main__":
    from tests.support import rank_worker  # the parent unpickles answers of this module, not of __main__

    rank_worker.main(Path(sys.argv[1]))
