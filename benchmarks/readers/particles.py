"""Readers of particle data: branches of a ROOT file, and tables in HDF5."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import matex_data as md
from benchmarks.harness.counting import counting
from benchmarks.harness.data import SMALL, Task
from benchmarks.readers.ceiling import Pass
from benchmarks.readers.ours import SEED
from matex_data.epochs.batches import BatchWindow
from matex_data.index.ragged import RaggedArray

TREE = "Events"
FLAT = ["MET_pt", "MET_phi", "HT", "nVertex"]
JAGGED = ["Muon_pt", "Muon_eta", "Muon_phi"]
BRANCHES = {"flat": FLAT, "jagged": JAGGED}
BATCH = 1024
CLUSTER = 100_000  # events
COLUMNS = ("pt", "eta", "phi", "mass", "area", "charge", "energy", "width")


def events(folder: Path, quick: bool = False) -> Task:
    """Write 16,000,000 events with flat branches and three branches of muons, 3 on average; ZSTD."""
    import awkward as ak
    import uproot

    count = 16_000_000 // (SMALL if quick else 1)
    path = folder / f"events-{count}.root"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part, rng = path.with_suffix(".part"), np.random.default_rng(0)
        flat = dict.fromkeys(FLAT, "float32")
        with uproot.recreate(part, compression=uproot.ZSTD(3)) as file:
            tree = file.mktree(TREE, flat | dict.fromkeys(JAGGED, "var * float32"))
            for _ in range(count // CLUSTER):
                muons = rng.poisson(3, CLUSTER)
                columns = {name: rng.exponential(30, CLUSTER).astype("f4") for name in FLAT}
                for name in JAGGED:
                    columns[name] = ak.unflatten(rng.normal(0, 1, muons.sum()).astype("f4"), muons)
                tree.extend(columns)
        part.rename(path)
    return Task(str(path), "", "", BATCH, count, 4 * (len(FLAT) + 3 * len(JAGGED)), 50 * BATCH)


def jets(folder: Path, quick: bool = False) -> Task:
    """Write a compound table of 8 float32 members, and the same columns as contiguous datasets: 2 x 256 MB."""
    count = 8_000_000 // (SMALL if quick else 1)
    path = folder / f"jets-{count}.h5"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part, rng = path.with_suffix(".part"), np.random.default_rng(0)
        table = np.empty(count, [(name, "<f4") for name in COLUMNS])
        for name in COLUMNS:
            table[name] = rng.random(count, np.float32)
        with h5py.File(part, "w") as file:
            file["jets"] = table
            file["matrix"] = table.view("<f4").reshape(count, -1)
        part.rename(path)
    return Task(str(path), "", "", BATCH, count, 4 * len(COLUMNS), count)


def tensors(task: Task, branches: str) -> Pass:
    """Read shuffled batches of branches from ``tf_dataset``."""
    data = md.open_dataset(task.path, inputs=BRANCHES[branches])
    return counting(_flat(data.tf_dataset(task.batch_size, shuffle=True, seed=SEED)))


def _flat(dataset: Any) -> Any:
    """Return the dataset with the row splits and the values of ragged tensors as tensors."""
    import tensorflow as tf

    def components(batch: Any) -> Any:
        parts = [[x.row_splits[:-1], x.flat_values] if isinstance(x, tf.RaggedTensor) else [x] for x in batch.values()]
        return tuple(tf.nest.flatten(parts))

    return dataset.map(components)


def windows(task: Task, branches: str) -> Pass:
    """Read the windows from which TensorFlow slices the shuffled batches, without TensorFlow."""
    batches = md.open_dataset(task.path, inputs=BRANCHES[branches]).batches(task.batch_size, shuffle=True, seed=SEED)

    def run() -> int:
        return sum(int(window.sizes.sum()) for window in batches.windows())

    return run


def slicing(task: Task, branches: str) -> Pass:
    """Slice batches of an epoch that is in memory already, in order: what TensorFlow alone takes for them."""
    import tensorflow as tf

    def slices(window: BatchWindow) -> Any:
        return tf.data.Dataset.from_tensor_slices({name: tensor(array) for name, array in window.arrays.items()})

    def tensor(samples: Any) -> Any:
        if not isinstance(samples, RaggedArray):
            return samples.reshape(-1, task.batch_size)
        ragged = tf.RaggedTensor.from_row_lengths(samples.values, samples.lengths, validate=False)
        return tf.RaggedTensor.from_uniform_row_length(ragged, task.batch_size, validate=False)

    data = md.open_dataset(task.path, inputs=BRANCHES[branches]).batches(task.batch_size)
    return counting(_flat(reduce(tf.data.Dataset.concatenate, map(slices, data.windows()))))


def table(task: Task, name: str) -> Pass:
    """Read shuffled batches of all members of the table as one matrix, or of the matrix."""
    inputs: Any = "matrix" if name == "matrix" else [f"jets/{column}" for column in COLUMNS]
    data = md.open_dataset(task.path, inputs=inputs, stack=name != "matrix")
    return counting(data.tf_dataset(task.batch_size, shuffle=True, seed=SEED))


def uproot_bulk(task: Task, branches: str, threads: int) -> Pass:
    """Read whole branches as awkward arrays, in the order of the file; threads decompress."""
    import uproot

    def run() -> int:
        pool = ThreadPoolExecutor(threads) if threads > 1 else None  # the file shuts it down when it is closed
        with uproot.open(task.path, decompression_executor=pool) as file:
            return len(file[TREE].arrays(BRANCHES[branches]))

    return run


def uproot_iterate(task: Task, branches: str) -> Pass:
    """Read batches by ``uproot.iterate`` in the order of the file, through ``from_generator``."""
    import tensorflow as tf
    import uproot

    names = BRANCHES[branches]
    ragged = branches == "jagged"

    def batches() -> Any:
        taken = 0
        for batch in uproot.iterate(f"{task.path}:{TREE}", names, step_size=task.batch_size):
            if ragged:
                yield {
                    name: tf.RaggedTensor.from_row_lengths(
                        batch[name].layout.content.data, np.diff(batch[name].layout.offsets.data)
                    )
                    for name in names
                }
            else:
                yield {name: batch[name].to_numpy() for name in names}
            taken += len(batch)
            if taken >= task.limit:
                return

    spec: Any = tf.RaggedTensorSpec([None, None], tf.float32) if ragged else tf.TensorSpec([None], tf.float32)
    dataset = tf.data.Dataset.from_generator(batches, output_signature=dict.fromkeys(names, spec))
    return counting(_flat(dataset).prefetch(2))
