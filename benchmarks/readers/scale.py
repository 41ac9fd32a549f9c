"""Probe of the bytes that a rank reads. Without TensorFlow, whose import would take minutes on 16 ranks."""

from __future__ import annotations

from collections.abc import Callable

import matex_data as md
from benchmarks.harness.data import Task
from benchmarks.readers.ours import SEED


def bytes_of_epoch(task: Task, batch_size: int) -> Callable[[], dict[str, float]]:
    """Count the bytes that this rank reads in the first epoch."""

    def run() -> dict[str, float]:
        data = md.open_dataset(task.path, inputs=task.inputs)
        for _ in data.batches(batch_size, shuffle=True, seed=SEED):
            pass
        return {"bytes": data.profile.bytes, "seconds": 0.0}

    return run
