"""References of kerchunk, in JSON and in Parquet, to netCDF files: values against xarray."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from kerchunk.combine import MultiZarrToZarr
from kerchunk.df import refs_to_dataframe
from kerchunk.hdf import SingleHdf5ToZarr
from mpi4py import MPI

from matex_data import DataError, FormatError, open_dataset
from tests.support.format_suite import same


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


def test_a_moved_file_and_a_remote_one_are_told(references: dict[str, str], tmp_path: Path) -> None:
    document = json.loads(Path(references["json"]).read_text())
    chunks = {key: value for key, value in document["refs"].items() if isinstance(value, list)}
    for prefix, problem in (
        ("s3://bucket", "store of objects"),
        (str(tmp_path / "gone"), "file of a chunk is missing"),
    ):
        moved = {key: [f"{prefix}/{Path(url).name}", *where] for key, (url, *where) in chunks.items()}
        (tmp_path / "moved.json").write_text(json.dumps({**document, "refs": {**document["refs"], **moved}}))
        with pytest.raises(DataError, match=problem):
            open_dataset(tmp_path / "moved.json", comm=MPI.COMM_SELF).load()
    (tmp_path / "broken.json").write_text(json.dumps(document)[:-20])
    with pytest.raises(FormatError, match="references are damaged"):
        open_dataset(tmp_path / "broken.json", comm=MPI.COMM_SELF)
