"""Readers of fields of a climate model in netCDF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import netCDF4
import numpy as np

import matex_data as md
from benchmarks.harness.counting import counting
from benchmarks.harness.data import SMALL, Task
from benchmarks.readers.ceiling import Pass
from benchmarks.readers.ours import SEED

GRID = (180, 360)
FIELDS = ["t2m", "wind"]  # int16 with scale and offset, and float32


def classic(folder: Path, quick: bool = False) -> Task:
    """Write a classic file with an unlimited time axis, whose records are interleaved: 583 MB."""
    return _table(folder, "classic", quick, format="NETCDF3_64BIT_OFFSET")


def deflated(folder: Path, quick: bool = False) -> Task:
    """Write a netCDF-4 file, shuffled and deflated in chunks of 4 times: 778 MB decoded."""
    return _table(folder, "deflated", quick, format="NETCDF4")


def _table(folder: Path, name: str, quick: bool, format: Any) -> Task:
    count = 1500 // (SMALL if quick else 1)
    path = folder / f"{name}-{count}.nc"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with netCDF4.Dataset(part, "w", format=format) as file:
            _write(file, count, format == "NETCDF4")
        part.rename(path)
    return Task(str(path), FIELDS[0], "", 64, count, 8 * GRID[0] * GRID[1], count)


def _write(file: Any, count: int, deflate: bool) -> None:
    for axis, length in (("time", None), ("y", GRID[0]), ("x", GRID[1])):
        file.createDimension(axis, length)
    stored = {"zlib": True, "complevel": 1, "shuffle": True, "chunksizes": (4, *GRID)} if deflate else {}
    packed = file.createVariable("t2m", "i2", ("time", "y", "x"), fill_value=-32767, **stored)
    packed.scale_factor, packed.add_offset = np.float32(0.01), np.float32(273)
    packed.set_auto_maskandscale(False)
    plain = file.createVariable("wind", "f4", ("time", "y", "x"), **stored)
    rng = np.random.default_rng(0)
    for start in range(0, count, 25):
        packed[start : start + 25] = rng.normal(0, 1500, (25, *GRID)).astype("i2")
        plain[start : start + 25] = np.round(rng.random((25, *GRID), np.float32), 3)


def tensors(task: Task) -> Pass:
    """Read shuffled batches of both fields, decoded, from ``tf_dataset``."""
    data = md.open_dataset(task.path, inputs=FIELDS)
    return counting(data.tf_dataset(task.batch_size, shuffle=True, seed=SEED, remainder="keep"))


def netcdf4_python(task: Task) -> Pass:
    """Read both variables as decoded masked arrays, batch by batch in the order of the file."""

    def run() -> int:
        with netCDF4.Dataset(task.path) as file:
            for start in range(0, task.samples, task.batch_size):
                for name in FIELDS:
                    file[name][start : start + task.batch_size]
        return task.samples

    return run


def xarray(task: Task) -> Pass:
    """Load both variables at once, decoded, by ``xarray.open_dataset(...).load()``."""
    from xarray import open_dataset

    def run() -> int:
        with open_dataset(task.path) as data:
            return int(data.load().sizes["time"])

    return run
