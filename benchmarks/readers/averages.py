"""The average of gradients over the ranks, within a graph and by MPI alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from benchmarks.harness.data import Task
from benchmarks.readers.ceiling import Pass

STEPS = 50  # of one pass
SHAPES = [
    (1024, 1024),
    (1024,),
    (1024, 1024),
    (1024,),
    *[(64, 64), (64,)] * 20,
]  # gradients of an MLP, and of a deep network
NBYTES = 4 * sum(int(np.prod(shape)) for shape in SHAPES)


def in_graph(task: Task, rank: int = 0, size: int = 1, *, strategy: str) -> Pass:
    """Return a pass of steps of a ``tf.function`` that averages all gradients. *Collective*."""
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
    """Return a pass that reduces as many bytes by one ``Allreduce`` in place. *Collective*."""
    flat = np.ones(sum(int(np.prod(shape)) for shape in SHAPES), np.float32)

    def run() -> int:
        for _ in range(STEPS):
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, flat)
        return STEPS

    return run
