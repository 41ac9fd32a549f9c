"""Files of events with ragged fields for the tests: variable-length HDF5 datasets, and their contents in awkward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import awkward as ak
import h5py
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from matex_data import open_dataset

LENGTHS = (70, 0, 113)
"""Events of each file."""
Batch = dict[str, NDArray[Any]]


def write_events(folder: Path, lengths: Sequence[int] = LENGTHS, most: int = 6) -> ak.Array:
    """Write one file for each length, and return the events of all files, sorted by ``number``.

    ``Muon_pt`` (float32) has equal values, so that ties occur; ``Muon_charge`` (int8) and ``Jet_pt`` (float64) are
    ragged, too. ``MET``, ``nMuon``, ``jets/pt``, ``genWeight`` and ``number`` have one number for each event.
    """
    rng = np.random.default_rng(7)
    total = sum(lengths)
    counts, jets = rng.integers(0, most + 1, total), rng.integers(0, 4, total)
    muons = counts.sum()
    events = ak.zip(
        {
            "Muon_pt": ak.unflatten(rng.integers(0, 12, muons).astype("f4") / 2, counts),
            "Muon_charge": ak.unflatten(rng.choice(np.array([-128, -1, 1, 127], "i1"), muons), counts),
            "Jet_pt": ak.unflatten(rng.exponential(40, jets.sum()), jets),
            "MET": rng.exponential(30, total).astype("f4"),
            "nMuon": counts.astype("i4"),
            "jets/pt": rng.normal(size=total),
            "genWeight": rng.normal(1, 1, total),
            "vertex": ak.from_numpy(rng.normal(size=(total, 3)), regulararray=True),
            "number": np.arange(total),
        },
        depth_limit=1,
    )
    first = 0
    for i, rows in enumerate(lengths):
        with h5py.File(folder / f"{i}.h5", "w") as file:
            for name in events.fields:
                _write(file, name, events[name][first : first + rows])
        first += rows
    return events


def _write(file: h5py.File, name: str, values: ak.Array) -> None:
    if "var" not in str(values.type) or "_" not in name:
        file[name] = ak.to_numpy(values)
        return
    dtype = ak.to_numpy(ak.flatten(values)).dtype
    chunks = {"chunks": (16,), "maxshape": (None,)} if len(values) else {}
    dataset = file.create_dataset(name, (len(values),), h5py.vlen_dtype(dtype), **chunks)
    for i, row in enumerate(values):
        dataset[i] = ak.to_numpy(row)


def read(comm: MPI.Intracomm, folder: Path, step: int = 0, **options: Any) -> list[Batch]:
    """Return this rank's rows of all shuffled batches of two epochs, from global batch ``step`` on."""
    data = open_dataset(str(folder), comm=comm, **options)
    start = data.state(step) if step else None
    batches = data.batches(24, shuffle=True, seed=3, remainder="keep", start=start)
    return [{name: array.copy() for name, array in batch.items()} for _ in range(2) for batch in batches]


def load(comm: MPI.Intracomm, folder: Path, **options: Any) -> tuple[int, Batch]:
    """Return the number of samples, and this rank's block of them."""
    data = open_dataset(str(folder), comm=comm, **options)
    return len(data), data.load()


def joined(batches: Sequence[Batch]) -> Batch:
    """Return the samples of several batches, one batch after the other."""
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def global_batches(by_rank: Sequence[Sequence[Batch]]) -> list[Batch]:
    """Return the global batches of those of the ranks."""
    return [joined(batches) for batches in zip(*by_rank, strict=True)]
