"""The tree of a file that ``matex inspect`` prints."""

from __future__ import annotations

from pathlib import Path

import h5py
import netCDF4
import numpy as np
import pytest
import uproot
from rich.console import Console

from matex_data.cli import inspecting


def _lines(path: Path, format: str) -> list[str]:
    tree = inspecting.tree(str(path), format)
    assert tree is not None
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(tree)
    return [line.strip("│├└─ ") for line in capture.get().splitlines()[1:]]


def test_hdf5_with_datasets_of_different_lengths(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("run/image", data=np.zeros((10, 4), "u2"), chunks=(5, 4), compression="gzip")
        file["run/table"] = np.zeros(3, [("pt", "f4"), ("eta", "f4")])
        file["comment"] = "text"
        file["loop"] = file["run"]
    assert _lines(tmp_path / "a.h5", "hdf5") == [
        "comment  () object",
        "loop",
        "image  (10, 4) uint16, chunks (5, 4), gzip",
        "table  (3,) table of pt, eta",
    ]


def test_hdf5_with_a_type_that_numpy_does_not_have(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        h5py.h5d.create(file.id, b"when", h5py.h5t.UNIX_D32LE, h5py.h5s.create_simple((3,)))
        file["x"] = np.arange(3)
    assert _lines(tmp_path / "a.h5", "hdf5") == [
        "when  (3,) (No NumPy equivalent for TypeTimeID exists)",
        "x  (3,) int64",
    ]


def test_netcdf_with_groups(tmp_path: Path) -> None:
    with netCDF4.Dataset(tmp_path / "a.nc", "w") as file:
        file.createDimension("time", 5)
        file.createVariable("t2m", "f4", ("time",))
        file.createGroup("forecast").createVariable("z", "i2", ("time",))
    assert _lines(tmp_path / "a.nc", "netcdf") == ["t2m  (time: 5) float32", "forecast", "z  (time: 5) int16"]


@pytest.mark.filterwarnings("error")
def test_netcdf_with_a_type_that_netcdf4_does_not_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.nc", "w") as file:
        file["t"], file["raw"] = np.arange(3.0), np.zeros(3, "V4")
        file["t"].make_scale("t")
        file["raw"].dims[0].attach_scale(file["t"])
    assert _lines(tmp_path / "a.nc", "netcdf") == ["t  (t: 3) float64"]


def test_root_files(tmp_path: Path) -> None:
    with uproot.recreate(tmp_path / "a.root") as file:
        file["dir/events"] = {"x": np.arange(7.0)}
    lines = _lines(tmp_path / "a.root", "root")
    assert lines[0].startswith("dir  TDirectory")
    assert lines[1] in ("events  TTree, 7 entries", "events  ROOT::RNTuple, 7 entries")


def test_long_files_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspecting, "ENTRIES", 3)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for i in range(5):
            file[f"x{i}"] = np.arange(3)
    assert _lines(tmp_path / "a.h5", "hdf5")[-1] == "and 2 further entries"


def test_formats_without_groups() -> None:
    assert inspecting.tree("a.csv", "csv") is None
