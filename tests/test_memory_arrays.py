"""Arrays in memory as data sets: values of pandas, xarray and NumPy, equal on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import xarray as xr
from mpi4py import MPI

import matex_data as md
from tests.support.ranks import Pool

ROWS = 53


def _table() -> pd.DataFrame:
    rng = np.random.default_rng(1)
    return pd.DataFrame(
        {
            "mass": rng.normal(size=ROWS).astype("f4"),
            "count": pd.array([None, *range(1, ROWS)], dtype="Int64"),
            "whole": pd.array(range(ROWS), dtype="Int32"),
            "species": [None, *(f"Größe {i % 3}" for i in range(1, ROWS))],
            "day": pd.date_range("2001-02-03T04:05:06.789", periods=ROWS, freq="D"),
            "local": pd.date_range("2001-02-03", periods=ROWS, freq="h", tz="Europe/Berlin"),
            "site": pd.Categorical([f"s{i % 2}" for i in range(ROWS)]),
            "hits": [np.arange(i % 4, dtype="f4") for i in range(ROWS)],
        }
    )


def _all(comm: MPI.Intracomm, shuffle: Any) -> list[dict[str, Any]]:
    data = md.open_dataset(_table(), comm=comm)
    batches = data.batches(12, shuffle=shuffle, seed=3, remainder="keep")
    return [dict(batch) for batch in batches]


@pytest.mark.parametrize("shuffle", [False, True, "global"])
def test_a_data_frame_has_the_values_of_pandas(pool: Pool, shuffle: Any) -> None:
    table = _table()
    by_rank = pool.run(_all, shuffle)
    batches = [batch for of_step in zip(*by_rank, strict=True) for batch in of_step]
    rows = [{name: array[i] for name, array in batch.items()} for batch in batches for i in range(len(batch["whole"]))]
    order = [int(row["whole"]) for row in rows]
    assert sorted(order) == list(range(ROWS))
    assert (order == sorted(order)) is (shuffle is False)
    for row in rows:
        expected = table.iloc[int(row["whole"])]
        assert row["mass"] == expected["mass"]
        assert row["count"] == expected["count"] if expected["count"] is not pd.NA else np.isnan(row["count"])
        assert row["species"].decode() == ("" if pd.isna(expected["species"]) else expected["species"])
        assert row["day"] == pytest.approx(expected["day"].value / 1e9, abs=1e-6)
        assert row["local"] == pytest.approx(expected["local"].value / 1e9, abs=1e-6)
        assert row["site"].decode() == expected["site"]
        np.testing.assert_array_equal(row["hits"], expected["hits"])


def test_named_levels_of_an_index_are_fields(tmp_path: Path) -> None:
    levels = pd.MultiIndex.from_arrays([[7, 8, 9], [0, 0, 1], ["a", "b", "c"]], names=["time", None, "x"])
    table = pd.DataFrame({"x": [0.5, 1.5, 2.5]}, index=levels)
    found = md.open_dataset(table).load()
    assert {name: values.tolist() for name, values in found.items()} == {"time": [7, 8, 9], "x": [0.5, 1.5, 2.5]}
    series = pd.DataFrame({"x": [0.5, 1.5]}, index=pd.Index([3, 4], name="time"))
    series.to_parquet(tmp_path / "a.parquet")
    found, stored = md.open_dataset(series).load(), md.open_dataset(tmp_path / "a.parquet").load()
    assert found.keys() == stored.keys() and all(np.array_equal(found[name], stored[name]) for name in stored)
    assert list(md.open_dataset(series.reset_index(drop=True)).schema) == ["x"]
    times = pd.DataFrame({"x": [0.5, 1.5]}, index=pd.date_range("2020", periods=2, tz="Europe/Paris", name="time"))
    assert md.open_dataset(times).load()["time"].tolist() == [one.timestamp() for one in times.index]
    spans = pd.DataFrame({"x": [0.5, 1.5]}, index=pd.interval_range(0, 2, name="span"))
    with pytest.warns(UserWarning, match="the index 'span' is left out"):
        assert list(md.open_dataset(spans).schema) == ["x"]
    twice = pd.DataFrame({"x": [0.5]}, index=pd.MultiIndex.from_tuples([(1, 2)], names=["k", "k"]))
    assert md.open_dataset(twice).load()["k"].tolist() == [1]


@pytest.mark.parametrize("given", [np.zeros(3), pd.Series([1.0]), 5], ids=["array", "series", "number"])
def test_what_is_neither_paths_nor_named_arrays(given: Any) -> None:
    with pytest.raises(md.DataError, match=r"DataFrame(.|\n)*by name, such as \{"):
        md.open_dataset(given)


def test_a_data_set_of_xarray() -> None:
    times = pd.date_range("2010-01-01", periods=20, freq="6h")
    z = xr.DataArray(np.arange(120.0).reshape(20, 2, 3), dims=("time", "lat", "lon"), attrs={"units": "m"})
    dataset = xr.Dataset({"z": z, "terrain": (("lat", "lon"), np.ones((2, 3)))}, coords={"time": times})
    data = md.open_dataset(dataset, inputs="z", window=4, lead=2, horizon=1)
    x, y = data[3]
    np.testing.assert_array_equal(x, dataset["z"][3:7])
    np.testing.assert_array_equal(y, dataset["z"][8:9])
    whole = md.open_dataset(dataset)
    assert whole.schema["z"].attributes["units"] == "m"
    assert whole.load()["time"][1] == times[1].value / 1e9
    assert dict(whole.static).keys() == {"terrain"}
    early, late = whole.split(at=["2010-01-03"], along="time")
    assert (len(early), len(late)) == (8, 12)
    assert len(md.open_dataset(dataset.transpose("lat", "lon", "time"))) == 20  # as in files
    assert len(md.open_dataset(dataset.transpose("lat", "lon", "time"), inputs="terrain")) == 2
    by_latitude = md.open_dataset(dataset, sample_dim="lat")
    np.testing.assert_array_equal(by_latitude.load()["z"], dataset["z"].transpose("lat", "time", "lon"))


def test_options_of_samples_apply_to_arrays() -> None:
    arrays = {"x": np.arange(40.0).reshape(20, 2), "y": np.arange(20) % 2, "name": np.array(["a", "bc"] * 10)}
    data = md.open_dataset(arrays, inputs="x", targets="y", where="y == 1", cache="memory")
    assert len(data) == 10
    train, test = data.split(0.8, 0.2, seed=1)
    state = train.state(1)
    assert np.concatenate([y for _, y in train.batches(4, shuffle=True, seed=1)]).tolist() == [1] * 8
    assert state["samples"] == 8
    assert len(test) == 2
    assert md.open_dataset(arrays).value_counts("name") == {"a": 10, "bc": 10}
    assert "20 samples in memory" in repr(md.open_dataset(arrays))
    integers = md.open_dataset({"big": np.arange(5, dtype=">i2")}).load()["big"]
    assert (integers.dtype, integers.tolist()) == (np.dtype("i2"), [0, 1, 2, 3, 4])


def _composed(comm: MPI.Intracomm, start: Any) -> Any:
    """Return this rank's batches of a table with expressions, categories and filled gaps, and the state after two."""
    data = md.open_dataset(
        _table(),
        inputs=["heavy", "species", "site", "count", "double"],
        targets="whole",
        weights="double + 1",
        derive={"heavy": "mass > 0.5", "hits_sum": "sum(hits)", "double": "hits_sum * 2"},
        where="(hits_sum > 0) & (species != 'Größe 1')",
        dtype={"species": "category"},
        one_hot="site",
        missing={"species": "mode", "count": "mean"},
        comm=comm,
    )
    assert data.schema["species"].attributes["categories"] == [f"Größe {i}" for i in range(3)]
    batches = data.batches(6, shuffle=True, seed=1, start=start)
    return [(dict(x), y, w) for x, y, w in batches], batches.state(2)


@pytest.mark.rank_counts(1, 3, slow=(2,))
def test_expressions_categories_and_missing_values_are_those_of_pandas(pool: Pool) -> None:
    table = _table()
    double = table.hits.map(np.sum) * 2
    chosen = table[(double > 0) & (table.species != "Größe 1")]
    alone, state = _composed(MPI.COMM_SELF, None)
    assert sorted(np.concatenate([y for _, y, _ in alone]).tolist())[:2] != [0, 1]
    assert len(alone) == len(chosen) // 6
    for x, y, w in alone:
        rows = chosen.loc[y]
        np.testing.assert_array_equal(x["heavy"], rows.mass > 0.5)
        np.testing.assert_array_equal(x["species"], rows.species.fillna(chosen.species.mode()[0]).str[-1].astype(int))
        np.testing.assert_array_equal(x["site"], pd.get_dummies(rows.site))
        np.testing.assert_allclose(x["count"], rows["count"].astype(float).fillna(chosen["count"].mean()))
        np.testing.assert_allclose(x["double"], double[y], rtol=1e-6)
        np.testing.assert_allclose(w, double[y] + 1, rtol=1e-6)
    for step, (_, y, _) in enumerate(alone[2:]):
        resumed = [batches[step][1] for batches, _ in pool.run(_composed, state)]
        np.testing.assert_array_equal(np.concatenate(resumed), y)


def test_static_arrays_of_xarray_are_inputs() -> None:
    fields = {"z": (("time", "lat"), np.arange(12.0).reshape(4, 3)), "terrain": ("lat", np.arange(3.0))}
    data = md.open_dataset(xr.Dataset(fields), inputs=["z", "terrain"], static_as_inputs=True, stack=True)
    np.testing.assert_array_equal(data[2], np.stack([fields["z"][1][2], np.arange(3)], axis=-1))


@pytest.mark.parametrize(
    ("arrays", "options", "problem"),
    [
        ({}, {}, "no arrays"),
        ({"x": 1.0}, {}, "no axis of samples"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, {}, "different numbers of samples"),
        ({"x": np.array([{}, 1], object)}, {}, r"Python objects.*row 0"),
        ({"x": np.zeros(3)}, {"inputs": "y"}, "no such array"),
        ({"x": np.zeros(3)}, {"format": "hdf5"}, "format= is an option of files"),
        ({"x": np.zeros(3)}, {"chunks": 3}, "chunks= is an option of files"),
        ({"x": np.zeros(3)}, {"dtype": {"x": "float32"}}, "dtype= is an option of files"),
        ({"x": np.zeros(3), "y": np.ones(3)}, {"inputs": "y", "derive": {"x": "2 * y"}}, "this name already.*'x'"),
        ({"x": np.zeros(3)}, {"index": "x.matex"}, "index= is an option of files"),
        ({"x": [1, 2**64]}, {}, f"no dtype holds all integers.*row 1.*{2**64}"),
        ({"x": [-1, 2**63 + 1]}, {}, f"no dtype holds all integers.*row 1.*{2**63 + 1}"),
        (pd.DataFrame({"x": [2**64, 1]}), {}, f"no dtype holds all integers.*row 0.*{2**64}"),
        ({"x": [0.5, 2**60 + 1]}, {}, f"not exact as float64.*row 1.*{2**60 + 1}"),
        ({"x": [[1, 2], [0.5, 2**60 + 1]]}, {}, f"not exact as float64.*row 1.*{2**60 + 1}"),
        ({"x": [np.array([2**63 + 1], "u8"), np.array([-1, 2])]}, {}, f"not exact as float64.*row 0.*{2**63 + 1}"),
        ({"x": np.ma.array(np.zeros(2, "i4,f8"), mask=[1, 0])}, {}, "Python objects"),
        ({1: np.arange(2), "1": np.arange(2)}, {}, "two arrays have one name.*'1'"),
        (pd.DataFrame(np.zeros((2, 2)), columns=["a", "a"]), {}, "two arrays have one name.*'a'"),
        (pd.DataFrame(np.zeros((2, 2)), columns=[1, "1"]), {}, "two arrays have one name.*'1'"),
    ],
)
def test_what_is_no_data_set_is_an_error(arrays: Any, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(md.DataError, match=f"(?s){problem}"):
        md.open_dataset(arrays, **options)


def test_an_array_that_is_no_field_is_an_error_where_it_is_read() -> None:
    data = pd.DataFrame({"x": [1.0, 2.0], "y": [0, 1], "notes": [{"a": 1}, None]})
    assert list(md.open_dataset(data, inputs="x", targets="y").schema) == ["x", "y"]
    for names in (None, ["x", "notes"], "n*"):
        with pytest.raises(md.FormatError, match=r"(?s)Python objects.*'notes'.*row 0"):
            md.open_dataset(data, inputs=names)


DAY = 86400.0
FIRST = pd.Timestamp("1970-01-02")
VALUES: dict[str, tuple[Any, list[Any]]] = {
    "masked text": (np.ma.array(["a", "b"], mask=[1, 0]), [b"", b"b"]),
    "masked bytes": (np.ma.array([b"a", b"b"], mask=[1, 0]), [b"", b"b"]),
    "masked objects": (np.ma.array(["a", "b"], mask=[1, 0], dtype=object), [b"", b"b"]),
    "masked times": (np.ma.array([0, 1], mask=[1, 0], dtype="M8[D]"), [np.nan, DAY]),
    "masked durations": (np.ma.array([0, 1], mask=[1, 0], dtype="m8[D]"), [np.nan, DAY]),
    "masked complex": (np.ma.array([1j, 2j], mask=[1, 0]), [np.nan, 2j]),
    "records without a missing one": (np.ma.array([(1, 0.5)], "i4,f8"), [(1, 0.5)]),
    "three milliseconds": (np.array([1, 2], "M8[3ms]"), [0.003, 0.006]),
    "five hours": (np.array([1, 2], "m8[5h]"), [18000.0, 36000.0]),
    "surrogates": (["a\udc80", "é"], [b"a\x80", "é".encode()]),
    "texts beside NaN": (["a", np.nan, "é"], [b"a", b"", "é".encode()]),
    "unsigned": ([2**63 + 1, 1], [2**63 + 1, 1]),
    "large fractions": ([1e300, np.inf, 1], [1e300, np.inf, 1.0]),
    "integers of NumPy": (np.array([np.int64(2**60 + 1), np.int64(3)], object), [2**60 + 1, 3]),
    "floats of NumPy": (np.array([np.float32(1.5), None, np.float32("nan")], object), [1.5, np.nan, np.nan]),
    "categories of integers": (pd.Categorical([5, 7, None]), [5.0, 7.0, np.nan]),
    "lists of two dtypes": ([np.array([1], "u8"), np.array([-1, 2])], [[1.0], [-1.0, 2.0]]),
    "dates": ([FIRST.date(), None], [DAY, np.nan]),
    "times of pandas": ([FIRST, FIRST.tz_localize("Etc/GMT-1"), pd.NaT], [DAY, DAY - 3600, np.nan]),
    "times far apart": ([pd.Timestamp(1), FIRST.replace(year=3000).to_pydatetime()], [0.0, 32503766400.0]),
    "times of Arrow": (pd.Series([FIRST, None], dtype="timestamp[ns, tz=UTC][pyarrow]"), [DAY, np.nan]),
    "dates of Arrow": (pd.Series([FIRST.date(), None], dtype="date32[pyarrow]"), [DAY, np.nan]),
    "lists of Arrow": (pd.Series([[1, 2], [3]], dtype=pd.ArrowDtype(pa.list_(pa.int64()))), [[1, 2], [3]]),
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.filterwarnings("error")
def test_values_of_each_kind_are_exact(kind: str) -> None:
    values, expected = VALUES[kind]
    found = md.open_dataset({"x": values}, comm=MPI.COMM_SELF).load()["x"]
    np.testing.assert_equal([one.tolist() if isinstance(one, np.ndarray) else one for one in found.tolist()], expected)


@pytest.mark.parametrize(
    ("values", "rest"),
    [
        (np.ma.array([5, 0, 2**64 - 1, 2**64 - 2], "u8", mask=[1, 0, 0, 0]), [0, 2**64 - 1, 2**64 - 2]),
        (pd.Categorical([None, 2**60 + 1, 5]), [2**60 + 1, 5]),
        ([None, 2**60 + 1, -3], [2**60 + 1, -3]),
    ],
)
def test_large_integers_with_a_missing_one_stay_what_they_are(values: Any, rest: list[int]) -> None:
    assert md.open_dataset({"x": values}, missing="drop", comm=MPI.COMM_SELF).load()["x"].tolist() == rest


def _different(comm: MPI.Intracomm) -> str:
    with pytest.raises(md.PartitionError, match="different arrays") as caught:
        md.open_dataset({"x": np.full(4, comm.rank)}, comm=comm)
    return str(caught.value)


@pytest.mark.rank_counts(3)
def test_ranks_with_different_arrays_are_an_error(pool: Pool) -> None:
    assert len(set(pool.run(_different))) == 1
