"""Splits by values, compared with the splitters of scikit-learn, with pandas and with xarray."""

from __future__ import annotations

import tracemalloc
from datetime import date
from pathlib import Path
from typing import Any

import awkward as ak
import h5py
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI
from sklearn.model_selection import GroupKFold, KFold, StratifiedKFold

from matex_data import DataError, FormatError, PartitionError, concat, merge, open_dataset
from matex_data.transforms.strata import sizes_by_class
from tests.support.ranks import Pool

ROWS = 701


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    patients = rng.geometric(0.05, ROWS)
    return pd.DataFrame(
        {
            "x": np.arange(ROWS),
            "label": rng.choice(["common", "rare", "é"], ROWS, p=[0.8, 0.05, 0.15]),
            "patient": patients,
            "day": pd.date_range("2014-11-01", periods=ROWS).strftime("%Y-%m-%d"),
        }
    )


@pytest.fixture(scope="module")
def table(frame: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write the table as files of different lengths."""
    folder = tmp_path_factory.mktemp("table")
    for number, (begin, end) in enumerate([(0, 400), (400, 407), (407, ROWS)]):
        frame[begin:end].to_csv(folder / f"{number}.csv", index=False)
    return str(folder)


def _sets(comm: MPI.Intracomm, path: str, fractions: tuple[float, ...], **options: Any) -> list[Any]:
    """Return the rows of this rank in each set; only ``x`` is a field of the batches."""
    return [part.load()["x"] for part in open_dataset(path, inputs="x", comm=comm).split(*fractions, **options)]


def _folds(comm: MPI.Intracomm, path: str, number: int, **options: Any) -> list[Any]:
    pairs = open_dataset(path, inputs="x", comm=comm).kfold(number, **options)
    return [(train.load()["x"], valid.load()["x"]) for train, valid in pairs]


def _check(sets: list[Any]) -> None:
    """Check that the sets are disjoint and cover all rows."""
    np.testing.assert_array_equal(np.sort(np.concatenate(sets)), np.arange(ROWS))


@pytest.mark.parametrize("seed", [None, 3])
def test_each_set_has_its_fraction_of_each_class(table: str, frame: pd.DataFrame, seed: int | None) -> None:
    fractions = (0.6, 0.25, 0.15)
    sets = _sets(MPI.COMM_SELF, table, fractions, stratify="label", seed=seed)
    _check(sets)
    for fraction, rows in zip(fractions, sets, strict=True):
        assert abs(len(rows) - fraction * ROWS) < 1.5
        difference = frame.label[rows].value_counts() - fraction * frame.label.value_counts()
        assert (difference.abs() < 1).all()
    if seed is None:
        assert sets[0].tolist() == sorted(sets[0]) and (frame.label[sets[0]] == "rare").sum() > 0
        for label in frame.label.unique():
            of_class = [rows[frame.label[rows] == label] for rows in sets]
            assert of_class[0].max() < of_class[1].min() and of_class[1].max() < of_class[2].min()
    else:
        others = _sets(MPI.COMM_SELF, table, fractions, stratify="label", seed=seed + 1)
        assert not np.array_equal(np.sort(others[1]), np.sort(sets[1]))


@pytest.mark.parametrize("seed", [None, 3])
def test_groups_are_whole(table: str, frame: pd.DataFrame, seed: int | None) -> None:
    fractions = (0.6, 0.25, 0.15)
    sets = _sets(MPI.COMM_SELF, table, fractions, groups="patient", seed=seed)
    _check(sets)
    of_set = [set(frame.patient[rows]) for rows in sets]
    assert all(of_set) and sum(map(len, of_set)) == frame.patient.nunique()
    largest = frame.patient.value_counts().max()
    for fraction, rows in zip(fractions, sets, strict=True):
        assert abs(len(rows) - fraction * ROWS) <= (1 if seed is None else largest)


@pytest.mark.parametrize(
    "options",
    [
        {"stratify": "label", "seed": 3},
        {"groups": "patient", "seed": 3},
        {"groups": "label"},
        {"at": ["2015-01-01", "2015-06-01"], "along": "day"},
    ],
)
def test_every_number_of_ranks_has_the_sets(table: str, pool: Pool, options: dict[str, Any]) -> None:
    fractions = () if "at" in options else (0.6, 0.4)
    expected = _sets(MPI.COMM_SELF, table, fractions, **options)
    for number, rows in enumerate(expected):
        by_rank = [sets[number] for sets in pool.run(_sets, table, fractions, **options)]
        np.testing.assert_array_equal(np.concatenate(by_rank), rows)


def test_a_split_by_classes_keeps_some_bytes_of_each_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matex_data.sampling.permutation.TABLE_ITEMS", 0)
    for module in ("strata", "select"):
        monkeypatch.setattr(f"matex_data.transforms.{module}.AT_ONCE", 1 << 14)
    monkeypatch.setattr("matex_data.reading.source.LOAD_BYTES", 1 << 16)
    classes = (np.arange(1 << 19) % 64 == 0).astype(np.int8)
    np.save(tmp_path / "x.npy", classes)
    data = open_dataset(tmp_path / "x.npy")
    tracemalloc.start()
    try:
        train, valid = data.split(0.5, 0.5, seed=1, stratify="data")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert train.value_counts("data") == valid.value_counts("data") == {0: 258048, 1: 4096}
    assert peak < 12 * len(classes)


def test_folds_are_those_of_scikit_learn(table: str) -> None:
    folds = _folds(MPI.COMM_SELF, table, 5)
    for (train, valid), (expected, held_out) in zip(folds, KFold(5).split(np.arange(ROWS)), strict=True):
        np.testing.assert_array_equal(train, expected)
        np.testing.assert_array_equal(valid, held_out)


@pytest.mark.parametrize("seed", [None, 4])
def test_folds_of_classes_and_groups_are_as_even_as_those_of_scikit_learn(
    table: str, frame: pd.DataFrame, seed: int | None
) -> None:
    found = _folds(MPI.COMM_SELF, table, 5, stratify="label", seed=seed)
    expected = StratifiedKFold(5).split(frame, frame.label)
    _check([valid for _, valid in found])
    for (train, valid), (_, held_out) in zip(found, expected, strict=True):
        _check([train, valid])
        difference = frame.label[valid].value_counts() - frame.label[held_out].value_counts()
        assert (difference.abs() <= 1).all() and abs(len(valid) - len(held_out)) <= 1
    found = _folds(MPI.COMM_SELF, table, 4, groups="patient", seed=seed)
    _check([valid for _, valid in found])
    assert all(not set(frame.patient[train]) & set(frame.patient[valid]) for train, valid in found)
    if seed is None:
        sizes = sorted(len(held_out) for _, held_out in GroupKFold(4).split(frame, groups=frame.patient))
        assert sorted(len(valid) for _, valid in found) == sizes


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=30),
    st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
)
def test_sizes_of_classes(counts: list[int], weights: list[int]) -> None:
    fractions = np.array(weights) / sum(weights)
    sizes = sizes_by_class(np.array(counts), fractions.tolist())
    np.testing.assert_array_equal(sizes.sum(axis=1), counts)
    assert (abs(sizes - np.outer(counts, fractions)) < 1 + 1e-6).all()
    assert (abs(sizes.sum(axis=0) - sum(counts) * fractions) < len(weights)).all()


def _resumed(comm: MPI.Intracomm, path: str, start: Any, shuffle: Any) -> list[Any]:
    train, _ = open_dataset(path, inputs="x", comm=comm).split(0.7, 0.3, stratify="label", seed=1)
    return [batch.copy() for batch in train.batches(36, shuffle=shuffle, seed=2, start=start)]


@pytest.mark.parametrize("shuffle", [True, "global"])
def test_a_run_resumes_on_another_number_of_ranks(table: str, pool: Pool, shuffle: Any) -> None:
    train, _ = open_dataset(table, inputs="x", comm=MPI.COMM_SELF).split(0.7, 0.3, stratify="label", seed=1)
    train.batches(36, shuffle=shuffle, seed=2)
    expected = _resumed(MPI.COMM_SELF, table, None, shuffle)[3:]
    by_rank = pool.run(_resumed, table, train.state(3), shuffle)
    for number, batch in enumerate(expected):
        found = np.concatenate([batches[number] for batches in by_rank])
        np.testing.assert_array_equal(np.sort(found), np.sort(batch))


def test_a_selection_is_split(table: str, frame: pd.DataFrame) -> None:
    data = open_dataset(table, inputs="x", where="x % 3 == 0", comm=MPI.COMM_SELF)
    sets = [part.load()["x"] for part in data.split(0.5, 0.5, stratify="label", seed=1)]
    chosen = frame[frame.x % 3 == 0]
    np.testing.assert_array_equal(np.sort(np.concatenate(sets)), chosen.x)
    difference = frame.label[sets[0]].value_counts() - 0.5 * chosen.label.value_counts()
    assert (difference.abs() < 1).all()


def test_borders_of_dates_and_numbers(table: str, frame: pd.DataFrame) -> None:
    dates = pd.to_datetime(frame.day)
    for borders, values in ((["2015-01-01", "2016-02"], dates), ([100, 107.5], frame.x)):
        edges = [pd.Timestamp(border) if isinstance(border, str) else border for border in borders]
        expected = [frame.x[values < edges[0]], frame.x[(values >= edges[0]) & (values < edges[1])]]
        expected.append(frame.x[values >= edges[1]])
        sets = _sets(MPI.COMM_SELF, table, (), at=borders, along="day" if values is dates else "x")
        for rows, of_set in zip(sets, expected, strict=True):
            np.testing.assert_array_equal(rows, of_set)


LARGE = 2**60 + np.arange(4)
TIMES = np.array(["2015-01-01T00:00:00.000200", "2015-01-01T00:00:00.000800"], "M8[us]")


@pytest.mark.parametrize(
    ("values", "borders", "sizes"),
    [
        (LARGE, [2**60 + 1], (1, 3)),
        (LARGE.astype("u8"), [-1, 2**60 + 3, 2**64], (0, 3, 1, 0)),
        (LARGE, [-np.inf, 0.5, 2.0**60, np.inf], (0, 0, 0, 4, 0)),
        (np.arange(4, dtype="i1"), [0.2, 0.7, 2.5, 1000], (1, 0, 2, 1, 0)),
        (np.arange(4) / 2, [0.5, 1.25], (1, 2, 1)),
        (np.array([0.6, 0.7, 0.8], "f4"), [0.7], (1, 2)),
        (TIMES, [np.datetime64("2015-01-01T00:00:00.000500")], (1, 1)),
        (TIMES.astype(str), ["2015-01-01T00:00:00.000500"], (1, 1)),
    ],
)
def test_borders_are_exact(values: Any, borders: list[Any], sizes: tuple[int, ...]) -> None:
    data = open_dataset({"t": values}, comm=MPI.COMM_SELF)
    assert tuple(len(part) for part in data.split(at=borders, along="t")) == sizes


@pytest.mark.parametrize("calendar", ["standard", "noleap", "360_day"])
def test_borders_of_the_time_coordinate(tmp_path: Path, calendar: str) -> None:
    time = xr.date_range("2014-01-01", periods=60, freq="MS", calendar=calendar, use_cftime=True)
    series = xr.Dataset({"t2m": ("time", np.arange(60.0))}, coords={"time": time})
    for year, part in series.groupby("time.year"):
        part.to_netcdf(tmp_path / f"{year}.nc")
    data = open_dataset(str(tmp_path), inputs="t2m", comm=MPI.COMM_SELF)
    expected = series.sel(time=slice("2015-01", "2016-12")).t2m.values
    sets = [part.load()["t2m"] for part in data.split(at=["2015-01-01", "2017-01-01"])]
    np.testing.assert_array_equal(sets[1], expected)
    assert [len(rows) for rows in sets] == [12, 24, 24]
    kinds: list[Any] = [np.datetime64, pd.Timestamp, date.fromisoformat]
    for kind in (*kinds, lambda text: pd.Timestamp(text, tz="Europe/Berlin") + pd.Timedelta("1h")):
        of_kind = data.split(at=[kind("2015-01-01"), kind("2017-01-01")])
        assert [len(part) for part in of_kind] == [12, 24, 24]
    windows = open_dataset(str(tmp_path), inputs="t2m", window=2, horizon=3, comm=MPI.COMM_SELF)
    sets = [np.concatenate(list(p.load().values()), axis=1) for p in windows.split(at=["2015-01-01", "2017-01-01"])]
    assert [rows.ravel()[[0, -1]].tolist() for rows in sets] == [[0, 11], [12, 35], [36, 59]]


@pytest.mark.parametrize("how", ["option", "method", "concat", "merge"])
def test_borders_of_windows_that_share_no_rows(how: str) -> None:
    arrays = {"n": np.arange(24), "t": np.arange(24) / 2}
    if how == "option":
        windows = open_dataset(arrays, inputs=["n", "t"], window=4, stride=4, comm=MPI.COMM_SELF)
    else:
        windows = open_dataset(arrays, inputs=["n", "t"], comm=MPI.COMM_SELF).window(4, stride=4)
    if how == "concat":
        windows = concat([windows.split(0.5, 0.5)[0], windows.split(0.5, 0.5)[1]])
    elif how == "merge":
        windows = merge(windows, open_dataset({"k": np.arange(6)}, inputs="k", comm=MPI.COMM_SELF), how="rows")
    early, late = windows.split(at=[6.0], along="t")
    assert [part[:]["n"][:, 0].tolist() for part in (early, late)] == [[0, 4, 8], [12, 16, 20]]


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """Write events of 0 to 4 particles, each of which has the number of its event."""
    rng, counts = np.random.default_rng(0), np.random.default_rng(1).integers(0, 5, 300)
    path = tmp_path_factory.mktemp("events") / "a.h5"
    with h5py.File(path, "w") as file:
        file["offsets"] = np.concatenate([[0], np.cumsum(counts)])
        file["event"] = np.repeat(np.arange(300), counts)
        file["run"] = rng.integers(0, 12, 300)
    return str(path), ak.unflatten(np.repeat(np.arange(300), counts), counts)


@pytest.mark.parametrize(
    "options", [{}, {"seed": 1}, {"groups": "run"}, {"gap": 3}], ids=["ordered", "random", "groups", "gap"]
)
def test_the_objects_of_an_event_are_not_divided(events: tuple[str, Any], options: dict[str, Any]) -> None:
    path, expected = events
    offsets = {"event": "offsets"}
    data = open_dataset(path, inputs="event", flatten="event", offsets=offsets, comm=MPI.COMM_SELF)
    sets = [part.load()["event"] for part in data.split(0.5, 0.3, 0.2, **options)]
    assert sum(len(set(rows)) for rows in sets) == len(set(np.concatenate(sets)))
    if "gap" not in options:
        np.testing.assert_array_equal(np.sort(np.concatenate(sets)), ak.flatten(expected))
    for fraction, rows in zip((0.5, 0.3, 0.2), sets, strict=True):
        assert abs(len(rows) - fraction * len(data)) <= (5 if "groups" not in options else len(data) / 12)
    folds = [(a.load()["event"], b.load()["event"]) for a, b in data.kfold(4, seed=2)]
    assert all(not set(train) & set(valid) for train, valid in folds)
    np.testing.assert_array_equal(np.sort(np.concatenate([valid for _, valid in folds])), ak.flatten(expected))
    with pytest.raises(PartitionError, match="objects of an event"):
        data.split(0.5, 0.5, stratify="event")


def test_a_fold_without_samples_is_an_error(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(12))
    data = open_dataset(tmp_path / "a.npy", comm=MPI.COMM_SELF)
    assert [len(valid) for _, valid in data.kfold(12)] == [1] * 12
    with pytest.raises(PartitionError, match="a fold has no samples"):
        data.kfold(13)


def test_folds_of_windows_share_no_rows(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["t"] = np.arange(500)
    data = open_dataset(tmp_path / "a.h5", inputs="t", window=6, comm=MPI.COMM_SELF)
    for train, valid in data.kfold(5):
        assert not set(train.load()["t"].ravel()) & set(valid.load()["t"].ravel()) and len(valid) >= 94
    with pytest.raises(PartitionError, match="windows that share rows"):
        data.split(0.5, 0.5, groups="t")


def _errors(comm: MPI.Intracomm, path: str) -> list[str]:
    data = open_dataset(path, inputs="x", comm=comm)
    found = []
    for options in (
        {"stratify": "no such"},
        {"stratify": "label", "groups": "label"},
        {"groups": "label", "seed": comm.rank if comm.size > 1 else -1},
        {"groups": "label", "gap": 2},
    ):
        with pytest.raises(DataError) as caught:
            data.split(0.5, 0.5, **options)
        found.append(str(caught.value))
    for borders, along in (([3, 2], "x"), (["2015"], "x"), ([3], "label"), ([], "x"), ([1], None)):
        with pytest.raises(DataError) as caught:
            data.split(at=borders, along=along)
        found.append(str(caught.value))
    return found


def test_fractions_are_numbers(table: str) -> None:
    with pytest.raises(PartitionError, match="must sum to 1"):
        open_dataset(table, inputs="x", comm=MPI.COMM_SELF).split(float("nan"), 1.0)


def test_every_rank_raises_the_errors(table: str, pool: Pool) -> None:
    by_rank = pool.run(_errors, table)
    assert by_rank == [by_rank[0]] * pool.size
    expected = ("no such", "exclude each other", "seed", "no gap", *["at= has no borders"] * 4, "no coordinate")
    for text, part in zip(by_rank[0], expected, strict=True):
        assert part in text


def test_a_missing_value_has_no_set(tmp_path: Path) -> None:
    pd.DataFrame({"x": [1, 2, 3, 4], "label": ["a", None, "b", "b"]}).to_csv(tmp_path / "a.csv", index=False)
    data = open_dataset(tmp_path / "a.csv", inputs="x", comm=MPI.COMM_SELF)
    with pytest.raises(FormatError, match=r"row 1(.|\n)*missing"):
        data.split(0.5, 0.5, stratify="label")
