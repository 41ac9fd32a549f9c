"""Process of one reader: ``python -m benchmarks.harness.worker SPEC``, started by ``measure``.

It writes a line of JSON when it is ready; then, for each line of input, it runs passes for a second and answers with
another one. Under ``mpiexec`` rank 0 reads and answers; the other ranks sleep meanwhile.
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

LEAST_SECONDS = 1.0  # of consecutive passes: a single one may be too short to measure
NAP = 0.005  # seconds between two checks for a request


def main() -> None:
    """Answer requests until the input ends."""
    spec = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keep the output of libraries out of the answers
    ranks = _Ranks() if spec["ranks"] > 1 else _Alone()
    if spec["pinned"] and ranks.size == 1:  # mpiexec binds the others
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    try:
        run = _reader(spec, ranks)
    except ImportError as error:
        answers.write(json.dumps({"missing": str(error)}) + "\n")
        return
    ranks.meet()
    if ranks.rank == 0:
        answers.write(json.dumps({}) + "\n")
    while ranks.requested():
        answer = ranks.joined(_measured(run, ranks))
        if ranks.rank == 0:
            answers.write(json.dumps(answer) + "\n")


def _reader(spec: dict[str, Any], ranks: _Alone) -> Callable[[], Any]:
    """Return the pass, or the probe, that a specification names."""
    module, name = spec["function"].split(".")
    options = dict(spec["options"])
    if module == "ceiling":
        options |= {"rank": ranks.rank, "size": ranks.size}
    function = getattr(import_module(f"benchmarks.readers.{module}"), name)
    reader: Callable[[], Any] = function(Task(**spec["task"]), **options)
    return reader


def _measured(run: Callable[[], Any], ranks: _Alone) -> dict[str, float]:
    """Run passes for a second and return samples, wall and CPU seconds; or return the figures of a probe.

    One pass before them is not counted.
    """
    result = run()
    if isinstance(result, dict):
        return result
    ranks.meet()
    cpu, begin = cpu_seconds(), time.perf_counter()
    samples, more = 0, True
    while more:
        samples += run()
        more = ranks.agreed(time.perf_counter() - begin < LEAST_SECONDS)
    return {"samples": samples, "seconds": time.perf_counter() - begin, "cpu": cpu_seconds() - cpu}


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children."""
    this = psutil.Process()
    used = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return float(sum(times.user + times.system for times in used))


class _Alone:
    """Single process."""

    rank, size = 0, 1

    def requested(self) -> bool:
        """Return whether another pass is requested."""
        return bool(sys.stdin.readline())

    def meet(self) -> None:
        """Wait for all ranks. *Collective*."""

    def agreed(self, more: bool) -> bool:
        """Return the value of rank 0. *Collective*."""
        return more

    def joined(self, own: dict[str, float]) -> dict[str, float]:
        """Merge the figures of all ranks. *Collective*."""
        return own


class _Ranks(_Alone):
    """Ranks of ``mpiexec``."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.rank, self._comm.size

    def requested(self) -> bool:
        order = bytearray([self.rank == 0 and super().requested()])
        request = self._comm.Ibcast(order)
        while not request.Test():
            time.sleep(NAP)
        return bool(order[0])

    def meet(self) -> None:
        self._comm.Barrier()

    def agreed(self, more: bool) -> bool:
        return bool(self._comm.bcast(more))

    def joined(self, own: dict[str, float]) -> dict[str, float]:
        if "seconds" not in own:  # a probe, whose figures are of all ranks
            return own
        every: list[dict[str, float]] = self._comm.allgather(own)
        seconds = max(one["seconds"] for one in every)
        return {name: seconds if name == "seconds" else sum(one[name] for one in every) for name in own}


if __name__ == "__main__":
    main()
