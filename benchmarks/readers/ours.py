"""matex_data as its users have it."""

from __future__ import annotations

from typing import Any

import matex_data as md
from benchmarks.harness.counting import counting
from benchmarks.harness.data import Task
from benchmarks.readers.ceiling import Pass

SEED = 1


def tensors(task: Task, **options: Any) -> Pass:
    """Shuffled batches from ``tf_dataset``."""
    return counting(opened(task, **options).tf_dataset(task.batch_size, shuffle=True, seed=SEED))


def arrays(task: Task, **options: Any) -> Pass:
    """Shuffled batches from ``batches``."""
    batches = opened(task, **options).batches(task.batch_size, shuffle=True, seed=SEED)

    def run() -> int:
        return sum(len(x) for x, _ in batches)

    return run


def everywhere(task: Task, **options: Any) -> Pass:
    """Batches from a uniform permutation of all samples, which the ranks keep in memory and exchange."""
    batches = opened(task, **options).batches(task.batch_size, shuffle="global", seed=SEED)

    def run() -> int:
        return sum(len(x) for x, _ in batches)

    return run


def opened(task: Task, **options: Any) -> md.Dataset:
    """The files of a task."""
    return md.open_dataset(task.path, inputs=task.inputs, targets=task.targets, **options)
