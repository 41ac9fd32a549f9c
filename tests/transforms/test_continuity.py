"""Windows that reach from one file into the next, compared with windows of one array that xarray has joined."""

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
from numpy.lib.stride_tricks import sliding_window_view

from matex_data import FieldNotFound, FormatError, PartitionError, open_dataset
from matex_data.io.counters import process_profile
from tests.support.ranks import Pool

MONTHS = range(1, 6)


@pytest.fixture(scope="module", params=["NETCDF4", "NETCDF3_64BIT"])
def months(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write five months of six-hourly fields, a file each."""
    folder, rng = tmp_path_factory.mktemp("months"), np.random.default_rng(0)
    time = pd.date_range("2010-01-01", "2010-05-31T18", freq="6h")
    fields = {"z": (("time", "lat"), rng.normal(size=(len(time), 3))), "y": ("time", np.arange(len(time), dtype="f4"))}
    series = xr.Dataset(fields, coords={"time": time, "lat": [10.0, 20.0, 30.0]})
    for month, part in series.groupby("time.month"):
        part.to_netcdf(folder / f"{month}.nc", format=request.param, engine="netcdf4", unlimited_dims="time")
    return folder


def _joined(folder: Path) -> xr.Dataset:
    return xr.concat([xr.load_dataset(folder / f"{month}.nc") for month in MONTHS], "time")


def _windows(array: Any, window: int, stride: int, horizon: int, lead: int) -> tuple[Any, Any]:
    """Return all windows of an array, and their targets."""
    span = window + lead - 1 + horizon
    every = np.moveaxis(sliding_window_view(array, span, axis=0), -1, 1)[::stride]
    return every[:, :window], every[:, span - horizon :]


def _loaded(comm: MPI.Intracomm, folder: str, **options: Any) -> list[Any]:
    loaded = open_dataset(folder, inputs="z", targets="y", comm=comm, **options).load()
    return [loaded["z"], loaded["y_ahead"]]


@pytest.mark.parametrize("shape", [(4, 1, 1, 12), (2, 5, 3, 1), (130, 7, 1, 0)])
def test_windows_of_months_are_those_of_the_joined_series(
    months: Path, pool: Pool, shape: tuple[int, int, int, int]
) -> None:
    window, stride, horizon, lead = shape
    options = {"window": window, "stride": stride, "horizon": horizon, "lead": lead}
    by_rank = pool.run(_loaded, str(months), **options)
    expected = _joined(months)
    np.testing.assert_array_equal(np.concatenate([z for z, _ in by_rank]), _windows(expected.z.values, *shape)[0])
    np.testing.assert_array_equal(np.concatenate([y for _, y in by_rank]), _windows(expected.y.values, *shape)[1])


def _batches(comm: MPI.Intracomm, folder: str, start: Any, shuffle: Any) -> list[Any]:
    data = open_dataset(folder, inputs="y", window=4, lead=12, horizon=1, comm=comm)
    train, _ = data.split(0.8, 0.2)
    batches = train.batches(60, shuffle=shuffle, seed=3, start=start)
    return [(x.copy(), y.copy()) for x, y in batches]


@pytest.mark.parametrize("shuffle", [True, "global"])
def test_a_run_resumes_on_another_number_of_ranks(months: Path, pool: Pool, shuffle: Any) -> None:
    data, _ = open_dataset(str(months), inputs="y", window=4, lead=12, horizon=1, comm=MPI.COMM_SELF).split(0.8, 0.2)
    data.batches(60, shuffle=shuffle, seed=3)
    expected = _batches(MPI.COMM_SELF, str(months), None, shuffle)[2:]
    by_rank = pool.run(_batches, str(months), data.state(2), shuffle)
    for number, (_, y) in enumerate(expected):
        found = np.concatenate([batches[number][1] for batches in by_rank])
        np.testing.assert_array_equal(np.sort(found, axis=0), np.sort(y, axis=0))
        x = np.concatenate([batches[number][0] for batches in by_rank])
        np.testing.assert_array_equal(x[:, -1] + 12, found[:, 0])


def test_no_row_of_a_split_is_in_two_sets(months: Path) -> None:
    data = open_dataset(str(months), inputs="y", window=4, lead=3, horizon=2, comm=MPI.COMM_SELF)
    rows = [np.concatenate([a.ravel() for a in part.load().values()]) for part in data.split(0.6, 0.4)]
    assert rows[0].max() + 1 == rows[1].min()
    assert sum(map(len, data.split(0.6, 0.4))) == len(data) - 7


def test_windows_end_at_a_gap(months: Path) -> None:
    files = [str(months / f"{month}.nc") for month in (1, 2, 4, 5)]
    with pytest.warns(UserWarning, match=r"over 1 of 3 borders.*'time'.*4\.nc.*step is 2\.7\S+, and usually 21600"):
        data = open_dataset(files, inputs="y", window=8, comm=MPI.COMM_SELF)
    y = _joined(months).y.values
    march = slice((31 + 28) * 4, (31 + 28 + 31) * 4)
    expected = [sliding_window_view(part, 8) for part in (y[: march.start], y[march.stop :])]
    np.testing.assert_array_equal(data.load()["y"], np.concatenate(expected))


def _write(folder: Path, times: list[list[float]]) -> str:
    for number, of_file in enumerate(times):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file["t"] = np.array(of_file, "f4")
            file["v"] = np.arange(2 * len(of_file)).reshape(-1, 2)
    return str(folder)


@pytest.mark.parametrize(
    ("times", "sections"),
    [
        ([[0, 1], [2], [], [3, 4]], [5]),
        ([[0], [1], [2], [5], [6]], [3, 2]),
        ([[0, 31, 59], [90, 120, 151], [181, 212]], [8]),  # months
        ([[0, 1, 2], [2, 3]], [3, 2]),
        ([[4, 3], [2, 1], [4, 3]], [4, 2]),
        ([[], [0, 1]], [2]),
        ([[0, 1], [], [3, 4]], [2, 2]),
    ],
)
def test_a_named_coordinate_joins_files(tmp_path: Path, times: list[list[float]], sections: list[int]) -> None:
    folder = _write(tmp_path, times)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        data = open_dataset(folder, inputs="t", window=2, along="t", comm=MPI.COMM_SELF)
    of_section = np.split(np.concatenate(times), np.cumsum(sections)[:-1])
    np.testing.assert_array_equal(data.load()["t"], np.concatenate([sliding_window_view(t, 2) for t in of_section]))
    assert sum("borders" in str(warning.message) for warning in said) == (len(sections) > 1)


def test_files_without_a_coordinate_do_not_continue_one_another(tmp_path: Path) -> None:
    folder = _write(tmp_path, [[0, 1, 2], [3], [4, 5]])
    assert len(open_dataset(folder, inputs="t", window=2, comm=MPI.COMM_SELF)) == 3


def test_only_the_rows_of_windows_and_targets_are_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["v"] = np.arange(13 * 1000, dtype="f8").reshape(13, 1000)
    data = open_dataset(tmp_path / "a.h5", inputs="v", window=1, lead=12, horizon=1, comm=MPI.COMM_SELF)
    before = process_profile().bytes
    ((x, y),) = data.batches(1)
    assert y[0, 0, 0] - x[0, 0, 0] == 12 * 1000 and process_profile().bytes - before == 2 * 8000


def _errors(comm: MPI.Intracomm, folder: str) -> list[str]:
    found = []
    for options in ({"along": "q"}, {"along": "v"}, {"lead": -1}, {"lead": 3}):
        try:
            open_dataset(folder, inputs="t", window=2, comm=comm, **options)
        except (FieldNotFound, FormatError, PartitionError) as error:
            found.append(str(error))
    return found


def test_every_rank_raises_the_errors(tmp_path: Path, pool: Pool) -> None:
    by_rank = pool.run(_errors, _write(tmp_path, [[0, 1], [2, 3]]))
    assert by_rank == [by_rank[0]] * pool.size
    for text, expected in zip(
        by_rank[0], ("'q'", "one number for each sample", "lead=-1", "lead=3 alone"), strict=True
    ):
        assert expected in text


def test_the_warning_of_a_poor_shuffle_has_remedies_for_windows(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["v"] = np.zeros((4000, 64), "f4")
    data = open_dataset(tmp_path / "a.h5", inputs="v", window=200, comm=MPI.COMM_SELF, window_bytes=1 << 20)
    with pytest.warns(UserWarning, match="windows share rows.*window_bytes=.*larger stride=") as said:
        data.batches(64, shuffle=True, seed=1)
    assert "block_bytes" not in str(said[0].message)


ORDERS = {
    "overlap": ({"a": 0, "b": 48, "c": 40}, ("files overlap in 'time'", "c.nc", "b.nc", "split(at=[...])")),
    "touch": ({"a": 0, "b": 23}, ("files overlap in 'time'", "a.nc", "b.nc")),
    "order": ({"apr": 72, "feb": 24, "jan": 0, "mar": 48}, ("files are not in order in 'time'", "apr.nc", "feb.nc")),
    "series": ({"a": 0, "b": 24, "c": 72}, ()),
}


def _said(comm: MPI.Intracomm, folder: str, inputs: str | None, window: int | None) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        data = open_dataset(folder, inputs=inputs, window=window, comm=comm)
    assert inputs is None or list(data.schema) == [inputs]
    return [str(warning.message) for warning in said]


@pytest.mark.parametrize("inputs", ["z", None])
@pytest.mark.parametrize("case", ORDERS)
def test_files_that_overlap_or_are_out_of_order_are_said_once(
    tmp_path: Path, pool: Pool, case: str, inputs: str | None
) -> None:
    begins, words = ORDERS[case]
    for name, hour in begins.items():
        time = pd.date_range("2010-01-01", periods=24, freq="h") + pd.Timedelta(hours=hour)
        xr.Dataset({"z": ("time", np.zeros(24))}, {"time": time}).to_netcdf(tmp_path / f"{name}.nc")
    by_rank = pool.run(_said, str(tmp_path), inputs, None)
    assert [len(said) for said in by_rank] == [bool(words)] + [0] * (pool.size - 1)
    assert all(word in by_rank[0][0] for word in words)


@pytest.mark.rank_counts(1, 3)
def test_stores_of_zarr_are_ordered_and_go_on_as_files_of_netcdf(tmp_path: Path, pool: Pool) -> None:
    pytest.importorskip("zarr")
    time = pd.date_range("2010-01-01", periods=30, freq="h")
    for folder, begins in {"series": (0, 10, 20), "overlap": (0, 6, 20)}.items():
        for number, begin in enumerate(begins):
            part = slice(begin, begin + 10)
            values = xr.Dataset({"z": ("time", np.arange(30.0)[part])}, {"time": time[part]})
            values.to_zarr(tmp_path / folder / f"{number}.zarr", zarr_format=2)
    said = pool.run(_said, str(tmp_path / "overlap" / "*.zarr"), "z", None)
    assert [len(of_rank) for of_rank in said] == [1] + [0] * (pool.size - 1)
    assert "files overlap in 'time'" in said[0][0]
    series = str(tmp_path / "series" / "*.zarr")
    assert not any(pool.run(_said, series, "z", 4))
    data = open_dataset(series, inputs="z", window=4, comm=MPI.COMM_SELF)
    np.testing.assert_array_equal(data.load()["z"], np.lib.stride_tricks.sliding_window_view(np.arange(30.0), 4))
    assert [len(part) for part in open_dataset(series, inputs="z", comm=MPI.COMM_SELF).split(at=[time[13]])] == [13, 17]


def test_numbers_of_samples_are_no_times(tmp_path: Path) -> None:
    for number in range(2):
        xr.Dataset({"z": ("sample", np.zeros(4))}, {"sample": np.arange(4)}).to_netcdf(tmp_path / f"{number}.nc")
    assert _said(MPI.COMM_SELF, str(tmp_path), None, None) == []
