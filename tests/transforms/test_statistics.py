"""Statistics over the ranks, compared with NumPy on all data."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from matex_data import FieldNotFound, FormatError, open_dataset
from matex_data.fields import Field
from matex_data.transforms.statistics import Moments, _moments, _no_moments
from tests.support.ranks import Pool

ROWS = 1003


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("statistics") / "a.h5"
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        image = rng.normal(1e6, 1e-2, (ROWS, 4, 5, 3)).astype("f8")  # E[x^2] - E[x]^2 has no correct digit
        image[rng.random(image.shape) < 0.1] = np.nan
        file.create_dataset("image", data=image, chunks=(50, 4, 5, 3))
        file["label"] = rng.integers(-5, 5, ROWS)
        file["empty"] = np.full(ROWS, np.nan, "f4")
        file["name"] = np.array([b"a"] * ROWS)
    return str(path)


def _statistics(comm: MPI.Intracomm, path: str, name: str, axis: Any) -> dict[str, Any]:
    found = open_dataset(path, comm=comm).statistics(name, axis=axis)[name]
    return {key: getattr(found, key) for key in ("count", "missing", "mean", "std", "min", "max")}


@pytest.mark.filterwarnings("error")
def test_infinite_and_very_large_numbers_give_no_warning_of_numpy() -> None:
    found = open_dataset({"x": np.array([1.0, np.inf, -np.inf, np.nan]), "y": np.full(4, 1e300)}).statistics()
    assert np.isnan(found["x"].mean) and found["x"].min == -np.inf and found["x"].max == np.inf
    assert found["x"].count == 3 and found["y"].mean == 1e300 and found["y"].std == 0
    halves = open_dataset({"x": np.repeat([-1e300, np.inf], 1 << 18)}).statistics()  # summed one after the other
    assert halves["x"].mean == np.inf


@pytest.mark.parametrize(
    ("name", "axis"), [("image", None), ("image", -1), ("image", (1, 3)), ("image", (3, 1)), ("label", None)]
)
def test_statistics_are_those_of_numpy(path: str, pool: Pool, name: str, axis: Any) -> None:
    with h5py.File(path) as file:
        values = file[name][:].astype("f8")
    kept = () if axis is None else (values.ndim - 1,) if axis == -1 else axis
    others = tuple(a for a in range(values.ndim) if a not in kept)
    for found in pool.run(_statistics, path, name, axis):
        np.testing.assert_array_equal(found["count"], (~np.isnan(values)).sum(others))
        np.testing.assert_array_equal(found["missing"], np.isnan(values).sum(others))
        np.testing.assert_allclose(found["mean"], np.nanmean(values, others), rtol=1e-13)
        np.testing.assert_allclose(found["std"], np.nanstd(values, others), rtol=1e-6)
        np.testing.assert_array_equal(found["min"], np.nanmin(values, others))
        np.testing.assert_array_equal(found["max"], np.nanmax(values, others))


def test_a_field_without_values(path: str) -> None:
    found = open_dataset(path, inputs="empty", comm=MPI.COMM_SELF).statistics("empty")
    assert found.count == 0 and found.missing == ROWS
    assert np.isnan(found.std) and np.isnan(found.min)


@pytest.mark.parametrize("categories", ["low high", ["low", "high"]])
def test_floats_with_an_attribute_of_this_name_are_no_codes(categories: Any) -> None:
    values = np.array([-1.5, 2.5, 3.0])
    data = open_dataset(xr.Dataset({"x": ("t", values, {"categories": categories})}), comm=MPI.COMM_SELF)
    found = data.statistics("x")
    assert (found.count, found.missing, found.min, found.mean) == (3, 0, -1.5, values.mean())


def test_statistics_of_a_split(path: str) -> None:
    first, _ = open_dataset(path, inputs="label", comm=MPI.COMM_SELF).split(0.3, 0.7, seed=1)
    assert first.statistics().mean == pytest.approx(first.load()["label"].mean())


def test_errors(path: str) -> None:
    data = open_dataset(path, comm=MPI.COMM_SELF)
    with pytest.raises(FieldNotFound, match="'label'"):
        data.statistics("labl")
    with pytest.raises(FormatError, match="no numbers"):
        data.statistics("name")
    for axis in (7, (1, -3)):
        with pytest.raises(FormatError, match="axis"):
            data.statistics("image", axis=axis)


def test_normalization_is_a_keras_layer(path: str) -> None:
    data = open_dataset(path, inputs="image", comm=MPI.COMM_SELF)
    layer = data.normalization("image")
    values = np.nan_to_num(data.load()["image"][:10], nan=1e6)
    found = data.statistics("image", axis=-1)["image"]
    expected = (values.astype("f4") - found.mean.astype("f4")) / found.std.astype("f4")
    np.testing.assert_allclose(np.asarray(layer(values)), expected, rtol=1e-3, atol=1e-3)


@given(st.lists(st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), max_size=6), min_size=1, max_size=6))
def test_merged_moments_are_those_of_all_values(sets: list[list[float]]) -> None:
    field = Field("x", (), np.dtype("f8"))
    moments = [m for values in sets for m in _moments(np.array(values, "f8"), field, field, ())]
    found: Moments = reduce(Moments.merge, moments, _no_moments(field, field, ()))
    values = np.array([v for numbers in sets for v in numbers if v == v])
    assert found.count == len(values)
    assert found.missing == sum(map(len, sets)) - len(values)
    if len(values):
        np.testing.assert_allclose(found.mean, values.mean(), rtol=1e-9, atol=1e-6)
        np.testing.assert_allclose(found.std, values.std(), rtol=1e-9, atol=1e-6)
        assert found.min == values.min() and found.max == values.max()


def test_normalization_begins_a_model_without_an_input(path: str) -> None:
    import keras

    data = open_dataset(path, inputs="image", targets="label", comm=MPI.COMM_SELF)
    model = keras.Sequential([data.normalization("image"), keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    history = model.fit(data.tf_dataset(2), epochs=2, verbose=0)  # the second epoch traces no new graph
    assert len(history.history["loss"]) == 2


def test_lists_of_lists_are_left_out_or_refused(tmp_path: Path) -> None:
    table = pa.table({"x": [1.0, 2.0], "lists": [[[1.0, 2.0], [3.0]], [[4.0]]]})
    pq.write_table(table, tmp_path / "a.parquet")
    data = open_dataset(str(tmp_path / "a.parquet"), comm=MPI.COMM_SELF)
    assert list(data.statistics()) == ["x"]
    calls = (lambda: data.statistics("lists"), lambda: data.flatten("lists"), lambda: data.pad({"lists": 2}))
    for call in calls:
        with pytest.raises(FormatError, match=r"field 'lists'"):
            call()
