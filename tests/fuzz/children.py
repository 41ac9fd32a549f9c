"""Processes that look at damaged files one after the other, so that a crash or a hang is that of a known file."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from mpi4py import MPI

from tests.fuzz.readings import CRASH, TIMEOUT, Verdict
from tests.support import shared_memory

TOGETHER = 150  # files that one process looks at
ADDRESSES = 4 << 30  # bytes of addresses that a process may have beyond those at its start

Task = Callable[[int, Callable[[str], None]], Verdict]
"""Looks at file ``number``, and says which library works now."""


@dataclass(frozen=True)
class Result:
    """Outcome of a file; ``stage`` is the library that worked last."""

    number: int
    verdict: Verdict
    stage: str
    seconds: float


class _Child:
    """A process, and what it is doing."""

    def __init__(self, task: Task, numbers: Sequence[int], limit: float) -> None:
        self.left = deque(numbers)
        self.stage = ""
        self.begun = time.monotonic()
        self._limit = limit
        handle, name = tempfile.mkstemp(prefix="matex-fuzz-", suffix=".stacks")
        os.close(handle)
        self._trace = Path(name)
        mine, its = FORK.Pipe()
        self.connection: Connection[Any, Any] = mine
        self.process: ForkProcess = FORK.Process(target=_serve, args=(task, numbers, its, limit, str(self._trace)))
        self.process.start()
        its.close()

    @property
    def late(self) -> bool:
        return time.monotonic() > self.begun + self._limit

    def results(self) -> Iterator[Result]:
        """Yield the reports of the child; its end is one as well."""
        try:
            while self.connection.poll():
                kind, value = self.connection.recv()
                if kind == "stage":
                    self.stage = value
                else:
                    yield self._result(value)
        except (EOFError, OSError):
            self.process.join()
            if self.left:
                yield self._result(Verdict(CRASH, f"{_ending(self.process.exitcode)}\n{self._stacks()}"))

    def stop(self) -> Iterator[Result]:
        """Kill a child that takes too long."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGUSR1)
            time.sleep(0.3)
        self.process.kill()
        self.process.join()
        yield self._result(Verdict(TIMEOUT, f"after {self._limit:g} s\n{self._stacks()}"))

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        self._trace.unlink()

    def _result(self, verdict: Verdict) -> Result:
        now = time.monotonic()
        result = Result(self.left.popleft(), verdict, self.stage, now - self.begun)
        self.begun, self.stage = now, ""
        return result

    def _stacks(self) -> str:
        return Path(str(self._trace)).read_text()[-6000:]


FORK = get_context("fork")


def look(task: Task, numbers: Sequence[int], limit: float, jobs: int, together: int = TOGETHER) -> Iterator[Result]:
    """Read each file in a child process, ``jobs`` at a time, and yield the results as they arrive.

    Parameters
    ----------
    limit : seconds for one file.
    together : files that one child looks at.
    """
    waiting = deque(list(numbers[at : at + together]) for at in range(0, len(numbers), together))
    children: list[_Child] = []
    try:
        while waiting or children:
            while waiting and len(children) < jobs:
                children.append(_Child(task, waiting.popleft(), limit))
            wait([child.connection for child in children], timeout=0.5)
            for child in list(children):
                broken = False
                for result in _news(child):
                    broken = result.verdict.outcome in (CRASH, TIMEOUT)
                    yield result
                if broken or not child.left:
                    children.remove(child)
                    if child.left:
                        waiting.appendleft(list(child.left))
                    child.close()
    finally:
        for child in children:
            child.close()


def _news(child: _Child) -> Iterator[Result]:
    yield from child.results()
    if child.left and child.late and child.process.is_alive():
        yield from child.stop()


def _serve(task: Task, numbers: Sequence[int], parent: Connection[Any, Any], limit: float, trace: str) -> None:
    """Run a child until it has read its file."""
    with open(trace, "w") as stacks, open(os.devnull, "w") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _limit_memory()
        warnings.simplefilter("ignore")
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        shared_memory.unlink()
        for number in numbers:
            verdict = task(number, lambda stage: parent.send(("stage", stage)))
            parent.send(("done", verdict))
        parent.close()
        os._exit(0)


def _limit_memory() -> None:
    size = (
        int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if sys.platform == "linux" else 0
    )
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (size + ADDRESSES, size + ADDRESSES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _ending(code: int | None) -> str:
    return f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
