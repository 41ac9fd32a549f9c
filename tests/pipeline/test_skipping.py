"""``on_error="skip"``: the batches of sound files without the damaged samples, on any number of ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from matex_data import open_dataset
from tests.support.ranks import Pools

ROWS, CHUNK, BATCH = 1003, 16, 24
BAD_CHUNKS = (3, 40, 41)
BAD = [row for chunk in BAD_CHUNKS for row in range(chunk * CHUNK, (chunk + 1) * CHUNK)]
SIZES = (1, 3, pytest.param(2, marks=pytest.mark.slow))
ORDERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "in order": ({}, {"remainder": "drop"}),
    "independent": ({"io": "independent"}, {"remainder": "keep", "shuffle": True, "seed": 1}),
    "padded": ({}, {"remainder": "pad", "shuffle": True, "seed": 1}),
    "in memory": ({"cache": "memory"}, {"remainder": "keep", "shuffle": True, "seed": 1}),
    "exchanged": ({}, {"remainder": "pad", "shuffle": "global", "seed": 1}),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("skipping") / "sound.h5"
    with h5py.File(path, "w") as file:
        x = np.repeat(np.arange(ROWS, dtype="f4")[:, None], 50, axis=1)
        file.create_dataset("x", data=x, chunks=(CHUNK, 50), compression="gzip", shuffle=True)
        file["id"] = np.arange(ROWS)
    return path


@pytest.fixture(scope="module")
def damaged(sound: Path) -> Path:
    path = sound.with_name("damaged.h5")
    content = bytearray(sound.read_bytes())
    with h5py.File(sound) as file:
        for chunk in BAD_CHUNKS:
            content[file["x"].id.get_chunk_info(chunk).byte_offset + 9] ^= 0xFF
    path.write_bytes(content)
    return path


def _epochs(comm: MPI.Intracomm, path: Path, options: dict[str, Any], order: dict[str, Any]) -> Any:
    """Return the sample numbers of two epochs, the warnings, the skipped samples, and their number on this rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = open_dataset(path, comm=comm, **options)
        batches = data.batches(BATCH, **order)
        epochs = [[_numbers(batch, comm.size) for batch in batches] for _ in range(2)]
    said = [str(w.message) for w in caught if "cannot be read" in str(w.message)]
    return epochs, said, data.skipped, data.profile.skipped


def _numbers(batch: Any, size: int) -> list[int]:
    real = batch.get("sample_weight", np.ones(len(batch["id"]))) > 0
    assert np.array_equal(batch["x"][real][:, 0], batch["id"][real]) and not batch["x"][~real].any()
    assert len(batch["id"]) == BATCH // size or "sample_weight" not in batch
    return batch["id"][real].tolist()


def _joined(results: list[Any]) -> list[list[list[int]]]:
    """Return the sorted samples of every global batch of both epochs."""
    return [
        [sorted(n for own in of_ranks for n in own) for of_ranks in zip(*epochs, strict=True)]
        for epochs in zip(*(epochs for epochs, *_ in results), strict=True)
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ORDERS)
def test_the_same_batches_without_the_damaged_samples(
    sound: Path, damaged: Path, ranks: Pools, size: int, name: str
) -> None:
    options, order = ORDERS[name]
    expected = _joined([_epochs(MPI.COMM_SELF, sound, options, order)])
    results = ranks(size).run(_epochs, damaged, {**options, "on_error": "skip"}, order)
    assert _joined(results) == [[[n for n in batch if n not in BAD] for batch in epoch] for epoch in expected]
    assert all([sample.row for sample in skipped] == BAD for _, _, skipped, _ in results)
    assert sum(own for *_, own in results) == len(BAD)
    first, *others = (said for _, said, *_ in results)
    assert len(first) == (1 if name in ("in memory", "exchanged") else 2) and not any(others)
    assert f"{len(BAD)} of " in first[0] and "damaged.h5', row 48: a chunk does not decode" in first[0]
    assert "43 more" in first[0]
