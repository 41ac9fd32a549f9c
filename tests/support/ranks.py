"""Pools of MPI ranks that run functions of tests under a time limit: a hang is a failure with stack traces."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Container, Mapping
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from pathlib import Path
from typing import Any

from tests.support import contexts, machine_speed, rank_worker
from tests.support.launch import ROOT, TIME_LIMIT, environment, fork_client, kill, mpiexec
from tests.support.rank_worker import Answer

START_LIMIT = 120.0
"""Seconds for a pool to start."""
PEER_LIMIT = 20.0
"""Seconds left to the other ranks after one has raised an exception."""
ALIVE = 4
"""Pools that are kept running; the least recently used one is closed first."""

Task = Callable[..., Any]


class RanksFailed(Exception):
    """A task raised an exception, hung, or ended its process on at least one rank."""


class Pools:
    """Pools by their number of ranks, kept running for a whole test session."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}  # least recently used first

    def __call__(self, size: int) -> Pool:
        """Return the pool of ``size`` ranks."""
        pool = self._pools.pop(size, None) or Pool(size)
        self._pools[size] = pool
        for other in [p for p in self._pools.values() if p is not pool and p.alive][: -(ALIVE - 1)]:
            other.close()
        return pool

    def close(self) -> None:
        """End all processes."""
        for pool in self._pools.values():
            pool.disconnect()
        for pool in self._pools.values():
            pool.close()


class Pool:
    """P ranks that keep running between tasks, so that they import once. The first task starts them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: _Workers | None = None

    @property
    def alive(self) -> bool:
        """Return whether the processes run."""
        return self._workers is not None

    def run(self, function: Task, *args: Any, timeout: float = TIME_LIMIT, **kwargs: Any) -> list[Any]:
        """Run ``function(comm, *args, **kwargs)``, which is a module's, on all ranks; return its results by rank.

        Raises
        ------
        RanksFailed : it raised on a rank, or did not return on all within ``timeout`` seconds.
        """
        __tracebackhide__ = True
        answers = self._ask(function, args, kwargs, timeout)
        failed = sum(answer.failed for answer in answers.values())
        if failed and self._workers:
            title = f"{_name(function)} raised on {failed} of {self.size} ranks"
            raise RanksFailed(_report(title, answers, self._workers.output()))
        return _values(answers)

    def outcomes(self, function: Task, *args: Any, timeout: float = TIME_LIMIT, **kwargs: Any) -> list[Any]:
        """Like ``run``, but return the exception of a rank that raised instead of raising it here."""
        __tracebackhide__ = True
        return _values(self._ask(function, args, kwargs, timeout))

    def disconnect(self) -> None:
        """Make the processes end without waiting for them; ``close`` waits."""
        if self._workers is not None:
            self._workers.disconnect()

    def close(self) -> None:
        """End the processes."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _ask(self, function: Task, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float) -> dict[int, Answer]:
        __tracebackhide__ = True
        task, timeout = pickle.dumps((function, args, kwargs)), machine_speed.scaled(timeout)
        if self._workers is not None and self._workers.ended():  # with the output of what they did last
            title = f"{_name(function)}: a process had ended after {self._workers.task}"
            output = self._workers.output()
            self.close()
            raise RanksFailed(_report(title, {}, output))
        if self._workers is None:
            self._workers = _Workers(self.size)
        answers: dict[int, Answer] = {}
        try:
            self._workers.task = _name(function)
            self._workers.ask(task, timeout, answers)
        except TimeoutError:
            title = f"{_name(function)} hung on {self.size - len(answers)} of {self.size} ranks ({timeout:g} s)"
            details = self._workers.stacks(without=answers)
        except (EOFError, OSError):
            title = f"{_name(function)}: a process ended on {self.size - len(answers)} of {self.size} ranks"
            details = {}
            self._workers.wait()
        else:
            return answers
        output = self._workers.output()
        self._workers.close(grace=0)
        self._workers = None
        raise RanksFailed(_report(title, answers, details | output))


class _Workers:
    """Processes of one pool.

    Attributes
    ----------
    task : name of the function that they ran last.

    Raises
    ------
    RanksFailed : the processes do not start.
    """

    def __init__(self, size: int) -> None:
        self.task = ""
        self._folder = Path(tempfile.mkdtemp(prefix="matex-ranks-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._connections: list[Connection[Any, Any]] = []
        self._pids: list[int] = []
        try:
            self._start(size)
        except BaseException:
            self.close()
            raise

    def _start(self, size: int) -> None:
        __tracebackhide__ = True
        key = secrets.token_bytes(16)
        command = [mpiexec(), "-n", str(size), *fork_client(), rank_worker.__file__, str(self._folder)]
        with socket.socket(socket.AF_UNIX) as server, (self._folder / "mpiexec.out").open("ab") as output:
            server.bind(str(self._folder / "socket"))
            server.listen(size)
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(MATEX_POOL_KEY=key.hex()),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            found = [self._accept(server, key) for _ in range(size)]
        found.sort(key=lambda worker: worker[0])
        if [rank for rank, *_ in found] != list(range(size)):
            raise RanksFailed(f"{command[0]} starts {size} worlds of one rank: mpi4py was built for another MPI")
        self._pids = [pid for _, pid, _ in found]
        self._connections = [connection for *_, connection in found]

    def _accept(self, server: socket.socket, key: bytes) -> tuple[int, int, Connection[Any, Any]]:
        """Return rank, process id and connection of the next worker that connects."""
        end = time.monotonic() + machine_speed.scaled(START_LIMIT)
        server.settimeout(0.2)
        while True:
            with contextlib.suppress(TimeoutError):
                accepted, _ = server.accept()
                break
            if time.monotonic() > end or self._process is None or self._process.poll() is not None:
                raise RanksFailed(_report("the ranks did not start", {}, self.output()))
        accepted.setblocking(True)
        connection: Connection[Any, Any] = Connection(accepted.detach())
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        return (*connection.recv(), connection)

    def ask(self, task: bytes, timeout: float, answers: dict[int, Answer]) -> None:
        """Send the task to all ranks, and fill in their answers.

        Raises
        ------
        TimeoutError : a rank did not answer in time.
        EOFError, OSError : the process of a rank ended.
        """
        for path in self._folder.glob("*.out"):
            os.truncate(path, 0)
        for connection in self._connections:
            connection.send((timeout, contexts.current(), task))
        end = time.monotonic() + timeout
        while len(answers) < len(self._connections):
            waiting = {rank: c for rank, c in enumerate(self._connections) if rank not in answers}
            ready = wait(waiting.values(), max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                answers[rank] = waiting[rank].recv()
                if answers[rank].failed:
                    end = min(end, time.monotonic() + machine_speed.scaled(PEER_LIMIT))

    def ended(self) -> bool:
        """Return whether a process has ended on its own: between two tasks nothing else is heard of it."""
        return bool(wait(self._connections, 0))

    def wait(self) -> None:
        """Give the launcher time to say how a process ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                self._process.wait(3)

    def stacks(self, without: Container[int]) -> dict[str, str]:
        """Return the stacks of all threads of the ranks that have not answered."""
        hung = [rank for rank in range(len(self._pids)) if rank not in without]
        for rank in hung:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(1)  # the handler writes at once, unless the machine is busy
        return {f"rank {rank} hung here": _tail(self._folder / f"rank{rank}.stacks") for rank in hung}

    def output(self) -> dict[str, str]:
        """Return the output of the ranks and of their launcher during this task."""
        return {f"output of {path.stem}": _tail(path) for path in sorted(self._folder.glob("*.out"))}

    def disconnect(self) -> None:
        """Close the connections, whereupon the processes end."""
        for connection in self._connections:
            connection.close()

    def close(self, grace: float = 3) -> None:
        """End the processes; kill them after ``grace`` seconds."""
        self.disconnect()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace)
            kill(self._process)
        shutil.rmtree(self._folder, ignore_errors=True)


def _values(answers: Mapping[int, Answer]) -> list[Any]:
    values = []
    for _, answer in sorted(answers.items()):
        value = pickle.loads(answer.payload)
        if answer.failed:
            value.__cause__ = RanksFailed(answer.traceback)
        values.append(value)
    return values


def _name(function: Task) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"


def _report(title: str, answers: Mapping[int, Answer], details: Mapping[str, str]) -> str:
    """Format the title, the tracebacks of the ranks (equal ones once) and the details that are not empty."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, answer in sorted(answers.items()):
        ranks_by_text.setdefault(answer.traceback or "(returned a value)", []).append(rank)
    by_ranks = {f"rank {', '.join(map(str, ranks))}": text for text, ranks in ranks_by_text.items()}
    sections = [f"---- {head}\n{text.rstrip()}" for head, text in (by_ranks | dict(details)).items() if text.strip()]
    return "\n".join([title, *sections])


def _tail(path: Path, limit: int = 20_000) -> str:
    """Return the end of a text file, at most ``limit`` bytes."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - limit))
        return file.read().decode(errors="replace")
