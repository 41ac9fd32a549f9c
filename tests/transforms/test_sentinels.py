"""Numbers that stand for missing ones (``missing_values=``), in files of several formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
from mpi4py import MPI

import matex_data as md
from matex_data.errors import ArgumentError
from tests.support.ranks import Pool

ROWS = 60
RNG = np.random.default_rng(0)
ABSENT = RNG.random(ROWS) < 0.2
T = np.where(ABSENT, -9999.0, RNG.normal(size=ROWS)).astype("f4")
STATION = np.where(ABSENT, -1, np.arange(ROWS)).astype("i8")
WIND = np.where(ABSENT[:, None], [-9999.0, 9.0e36], RNG.normal(size=(ROWS, 2)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the same numbers in HDF5, in CSV and in Parquet."""
    folder = tmp_path_factory.mktemp("sentinels")
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("t", data=T, chunks=(16,), compression="gzip")
        file["station"], file["wind"] = STATION, WIND
        lists = file.create_dataset("lists", (ROWS,), h5py.vlen_dtype(np.dtype("f4")))
        for row in range(ROWS):
            lists[row] = [T[row], 1.0]
    frame = pd.DataFrame({"t": T, "station": STATION})
    frame.to_csv(folder / "a.csv", index=False)
    frame.to_parquet(folder / "a.parquet")
    return folder


def _expected(values: Any, *sentinels: float) -> Any:
    return np.where(np.isin(values, np.array(sentinels, values.dtype)), np.nan, values)


def _loaded(comm: Any, folder: Path, name: str) -> Any:
    options: dict[str, Any] = {"missing_values": {"t": -9999, "st*": [-1, 12]}, "inputs": ["t", "station"]}
    data = md.open_dataset(folder / name, comm=comm, **options)
    below = md.open_dataset(folder / name, comm=comm, where="t < 0", **options)
    return data.load(), len(below), data.statistics("t")


@pytest.mark.rank_counts(1, 3)
@pytest.mark.parametrize("name", ["a.h5", "a.csv", "a.parquet"])
def test_they_are_missing_for_all_options(pool: Pool, folder: Path, name: str) -> None:
    loaded, below, statistics = zip(*pool.run(_loaded, folder, name), strict=True)
    t, station = (np.concatenate([part[field] for part in loaded]) for field in ("t", "station"))
    np.testing.assert_allclose(t, _expected(T, -9999), rtol=1e-6)
    np.testing.assert_array_equal(station, _expected(STATION, -1, 12))
    assert set(below) == {int((_expected(T, -9999) < 0).sum())}
    assert statistics[0].missing == ABSENT.sum()
    np.testing.assert_allclose(statistics[0].min, np.nanmin(_expected(T, -9999)))


def test_without_names_they_are_those_of_floats(folder: Path) -> None:
    found = md.open_dataset(folder / "a.h5", comm=MPI.COMM_SELF, missing_values=[-9999, 9.0e36]).load()
    np.testing.assert_array_equal(found["wind"], _expected(WIND, -9999, 9.0e36))
    np.testing.assert_array_equal(found["station"], STATION)
    assert found["t"].dtype == np.float32
    for row, values in enumerate(found["lists"]):
        np.testing.assert_array_equal(values, [np.nan if ABSENT[row] else T[row], 1.0])
    filled = md.open_dataset(folder / "a.h5", comm=MPI.COMM_SELF, inputs="t", missing_values=-9999, missing=0.5).load()
    np.testing.assert_array_equal(filled["t"], np.where(ABSENT, np.float32(0.5), T))


def test_fields_of_names_of_files_are_beside_them(folder: Path) -> None:
    options: Any = {"missing_values": -9999, "file_fields": {"run": {"a*": -9999.0}}}
    found = md.open_dataset(folder / "a.h5", comm=MPI.COMM_SELF, inputs=["t", "run"], **options).load()
    np.testing.assert_array_equal(found["t"], _expected(T, -9999))
    np.testing.assert_array_equal(found["run"], np.full(ROWS, -9999.0))


def test_integers_are_compared_with_the_numbers_themselves(folder: Path) -> None:
    rules = {"station": [0.5, 3]}
    found = md.open_dataset(folder / "a.h5", comm=MPI.COMM_SELF, inputs="station", missing_values=rules).load()
    np.testing.assert_array_equal(found["station"], _expected(STATION, 3))


@pytest.mark.parametrize("value", ["-9999", {"t": "x"}, {"t": True}])
def test_what_is_no_number_is_an_error(folder: Path, value: Any) -> None:
    with pytest.raises(ArgumentError, match="takes no missing_values= of this kind"):
        md.open_dataset(folder / "a.h5", comm=MPI.COMM_SELF, missing_values=value)


def test_a_name_that_is_no_field_is_an_error(folder: Path) -> None:
    with pytest.raises(md.FieldNotFound, match="missing_values= names no field"):
        md.open_dataset(folder / "a.h5", comm=MPI.COMM_SELF, missing_values={"tt": 0})


@pytest.mark.parametrize(
    ("values", "sentinel", "missing"),
    [
        (np.array([2**53, 2**53 - 1]), 2**53 + 1, []),
        (np.array([2**53, 2**53 - 1]), 2**53, [0]),
        (np.array([np.inf, 1.0], "f4"), 1e39, []),
        (np.array([-np.inf, 1.0], "f2"), [-9999999, 1], [1]),
        (np.array([-np.inf, 1.0], "f2"), -np.inf, [0]),
        (np.array([200, 100], "u1"), [-56, 100], [1]),
    ],
)
def test_numbers_that_a_field_cannot_hold_mark_no_other(values: Any, sentinel: Any, missing: list[int]) -> None:
    data = md.open_dataset({"x": values}, comm=MPI.COMM_SELF, missing_values={"x": sentinel})
    assert np.flatnonzero(np.isnan(data.load()["x"])).tolist() == missing
