"""The cases of text tables."""

from __future__ import annotations

from pathlib import Path

from benchmarks.cases.reading import GAIN, MOVING, ROUNDS, Goal, Measured, Setup
from benchmarks.harness.measure import Reader, interleaved
from benchmarks.readers import text

READERS = (
    Reader("matex_data, one matrix", "ours", "text.matrix"),
    Reader("matex_data, 30 columns", "ours", "text.columns"),
    Reader("matex_data, record borders alone", "ours", "text.scan", threads=1),
    Reader("pyarrow read_csv, 1 thread", "peer", "text.arrow"),
    Reader("pandas read_csv", "peer", "text.pandas"),
    Reader("tf.data CsvDataset, in order", "peer", "text.csv_dataset"),
    Reader("tf.data CsvDataset, shuffled", "peer", "text.csv_dataset", {"buffer": 10_000}),
    MOVING,
)
RANKS = [
    Reader(f"matex_data, {n} rank{'s' * (n > 1)}", "ours", "text.matrix", ranks=n, threads=1, pinned=True)
    for n in (1, 2)
]


def alone(setup: Setup) -> Measured:
    """Measure a table of floats as text on one rank."""
    task = text.table(setup.folder, setup.quick)
    size = Path(task.path).stat().st_size
    results = interleaved(task, READERS, setup.repetitions)
    matrix, columns, scan, arrow, _, in_order, shuffled, moving = results
    gigabytes = size / 1e9 / task.samples
    goals = [
        Goal("tf.data, shuffled / pyarrow", matrix.over(arrow), 0.9),
        Goal("tf.data, shuffled, by column / pyarrow", columns.over(arrow), 0.6),
        Goal("tf.data, shuffled / CsvDataset, shuffled", matrix.over(shuffled), 8),
        Goal("tf.data, shuffled / CsvDataset, in order", matrix.over(in_order), 8),
        Goal("record borders", scan.rate * gigabytes, min(1.0, 0.3 * moving.rate * gigabytes), unit=" GB/s"),
    ]
    return Measured(f"CSV, 30 numeric columns, {size / 1e6:.0f} MB", results, goals)


def on_ranks(setup: Setup) -> Measured:
    """Measure a table of floats as text on one rank and on two."""
    one, two = results = interleaved(text.table(setup.folder, setup.quick), RANKS, ROUNDS * setup.repetitions)
    goals = [Goal("2 ranks / 1 rank", two.over(one), GAIN)]
    return Measured("CSV on 2 ranks, one core a rank", results, goals)


CASES = {"csv": [alone, on_ranks]}
