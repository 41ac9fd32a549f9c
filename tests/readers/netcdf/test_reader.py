"""netCDF, classic and netCDF-4: conformance suite, and features of the format."""

from __future__ import annotations

import gzip
import os
import time
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
import pytest
import xarray
from mpi4py import MPI

from matex_data import DataError, DecodeError, FieldNotFound, FormatError, open_dataset
from matex_data.io.counters import process_profile
from matex_data.readers import detect
from matex_data.readers.hdf5.reader import attributes
from matex_data.readers.netcdf import netcdf4
from matex_data.readers.netcdf.classic import ClassicVariable
from matex_data.readers.netcdf.header import read_content
from matex_data.readers.netcdf.netcdf4 import Hdf5Variable
from matex_data.readers.netcdf.reader import index
from tests.support.format_suite import Case, FormatSuite
from tests.support.machine_speed import scaled
from tests.support.ranks import Pool
from tests.support.serial import every_row, random_rows, read_rows, same

CLASSIC = ["NETCDF3_CLASSIC", "NETCDF3_64BIT_OFFSET", "NETCDF3_64BIT_DATA"]
RANDOM = np.random.default_rng(0)


def _write(path: Path, kind: str, first: int, rows: int, **how: Any) -> None:
    """Write packed and plain numbers along an unlimited dimension, with another packing in each file."""
    rng = np.random.default_rng(first)
    with netCDF4.Dataset(path, "w", format=kind) as file:
        file.createDimension("time", None)
        file.createDimension("lat", 3)
        file.createDimension("lon", 5)
        packed = file.createVariable("t2m", "i2", ("time", "lat", "lon"), fill_value=-32767, **how)
        packed.set_auto_maskandscale(False)
        packed.setncatts({"scale_factor": np.float32(0.5 + first), "add_offset": np.float32(3), "units": "K"})
        values = rng.integers(-999, 999, (rows, 3, 5))
        values[rng.random(values.shape) < 0.1] = -32767
        packed[:] = values
        wind = file.createVariable("wind", "f4", ("time", "lon"), fill_value=np.float32(1e20), **how)
        wind.set_auto_maskandscale(False)
        wind[:] = np.where(rng.random((rows, 5)) < 0.1, np.float32(1e20), rng.normal(size=(rows, 5)))
        number = file.createVariable("number", "i4", ("time",), **how)
        number[:] = np.arange(first, first + rows)
        flag = file.createVariable("flag", "i1", ("time",), **how)
        flag[:] = np.arange(rows) % 3
        lat = file.createVariable("lat", "f4", ("lat",))
        lat[:] = [10, 20, 30]


def _case(folder: Path, kind: str, **how: Any) -> Case:
    first = 0
    for number, rows in ((1, 150), (2, 37), (10, 114)):
        _write(folder / f"part{number}.nc", kind, first, rows, **how)
        first += rows
    paths = [folder / f"part{number}.nc" for number in (1, 2, 10)]
    files = [xarray.open_dataset(path, engine="netcdf4").load() for path in paths]
    names = ("t2m", "wind", "number", "flag")
    expected = {name: np.concatenate([file[name].to_numpy() for file in files]) for name in names}
    for file in files:
        file.close()
    return Case(str(folder / "*.nc"), expected, "number")


class TestClassic(FormatSuite):
    def write(self, folder: Path) -> Case:
        return _case(folder, "NETCDF3_64BIT_OFFSET")

    def damage(self, folder: Path) -> Case:
        _case(folder, "NETCDF3_64BIT_OFFSET")
        path = folder / "part2.nc"
        os.truncate(path, path.stat().st_size - 100)
        return Case(str(folder / "*.nc"), {}, "number")


class TestNetcdf4(FormatSuite):
    def write(self, folder: Path) -> Case:
        return _case(folder, "NETCDF4", zlib=True, shuffle=True)

    def damage(self, folder: Path) -> Case:
        _case(folder, "NETCDF4")
        (folder / "part2.nc").write_bytes((folder / "part2.nc").read_bytes()[:-500])
        return Case(str(folder / "*.nc"), {}, "number")


@pytest.mark.parametrize("dtype", ["i1", "S1", "i2", "f4"])
@pytest.mark.parametrize("kind", CLASSIC)
def test_a_single_record_variable_is_not_padded(tmp_path: Path, kind: str, dtype: str) -> None:
    path = tmp_path / "a.nc"
    values = RANDOM.integers(65, 90, (7, 3)).astype("u1").astype("i1").view("S1") if dtype == "S1" else None
    numbers = RANDOM.integers(-99, 99, (7, 3)).astype(dtype) if values is None else values
    with netCDF4.Dataset(path, "w", format=kind) as file:
        file.createDimension("t", None)
        file.createDimension("x", 3)
        file.createVariable("v", dtype, ("t", "x"))[:] = numbers
    assert same(every_row(index(str(path), decode=False), "v"), numbers)


@pytest.mark.parametrize("kind", CLASSIC)
def test_record_count_of_a_stream_follows_from_the_size(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.nc"
    _write(path, kind, 0, 11)
    expected = every_row(index(str(path)), "number")
    content = bytearray(path.read_bytes())
    width = 8 if content[3] == 5 else 4
    content[4 : 4 + width] = b"\xff" * width
    path.write_bytes(content)
    assert same(every_row(index(str(path)), "number"), expected)


def test_a_sparse_terabyte_opens_at_once(tmp_path: Path) -> None:
    path = tmp_path / "big.nc"
    with netCDF4.Dataset(path, "w", format="NETCDF3_64BIT_DATA") as file:
        file.set_fill_off()
        file.createDimension("t", 2**20)
        file.createDimension("x", 2**18)
        variable = file.createVariable("v", "f4", ("t", "x"))
        variable[2**20 - 1, :3] = [1, 2, 3]
    assert path.stat().st_size > 2**40
    begin = time.monotonic()
    data = open_dataset(path, comm=MPI.COMM_SELF)
    assert time.monotonic() - begin < scaled(30)  # reading it takes many minutes
    assert len(data) == 2**20
    last = read_rows(index(str(path)), "v", np.array([2**20 - 1]), np.array([0]))
    assert last[0, :5].tolist() == [1, 2, 3, 0, 0]


def _bytes_of_one(comm: MPI.Intracomm, path: str, names: Any) -> int:
    data = open_dataset(path, inputs=names, comm=comm)
    before = process_profile().bytes
    for _ in data.batches(12, shuffle=True, seed=1, remainder="keep"):
        pass
    return process_profile().bytes - before


@pytest.mark.parametrize("names, row", [("t2m", 30), ("wind", 20), (["t2m", "wind"], 50), ("number", 4)])
def test_only_the_selected_variables_of_a_record_are_read(tmp_path: Path, pool: Pool, names: Any, row: int) -> None:
    _write(tmp_path / "a.nc", "NETCDF3_64BIT_OFFSET", 0, 480)
    needed = 480 * row / pool.size
    assert all(read <= needed * 1.05 + 24 * row for read in pool.run(_bytes_of_one, str(tmp_path / "a.nc"), names))


def _cube(path: Path, kind: str, **how: Any) -> np.ndarray[Any, Any]:
    values = RANDOM.normal(size=(9, 10, 11)).astype("f4")
    with netCDF4.Dataset(path, "w", format=kind) as file:
        for name, length in zip("zyx", values.shape, strict=True):
            file.createDimension(name, length)
        file.createVariable("v", "f4", tuple("zyx"), **how)[:] = values
    return values


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("kind, how", [(CLASSIC[1], {}), ("NETCDF4", {}), ("NETCDF4", {"chunksizes": (4, 3, 5)})])
def test_any_axis_counts_the_samples(tmp_path: Path, kind: str, how: dict[str, Any], axis: int) -> None:
    values = np.moveaxis(_cube(tmp_path / "a.nc", kind, **how), axis, 0)
    found = index(str(tmp_path / "a.nc"), sample_dim="zyx"[axis])
    assert same(every_row(found, "v"), values)
    rows, drawn = random_rows(found, "v", RANDOM)
    assert same(rows, values[drawn])


def test_ambiguous_sample_dimension(tmp_path: Path) -> None:
    with netCDF4.Dataset(tmp_path / "a.nc", "w") as file:
        file.createDimension("x", 3)
        file.createDimension("y", 4)
        file.createVariable("a", "f4", ("x",))
        file.createVariable("b", "f4", ("y", "x"))
    path = str(tmp_path / "a.nc")
    with pytest.raises(FormatError, match=r"the dimensions x \(3\), y \(4\)"):
        index(path)
    assert list(index(path, sample_dim="x").fields) == ["a", "b"]
    found = index(path, sample_dim="y")
    assert list(found.fields) == ["b"] and list(found.static) == ["a"]
    assert len(index(path, ["a"])) == 3
    with pytest.raises(FormatError, match="no such dimension"):
        index(path, sample_dim="time")
    with pytest.raises(FormatError, match=r"Dataset\.static"):
        index(path, ["a"], sample_dim="y")
    with pytest.raises(FieldNotFound, match="one of 'a'"):
        index(path, ["aa"])


@pytest.mark.parametrize("most", [False, True])
def test_an_empty_unlimited_dimension(tmp_path: Path, most: bool) -> None:
    """It has the samples of a file without records, and not those of profiles without a history."""
    with netCDF4.Dataset(tmp_path / "a.nc", "w") as file:
        for name, length in (("n", None), ("profile", 3), ("level", 2)):
            file.createDimension(name, length)
        for name in "abc":
            file.createVariable(name, "f4", ("n", "profile") if most else ("profile", "level"))
        file.createVariable("history", "f4", ("n", "profile"))
        file.createVariable("pressure", "f4", ("level",))
    if most:
        assert len(index(str(tmp_path / "a.nc"))) == 0
        return
    with pytest.raises(FormatError, match=r"n \(0\), profile \(3\)(.|\n)*sample_dim='profile'"):
        index(str(tmp_path / "a.nc"))


def test_groups_scales_and_a_partly_written_variable(tmp_path: Path) -> None:
    path = tmp_path / "a.nc"
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("t", None)
        group = file.createGroup("run")
        group.createDimension("x", 2)
        file.createVariable("t", "f8", ("t",))[:] = np.arange(6)
        group.createVariable("short", "i4", ("t", "x"))[:] = np.arange(8).reshape(4, 2)
        group.createVariable("x", "f4", ("t",))[:] = np.arange(6)
    found = index(str(path))
    assert set(found.fields) == {"t", "run/short", "run/x"}
    with netCDF4.Dataset(path) as file:
        file.set_auto_mask(False)
        for name in found.fields:
            assert same(every_row(found, name), np.asarray(file[name][:]))
            assert not [key for key in found.fields[name].attributes if key.isupper() or key.startswith("_N")]


@pytest.mark.parametrize("axis", [0, 1])
def test_dimensions_to_whose_end_a_variable_is_not_written(tmp_path: Path, axis: int) -> None:
    path, dims = tmp_path / "a.nc", ("time", "obs")
    with netCDF4.Dataset(path, "w") as file:
        for name in dims:
            file.createDimension(name, None)
        file.createVariable("a", "f4", dims)[:] = np.ones((3, 5))
        file.createVariable("b", "i4", dims, chunksizes=(1, 2), fill_value=-9)[:] = np.arange(9).reshape(3, 3)
        file.createVariable("c", "i4", dims[1 - axis :][:1], fill_value=-9)[:] = [7]
        file.createVariable("d", str, dims[1 - axis :][:1])[:] = np.array(["q"], object)
        file.createVariable("e", str, dims)[0, 0] = "q"
    expected = np.full((3, 5), -9)
    expected[:, :3] = np.arange(9).reshape(3, 3)
    other, expected = dims[1 - axis], np.moveaxis(expected, axis, 0)
    for chosen in (slice(None), slice(2, 3), [2, 1]):
        options = {"isel": {other: chosen}, "mask_and_scale": False, "sample_dim": dims[axis]}
        found = index(str(path), ["a", "b"], **options)
        assert found.fields["a"].shape == found.fields["b"].shape
        assert same(every_row(found, "b"), expected[:, chosen].astype("i4"))
        rest = np.array([7, -9, -9, -9, -9])[: expected.shape[1]]
        assert found.static["c"].tolist() == rest[chosen].tolist()
        assert found.static["d"].tolist() == np.where(rest == 7, b"q", b"")[chosen].tolist()
    with pytest.raises(FormatError, match=r"(?s)'e'.*expected: the shape \(3, 5\).*\(1, 1\)"):
        index(str(path), ["e"], sample_dim=dims[axis])


def test_the_rest_of_a_variable_that_netcdf_does_not_fill_is_an_error(tmp_path: Path) -> None:
    with netCDF4.Dataset(tmp_path / "a.nc", "w") as file:
        file.createDimension("time", None)
        file.createVariable("a", "f4", ("time",))[:] = np.ones(5)
        file.createVariable("b", "f4", ("time",), fill_value=False)[:] = np.ones(3)
    assert index(str(tmp_path / "a.nc"), ["a"], static=False).fields
    with pytest.raises(FormatError, match=r"(?s)'b'.*chunks that netCDF fills.*the shape \(3,\)"):
        index(str(tmp_path / "a.nc"), ["b"])


def test_a_scale_that_is_longer_than_an_axis(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.nc", "w") as file:
        file["t"], file["x"] = np.arange(6.0).reshape(2, 3), np.arange(4.0)
        file["x"].make_scale("x")
        file["t"].dims[1].attach_scale(file["x"])
    with pytest.raises(FormatError, match=r"expected: the shape \(2, 4\)"):
        index(str(tmp_path / "a.nc"), ["t"], isel={"x": 3})


def test_scale_factors_behind_many_attributes(tmp_path: Path) -> None:
    with netCDF4.Dataset(tmp_path / "a.nc", "w") as file:
        file.createDimension("t", 2)
        x = file.createVariable("x", "i2", ("t",))
        x.setncatts({f"note_{number}": number for number in range(70)})
        x.scale_factor = 0.5
        x[:] = [1.0, 1.5]
    assert every_row(index(str(tmp_path / "a.nc")), "x").tolist() == [1, 1.5]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("how", [{}, {"chunks": (2, 2), "compression": "gzip"}], ids=str)
def test_virtual_datasets_are_decoded(tmp_path: Path, how: dict[str, Any], axis: int) -> None:
    path, layout = tmp_path / "a.nc", h5py.VirtualLayout((6, 3), "i2")
    for number in range(2):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("t", data=np.arange(9, dtype="i2").reshape(3, 3) + 10 * number, **how)
        rows = slice(1, 3) if number else slice(3)
        layout[3 * number : 3 * number + rows.stop - (rows.start or 0)] = h5py.VirtualSource(
            tmp_path / f"{number}.h5", "t", (3, 3)
        )[rows]
    with h5py.File(path, "w") as file:
        virtual = file.create_virtual_dataset("t", layout, fillvalue=-1)
        virtual.attrs["scale_factor"], virtual.attrs["_FillValue"] = 0.5, np.int16(-1)
        for number, name in enumerate(("time", "x")):
            file[name] = np.arange(virtual.shape[number], dtype="f8")
            file[name].make_scale(name)
            virtual.dims[number].attach_scale(file[name])
    with xarray.open_dataset(path, engine="netcdf4") as library:
        expected = np.moveaxis(library["t"].values, axis, 0)
    assert same(every_row(index(str(path), ["t"], sample_dim=("time", "x")[axis]), "t"), expected)


@pytest.mark.parametrize("inner", [(), (700,), (1500,)], ids=str)
def test_values_of_records_are_read_in_blocks(tmp_path: Path, inner: tuple[int, ...]) -> None:
    """Records of 20 bytes, of less than a page, and of more."""
    path = tmp_path / "a.nc"
    with netCDF4.Dataset(path, "w", format=CLASSIC[0]) as file:
        file.createDimension("t", None)
        file.createDimension("x", (*inner, 3)[0])
        x, y = file.createVariable("x", "i2", ("t", "x")), file.createVariable("y", "f8", ("t",))
        x[:], y[:] = np.zeros((1000, (*inner, 3)[0])), np.arange(1000)
        x[:, 1] = np.arange(1000)
    (x, y) = (next(v for v in read_content(str(path)).variables if v.name == name) for name in "xy")
    assert np.array_equal(y.values(), np.arange(1000)) and np.array_equal(x.values()[:, 1], np.arange(1000))
    assert x.values().shape == x.shape and not x.values()[:, 2].any()


def test_letters_become_texts(tmp_path: Path) -> None:
    for kind in (CLASSIC[0], "NETCDF4"):
        with netCDF4.Dataset(tmp_path / f"{kind}.nc", "w", format=kind) as file:
            file.createDimension("t", None)
            file.createDimension("length", 5)
            letters = file.createVariable("name", "S1", ("t", "length"))
            letters[:] = netCDF4.stringtochar(np.array(["alpha", "beta", "c"], "S5"))
        found = index(str(tmp_path / f"{kind}.nc"))
        assert every_row(found, "name").tolist() == [b"alpha", b"beta", b"c"]
        assert index(str(tmp_path / f"{kind}.nc"), decode=False).fields["name"].shape == (5,)
        with netCDF4.Dataset(tmp_path / f"{kind}1.nc", "w", format=kind) as file:
            file.createDimension("t", None)
            file.createDimension("length", 1)
            file.createVariable("name", "S1", ("t", "length"))[:] = np.array([["a"], ["b"]], "S1")
        assert every_row(index(str(tmp_path / f"{kind}1.nc")), "name").tolist() == [b"a", b"b"]
        with netCDF4.Dataset(tmp_path / f"{kind}2.nc", "w", format=kind) as file:
            for name, length in (("x", 2), ("t", 3), ("length", 5)):
                file.createDimension(name, length)
            letters = file.createVariable("name", "S1", ("x", "t", "length"))
            letters[:] = netCDF4.stringtochar(np.array([["alpha", "beta", "c"]] * 2, "S5"))
        found = index(str(tmp_path / f"{kind}2.nc"), sample_dim="t")
        assert every_row(found, "name").tolist() == [[b"alpha"] * 2, [b"beta"] * 2, [b"c"] * 2]


def test_the_fill_value_of_an_hdf5_dataset_without_storage(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.nc", "w") as file:
        file["t"] = np.arange(3.0)
        file["t"].make_scale("t")
        for name, options in (("plain", {}), ("chunked", {"chunks": (2,)})):
            file.create_dataset(name, (3,), "f4", fillvalue=7, **options).dims[0].attach_scale(file["t"])
            file.create_dataset(f"{name}_zeros", (3,), "f4", **options).dims[0].attach_scale(file["t"])
    found = index(str(tmp_path / "a.nc"), sample_dim="t")
    with netCDF4.Dataset(tmp_path / "a.nc") as file:
        for name in file.variables:
            assert every_row(found, name).tolist() == file[name][:].data.tolist()


def test_gzipped_as_a_whole(tmp_path: Path) -> None:
    _write(tmp_path / "a.nc", CLASSIC[0], 0, 11)
    packed = tmp_path / "a.nc.gz"
    packed.write_bytes(gzip.compress((tmp_path / "a.nc").read_bytes()))
    assert detect(str(packed), packed.read_bytes()[:4096]) == "netcdf"
    plain, found = index(str(tmp_path / "a.nc")), index(str(packed))
    for name in plain.fields:
        assert same(every_row(found, name), every_row(plain, name))
    packed.write_bytes(packed.read_bytes()[:60])
    with pytest.raises(DecodeError, match="does not unpack"):
        index(str(packed))


@pytest.mark.parametrize("kind", CLASSIC)
def test_truncated_headers(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.nc"
    _write(path, kind, 0, 2)
    content = path.read_bytes()
    for end in range(0, 420, 7):
        path.write_bytes(content[:end])
        with pytest.raises(FormatError):
            index(str(path))


def test_headers_with_any_byte_changed_give_an_index_or_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "a.nc"
    _write(path, CLASSIC[1], 0, 3)
    content = path.read_bytes()
    for at in range(0, min(700, len(content)), 3):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
        try:
            index(str(path))
        except DataError as error:
            assert error.file == str(path) and error.remedy is not None


@pytest.mark.parametrize("change", ["units", "calendar", "coordinates", "packing", "shape"])
def test_files_have_to_agree(tmp_path: Path, change: str) -> None:
    for number in (0, 1):
        with netCDF4.Dataset(tmp_path / f"a{number}.nc", "w", format=CLASSIC[1]) as file:
            changed = number if change != "packing" else 0
            file.createDimension("t", None)
            file.createDimension("x", 3 + (changed if change == "shape" else 0))
            x = file.createVariable("x", "f4", ("x",))
            x[:] = np.arange(len(x)) + (changed if change == "coordinates" else 0)
            times = file.createVariable("t", "f8", ("t",))
            times.units, times[:] = f"days since 200{number}-01-01", np.arange(4)
            times.calendar = "noleap" if change == "calendar" and changed else "standard"
            a = file.createVariable("a", "i2", ("t", "x"))
            a.set_auto_maskandscale(False)
            a.units = "degC" if change == "units" and changed else "K"
            a.scale_factor = 1.0 + number
            a[:] = np.ones((4, len(x)))
    paths = str(tmp_path / "a*.nc")
    if change == "packing":
        loaded = open_dataset(paths, comm=MPI.COMM_SELF).load()
        assert loaded["a"][:, 0].tolist() == [1.0] * 4 + [2.0] * 4
        assert loaded["t"][[0, 4]].tolist() == [946684800, 978307200]
        with pytest.raises(FormatError, match="the files do not agree on 'scale_factor' of 'a'"):
            open_dataset(paths, comm=MPI.COMM_SELF, decode=False, inputs="a")
    else:
        text = {"units": "'units' of 'a'", "calendar": "'calendar' of 't'", "coordinates": "coordinates 'x'"}
        with pytest.raises(FormatError, match=text.get(change, "the same fields")):
            open_dataset(paths, comm=MPI.COMM_SELF)


def _without_suffix(path: Path, marks: str) -> None:
    """Write a netCDF-4 file with the marks of different library versions, after more than 4 KiB of other data."""
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("t", None)
        for name in ("late", "early"):
            group = file.createGroup(f"group_{name}")
            group.setncattr("history", "h" * 9000)
        file.createVariable("a", "i2", ("t",), fill_value=-9)[:] = np.ma.masked_equal([1, 2, -9], -9)
    with h5py.File(path, "r+") as file:
        if marks != "root":
            del file.attrs["_NCProperties"]
        if marks == "name":
            for dataset in (file["t"], file["a"]):
                for key in set(dataset.attrs) & {"_Netcdf4Dimid", "_Netcdf4Coordinates"}:
                    del dataset.attrs[key]


@pytest.mark.parametrize("marks", ["root", "numbers", "name"])
@pytest.mark.parametrize("name", ["a.h5", "a", "a.hdf5", "a.dat"])
def test_netcdf4_is_detected_by_content(tmp_path: Path, name: str, marks: str) -> None:
    _without_suffix(tmp_path / name, marks)
    data = open_dataset(tmp_path / name, comm=MPI.COMM_SELF)
    np.testing.assert_array_equal(data.load()["a"], [1, 2, np.nan])


def test_plain_hdf5_with_a_dimension_scale_is_not_netcdf(tmp_path: Path) -> None:
    path = str(tmp_path / "a.h5")
    with h5py.File(path, "w") as file:
        file["x"], file["y"] = np.arange(3), np.arange(3)
        file["x"].make_scale("x")
        file["y"].dims[0].attach_scale(file["x"])
    head = Path(path).read_bytes()[:4096]
    assert detect(path, head) == "hdf5"
    assert detect(str(tmp_path / "a.nc"), head) == "netcdf"


def test_cdf_of_nasa_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.cdf").write_bytes(bytes.fromhex("cdf30001 0000ffff") + bytes(400))
    with pytest.raises(FormatError, match=r"is not a netCDF file(.|\n)*NASA(.|\n)*cdflib"):
        open_dataset(tmp_path / "a.cdf", comm=MPI.COMM_SELF)


def test_a_thousand_variables_on_one_dimension_open_as_with_netcdf4(tmp_path: Path) -> None:
    """HDF5 searches the whole file for the name of an object behind a reference: 8 s for one search a variable."""
    path = str(tmp_path / "a.nc")
    with h5py.File(path, "w") as file:
        scale = file.create_dataset("z", data=np.arange(5.0))
        scale.make_scale("z")
        for number in range(1000):
            file.create_dataset(f"v{number:04}", data=np.arange(5.0)).dims[0].attach_scale(scale)
    begin = time.process_time()
    with netCDF4.Dataset(path) as opened:
        expected = {name: variable.dimensions for name, variable in opened.variables.items()}
    middle = time.process_time()
    found = index(path)
    end = time.process_time()
    assert set(found.fields) == set(expected) and set(expected.values()) == {("z",)}
    assert end - middle < 15 * (middle - begin)


def test_attributes_of_variables_that_are_not_read_stay_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "a.nc")
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("t", 4)
        file.createVariable("t", "i4", ("t",)).units = "days since 2000-01-01"
        for number in range(20):
            file.createVariable(f"v{number}", "f4", ("t",)).units = "K"
    read: list[str] = []
    monkeypatch.setattr(netcdf4, "attributes", lambda data, most: read.append(data.name) or attributes(data, most=most))
    assert index(path, ["v3"]).fields["v3"].attributes == {"units": "K"}
    assert sorted(read) == ["/t", "/v3"]


def test_names_of_an_enumeration_are_an_attribute(tmp_path: Path) -> None:
    path = str(tmp_path / "a.nc")
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("t", 3)
        kind = file.createEnumType("u1", "cloud", {"clear": 0, "cumulus": 2})
        variable = file.createVariable("a", kind, ("t",))
        variable.comment, variable[:] = "by eye", np.array([0, 2, 0], "u1")
    names = {"clear": 0, "cumulus": 2}
    assert index(path).fields["a"].attributes == {"enum": names, "comment": "by eye"}
    with h5py.File(path) as opened:
        assert netcdf4.UserAttributes(opened["a"])["enum"] == names
    np.testing.assert_array_equal(open_dataset(path, comm=MPI.COMM_SELF).load()["a"], [0, 2, 0])


@pytest.mark.parametrize("kind", [CLASSIC[0], "NETCDF4"])
@pytest.mark.parametrize("options", [{"decode_times": False}, {"mask_and_scale": False}, {"decode": False}])
def test_partial_decoding_against_xarray(tmp_path: Path, kind: str, options: dict[str, bool]) -> None:
    path = tmp_path / "a.nc"
    with netCDF4.Dataset(path, "w", format=kind) as file:
        file.createDimension("t", None)
        times = file.createVariable("t", "i4", ("t",))
        times.units, times.bounds, times[:] = "hours since 2000-01-01", "b", np.arange(4)
        file.createVariable("b", "i4", ("t",))[:] = np.arange(4) + 1
        packed = file.createVariable("a", "i2", ("t",), fill_value=-9)
        packed.set_auto_maskandscale(False)
        packed.scale_factor, packed[:] = 0.5, [1, 2, -9, 4]
    both = dict.fromkeys(("decode_times", "mask_and_scale"), False) if "decode" in options else options
    found = index(str(path), **options)
    with xarray.open_dataset(path, engine="netcdf4", **both) as file:
        for name in ("t", "a", "b"):
            expected = file[name].to_numpy()
            expected = expected.astype("M8[s]").astype("f8") if expected.dtype.kind == "M" else expected
            for named, at in ((found, name), (index(str(path), [f"/{name}"], **options), f"/{name}")):
                assert same(every_row(named, at), expected)
                assert named.fields[at].dtype == expected.dtype
    assert found.facts.get("'scale_factor' of 'a'") == (None if "decode_times" in options else "0.5")
    again = index(str(path), decode=False, decode_times=True, mask_and_scale=True)
    assert again.fields["a"].dtype == np.float64 and again.fields["t"].dtype == np.float64


@pytest.mark.parametrize("kind", [CLASSIC[1], "NETCDF4"])
def test_static_variables_are_read_only_on_request(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _cube(tmp_path / "a.nc", kind)
    with netCDF4.Dataset(tmp_path / "a.nc", "a") as file:
        file.createVariable("mask", "i1", ("y", "x"))[:] = 1
    path = str(tmp_path / "a.nc")
    assert index(path, ["v"], sample_dim="z").static["mask"].sum() == 110
    for variable in (ClassicVariable, Hdf5Variable):
        monkeypatch.setattr(variable, "values", None)
    assert index(path, ["v"], sample_dim="z", static=False).static == {}
