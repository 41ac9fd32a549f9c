"""Files as xarray and netCDF4 write them: times that are missing, ragged arrays, packing of its own in each file."""

from pathlib import Path

import netCDF4
import numpy as np
import pytest
import xarray

import matex_data as md
from tests.support.launch import run_script
from tests.support.loading import check_samples
from tests.support.ranks import Pool

pytestmark = pytest.mark.rank_counts(1, 3)
TIMES = np.array(["2000-01-01T06", "NaT", "2000-01-03", "NaT", "1969-12-31", "2020-02-29"], "M8[ns]")
SECONDS = np.where(np.isnat(TIMES), np.nan, TIMES.astype("M8[s]").astype(np.float64))


def test_times_that_are_missing(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "times.nc"
    content = xarray.Dataset({"n": ("s", np.arange(6)), "when": ("s", TIMES), "since": ("s", TIMES)})
    content.when.encoding = {"dtype": "int64", "units": "seconds since 2000-01-01"}
    content.since.encoding = {"dtype": "int64", "units": "nanoseconds since 2000-01-01"}
    content.to_netcdf(path)
    with netCDF4.Dataset(path) as file:
        file.set_auto_mask(False)
        for name in ("when", "since"):
            assert file[name][1] == np.iinfo(np.int64).min
            assert "_FillValue" not in file[name].ncattrs()
    check_samples(pool, str(path), {"n": range(6), "when": SECONDS, "since": SECONDS})


@pytest.mark.parametrize("suffix", ["nc", "zarr"])
def test_durations_that_are_missing(pool: Pool, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"durations.{suffix}"
    durations = np.array([1, "NaT", 30], "m8[h]").astype("m8[s]")
    content = xarray.Dataset({"n": ("s", np.arange(3)), "delay": ("s", durations)})
    content.delay.encoding = {"dtype": "int64", "units": "hours"}
    (content.to_netcdf if suffix == "nc" else content.to_zarr)(path)
    read = (xarray.open_dataset if suffix == "nc" else xarray.open_zarr)(path)["delay"].values
    hours = np.where(np.isnat(read), np.nan, read / np.timedelta64(1, "h"))
    check_samples(pool, str(path), {"n": range(3), "delay": hours})
    assert md.open_dataset(path).schema["delay"].attributes["units"] == "hours"
    assert md.open_dataset(path, inputs="delay", missing="drop").load()["delay"].tolist() == [1, 30]


AGAIN = """
import sys
import matex_data as md
kept = md.open_dataset(sys.argv[1])
found = [kept.load()["station"].tolist()]
for _ in range(6):
    again = md.open_dataset(sys.argv[1])
    found += [again.load()["station"].tolist(), kept.load()["station"].tolist()]
print(found == found[:1] * 13, found[0] == [name.encode() for name in sys.argv[2:]])
"""


def test_a_file_of_texts_that_is_opened_again(tmp_path: Path) -> None:
    """HDF5 ended the process: a fill value of texts has a pointer to an opening that has been closed."""
    names = [f"é{i}" for i in range(20)]
    with netCDF4.Dataset(tmp_path / "stations.nc", "w") as file:
        file.createDimension("station", len(names))
        file.createVariable("station", str, ("station",))[:] = np.array(names, object)
    finished = run_script(0, AGAIN, str(tmp_path / "stations.nc"), *names)
    assert (finished.returncode, finished.stdout.split()) == (0, ["True", "True"]), finished.stderr


def test_profiles_of_observations(pool: Pool, tmp_path: Path) -> None:
    path, counts = tmp_path / "argo.nc", np.array([3, 0, 2, 4, 1, 0])
    values = np.arange(12.0) / 2
    content = xarray.Dataset(
        {
            "row_size": ("profile", counts, {"sample_dimension": "obs"}),
            "lat": ("profile", np.arange(6.0)),
            "temp": ("obs", values),
            "qc": ("obs", np.arange(12, dtype="i1")),
            "pair": (("obs", "axis"), np.arange(24.0).reshape(12, 2)),
            "levels": ("obs_level", np.arange(3)),
        }
    )
    content.temp.encoding = {"dtype": "int16", "scale_factor": 0.5, "_FillValue": -9}
    content.to_netcdf(path)
    ends = np.cumsum(counts)
    wanted = {"row_size": counts, "lat": np.arange(6.0)}
    ragged = {"temp": np.split(values, ends)[:6], "qc": np.split(np.arange(12, dtype="i1"), ends)[:6]}
    ragged["pair"] = np.split(np.arange(24.0)[1::2], ends)[:6]
    shapes = {"row_size": (), "lat": (), "temp": (None,), "qc": (None,), "pair": (None,)}
    check_samples(pool, str(path), wanted | ragged, shapes, isel={"axis": 1})
    with pytest.raises(md.FormatError, match="along 'obs', which counts the observations"):
        md.open_dataset(path, isel={"obs": slice(4)})
    assert list(md.open_dataset(path, isel={"axis": 0}).static) == ["levels"]
    assert len(md.open_dataset(path, sample_dim="obs")) == 12
    assert [v.tolist() for v in md.open_dataset(path, inputs="qc").load()["qc"]] == [v.tolist() for v in ragged["qc"]]
    content["row_size"] = ("profile", counts + 1, {"sample_dimension": "obs"})
    content.to_netcdf(tmp_path / "wrong.nc")
    with pytest.raises(md.FormatError, match="the counts are not those of the observations"):
        md.open_dataset(tmp_path / "wrong.nc", isel={"axis": 0})


def test_each_file_has_its_own_packing(pool: Pool, tmp_path: Path) -> None:
    wanted = []
    for number, (scale, offset, fill) in enumerate([(0.5, 0.0, -1), (0.25, 100.0, -2), (2.0, -7.0, 0)]):
        values = offset + scale * np.arange(1.0, 13).reshape(3, 4)
        values[1, 2] = np.nan
        content = xarray.Dataset({"v": (("time", "lat"), values)}, {"time": np.arange(3) + 3 * number})
        content.v.encoding = {"dtype": "int16", "scale_factor": scale, "add_offset": offset, "_FillValue": fill}
        content.to_netcdf(tmp_path / f"{number}.nc")
        wanted += list(values)
    stored = {"sample_dim": "time", "index": str(tmp_path / "stored")}
    for _ in range(2):
        check_samples(pool, str(tmp_path / "*.nc"), {"v": wanted, "time": range(9)}, **stored)


def test_coordinates_are_compared_as_they_are_decoded(tmp_path: Path) -> None:
    for number, offset in enumerate((0.0, 180.0)):
        content = xarray.Dataset({"v": (("time", "lon"), np.zeros((2, 3)))}, {"lon": np.arange(3.0) + offset})
        content.lon.encoding = {"dtype": "int16", "scale_factor": 1.0, "add_offset": offset}
        content.to_netcdf(tmp_path / f"{number}.nc")
    with pytest.raises(md.FormatError, match="the files do not agree on the coordinates 'lon'"):
        md.open_dataset(str(tmp_path / "*.nc"), sample_dim="time")


@pytest.mark.parametrize("kind", ["nc", "zarr"])
def test_coordinates_of_two_dimensions_are_compared(tmp_path: Path, kind: str) -> None:
    for number in range(3):
        lat = np.arange(12.0).reshape(3, 4) + (number == 2)
        # What lies along the samples, and a single value, may differ from file to file.
        others = {"lead": ("time", np.arange(2.0) + number), "reference": float(number)}
        coordinates = {"time": np.arange(2), "lat": (("y", "x"), lat), **others}
        content = xarray.Dataset({"v": (("time", "y", "x"), np.zeros((2, 3, 4)))}, coordinates)
        if kind == "nc":
            content.to_netcdf(tmp_path / f"{number}.nc")
        else:
            content.to_zarr(tmp_path / f"{number}.zarr")
    assert len(md.open_dataset(str(tmp_path / f"[01].{kind}"), inputs="v", sample_dim="time")) == 4
    with pytest.raises(md.FormatError, match="the files do not agree on the coordinates 'lat'"):
        md.open_dataset(str(tmp_path / f"*.{kind}"), inputs="v", sample_dim="time")


def test_the_nearest_values_of_a_coordinate(pool: Pool, tmp_path: Path) -> None:
    path, values = tmp_path / "grid.nc", np.arange(60.0).reshape(3, 4, 5)
    lat, lon = np.array([60.0, 40, 20, 0], "f4"), np.linspace(-10, 10, 5)
    content = xarray.Dataset({"t": (("time", "lat", "lon"), values)}, {"lat": lat, "lon": lon, "time": np.arange(3)})
    content.to_netcdf(path)
    for wanted in ({"lat": 33.3, "lon": [-9.9, 2.5]}, {"lat": [50, 10], "lon": -1e9}):
        expected = content.sel(wanted, method="nearest").t.values
        options = {"sel": wanted, "method": "nearest", "inputs": ["t"]}
        assert np.array_equal(md.open_dataset(path, **options).load()["t"], expected)
    check_samples(pool, str(path), {"t": list(expected)}, **options)
    with pytest.raises(md.FormatError, match='method="nearest"'):
        md.open_dataset(path, sel={"lat": 33.3})
    with pytest.raises(md.FormatError, match="no such method"):
        md.open_dataset(path, sel={"lat": 33.3}, method="pad")
