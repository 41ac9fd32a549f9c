"""The case of the average of gradients."""

from __future__ import annotations

from benchmarks.cases.reading import Measured, Setup
from benchmarks.harness import data
from benchmarks.harness.data import Task
from benchmarks.harness.measure import Reader, interleaved
from benchmarks.readers.averages import NBYTES, SHAPES, STEPS

STRATEGIES = ("chained", "funneled", "concurrent")
RANKS = 2


def average(setup: Setup) -> Measured:
    """Compare the strategies with one ``Allreduce`` of as many bytes; a "sample" is a step."""
    readers = [
        Reader(strategy, "ours", "averages.in_graph", {"strategy": strategy}, ranks=RANKS) for strategy in STRATEGIES
    ]
    ceiling = Reader("MPI.Allreduce, one array", "ceiling", "averages.by_mpi", ranks=RANKS)
    small = data.small(setup.folder)
    task = Task(small.path, small.inputs, small.targets, 1, STEPS, NBYTES, STEPS)
    results = interleaved(task, [*readers, ceiling], setup.repetitions)
    return Measured(f"{len(SHAPES)} gradients, {NBYTES / 1e6:.1f} MB, averaged on {RANKS} ranks", results)


CASES = {"average": [average]}
