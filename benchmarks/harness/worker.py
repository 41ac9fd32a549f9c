"""One reader in processes of its own: ``python -m benchmarks.harness.worker SPEC``, started by ``measure``.

For every line that comes in it makes passes for a second, and answers with a line of JSON. Under ``mpiexec`` rank 0
listens and answers, and the others sleep meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import psutil

from benchmarks.harness.data import Task

LEAST_SECONDS = 1.0  # of passes, one after the other: a single one may be too short to be measured
NAP = 0.005  # seconds between two looks whether there is an order


def main() -> None:
    """Answer until the input ends."""
    spec = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print does not get between the answers
    ranks = _Ranks() if spec["ranks"] > 1 else _Alone()
    if spec["pinned"]:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[ranks.rank]})
    try:
        run = _reader(spec, ranks)
    except ImportError as error:
        answers.write(json.dumps({"missing": str(error)}) + "\n")
        return
    while ranks.ordered():
        answer = ranks.joined(_measured(run, ranks))
        if ranks.rank == 0:
            answers.write(json.dumps(answer) + "\n")


def _reader(spec: dict[str, Any], ranks: _Alone) -> Callable[[], Any]:
    """A pass, or a probe that returns figures of its own."""
    module, name = spec["function"].split(".")
    options = dict(spec["options"])
    if module == "ceiling":
        options |= {"rank": ranks.rank, "size": ranks.size}
    function = getattr(import_module(f"benchmarks.readers.{module}"), name)
    reader: Callable[[], Any] = function(Task(**spec["task"]), **options)
    return reader


def _measured(run: Callable[[], Any], ranks: _Alone) -> dict[str, float]:
    """Passes for a second: samples, wall and CPU seconds; or what a probe says.

    One pass before them is not counted: they begin as passes do that follow one another.
    """
    result = run()
    if isinstance(result, dict):
        return result
    ranks.meet()
    cpu, begin = _cpu_seconds(), time.perf_counter()
    samples, more = 0, True
    while more:
        samples += run()
        more = ranks.agreed(time.perf_counter() - begin < LEAST_SECONDS)
    return {"samples": samples, "seconds": time.perf_counter() - begin, "cpu": _cpu_seconds() - cpu}


def _cpu_seconds() -> float:
    """Of this process and of those that it has started."""
    this = psutil.Process()
    used = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return float(sum(times.user + times.system for times in used))


class _Alone:
    """One process."""

    rank, size = 0, 1

    def ordered(self) -> bool:
        """Whether another pass is asked for."""
        return bool(sys.stdin.readline())

    def meet(self) -> None:
        """Wait for all ranks. *Collective*."""

    def agreed(self, more: bool) -> bool:
        """What rank 0 says. *Collective*."""
        return more

    def joined(self, own: dict[str, float]) -> dict[str, float]:
        """The figures of all ranks as one. *Collective*."""
        return own


class _Ranks(_Alone):
    """The ranks of ``mpiexec``."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.rank, self._comm.size

    def ordered(self) -> bool:
        order = bytearray([self.rank == 0 and super().ordered()])
        request = self._comm.Ibcast(order)
        while not request.Test():
            time.sleep(NAP)
        return bool(order[0])

    def meet(self) -> None:
        self._comm.Barrier()

    def agreed(self, more: bool) -> bool:
        return bool(self._comm.bcast(more))

    def joined(self, own: dict[str, float]) -> dict[str, float]:
        every: list[dict[str, float]] = self._comm.allgather(own)
        seconds = max(one["seconds"] for one in every)
        return {name: seconds if name == "seconds" else sum(one[name] for one in every) for name in own}


if __name__ == "__main__":
    main()
