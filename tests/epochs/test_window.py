"""Successive epochs: each one has its own order, even after an unfinished one."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from matex_data import epochs, open_dataset
from tests.support.ranks import Pool

ROWS, BATCH = 4801, 48


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("window") / "x.h5"
    with h5py.File(path, "w") as file:
        x = np.random.default_rng(0).normal(size=(ROWS, 64)).astype("f4")
        file.create_dataset("x", data=x, chunks=(10, 64), compression="gzip", shuffle=True)
    return str(path)


def _batches(comm: MPI.Intracomm, path: str, step: int = 0, io: str = "independent") -> Any:
    data = open_dataset(path, comm=comm, io=io, window_bytes=64 * 1024)
    return data.batches(BATCH, shuffle=True, seed=1, start=data.state(step))


def _epochs(comm: MPI.Intracomm, path: str, io: str) -> list[bool]:
    """Compare four epochs, the second one left half-way, with those of data sets opened for one epoch alone."""
    batches, equal = _batches(comm, path, io=io), []
    steps = len(batches)
    for epoch, count in enumerate((steps, steps // 2, steps, steps)):
        found = [batch["x"].copy() for batch, _ in zip(batches, range(count), strict=False)]
        alone = _batches(comm, path, epoch * steps)
        equal.append(all(np.array_equal(a, b["x"]) for a, b in zip(found, alone, strict=False)) and len(found) == count)
    return equal


@pytest.mark.rank_counts(2, slow=(1, 3))
@pytest.mark.parametrize("io", ["independent", "collective"])
def test_every_epoch_has_its_own_order(path: str, pool: Pool, io: str) -> None:
    assert pool.run(_epochs, path, io) == [[True] * 4] * pool.size


def test_what_reads_epochs_is_abstract_or_final() -> None:
    """A strategy or a window holds what it shares with another one, and does not inherit it."""
    names = [module.name for module in pkgutil.iter_modules(epochs.__path__, "matex_data.epochs.")]
    modules = [importlib.import_module(name) for name in names]
    classes = {value for module in modules for value in vars(module).values() if inspect.isclass(value)}
    bases = [(one, base) for one in classes for base in one.__bases__ if base.__module__ in names]
    assert {base.__name__ for _, base in bases} >= {"PendingWindow", "Strategy"}
    inheriting = {one for one, _ in bases}
    wrong = [(one, base) for one, base in bases if base in inheriting or not inspect.isabstract(base)]
    assert wrong == []
