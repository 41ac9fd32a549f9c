"""States of data sets that are made in all ways: equal on every number of ranks, so that any other number resumes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from matex_data import Dataset, concat, merge, mix, open_dataset
from tests.support.ranks import Pool

ROWS = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write two files of events with lists, texts and gaps."""
    folder, rng = tmp_path_factory.mktemp("events"), np.random.default_rng(0)
    counts, number = rng.integers(0, 4, ROWS), np.arange(ROWS)
    for name, rows in (("sig_0.h5", number[:70]), ("bkg_0.h5", number[70:])):
        with h5py.File(folder / name, "w") as file:
            file["number"], file["kind"] = rows, rows % 3
            file["mass"] = np.where(rows % 7 == 0, np.nan, rows).astype("f4")
            file["offsets"] = np.concatenate([[0], np.cumsum(counts[rows])])
            file["pt"] = rng.exponential(30, counts[rows].sum()).astype("f4")
            file["site"] = np.array([f"s{n % 5}" for n in rows], "S2")
    return str(folder)


def tripled(arrays: dict[str, Any], seeds: Any) -> Any:
    """Return three times the number."""
    return arrays["number"] * 3


Open = Callable[..., Dataset]
WAYS: dict[str, Callable[[Open], Dataset]] = {
    "where": lambda o: o(where="mass > 20"),
    "derived": lambda o: o(derive={"ht": "sum(pt)"}, where="count(pt > 20) >= 1", weights="ht + 1"),
    "of files": lambda o: o(file_fields={"label": {"sig*": 1, "bkg*": 0}}, where="label == 1"),
    "flattened": lambda o: o(inputs=["pt", "number"], targets=None, flatten="pt", where="kind == 1"),
    "padded": lambda o: o(inputs=["pt", "number"], targets=None, pad={"pt": 2}, keep="pt"),
    "categories": lambda o: o(inputs=["number", "site"], dtype={"site": "category"}, one_hot="kind"),
    "dropped": lambda o: o(inputs="mass", missing="drop"),
    "means": lambda o: o(inputs="mass", missing={"mass": "mean"}).split(0.5, 0.5, seed=1)[1],
    "windows": lambda o: o(window=5, lead=2, horizon=1).split(0.7, 0.3)[0],
    "strata": lambda o: o().split(0.6, 0.4, stratify="kind", seed=1)[1],
    "groups": lambda o: o().kfold(3, groups="site")[1][0],
    "dates": lambda o: o().split(at=[50], along="number")[1],
    "concatenated": lambda o: concat([o(where="kind == 0"), o(where="mass > 50")]),
    "mixed": lambda o: mix([o(where="kind == 0"), o(where="kind != 0")], weights=[0.5, 0.5]),
    "merged": lambda o: merge(o(), o(inputs="mass", targets=None), on="number"),
    "joined": lambda o: merge(o(), o(inputs="mass", targets=None, where="kind == 1"), on="number", how="inner"),
    "mapped": lambda o: o().map(tripled, schema={"three": "i8"}, fields=["number"], seed=3),
}


def _states(comm: MPI.Intracomm, folder: str) -> dict[str, Any]:
    """Return the state of each data set, and the numbers of this rank's samples in the batches from step 1 on."""
    found = {}
    for way, make in WAYS.items():

        def opened(**options: Any) -> Dataset:
            chosen = {"inputs": "number", "targets": "kind", "offsets": {"pt": "offsets"}, **options}
            return open_dataset(folder, comm=comm, **chosen)

        data = make(opened)
        data.batches(12, shuffle=True, seed=4)
        state = data.state(1)
        resumed = data.batches(12, shuffle=True, start=state)
        found[way] = state, [_numbers(batch) for batch in resumed]
    return found


def _numbers(batch: Any) -> list[Any]:
    """Return a number of each sample of a batch."""
    array = batch[0] if isinstance(batch, tuple) else batch
    array = next(iter(array.values())) if isinstance(array, dict) else array
    return [np.asarray(value).ravel().tolist() for value in array]


def test_states_and_batches_are_those_of_one_rank(folder: str, pool: Pool) -> None:
    expected = _states(MPI.COMM_SELF, folder)
    by_rank = pool.run(_states, folder, timeout=100)
    for way, (state, batches) in expected.items():
        assert all(found[way][0] == state for found in by_rank), way
        for step, batch in enumerate(batches):
            of_step = [number for found in by_rank for number in found[way][1][step]]
            assert sorted(map(repr, of_step)) == sorted(map(repr, batch)), way
