"""The case of a Parquet file: shuffled batches beside peers that read in order, and that shuffle."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.cases.reading import Goal, Measured, Setup, best_peer
from benchmarks.harness.measure import Reader, interleaved
from benchmarks.readers import parquet

OURS = (
    Reader("matex_data, tf.data", "ours", "parquet.tensors"),
    Reader("matex_data, NumPy", "ours", "parquet.arrays"),
    Reader("pyarrow decodes row groups, nothing else", "ceiling", "parquet.decoding"),
    Reader("pyarrow to_batches, not looked at", "reference", "parquet.record_batches"),
)
IN_ORDER = (
    Reader("pyarrow to_batches, arrays", "peer", "parquet.in_order"),
    Reader("to_batches + from_generator", "peer", "parquet.tf_generator", {"shuffled": False}),
    *(
        Reader(f"PyTorch, iter_batches, {n} workers", "peer", "parquet.torch_groups", {"shuffled": False, "workers": n})
        for n in (0, 2)
    ),
    Reader("Grain ParquetIterDataset", "peer", "parquet.grain_rows", {"shuffled": False}),
)
BY_ROW = (
    Reader("PyTorch, dataset.take, 0 workers", "peer", "parquet.torch_rows", {"workers": 0}),
    Reader("PyTorch, dataset.take, 2 workers", "peer", "parquet.torch_rows", {"workers": 2}),
    Reader("from_generator + shuffle", "peer", "parquet.tf_generator", {"shuffled": True}),
    Reader("Grain WindowShuffle", "peer", "parquet.grain_rows", {"shuffled": True}),
)
BY_GROUP = tuple(
    Reader(f"PyTorch, row groups, {n} workers", "peer", "parquet.torch_groups", {"shuffled": True, "workers": n})
    for n in (0, 2)
)


def columns(setup: Setup, compression: str) -> Measured:
    """Measure the columns of a file as arrays of their own."""
    task = parquet.table(setup.folder, setup.quick, compression)
    results = interleaved(task, (*OURS, *IN_ORDER, *BY_ROW, *BY_GROUP), setup.repetitions)
    ours, arrays, _, plain = results[: len(OURS)]
    ordered, by_row, by_group = (
        best_peer([found for found in results if found.reader in readers]) for readers in (IN_ORDER, BY_ROW, BY_GROUP)
    )
    goals = [
        Goal(f"tf.data, shuffled / best peer in order ({ordered.reader.name})", ours.over(ordered), 1),
        Goal("NumPy, shuffled / pyarrow to_batches, not looked at", arrays.over(plain), 1),
        Goal(f"tf.data / best peer that shuffles rows ({by_row.reader.name})", ours.over(by_row), 5),
        Goal(f"tf.data / best peer that shuffles row groups ({by_group.reader.name})", ours.over(by_group), 5),
    ]
    title = f"Parquet, {compression}: 20 columns and lists of 16, row groups of {parquet.GROUP:,} rows"
    return Measured(f"{title}, batches of {parquet.BATCH}", results, goals)


CASES: dict[str, list[Callable[[Setup], Measured]]] = {
    "parquet": [partial(columns, compression=compression) for compression in ("zstd", "snappy")]
}
