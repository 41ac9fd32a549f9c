"""Selections of netCDF files by values and positions, static fields and stacks, compared with xarray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import netCDF4
import numpy as np
import pytest
import xarray as xr
from mpi4py import MPI

from matex_data import DataError, FieldNotFound, FormatError, open_dataset
from matex_data.readers.dimensions.labels import Labels
from tests.support.ranks import Pool
from tests.support.serial import same

SELF = MPI.COMM_SELF


def created(folder: Path) -> Path:
    """Return a folder that exists."""
    folder.mkdir(exist_ok=True)
    return folder


KINDS = ("NETCDF4", "NETCDF3_64BIT", "NETCDF3_CLASSIC")
"""In chunks, at even distances, and in records."""
SELECTIONS: list[dict[str, dict[str, Any]]] = [
    {"sel": {"level": [500, 850]}},
    {"sel": {"level": 500}},
    {"sel": {"lat": slice(70, 20)}},
    {"sel": {"level": [850, 500], "lat": slice(60, -30), "lon": slice(30, 100)}},
    {"sel": {"level": [1000, 500, 100], "lon": [15, 45, 30]}},
    {"sel": {"time": slice("2015-12-31", "2016-01-01")}},
    {"sel": {"time": "2016-01-01"}},
    {"sel": {"time": ["2015-12-31T00", "2016-01-02T12"]}},
    {"sel": {"time": slice("2016-01-02", None), "level": [300]}, "isel": {"lat": [6]}},
    {"isel": {"level": -1, "lat": slice(None, None, 2)}},
    {"isel": {"lon": slice(None, None, -1)}},
    {"isel": {"lat": slice(2, 9, 3), "lon": [1, 2, 3, 20]}},
    {"isel": {"lat": 3, "lon": 4, "level": 2}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a file of each kind: four fields, of which one has the levels in front of the times."""
    folder, rng = tmp_path_factory.mktemp("selections"), np.random.default_rng(1)
    coordinates: dict[str, Any] = {
        "time": ("time", np.arange(20) * 6, {"units": "hours since 2015-12-30"}),
        "level": [1000, 850, 500, 300, 100],
        "lat": np.linspace(90, -90, 13).astype("f4"),
        "lon": np.arange(24) * 15.0,
    }
    fields = {
        "t": (("time", "level", "lat", "lon"), rng.normal(size=(20, 5, 13, 24)).astype("f4")),
        "s": (("time", "lat", "lon"), rng.normal(size=(20, 13, 24))),
        "u": (("level", "time", "lat", "lon"), rng.normal(size=(5, 20, 13, 24)).astype("f4")),
        "land": (("lat", "lon"), rng.normal(size=(13, 24)).astype("f4")),
        "area": (("lat",), rng.normal(size=13).astype("f4")),
    }
    data = xr.Dataset(fields, coordinates)
    for kind in KINDS:
        how: dict[str, Any] = (
            {"encoding": {"t": {"chunksizes": (4, 2, 5, 7), "zlib": True}}} if kind == "NETCDF4" else {}
        )
        if kind == "NETCDF3_CLASSIC":
            data, how = data.drop_vars("u"), {"unlimited_dims": ("time",)}
        data.to_netcdf(folder / f"{kind}.nc", format=kind, **how)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_selections_are_those_of_xarray(folder: Path, kind: str) -> None:
    path = folder / f"{kind}.nc"
    names = ["t", "s"] if kind == "NETCDF3_CLASSIC" else ["t", "s", "u"]
    with xr.open_dataset(path) as file:
        for options in SELECTIONS:
            expected = file.sel(options.get("sel", {})).isel(options.get("isel", {}))
            data = open_dataset(path, inputs=names, comm=SELF, **options)
            order = np.random.default_rng(2).permutation(len(data))[:7]
            batch, scattered = data.load(), data[order]
            for name in names:
                values = expected[name].transpose("time", ...).values
                assert data.schema[name].shape == values.shape[1:] and data.schema[name].dtype == values.dtype
                np.testing.assert_array_equal(batch[name], values, err_msg=f"{options}, {name}")
                np.testing.assert_array_equal(scattered[name], values[order])
            for name in ("lat", "level", "land"):
                np.testing.assert_array_equal(data.static[name], expected[name])


def test_values_are_arrays_as_well(folder: Path) -> None:
    path = folder / "NETCDF4.nc"
    with xr.open_dataset(path) as file:
        level, chosen = file["level"], np.arange(5) == 2
        same: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"sel": {"level": level[1]}}, {"sel": {"level": 850}}),
            ({"sel": {"level": level[:2]}}, {"sel": {"level": [1000, 850]}}),
            ({"sel": {"level": [np.array(500)], "time": file["time"][3:5]}}, {"isel": {"level": [2], "time": [3, 4]}}),
            ({"sel": {"level": slice(level[1], level[3])}}, {"isel": {"level": slice(1, 4)}}),
            ({"isel": {"level": np.array(1)}}, {"isel": {"level": 1}}),
            ({"isel": {"level": chosen}}, {"isel": {"level": chosen}}),
        ]
        for options, expected in same:
            found = open_dataset(path, inputs="t", comm=SELF, **options).load()["t"]
            values = file["t"].sel(expected.get("sel", {})).isel(expected.get("isel", {})).values
            np.testing.assert_array_equal(found, values, err_msg=str(options))


@pytest.mark.parametrize("kind", KINDS)
def test_coordinates_of_texts(tmp_path: Path, kind: str) -> None:
    """Of one letter and of more: they are selected by value, and all files have the same ones."""
    for number, names in enumerate((["u", "v"], ["v", "u"], ["u", "wide"])):
        x = (("time", "channel"), np.arange(6.0).reshape(3, 2))
        xr.Dataset({"x": x}, {"channel": names}).to_netcdf(tmp_path / f"{number}.nc", format=kind)
    options: dict[str, Any] = {"sample_dim": "time", "inputs": "x", "comm": SELF}
    assert open_dataset(tmp_path / "1.nc", sel={"channel": "u"}, **options).load()["x"].tolist() == [1, 3, 5]
    assert open_dataset(tmp_path / "2.nc", sel={"channel": ["wide"]}, **options).static["channel"].tolist() == [b"wide"]
    assert len(open_dataset([tmp_path / "0.nc"] * 2, **options)) == 6
    for other in ("1.nc", "2.nc"):
        with pytest.raises(FormatError, match=r"(?s)agree on the coordinates 'channel'.*files that agree on the coord"):
            open_dataset([tmp_path / "0.nc", tmp_path / other], **options)
    if kind != "NETCDF4":
        with pytest.raises(FieldNotFound, match="no coordinate"):
            open_dataset(tmp_path / "0.nc", sel={"channel": "u"}, decode=False, **options)


def test_the_order_of_unsigned_coordinates(tmp_path: Path) -> None:
    coordinates = {"id": np.array([10, 30, 20, 40, 15], "u4"), "level": np.array([1000, 850, 500], "u2")}
    data = xr.Dataset({"x": (("id", "level"), np.arange(15.0).reshape(5, 3))}, coordinates)
    data.to_netcdf(tmp_path / "a.nc")
    options: dict[str, Any] = {"inputs": "x", "sample_dim": "id", "comm": SELF}
    found = open_dataset(tmp_path / "a.nc", sel={"level": slice(1000, 850)}, **options).load()["x"]
    assert same(found, data["x"].sel(level=slice(1000, 850)).values)
    with pytest.raises(FormatError, match="the coordinate is not in order"):
        open_dataset(tmp_path / "a.nc", sel={"id": slice(10, 20)}, **options)


@pytest.mark.parametrize("values", [[2**63, 2**63 + 1, 5], [0.1, np.nan, 0.3], [b"b", b"a", b"c"]], ids=str)
def test_values_of_lists_are_exact(values: list[Any]) -> None:
    array = np.array(values, "u8" if values[0] == 2**63 else None)
    labels = Labels("a.nc", "x", array, {})
    assert labels.entries([values[2], values[0]]) == (2, 0)
    assert labels.samples([values[0], values[2]]) == ((0, 2), "2 0 1") and labels.samples(values[2]) == ((2,), None)
    assert labels.samples([values[2] * 2]) == ((), "1")


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_selection_is_read(folder: Path, kind: str) -> None:
    options: dict[str, Any] = {"inputs": "t", "comm": SELF}
    for selection in (
        {"sel": {"level": [500, 850]}},
        {"sel": {"lat": slice(20, 70)}},
        {"isel": {"level": [0, 2], "lat": 3}},
    ):
        data = open_dataset(folder / f"{kind}.nc", **options, **selection)
        for _ in data.batches(4, shuffle=True, seed=1):
            pass
        needed = data.load()["t"].nbytes
        if kind != "NETCDF4":  # whose chunks of two levels and five latitudes are read as a whole
            assert data.profile.bytes <= 2 * 1.05 * needed
    assert data.profile.bytes < 2 * 20 * 5 * 13 * 24 * 4 / 2


def test_descending_coordinates_and_exact_values(folder: Path) -> None:
    path = folder / "NETCDF3_64BIT.nc"
    for wanted in (slice(20, 70), slice(70, 20)):
        assert open_dataset(path, inputs="s", sel={"lat": wanted}, comm=SELF).static["lat"].tolist() == [60, 45, 30]
    errors: list[tuple[dict[str, Any], type[DataError], str]] = [
        ({"sel": {"level": 501}}, FormatError, "one of .1000, 850, 500, 300, 100"),
        ({"sel": {"level": [500, 700]}}, FormatError, "700"),
        ({"sel": {"lon": slice(350, 10)}}, FormatError, "nothing is selected"),
        ({"sel": {"levle": 500}}, FieldNotFound, "'level'"),
        ({"sel": {"level": "500"}}, FormatError, "numbers"),
        ({"sel": {"time": "yesterday"}}, FormatError, "ISO 8601"),
        ({"sel": {"time": ["2015-12-31T00", "2015-12-31T05"]}}, FormatError, "2 samples"),
        ({"sel": {"level": 500}, "isel": {"level": 1}}, FormatError, "both select"),
        ({"sel": {"level": []}}, FormatError, "one of .1000, 850"),
        ({"sel": {"time": []}}, FormatError, "one of .'2015-12-30 00:00:00'"),
        ({"isel": {"level": 5}}, FormatError, "from -5 to 4"),
        ({"isel": {"level": [False] * 5}}, FormatError, "from -5 to 4"),
        ({"isel": {"level": slice(0, 2.5)}}, FormatError, "a slice of whole numbers"),
        ({"isel": {"level": slice(0, 2, 0)}}, FormatError, "a step other than 0"),
        ({"isel": {"time": slice(0, 4)}}, FormatError, "counts the samples"),
        ({"sel": ["level"]}, FormatError, "expected: a dict or None"),
    ]
    for options, kind, text in errors:
        with pytest.raises(kind, match=text):
            open_dataset(path, inputs="t", comm=SELF, **options)


def _epochs(comm: MPI.Intracomm, pattern: str, shuffle: Any, step: int, options: dict[str, Any]) -> list[Any]:
    data = open_dataset(pattern, comm=comm, **options)
    start = data.state(step) if step else None
    batches = data.batches(6, shuffle=shuffle, seed=4, remainder="keep", start=start)
    return [(x.copy(), y.copy()) for x, y in batches]


@pytest.fixture(scope="module")
def months(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, xr.Dataset]:
    """Return the pattern of monthly files of packed numbers with levels and a static field, and what xarray reads."""
    folder, rng = tmp_path_factory.mktemp("months"), np.random.default_rng(5)
    land = (("lat", "lon"), rng.normal(size=(4, 6)).astype("f4"))
    for month, days in ((1, 31), (2, 28), (3, 31)):
        time = np.datetime64(f"2015-{month:02d}-01") + np.arange(days).astype("m8[D]")
        z = (("time", "level", "lat", "lon"), rng.normal(size=(days, 3, 4, 6)))
        one = xr.Dataset({"z": z, "land": land}, {"time": time.astype("M8[ns]"), "level": [1000, 850, 500]})
        packed = {"dtype": "i2", "scale_factor": 1e-3, "add_offset": 0.5, "_FillValue": -32767}
        one.to_netcdf(folder / f"{month}.nc", encoding={"z": packed})
    files = [xr.open_dataset(path) for path in sorted(folder.glob("*.nc"))]
    return str(folder / "*.nc"), xr.concat(files, "time", data_vars="minimal")


@pytest.mark.parametrize("shuffle", [True, "global"])
def test_windows_of_levels_and_a_static_field(months: tuple[str, xr.Dataset], ranks: Any, shuffle: Any) -> None:
    pattern, file = months
    sel = {"level": [500, 850], "time": slice("2015-01-20", "2015-03-10")}
    options = {
        "inputs": ["z", "land"], "targets": "z", "sel": sel,
        "static_as_inputs": True, "stack": True, "window": 2, "lead": 3, "dtype": "float32",
    }  # fmt: skip
    chosen = file.sel(sel)
    z = chosen.z.values.astype("f4")
    land = np.broadcast_to(chosen.land.values, (len(z), 4, 6))
    rows = np.stack([z[:, 0], z[:, 1], land], axis=-1)
    windows = {rows[i : i + 2].tobytes(): z[i + 4 : i + 5].tobytes() for i in range(len(z) - 4)}
    found = {size: ranks(size).run(_epochs, pattern, shuffle, 0, options) for size in (1, 2, 3)}
    for by_rank in found.values():
        pairs = [(x, y) for batches in by_rank for xs, ys in batches for x, y in zip(xs, ys, strict=True)]
        assert pairs[0][0].shape == (2, 4, 6, 3) and pairs[0][0].dtype == np.float32
        assert {x.tobytes(): y.tobytes() for x, y in pairs} == windows and len(pairs) == len(windows)
    rest = ranks(2).run(_epochs, pattern, shuffle, 4, options)
    assert [_batch(batches) for batches in zip(*rest, strict=True)] == [
        _batch(batches) for batches in zip(*found[3], strict=True)
    ][4:]


def _batch(by_rank: Any) -> set[bytes]:
    return {x.tobytes() for xs, _ in by_rank for x in xs}


def test_orders_of_a_stack(months: tuple[str, xr.Dataset]) -> None:
    pattern, file = months
    options: dict[str, Any] = {"inputs": ["land", "z"], "static_as_inputs": True, "comm": SELF}
    first, last = (open_dataset(pattern, stack=stack, **options) for stack in ("first", "last"))
    np.testing.assert_array_equal(first[7][1:], file.z[7].values)
    np.testing.assert_array_equal(first[7], np.moveaxis(last[7], -1, 0))
    assert last.schema["inputs"].attributes["columns"] == ["land", "z[0]", "z[1]", "z[2]"]
    everything = open_dataset(pattern, static_as_inputs=True, comm=SELF)
    np.testing.assert_array_equal(everything[40]["land"], file.land.values)
    assert everything.statistics("land").mean == pytest.approx(float(file.land.mean()), rel=1e-6)
    with pytest.raises(FormatError, match="static_as_inputs=True"):
        open_dataset(pattern, inputs=["land", "z"], comm=SELF)
    with pytest.raises(FormatError, match='"first"'):
        open_dataset(pattern, inputs="z", stack="middle", comm=SELF)


def test_packed_numbers_as_float32(months: tuple[str, xr.Dataset]) -> None:
    pattern, file = months
    data = open_dataset(pattern, dtype="float32", comm=SELF).load()
    assert file.z.dtype == np.float64 and data["z"].dtype == np.float32
    np.testing.assert_array_equal(data["z"], file.z.values.astype("f4"))
    with pytest.raises(FormatError, match="float32"):
        open_dataset(pattern, dtype="int8", comm=SELF)


def test_the_sample_dimension_is_a_time(tmp_path: Path, pool: Pool) -> None:
    coordinates = {"hour": ("hour", np.arange(7), {"units": "hours since 2000-01-01"}), "x": np.arange(3.0)}
    fields = {"t": (("x", "hour"), np.arange(21.0).reshape(3, 7)), "s": (("x", "hour"), np.ones((3, 7)))}
    xr.Dataset(fields, coordinates).to_netcdf(tmp_path / "a.nc", unlimited_dims=("x",))
    assert pool.run(_shape, str(tmp_path / "a.nc"), {}) == [(7, (3,))] * pool.size
    assert pool.run(_shape, str(tmp_path / "a.nc"), {"sample_dim": "x"}) == [(3, (7,))] * pool.size


def _shape(comm: MPI.Intracomm, path: str, options: dict[str, Any]) -> tuple[int, tuple[int, ...]]:
    data = open_dataset(path, comm=comm, **options)
    return len(data), data.schema["t"].shape


def test_groups_with_their_own_times(tmp_path: Path) -> None:
    path = tmp_path / "groups.nc"
    with netCDF4.Dataset(path, "w") as file:
        for number, name in enumerate(("input", "output", "other")):
            group = file.createGroup(name)
            group.createDimension("time", None)
            time = group.createVariable("time", "f8", ("time",))
            time.units = "hours since 2000-01-01"
            time[:] = np.arange(8) * (2 if name == "other" else 1)
            group.createVariable("v", "f4", ("time",))[:] = np.arange(8) + 10 * number
    data = open_dataset(path, inputs="input/v", targets="output/v", comm=SELF)
    x, y = data[:]
    np.testing.assert_array_equal(x, np.arange(8))
    np.testing.assert_array_equal(y, x + 10)
    for name in ("time", "output/time", "/output/time"):
        both = open_dataset(path, inputs=["input/v", "output/v"], sel={name: "2000-01-01T03"}, comm=SELF).load()
        assert [both[at].tolist() for at in ("input/v", "output/v")] == [[3], [13]]
    early = open_dataset(path, inputs="other/v", sel={"time": slice(None, "2000-01-01T09")}, comm=SELF)
    assert early.load()["other/v"].tolist() == [20, 21, 22, 23, 24]
    with pytest.raises(FormatError, match="other/v"):
        open_dataset(path, inputs=["input/v", "other/v"], comm=SELF)


def test_groups_with_their_own_times_in_several_files(tmp_path: Path) -> None:
    for number in range(2):
        with netCDF4.Dataset(tmp_path / f"{number}.nc", "w") as file:
            for group in (file, file.createGroup("other")):
                group.createDimension("time", None)
                group.createVariable("time", "f8", ("time",))[:] = np.arange(2) + 2 * number
                group["time"].units = "hours since 2000-01-01"
                group.createVariable("lead", "f4", ("time",))[:] = [number, number]
                group.createVariable("v", "f4", ("time",))[:] = np.arange(2) + 2 * number
                group["v"].coordinates = "lead"
    data = open_dataset(str(tmp_path / "*.nc"), inputs=["v", "other/v"], comm=SELF).load()
    assert [values.tolist() for values in data.values()] == [[0, 1, 2, 3]] * 2


def test_a_dimension_by_its_name_is_that_of_what_is_read(tmp_path: Path) -> None:
    path, values = tmp_path / "groups.nc", np.arange(12.0)
    with netCDF4.Dataset(path, "w") as file:
        for group, first in ((file, 0), (file.createGroup("other"), 2)):
            for name, length in (("time", 4), ("level", 3)):
                group.createDimension(name, length)
                group.createVariable(name, "f4", (name,))[:] = np.arange(length) + first
            group["time"].units = "days since 2000-01-01"
            group.createVariable("v", "f4", ("time", "level"))[:] = values.reshape(4, 3) + 100 * first
    for name, expected in (("v", 7), ("other/v", 201), ("/other/v", 201)):
        options: dict[str, Any] = {"sel": {"time": "2000-01-03", "level": 1 if name == "v" else 3}, "comm": SELF}
        assert open_dataset(path, inputs=name, **options).load()[name].tolist() == [expected]
    assert open_dataset(path, inputs="v", sel={"other/level": 2.0}, comm=SELF).schema["v"].shape == (3,)


def test_samples_without_a_coordinate_are_not_said_to_have_positions(tmp_path: Path) -> None:
    xr.Dataset({"v": (("n", "x"), np.ones((4, 2)))}).to_netcdf(tmp_path / "a.nc")
    for name, remedy in (("n", "where="), ("x", "isel=")):
        with pytest.raises(FieldNotFound, match=f"(?s)no coordinate.*{remedy}"):
            open_dataset(tmp_path / "a.nc", sample_dim="n", sel={name: 1}, comm=SELF)


def test_a_stepwise_calendar(tmp_path: Path) -> None:
    time = ("time", np.arange(0, 720, 15), {"units": "days since 2000-01-01", "calendar": "360_day"})
    xr.Dataset({"t": ("time", np.arange(48.0))}, {"time": time}).to_netcdf(tmp_path / "a.nc")
    with xr.open_dataset(tmp_path / "a.nc") as file:
        for wanted in (slice("2000-02", "2000-02-30"), slice("2000-12-16", "2001"), "2001-02"):
            data = open_dataset(tmp_path / "a.nc", inputs="t", sel={"time": wanted}, comm=SELF)
            np.testing.assert_array_equal(data.load()["t"], file.t.sel(time=wanted))


@pytest.mark.parametrize("files", [1, 2])
def test_listed_samples_are_in_their_order_in_one_file_and_in_several(tmp_path: Path, files: int) -> None:
    days = xr.Dataset({"b": ("day", np.arange(8.0))}, {"day": np.arange(8)})
    for number, part in enumerate(np.array_split(np.arange(8), files)):
        days.isel(day=part).to_netcdf(tmp_path / f"{number}.nc")
    options = {"inputs": "b", "sample_dim": "day", "comm": SELF}
    assert open_dataset(str(tmp_path), sel={"day": [1, 5]}, **options).load()["b"].tolist() == [1, 5]
    for wanted in ([5, 1], [1, 1]):
        with pytest.raises(FormatError, match=r"in another order than .*, or twice") as raised:
            open_dataset(str(tmp_path), sel={"day": wanted}, **options)
        assert "remedy: list them in the order of the files" in str(raised.value)


@pytest.mark.parametrize("format", ["netcdf", "zarr"])
def test_the_order_of_the_files_is_that_of_a_list_of_samples(tmp_path: Path, format: str) -> None:
    options = {"inputs": "b", "sample_dim": "day", "comm": SELF}
    for case, days, right, wrong in (
        ("steps", [[0], [1], [2], [3]], [1, 3], [[3, 1], [0, 2, 1], [2, 2]]),
        ("descending", [[2, 3], [0, 1]], [2, 3, 0], [[0, 3], [0, 2, 3]]),
        ("twice", [[5], [5], [6]], [6], [[5, 7], [5, 6, 7]]),
    ):
        for number, of_file in enumerate(days):
            part = xr.Dataset({"b": ("day", np.array(of_file, float))}, {"day": np.array(of_file)})
            if format == "netcdf":
                part.to_netcdf(created(tmp_path / case) / f"{number}.nc")
            else:
                part.to_zarr(created(tmp_path / case) / f"{number}.zarr", zarr_format=2)
        paths = [str(path) for path in sorted((tmp_path / case).iterdir())]
        assert open_dataset(paths, sel={"day": right}, **options).load()["b"].tolist() == right
        for wanted in wrong:
            with pytest.raises(FormatError, match=r"in another order than .*, or twice"):
                open_dataset(paths, sel={"day": wanted}, **options)


def test_a_list_of_samples_beside_a_stored_index_of_which_a_file_has_changed(tmp_path: Path) -> None:
    for day in range(4):
        xr.Dataset({"b": ("day", [float(day)])}, {"day": [day]}).to_netcdf(created(tmp_path / "days") / f"{day}.nc")
    options = {"sample_dim": "day", "sel": {"day": [1, 2]}, "index": tmp_path / "days.matex", "comm": SELF}
    assert open_dataset(str(tmp_path / "days"), **options).load()["b"].tolist() == [1, 2]
    xr.Dataset({"b": ("day", [7.0])}, {"day": [9]}).to_netcdf(tmp_path / "days" / "1.nc")
    xr.Dataset({"b": ("day", [7.0])}, {"day": [1]}).to_netcdf(tmp_path / "days" / "3.nc")
    with pytest.raises(FormatError, match="in another order"):
        open_dataset(str(tmp_path / "days"), **options)


def test_a_value_of_a_list_that_several_samples_of_a_file_have(tmp_path: Path) -> None:
    xr.Dataset({"b": ("day", [0.0, 1, 2])}, {"day": [5, 5, 6]}).to_netcdf(tmp_path / "a.nc")
    with pytest.raises(FormatError, match="or twice"):
        open_dataset(tmp_path / "a.nc", sample_dim="day", sel={"day": [5, 7]}, comm=SELF)
    assert len(open_dataset(tmp_path / "a.nc", sample_dim="day", sel={"day": 5}, comm=SELF)) == 2


@pytest.mark.parametrize("wanted", [[5, np.nan], np.nan, slice(np.nan, 6)])
def test_a_missing_value_of_sel_is_named(tmp_path: Path, wanted: object) -> None:
    xr.Dataset({"b": ("day", [0.0, 1])}, {"day": [5.0, 6.0]}).to_netcdf(tmp_path / "a.nc")
    with pytest.raises(FormatError, match="sel= has a missing value"):
        open_dataset(tmp_path / "a.nc", sample_dim="day", sel={"day": wanted}, comm=SELF)
    time = ("time", [0, 1], {"units": "days since 2000-01-01"})
    xr.Dataset({"b": ("time", [0.0, 1])}, {"time": time}).to_netcdf(tmp_path / "t.nc")
    with pytest.raises(FormatError, match="sel= has a missing value"):
        open_dataset(tmp_path / "t.nc", sel={"time": ["2000-01-01", np.datetime64("NaT")]}, comm=SELF)


def test_static_fields_are_those_of_the_first_file_also_if_no_sample_of_it_is_selected(tmp_path: Path) -> None:
    for day in range(3):
        part = xr.Dataset({"t": ("time", [float(day)]), "oro": ("lat", [7.0, 8.0])}, {"lat": [1, 2]})
        part = part.assign_coords(time=("time", [np.datetime64("2000-01-01", "ns") + np.timedelta64(day, "D")]))
        (part if day else part.rename(oro="height")).to_netcdf(created(tmp_path / "lacks") / f"{day}.nc")
        part.to_netcdf(created(tmp_path / "has") / f"{day}.nc")
    options = {"inputs": ["t", "oro"], "static_as_inputs": True, "sel": {"time": "2000-01-02"}, "comm": SELF}
    data = open_dataset(tmp_path / "has", **options)
    assert {name: values.tolist() for name, values in data.load().items()} == {"t": [1.0], "oro": [[7.0, 8.0]]}
    assert data.static["oro"].tolist() == [7.0, 8.0]
    with pytest.raises(FieldNotFound, match=r"(?s)the first file, which has none.*'height'"):
        open_dataset(tmp_path / "lacks", **options)
