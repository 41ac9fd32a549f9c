"""The average of gradients over the ranks, within a graph and by MPI alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from benchmarks import data
from benchmarks.ceiling import Pass
from benchmarks.data import Task
from benchmarks.measure import Reader, interleaved
from benchmarks.reading import Measured, Setup

STEPS = 50  # of one pass
SHAPES = [
    (1024, 1024),
    (1024,),
    (1024, 1024),
    (1024,),
    *[(64, 64), (64,)] * 20,
]  # an MLP's gradients, and a deep network's
STRATEGIES = ("chained", "funneled", "concurrent")
RANKS = 2


def in_graph(task: Task, rank: int = 0, size: int = 1, *, strategy: str) -> Pass:
    """Steps of a ``tf.function`` that averages all gradients. *Collective*."""
    import tensorflow as tf

    from matex_data.training.comm.channel import open_channel
    from matex_data.training.reduction.ops import Reducer

    reducer = Reducer(open_channel(None), strategy)  # type: ignore[arg-type]
    gradients = [tf.ones(shape) for shape in SHAPES]

    @tf.function
    def step() -> Any:
        return reducer([gradient * 2 for gradient in gradients])

    def run() -> int:
        for _ in range(STEPS):
            step()
        return STEPS

    return run


def by_mpi(task: Task, rank: int = 0, size: int = 1) -> Pass:
    """As many bytes by one ``Allreduce`` in place. *Collective*."""
    flat = np.ones(sum(int(np.prod(shape)) for shape in SHAPES), np.float32)

    def run() -> int:
        for _ in range(STEPS):
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, flat)
        return STEPS

    return run


def average(setup: Setup) -> Measured:
    """The strategies beside one ``Allreduce`` of as many bytes; a "sample" is a step."""
    nbytes = 4 * sum(int(np.prod(shape)) for shape in SHAPES)
    readers = [
        Reader(strategy, "ours", "averages.in_graph", {"strategy": strategy}, ranks=RANKS) for strategy in STRATEGIES
    ]
    ceiling = Reader("MPI.Allreduce, one array", "ceiling", "averages.by_mpi", ranks=RANKS)
    small = data.small(setup.folder)
    task = Task(small.path, small.inputs, small.targets, 1, STEPS, nbytes, STEPS)
    results = interleaved(task, [*readers, ceiling], setup.repetitions)
    return Measured(f"{len(SHAPES)} gradients, {nbytes / 1e6:.1f} MB, averaged on {RANKS} ranks", results)


CASES = {"average": [average]}
