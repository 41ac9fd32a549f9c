"""Statistics of the samples with each value of a field, and parts of dates, compared with pandas and xarray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr
from mpi4py import MPI

import matex_data as md
from tests.support.ranks import Pool

ROWS = 203
RNG = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {
        "x": np.where(RNG.random(ROWS) < 0.1, np.nan, RNG.normal(5, 2, ROWS)),
        "y": RNG.integers(0, 9, ROWS),
        "station": RNG.choice(["north", "south", "east", ""], ROWS),
        "rare": np.where(np.arange(ROWS) == 100, 7, 1),
    }
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a table of numbers of stations."""
    path = tmp_path_factory.mktemp("groups") / "a.parquet"
    FRAME.to_parquet(path)
    return path


def _grouped(comm: Any, path: Path) -> Any:
    data = md.open_dataset(path, comm=comm)
    return data.statistics("x", "y", by="station"), data.statistics("x", by="rare")


@pytest.mark.rank_counts(1, 3)
def test_groups_are_those_of_pandas(pool: Pool, path: Path) -> None:
    known = FRAME[FRAME["station"] != ""].groupby("station")
    for by_station, by_rare in pool.run(_grouped, path):
        assert list(by_station) == ["east", "north", "south"] and list(by_rare) == [1, 7]
        for station, part in known:
            for name in ("x", "y"):
                found = by_station[station][name]
                np.testing.assert_allclose(found.mean, part[name].mean(), rtol=1e-12)
                np.testing.assert_allclose(found.std, part[name].std(ddof=0), rtol=1e-12)
                assert (found.count, found.missing) == (part[name].count(), part[name].isna().sum())
                assert (found.min, found.max) == (part[name].min(), part[name].max())
        assert by_rare[7].count + by_rare[7].missing == 1


def _climatology(comm: Any, path: Path) -> Any:
    data = md.open_dataset(path, comm=comm, inputs=["t2m", "month"], derive={"month": "month(time)"})
    plain = md.open_dataset(path, comm=comm, inputs=["t2m", "time"])
    groups = ((data, "month"), (plain, "month(time)"), (plain, "month"))
    return [one.statistics("t2m", axis=(1, 2), by=by) for one, by in groups]


@pytest.mark.rank_counts(3)
@pytest.mark.parametrize("calendar", ["standard", "noleap", "360_day"])
def test_a_climatology_is_that_of_xarray(pool: Pool, tmp_path: Path, calendar: str) -> None:
    time = xr.date_range("2014-01-01", periods=500, freq="36h", calendar=calendar, use_cftime=True)
    field = xr.DataArray(RNG.normal(size=(500, 3, 4)), {"time": time}, ("time", "lat", "lon"))
    field.to_dataset(name="t2m").to_netcdf(tmp_path / "a.nc")
    expected = field.groupby("time.month").mean()
    for found in (one for of_rank in pool.run(_climatology, tmp_path / "a.nc") for one in of_rank):
        assert list(found) == list(range(1, 13))
        for month, of_month in found.items():
            np.testing.assert_allclose(of_month.mean, expected.sel(month=month), rtol=1e-10)
    made = {part: f"{part}(time)" for part in ("year", "day", "hour", "dayofyear")}
    loaded = md.open_dataset(tmp_path / "a.nc", comm=MPI.COMM_SELF, inputs=list(made), derive=made).load()
    for part, values in loaded.items():
        np.testing.assert_array_equal(values, getattr(field.time.dt, part))


@pytest.mark.parametrize(
    ("by", "kind"),
    [
        ("month", md.FieldNotFound),
        ("nothing", md.FieldNotFound),
        ("log(nothing)", md.FieldNotFound),
        ("x +", md.FormatError),
    ],
)
def test_groups_of_no_field(path: Path, by: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        md.open_dataset(path, comm=MPI.COMM_SELF).statistics("x", by=by)


@pytest.mark.parametrize("text", ["month(x)", "month(x + 1)", "hour()"])
def test_dates_of_what_is_no_time(path: Path, text: str) -> None:
    with pytest.raises(md.FormatError, match="cannot be evaluated"):
        md.open_dataset(path, comm=MPI.COMM_SELF, derive={"made": text})


@pytest.mark.parametrize("part", ["year", "month", "day", "hour", "dayofyear"])
@pytest.mark.parametrize(
    ("units", "times"),
    [
        ("days since 1970-01-01", -20000 + np.arange(3000) * 11 / 24),  # an hour is inexact in days
        ("weeks since 1970-01-01", np.arange(300)),
        ("nanoseconds since 1970-01-01", np.arange(300) * 10**15 + 1_600_000_000_000_000_000),
    ],
)
def test_parts_of_dates_are_those_of_pandas(tmp_path: Path, part: str, units: str, times: Any) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["t"] = times
        file["t"].attrs["units"] = units
    found = md.open_dataset(tmp_path / "a.h5", comm=MPI.COMM_SELF, derive={"made": f"{part}(t)"}).load()["made"]
    unit = pd.Timedelta(1, {"days": "D", "weeks": "W", "nanoseconds": "ns"}[units.split()[0]])
    expected = pd.Timestamp(0) + pd.to_timedelta(np.round(times * (unit / pd.Timedelta(1, "us"))), "us")
    np.testing.assert_array_equal(found, getattr(expected, {"dayofyear": "day_of_year"}.get(part, part)))


@pytest.mark.parametrize(
    ("units", "time"),
    [
        ("seconds since trigger", 1.0),
        ("months since 2000-01-01", 1.0),
        ("days since 1970-01-01", np.inf),
        ("seconds since 1970-01-01", 1e30),
        ("nanoseconds since 1970-01-01", np.iinfo(np.int64).min),
    ],
)
def test_times_without_a_date_are_an_error(tmp_path: Path, units: str, time: Any) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["t"] = np.array([0, time])
        file["t"].attrs["units"] = units
    with pytest.raises(md.FormatError, match=rf"year[\s\S]*{units}"):
        md.open_dataset(tmp_path / "a.h5", comm=MPI.COMM_SELF, derive={"y": "year(t)"}).load()


@pytest.mark.parametrize("kind", ["memory", "parquet", "csv", "zarr", "netcdf"])
def test_times_before_1582_are_in_the_calendar_of_what_has_written_them(tmp_path: Path, kind: str) -> None:
    days = ["0850-03-01T05", "1500-02-28", "1582-10-04", "1582-10-14", "1582-10-15", "1999-12-31"]
    times = pd.Series(np.array(days, "datetime64[us]"))
    table, path = pd.DataFrame({"t": times, "n": np.arange(6.0)}), str(tmp_path / f"a.{kind}")
    if kind == "parquet":
        table.to_parquet(path)
    elif kind == "csv":
        table.to_csv(path, index=False)
    elif kind == "zarr":
        group = zarr.open_group(path, mode="w")
        for name in table:
            group.create_array(name, data=table[name].to_numpy(), dimension_names=("t",))
    elif kind == "netcdf":
        xr.Dataset({"n": ("t", table["n"])}, {"t": times.to_numpy()}).to_netcdf(path, format="NETCDF3_64BIT")
    made = {"y": "year(t)", "d": "dayofyear(t)", "n2": "2 * n"}
    data = md.open_dataset(table if kind == "memory" else path, inputs=["t", *made], derive=made, comm=MPI.COMM_SELF)
    found = data.load()
    assert found["y"].tolist() == times.dt.year.tolist() and found["d"].tolist() == times.dt.day_of_year.tolist()
    early, late = data.split(along="t", at=["1582-10-14"])
    assert (len(early), len(late)) == (3, 3)
