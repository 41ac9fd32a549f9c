"""Readers of a text table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import matex_data as md
from benchmarks.harness.counting import counting
from benchmarks.harness.data import SMALL, Task
from benchmarks.readers.ceiling import Pass
from benchmarks.readers.ours import SEED

COLUMNS = [f"x{i}" for i in range(29)]


def table(folder: Path, quick: bool = False) -> Task:
    """Write 29 columns of floats with six digits and one of integers: 266 MB of text."""
    count = 960_000 // (SMALL if quick else 1)
    path = folder / f"table-{count}.csv"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(0)
        part = path.with_suffix(".part")
        with part.open("w") as file:
            file.write(",".join([*COLUMNS, "label"]) + "\n")
            for _ in range(count // 1000):
                values = np.column_stack([rng.normal(size=(1000, len(COLUMNS))), rng.integers(0, 2, 1000)])
                np.savetxt(file, values, fmt=["%.6f"] * len(COLUMNS) + ["%d"], delimiter=",")
        part.rename(path)
    return Task(str(path), COLUMNS[0], "label", 1024, count, 8 * len(COLUMNS), 48 * 1024)


def matrix(task: Task, **options: Any) -> Pass:
    """Read shuffled batches from ``tf_dataset``, the floats as one matrix."""
    data = md.open_dataset(task.path, inputs=COLUMNS, targets=task.targets, stack=True, **options)
    return counting(data.tf_dataset(task.batch_size, shuffle=True, seed=SEED))


def columns(task: Task) -> Pass:
    """Read shuffled batches from ``tf_dataset``, each column by itself."""
    return counting(md.open_dataset(task.path).tf_dataset(task.batch_size, shuffle=True, seed=SEED))


def scan(task: Task) -> Pass:
    """Search for the borders of the records alone."""
    from matex_data.readers.collective import SingleRank
    from matex_data.readers.csv.dialect import Dialect
    from matex_data.readers.csv.records import scan_file

    size = Path(task.path).stat().st_size
    return lambda: scan_file(task.path, 0, 0, size, Dialect(), SingleRank()).count - 1


def arrow(task: Task) -> Pass:
    """Read with ``pyarrow.csv.read_csv`` and one thread, in the order of the file, without batches or tensors."""
    from pyarrow import csv

    options = csv.ReadOptions(use_threads=False)
    return lambda: int(csv.read_csv(task.path, read_options=options).num_rows)


def pandas(task: Task) -> Pass:
    """Read with ``pandas.read_csv`` and its own parser, in the order of the file, without batches or tensors."""
    from pandas import read_csv

    return lambda: len(read_csv(task.path))


def csv_dataset(task: Task, buffer: int = 0) -> Pass:
    """Read the first samples with ``tf.data.experimental.CsvDataset`` in batches, shuffled in a buffer of rows."""
    import tensorflow as tf

    types = [tf.float64] * len(COLUMNS) + [tf.int64]
    lines = tf.data.experimental.CsvDataset(task.path, types, header=True)
    lines = lines.shuffle(buffer, SEED) if buffer else lines
    return counting(lines.batch(task.batch_size).take(max(1, min(task.limit, task.samples) // task.batch_size)))
