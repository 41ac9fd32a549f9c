"""One rank of a test pool: waits for a task on a socket, runs it with a communicator of its own, answers.

It waits outside MPI, since MPI implementations spin while they wait, and there are more ranks than cores.
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
from typing import Any

from mpi4py import MPI

GRACE = 30.0
"""Seconds after a task's time limit at which a rank ends itself: the parent should have ended it before."""


@dataclass(frozen=True)
class Answer:
    """What became of a task on one rank: the pickled value, or the pickled exception and its traceback."""

    payload: bytes
    traceback: str | None = None

    @property
    def failed(self) -> bool:
        """Whether the task raised an exception."""
        return self.traceback is not None


def main(folder: Path) -> None:
    """Serve tasks until the parent closes its end of the socket."""
    world = MPI.COMM_WORLD
    _write_output_to(folder / f"rank{world.rank}.out")
    with (folder / f"rank{world.rank}.stacks").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        with Client(str(folder / "socket"), authkey=bytes.fromhex(os.environ.pop("MATEX_POOL_KEY"))) as parent:
            parent.send((world.rank, os.getpid()))
            _serve(world, parent)


def _serve(world: MPI.Intracomm, parent: Connection[Any, Any]) -> None:
    while True:
        try:
            timeout, task = parent.recv()
        except (EOFError, OSError):
            return
        faulthandler.dump_traceback_later(timeout + GRACE, exit=True)
        answer = _answer(world, task)
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        parent.send(answer)


def _answer(world: MPI.Intracomm, task: bytes) -> Answer:
    comm = world.Dup()  # a message that one test leaves behind cannot reach the next
    try:
        function, args, kwargs = pickle.loads(task)
        return Answer(pickle.dumps(function(comm, *args, **kwargs)))
    except BaseException as error:  # SystemExit, too, is an outcome
        return Answer(_pickled(error), traceback.format_exc())
    finally:
        comm.Free()


def _pickled(error: BaseException) -> bytes:
    try:
        payload = pickle.dumps(error)
        pickle.loads(payload)
    except Exception:  # any class may fail to pickle in any way
        return pickle.dumps(RuntimeError(f"{type(error).__qualname__}: {error}"))
    return payload


def _write_output_to(path: Path) -> None:
    with path.open("ab") as file:  # appending: the parent empties the file between tasks
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


if __name__ == "__main__":
    from tests.support import rank_worker  # answers must be of the class that the parent can import

    rank_worker.main(Path(sys.argv[1]))
