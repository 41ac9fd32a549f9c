"""matex_data through its public interface."""

from __future__ import annotations

from typing import Any

import matex_data as md
from benchmarks.harness.counting import counting
from benchmarks.harness.data import Task
from benchmarks.readers.ceiling import Pass

SEED = 1


def tensors(task: Task, **options: Any) -> Pass:
    """Read shuffled batches from ``tf_dataset``."""
    return counting(opened(task, **options).tf_dataset(task.batch_size, shuffle=True, seed=SEED))


def arrays(task: Task, **options: Any) -> Pass:
    """Read shuffled batches from ``batches``."""
    batches = opened(task, **options).batches(task.batch_size, shuffle=True, seed=SEED)

    def run() -> int:
        return sum(len(x) for x, _ in batches)

    return run


def everywhere(task: Task, **options: Any) -> Pass:
    """Read batches of ``shuffle="global"``."""
    batches = opened(task, **options).batches(task.batch_size, shuffle="global", seed=SEED)

    def run() -> int:
        return sum(len(x) for x, _ in batches)

    return run


def opened(task: Task, **options: Any) -> md.Dataset:
    """Open the files of a task."""
    return md.open_dataset(task.path, inputs=task.inputs, targets=task.targets, **options)
