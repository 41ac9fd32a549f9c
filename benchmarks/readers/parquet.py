"""Readers of a Parquet file: columns of numbers, and one of lists of equal length.

All deliver the rows as an array for each column.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import matex_data as md
from benchmarks.harness.counting import counting
from benchmarks.harness.data import SMALL, Array, Task
from benchmarks.readers.ceiling import Pass
from benchmarks.readers.ours import SEED

MEASURED = [f"x{i}" for i in range(8)]  # float32, all bits random
ROUNDED = [f"r{i}" for i in range(8)]  # float32 with two decimals
CLASSES = [f"n{i}" for i in range(4)]  # int32 below 100
COLUMNS = [*MEASURED, *ROUNDED, *CLASSES]
WAVE, SAMPLES = "wave", 16  # list of so many float32, integers below 4096
GROUP = 50_000  # rows of a row group
BATCH = 1024
BUFFER = 10_000  # rows among which peers shuffle
SLOW = 48 * BATCH  # rows that a reader which makes an object of each row takes in a pass
TAKEN = 12  # row groups that PyTorch takes in a pass

Batch = dict[str, Array]


def table(folder: Path, quick: bool = False, compression: str = "zstd") -> Task:
    """Write 3,500,000 rows of 20 numbers and a list of 16: 504 MB in memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = 3_500_000 // (SMALL if quick else 1)
    path = folder / f"table-{compression}-{count}.parquet"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        kinds = dict.fromkeys([*MEASURED, *ROUNDED], pa.float32()) | dict.fromkeys(CLASSES, pa.int32())
        schema = pa.schema([*kinds.items(), (WAVE, pa.list_(pa.float32(), SAMPLES))])
        rng = np.random.default_rng(0)
        with pq.ParquetWriter(part, schema, compression=compression) as writer:
            for start in range(0, count, GROUP):
                writer.write_table(pa.table(_rows(rng, min(GROUP, count - start)), schema), row_group_size=GROUP)
        part.rename(path)
    return Task(str(path), "", "", BATCH, count, 4 * (len(COLUMNS) + SAMPLES), 4 * BATCH)


def _rows(rng: np.random.Generator, count: int) -> dict[str, Any]:
    import pyarrow as pa

    found: dict[str, Any] = {name: rng.normal(size=count).astype("f4") for name in MEASURED}
    found |= {name: rng.normal(size=count).round(2).astype("f4") for name in ROUNDED}
    found |= {name: rng.integers(0, 100, count, np.int32) for name in CLASSES}
    wave = rng.normal(2048, 60, count * SAMPLES).clip(0, 4095).astype("i2").astype("f4")
    return found | {WAVE: pa.FixedSizeListArray.from_arrays(pa.array(wave), SAMPLES)}


def tensors(task: Task) -> Pass:
    """Read shuffled batches from ``tf_dataset``, a tensor for each column."""
    data = md.open_dataset(task.path)
    return counting(data.tf_dataset(task.batch_size, shuffle=True, seed=SEED, remainder="keep"))


def arrays(task: Task) -> Pass:
    """Read shuffled batches from ``batches``, an array for each column."""
    batches = md.open_dataset(task.path).batches(task.batch_size, shuffle=True, seed=SEED, remainder="keep")
    return lambda: sum(len(batch[WAVE]) for batch in batches)


def decoding(task: Task) -> Pass:
    """Decode whole row groups by pyarrow in as many threads as matex_data has, without batches."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(task.path)
    groups, metadata = range(file.num_row_groups), file.metadata
    pool = ThreadPoolExecutor(int(os.environ["MATEX_THREADS"]))

    def decode(group: int) -> int:
        with pq.ParquetFile(task.path, metadata=metadata, memory_map=True) as own:
            return int(own.read_row_group(group, use_threads=False).num_rows)

    return lambda: sum(pool.map(decode, groups))


def record_batches(task: Task) -> Pass:
    """Read record batches by ``dataset.to_batches`` in the order of the file, and look at none."""
    from pyarrow import dataset

    rows = dataset.dataset(task.path)
    return lambda: sum(batch.num_rows for batch in rows.to_batches(batch_size=task.batch_size))


def in_order(task: Task) -> Pass:
    """Read arrays by ``dataset.to_batches`` in the order of the file."""
    from pyarrow import dataset

    rows = dataset.dataset(task.path)

    def run() -> int:
        return sum(len(_batch(found)[WAVE]) for found in rows.to_batches(batch_size=task.batch_size))

    return run


def tf_generator(task: Task, shuffled: bool) -> Pass:
    """Read by ``dataset.to_batches`` through ``from_generator``; TensorFlow shuffles the rows in a buffer."""
    import tensorflow as tf
    from pyarrow import dataset

    rows = dataset.dataset(task.path)

    def batches() -> Iterator[Batch]:
        return map(_batch, rows.to_batches(batch_size=task.batch_size))

    spec: Any = {name: tf.TensorSpec([None], tf.int32 if name in CLASSES else tf.float32) for name in COLUMNS}
    spec[WAVE] = tf.TensorSpec([None, SAMPLES], tf.float32)
    found = tf.data.Dataset.from_generator(batches, output_signature=spec)
    if shuffled:
        found = found.take(SLOW // task.batch_size).unbatch().shuffle(BUFFER, SEED).batch(task.batch_size)
    return counting(found.prefetch(tf.data.AUTOTUNE))


def torch_groups(task: Task, shuffled: bool, workers: int) -> Pass:
    """Read with PyTorch's ``DataLoader`` an iterable dataset of row groups, of which each worker has its own.

    Shuffled: the row groups in a random order, and the rows within each of them.
    """
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    class Groups(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Batch]:
            info: Any = get_worker_info()
            return _by_group(task, shuffled, *((info.id, info.num_workers) if info else (0, 1)))

    loader: DataLoader[Any] = DataLoader(Groups(), batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    return lambda: sum(len(batch[WAVE]) for batch in loader)


def _by_group(task: Task, shuffled: bool, number: int, size: int) -> Iterator[Batch]:
    """Yield the batches of every ``size``-th row group."""
    import pyarrow.parquet as pq

    rng = np.random.default_rng(SEED)
    with pq.ParquetFile(task.path, pre_buffer=True) as file:
        groups = rng.permutation(file.num_row_groups) if shuffled else np.arange(file.num_row_groups)
        own = groups[:TAKEN][number::size].tolist()
        if not shuffled:
            yield from map(_batch, file.iter_batches(task.batch_size, row_groups=own))
            return
        for group in own:
            rows = _batch(file.read_row_group(group).combine_chunks().to_batches()[0])
            order = rng.permutation(len(rows[WAVE]))
            for start in range(0, len(order), task.batch_size):
                chosen = order[start : start + task.batch_size]
                yield {name: values[chosen] for name, values in rows.items()}


def torch_rows(task: Task, workers: int) -> Pass:
    """Read with PyTorch's ``DataLoader`` rows of a random order, those of a batch by one ``dataset.take``."""
    from torch.utils.data import DataLoader, SubsetRandomSampler, default_convert

    class Rows:
        def __init__(self) -> None:
            self.rows: Any = None

        def __len__(self) -> int:
            return task.samples

        def __getitems__(self, numbers: list[int]) -> Batch:
            from pyarrow import dataset

            self.rows = self.rows or dataset.dataset(task.path)
            return _batch(self.rows.take(np.sort(numbers)).combine_chunks().to_batches()[0])

    chosen = np.random.default_rng(0).choice(task.samples, task.limit, replace=False).tolist()
    loader: DataLoader[Any] = DataLoader(
        Rows(),  # type: ignore[arg-type]
        task.batch_size,
        sampler=SubsetRandomSampler(chosen),
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=default_convert,
    )
    return lambda: sum(len(batch[WAVE]) for batch in loader)


def grain_rows(task: Task, shuffled: bool) -> Pass:
    """Read with Grain's ``ParquetIterDataset``, row by row, shuffled within a window."""
    grain: Any = import_module("grain")
    rows = grain.experimental.ParquetIterDataset(task.path)
    if shuffled:
        rows = grain.experimental.WindowShuffleIterDataset(rows, window_size=BUFFER, seed=SEED)
    batches = rows.batch(task.batch_size)
    return lambda: sum(len(batch[WAVE]) for batch in islice(batches, SLOW // task.batch_size))


def _batch(found: Any) -> Batch:
    """Return the columns of a record batch as arrays, without a copy."""
    arrays: Batch = {name: found.column(name).to_numpy() for name in COLUMNS}
    arrays[WAVE] = found.column(WAVE).flatten().to_numpy().reshape(-1, SAMPLES)
    return arrays
