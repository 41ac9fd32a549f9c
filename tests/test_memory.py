"""``cache="memory"``: each rank reads its shard once, and the batches are as usual."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI
from netCDF4 import Dataset

from matex_data import PartitionError, machine, open_dataset
from matex_data.io.counters import process_profile
from tests.support.ranks import Pool

ROWS, BATCH = 1001, 24


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("memory") / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(ROWS * 10.0).reshape(ROWS, 10), chunks=(16, 10), compression="gzip")
        file["id"] = np.arange(ROWS)
    return str(path)


def _epochs(comm: MPI.Intracomm, path: str, remainder: str, step: int, shuffle: bool) -> tuple[list[Any], list[int]]:
    data = open_dataset(path, comm=comm, cache="memory")
    batches = data.batches(BATCH, shuffle=shuffle, seed=3, remainder=remainder, start=data.state(step))
    epochs, read = [], []
    for _ in range(3):
        epoch = []
        for batch in batches:
            real = batch["sample_weight"] > 0 if remainder == "pad" else slice(None)
            assert np.array_equal(batch["x"][real][:, 0], batch["id"][real] * 10.0)
            epoch.append(batch["id"][real].copy())
        epochs.append(epoch)
        read.append(process_profile().bytes)
    return epochs, read


@pytest.mark.parametrize("remainder", ["drop", "pad", "keep"])
def test_every_sample_is_delivered_in_each_epoch_and_read_once(path: str, pool: Pool, remainder: str) -> None:
    by_rank = pool.run(_epochs, path, remainder, 0, True)
    orders = []
    for epoch in range(3):
        steps = [np.concatenate(of_ranks) for of_ranks in zip(*(epochs[epoch] for epochs, _ in by_rank), strict=True)]
        seen = np.concatenate(steps)
        assert len(np.unique(seen)) == len(seen) == (ROWS // BATCH * BATCH if remainder == "drop" else ROWS)
        orders.append([np.sort(step).tolist() for step in steps])
    assert orders[0] != orders[1] != orders[2]
    for _, read in by_rank:
        assert len(set(read)) == 1


def test_batches_are_equal_on_any_number_of_ranks_when_resumed(path: str, pool: Pool) -> None:
    alone, _ = _epochs(MPI.COMM_SELF, path, "keep", 0, True)
    by_rank = pool.run(_epochs, path, "keep", 50, True)
    found = [
        np.sort(np.concatenate(of_ranks)).tolist()
        for epoch in range(2)
        for of_ranks in zip(*(epochs[epoch] for epochs, _ in by_rank), strict=True)
    ]
    assert found == [np.sort(step).tolist() for epoch in alone for step in epoch][50:]


def test_unshuffled_batches_are_in_the_order_of_the_file(path: str) -> None:
    (first, second, _), _ = _epochs(MPI.COMM_SELF, path, "keep", 0, False)
    assert np.concatenate(first).tolist() == np.concatenate(second).tolist() == list(range(ROWS))


def test_unknown_cache(path: str) -> None:
    with pytest.raises(PartitionError, match="takes no cache= of this kind"):
        open_dataset(path, comm=MPI.COMM_SELF, cache="disk")


def test_a_shard_that_does_not_fit_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = "MemAvailable:   10 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda self: small)
    with pytest.raises(PartitionError, match="does not fit"):
        open_dataset(path, comm=MPI.COMM_SELF, cache="memory").batches(BATCH)


def test_static_variables_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(tmp_path / "a.nc")
    with Dataset(file, "w", format="NETCDF3_CLASSIC") as made:
        made.createDimension("time", None)
        made.createDimension("cell", 1 << 18)
        made.createVariable("t", "f4", ("time",))[:] = np.arange(5)
        made.createVariable("area", "f8", ("cell",))[:] = 1.0
    assert open_dataset(file, comm=MPI.COMM_SELF).static["area"].sum() == 1 << 18
    monkeypatch.setattr(machine, "free_memory", lambda: 4 << 20)
    with pytest.raises(PartitionError, match="the static variable does not fit") as caught:
        open_dataset(file, comm=MPI.COMM_SELF)
    assert (caught.value.file, caught.value.field) == (file, "area")
