"""References of kerchunk, in JSON and in Parquet, to netCDF files: values against xarray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
import xarray as xr
from imagecodecs.numcodecs import register_codecs
from kerchunk.combine import MultiZarrToZarr
from kerchunk.df import refs_to_dataframe
from kerchunk.hdf import SingleHdf5ToZarr
from mpi4py import MPI

from matex_data import DataError, FormatError, open_dataset
from matex_data.readers.zarr import writing
from matex_data.readers.zarr.writing import references as references_to
from matex_data.readers.zarr.writing import tiff_references
from tests.cli.test_commands import CALL
from tests.support.format_suite import same
from tests.support.launch import run_script


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return files of consecutive days, compressed and packed."""
    folder = tmp_path_factory.mktemp("days")
    rng = np.random.default_rng(0)
    paths = [folder / f"day{day}.nc" for day in range(3)]
    for day, path in enumerate(paths):
        data = xr.Dataset(
            {
                "t2m": (("time", "lat", "lon"), rng.normal(280, 9, (8, 6, 10)).astype("f4"), {"units": "K"}),
                "rain": (("time", "lat"), np.where(rng.random((8, 6)) < 0.2, np.nan, rng.integers(0, 90, (8, 6)) / 10)),
            },
            coords={
                "time": np.datetime64("2000-01-01", "ns") + np.arange(8 * day, 8 * day + 8) * np.timedelta64(3, "h"),
                "lat": np.linspace(-60, 60, 6),
                "lon": np.arange(10.0),
            },
        )
        packed = {"dtype": "i2", "scale_factor": 0.1, "_FillValue": -9, "chunksizes": (8, 3)}
        deflated = {"zlib": True, "shuffle": True, "chunksizes": (2, 6, 5)}
        hours = {"units": "hours since 2000-01-01"}
        data.to_netcdf(path, engine="netcdf4", encoding={"t2m": deflated, "rain": packed, "time": hours})
    return paths


@pytest.fixture(scope="module")
def references(files: list[Path]) -> dict[str, str]:
    """Return references to all files, as kerchunk writes them."""
    of_files = [SingleHdf5ToZarr(str(path), inline_threshold=100).translate() for path in files]
    joined = MultiZarrToZarr(
        of_files, concat_dims=["time"], identical_dims=["lat", "lon"], inline_threshold=100
    ).translate()
    folder = files[0].parent
    (folder / "all.json").write_text(json.dumps(joined))
    refs_to_dataframe(joined, str(folder / "all.parq"), record_size=5)
    return {"json": str(folder / "all.json"), "parquet": str(folder / "all.parq")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_references_are_read_like_the_files(files: list[Path], references: dict[str, str], kind: str) -> None:
    library = xr.concat([xr.load_dataset(path) for path in files], "time", data_vars="minimal")
    data = open_dataset(references[kind], comm=MPI.COMM_SELF)
    found = data.load()
    assert set(found) == {"t2m", "rain", "time"}
    for name in ("t2m", "rain"):
        same(found[name], library[name].values)
    same(found["time"], library["time"].values.astype("datetime64[ns]").astype("i8") / 1e9)
    same(data.static["lat"], library["lat"].values)
    batches = [batch["t2m"].copy() for batch in data.batches(6, shuffle=True, seed=1)]
    same(np.sort(np.concatenate(batches), axis=None), np.sort(library["t2m"].values, axis=None))
    chosen = open_dataset(references[kind], comm=MPI.COMM_SELF, inputs="t2m", sel={"lon": slice(2, 7)}).load()
    same(chosen["t2m"], library["t2m"].sel(lon=slice(2, 7)).values)


def _write_classic(path: Path, data: xr.Dataset, version: str) -> str:
    data.to_netcdf(path, format=version, unlimited_dims=["time"], engine="netcdf4")
    return str(path)


@pytest.mark.filterwarnings("ignore")
def test_references_are_written_for_xarray(files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kerchunk's engine of xarray reads the same from them as from the files, and so does this package."""
    monkeypatch.setattr(writing, "INLINE_BYTES", 100)
    library = xr.concat([xr.load_dataset(path) for path in files], "time", data_vars="minimal")
    many = xr.Dataset({"x": (("time", "level"), np.arange(20000.0).reshape(100, 200)), "n": ("time", np.arange(100))})
    classic = _write_classic(tmp_path / "a.nc", many, "NETCDF3_64BIT")
    whole = tmp_path / "whole.nc"
    many.to_netcdf(whole, engine="netcdf4", encoding={"x": {"fletcher32": True, "chunksizes": (30, 90)}})
    cases = [([str(path) for path in files], library), ([classic], xr.load_dataset(classic)), ([str(whole)], many)]
    for number, (paths, expected) in enumerate(cases):
        for suffix in ("json", "parquet"):
            target = f"{tmp_path}/{number}.{suffix}"
            made = references_to(paths)
            assert not made.left_out
            made.write(target)
            assert sum(isinstance(entry, list) for entry in made.entries.values()) > 8
            found = xr.open_dataset(target, engine="kerchunk").load()
            assert set(found.variables) == set(expected.variables)
            for name, variable in expected.variables.items():
                np.testing.assert_array_equal(found[name].values, variable.values)
                assert found[name].dtype == variable.dtype and found[name].dims == variable.dims
            own = open_dataset(target, comm=MPI.COMM_SELF, sample_dim="time", trusted=made.trees(target)).load()
            same(own["t2m" if number == 0 else "x"], expected["t2m" if number == 0 else "x"].values)


@pytest.mark.parametrize("fill", [0, 7])
def test_chunks_that_were_never_written(tmp_path: Path, fill: int) -> None:
    """xarray takes the fill value of Zarr for that of missing numbers, and that of HDF5 for a number."""
    values = np.where(np.arange(40000).reshape(8, 5000) < 20000, np.arange(5000) % 2, fill).astype("i4")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        x = file.create_dataset("x", values.shape, "i4", chunks=(2, 5000), fillvalue=fill)
        x[:4] = values[:4]
    made = references_to([str(tmp_path / "a.h5")])
    assert list(made.left_out) == ["x"] * (fill != 0)
    if fill == 0:
        made.write(f"{tmp_path}/a.json")
        same(xr.open_dataset(f"{tmp_path}/a.json", engine="kerchunk")["x"].values, values)
        same(open_dataset(f"{tmp_path}/a.json", inputs="x", comm=MPI.COMM_SELF).load()["x"], values)


def test_the_command(tmp_path: Path) -> None:
    xr.Dataset({"x": (("time", "level"), np.zeros((100, 200)))}).to_netcdf(tmp_path / "a.nc", engine="netcdf4")
    done = run_script(0, CALL, "index", str(tmp_path / "*.nc"), "--to", str(tmp_path / "a.json"))
    assert done.returncode == 0 and "a.json: 1 chunk" in done.stdout, done.stdout + done.stderr


TIFF: dict[str, dict[str, Any]] = {
    "tiles": {"tile": (16, 16), "compression": "zlib"},
    "predicted": {"compression": "lzw", "predictor": True, "rowsperstrip": 10},
    "plain": {"byteorder": ">", "photometric": "minisblack"},
    "zstd": {"compression": "zstd", "tile": (32, 32)},
}


@pytest.mark.parametrize("kind", TIFF)
def test_references_to_tiff_files(tmp_path: Path, kind: str) -> None:
    images = np.random.default_rng(0).integers(0, 4, (5, 40, 70)).astype("u2")
    tifffile.imwrite(tmp_path / "a.tif", images, metadata={"axes": "TYX"}, **TIFF[kind])
    target = str(tmp_path / "a.json")
    tiff_references(str(tmp_path / "a.tif")).write(target)
    same(open_dataset(target, comm=MPI.COMM_SELF).load()["image"], images)
    register_codecs()
    found = xr.open_dataset(target, engine="kerchunk")["image"]
    assert found.dtype == images.dtype.newbyteorder("=") and found.dims == ("T", "Y", "X")
    np.testing.assert_array_equal(found.values, images)


def test_tiff_files_without_references_are_told(tmp_path: Path) -> None:
    images = np.zeros((2, 41, 70), "u1")
    tifffile.imwrite(tmp_path / "a.tif", images, compression="zlib", rowsperstrip=10)
    with pytest.raises(FormatError, match="incomplete chunks"):
        tiff_references(str(tmp_path / "a.tif"))
    (tmp_path / "b.tif").write_bytes((tmp_path / "a.tif").read_bytes()[:100])
    with pytest.raises(DataError):
        tiff_references(str(tmp_path / "b.tif"))


def test_the_command_on_images(tmp_path: Path) -> None:
    for name in ("a.tif", "b.tif"):
        tifffile.imwrite(tmp_path / name, np.zeros((3, 32, 32), "u1"), photometric="minisblack")
    done = run_script(0, CALL, "index", str(tmp_path / "a.tif"), "--to", str(tmp_path / "a.json"))
    assert done.returncode == 0 and "a.json: 3 chunks" in done.stdout, done.stdout + done.stderr
    done = run_script(0, CALL, "index", str(tmp_path / "*.tif"), "--to", str(tmp_path / "b.json"))
    assert done.returncode and "write the references of each file" in done.stderr, done.stdout + done.stderr


def test_files_that_are_no_single_store(files: list[Path], tmp_path: Path) -> None:
    with xr.load_dataset(files[0]) as data:
        data.isel(lat=slice(3)).to_netcdf(tmp_path / "other.nc", engine="netcdf4")
    with pytest.raises(FormatError, match="the files cannot be one store"):
        references_to([str(files[0]), str(tmp_path / "other.nc")])


def test_a_moved_file_and_an_unknown_url_are_told(references: dict[str, str], tmp_path: Path) -> None:
    document = json.loads(Path(references["json"]).read_text())
    chunks = {key: value for key, value in document["refs"].items() if isinstance(value, list)}
    files = Path(next(iter(chunks.values()))[0]).parent
    for prefix, problem in (
        ("ftp://host", "no reader of such URLs"),
        (str(tmp_path / "gone"), "file of a chunk is missing"),
    ):
        moved = {key: [f"{prefix}/{Path(url).name}", *where] for key, (url, *where) in chunks.items()}
        (tmp_path / "moved.json").write_text(json.dumps({**document, "refs": {**document["refs"], **moved}}))
        with pytest.raises(DataError, match=problem):
            open_dataset(tmp_path / "moved.json", comm=MPI.COMM_SELF, trusted=["ftp://host", files]).load()
    (tmp_path / "broken.json").write_text(json.dumps(document)[:-20])
    with pytest.raises(FormatError, match="references are damaged"):
        open_dataset(tmp_path / "broken.json", comm=MPI.COMM_SELF)
