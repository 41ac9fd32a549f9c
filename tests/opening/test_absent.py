"""Values of fields in files that lack them (``absent=``)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from mpi4py import MPI
from PIL import Image

import matex_data as md
from tests.support.ranks import Pool

ROWS = (20, 7, 13)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with files of which the second lacks a detector, a trigger and waveforms."""
    folder = tmp_path_factory.mktemp("absent")
    first = 0
    for number, rows in enumerate(ROWS):
        numbers = np.arange(first, first + rows)
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file["x"] = numbers
            if number != 1:
                file["gmd"], file["wave"] = numbers.astype("f4"), np.tile(numbers[:, None], 3)
                file["trigger"], file["id"] = numbers % 2 == 0, numbers.astype("i4")
                file["name"] = [f"run {n}" for n in numbers]
        first += rows
    return folder


ABSENT = {"gmd": float("nan"), "wave": -1, "trigger": False, "id": -7, "name": "none", "weight": 1.5}
LACKING = slice(ROWS[0], ROWS[0] + ROWS[1])


def _loaded(comm: Any, folder: Path, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = md.open_dataset(folder, comm=comm, inputs=["x", *ABSENT], absent=ABSENT, **options)
    return {name: str(field.dtype) for name, field in data.schema.items()}, data.load(), data.value_counts("id")


def _expected() -> dict[str, Any]:
    number = np.arange(sum(ROWS))
    found: dict[str, Any] = {
        "gmd": number.astype("f4"), "wave": np.tile(number[:, None], 3), "trigger": number % 2 == 0,
        "id": number.astype("i4"), "name": np.array([f"run {n}".encode() for n in number], object),
    }  # fmt: skip
    for name, values in found.items():
        values[LACKING] = ABSENT[name].encode() if name == "name" else ABSENT[name]
    return {"x": number, **found, "weight": np.full(len(number), 1.5)}


@pytest.mark.rank_counts(1, 3)
def test_fields_have_their_values_where_files_lack_them(pool: Pool, folder: Path) -> None:
    dtypes, parts, counts = zip(*pool.run(_loaded, folder), strict=True)
    kinds = {"gmd": "float32", "wave": "int64", "trigger": "bool", "id": "int32", "name": "object", "weight": "float64"}
    assert all(found == {"x": "int64", **kinds} for found in dtypes)
    for name, values in _expected().items():
        found = np.concatenate([part[name] for part in parts])
        assert found.dtype == values.dtype
        np.testing.assert_array_equal(found, values, err_msg=name)
    assert counts[0][-7] == ROWS[1]


def test_selections_and_splits_use_the_values(folder: Path) -> None:
    data = md.open_dataset(folder, comm=MPI.COMM_SELF, inputs="x", absent={"id": -7}, where="id < 0")
    np.testing.assert_array_equal(data.load()["x"], np.arange(sum(ROWS))[LACKING])
    whole = md.open_dataset(folder, comm=MPI.COMM_SELF, inputs="x", absent={"id": -7})
    below, above = whole.split(at=[0], along="id")
    assert (len(below), len(above)) == (ROWS[1], ROWS[0] + ROWS[2])


def test_a_field_that_no_file_has(folder: Path, tmp_path: Path) -> None:
    for path in (folder, folder / "0.h5"):
        data = md.open_dataset(path, comm=MPI.COMM_SELF, inputs="x", targets="weight", absent={"weight": 1})
        assert data.schema["weight"].dtype == np.int64 and set(data.load()["weight"]) == {1}
    with pytest.warns(UserWarning, match="missing there"):
        data = md.open_dataset(folder, comm=MPI.COMM_SELF, absent={"weight": 1.5})
    assert set(data.load()["weight"]) == {1.5} and "x" in data.schema
    frame = pd.DataFrame({"x": np.arange(5), "w": np.arange(5) * 0.5})
    frame.to_parquet(tmp_path / "0.parquet")
    frame[["x"]].to_parquet(tmp_path / "1.parquet")
    both = md.open_dataset(tmp_path, comm=MPI.COMM_SELF, absent={"w": 2})
    assert both.load()["w"].tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, *[2.0] * 5]


def test_an_index_is_stored_with_the_values(folder: Path, tmp_path: Path) -> None:
    for value in (-7, -8):
        for _ in range(2):
            options: dict[str, Any] = {"absent": {"id": value}, "index": tmp_path / "a.matex"}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                data = md.open_dataset(folder, comm=MPI.COMM_SELF, inputs="id", **options)
            assert set(data.load()["id"][LACKING]) == {value}


@pytest.mark.parametrize(
    ("name", "value", "dtype"), [("id", 0.5, "float64"), ("id", 2**40, "int64"), ("id", float("nan"), "float64")]
)
def test_a_value_that_the_dtype_does_not_hold_makes_it_wider(folder: Path, name: str, value: Any, dtype: str) -> None:
    data = md.open_dataset(folder, comm=MPI.COMM_SELF, inputs=name, absent={name: value})
    assert str(data.schema[name].dtype) == dtype
    np.testing.assert_array_equal(data.load()[name][LACKING], np.full(ROWS[1], value))


@pytest.mark.parametrize(("name", "value"), [("id", "text"), ("name", 3)])
def test_a_value_of_another_kind_is_an_error(folder: Path, name: str, value: Any) -> None:
    with pytest.raises(md.FormatError, match="none of the field"):
        md.open_dataset(folder, comm=MPI.COMM_SELF, inputs=name, absent={name: value})


def _of_months(comm: Any, folder: Path, options: dict[str, Any]) -> Any:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        data = md.open_dataset(folder, comm=comm, **options)
    return data.load(), [str(warning.message) for warning in said if "lack" in str(warning.message)]


@pytest.mark.rank_counts(1, 3)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"inputs": "flag", "absent": {"flag": 2}}, 0),
        ({"inputs": ["x", "flag"], "absent": {"flag": 2}}, 0),
        ({"inputs": ["x", "flag"]}, 1),
        ({"inputs": ["x", "flag"], "absent": {"flag": 2}, "window": 3}, 0),
        ({"inputs": "flag", "absent": {"flag": 2}, "window": 3}, 0),
    ],
)
def test_a_month_without_a_field_of_levels(pool: Pool, tmp_path: Path, options: dict[str, Any], said: int) -> None:
    """It has neither the field nor the coordinate of the levels; its times are those of all the months."""
    months = []
    for month in (1, 2, 3):
        time = pd.date_range(f"2020-{month:02}-01", periods=29 + month % 2 * 2, freq="D")
        values = xr.Dataset({"x": ("time", np.arange(len(time)) + 100.0 * month)}, {"time": time})
        if month != 2:
            values["flag"] = ("time", "level"), np.full((len(time), 2), month, "i4")
            values["level"] = [500.0, 850.0]
        values.to_netcdf(tmp_path / f"{month}.nc")
        months.append(values["flag"] if month != 2 else xr.full_like(months[0][:29], 2))
    expected = np.concatenate(months).astype("f8")
    expected[31:60] = options.get("absent", {}).get("flag", np.nan)
    if "window" in options:
        expected = np.moveaxis(np.lib.stride_tricks.sliding_window_view(expected, 3, axis=0), -1, 1)
    loaded, warned = zip(*pool.run(_of_months, tmp_path, options), strict=True)
    np.testing.assert_array_equal(np.concatenate([part["flag"] for part in loaded]), expected)
    assert sum(map(len, warned)) == said


def _opened(comm: Any, folder: Path, options: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = md.open_dataset(folder, comm=comm, **options)
    return {name: str(field.dtype) for name, field in data.schema.items()}, data.load()


@pytest.mark.rank_counts(1, 3)
@pytest.mark.parametrize(
    ("options", "kinds", "expected"),
    [
        ({"absent": {"w": 2}}, {"w": "int64"}, {"w": [5, 6, 2, 2]}),
        ({"absent": {"w": 0.5}, "inputs": "w"}, {"w": "float64"}, {"w": [5, 6, 0.5, 0.5]}),
        ({"absent": {"w": 2, "v": "no"}, "inputs": ["v", "w"]}, {"w": "int64"}, {"v": [b"no"] * 4, "w": [5, 6, 2, 2]}),
        ({"absent": {"w": 2}, "dtype": {"w": "int8"}}, {"w": "int8"}, {"w": [5, 6, 2, 2]}),
    ],
)
def test_columns_that_a_text_table_lacks(
    pool: Pool, tmp_path: Path, options: dict[str, Any], kinds: dict[str, str], expected: dict[str, list[Any]]
) -> None:
    (tmp_path / "0.csv").write_text("x,w\n1,5\n2,6\n")
    (tmp_path / "1.csv").write_text("x\n3\n4\n")
    dtypes, loaded = zip(*pool.run(_opened, tmp_path, options), strict=True)
    assert all(kinds.items() <= found.items() for found in dtypes)
    for name, values in expected.items():
        assert np.concatenate([part[name] for part in loaded]).tolist() == values


def test_a_text_table_of_one_file_and_a_format_that_has_no_columns(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text("x,w\n1,5\n2,6\n")
    data = md.open_dataset(tmp_path / "0.csv", comm=MPI.COMM_SELF, absent={"v": 1.5})
    assert data.load()["v"].tolist() == [1.5, 1.5]
    with pytest.raises(md.FieldNotFound, match="'nothing'"):
        md.open_dataset(tmp_path / "0.csv", comm=MPI.COMM_SELF, inputs="nothing", absent={"v": 1.5})
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "a.png")
    with pytest.raises(md.FormatError, match="absent"):
        md.open_dataset(tmp_path / "a.png", comm=MPI.COMM_SELF, absent={"w": 2})
