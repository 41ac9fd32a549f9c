"""The cases of netCDF files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.cases.reading import MOVING, Goal, Measured, Setup
from benchmarks.harness.data import Task
from benchmarks.harness.measure import Reader, interleaved
from benchmarks.readers import climate

READERS = (
    Reader("matex_data, tf.data", "ours", "climate.tensors"),
    Reader("netCDF4-python, by batch", "peer", "climate.netcdf4_python"),
    Reader("xarray, all at once", "peer", "climate.xarray"),
    MOVING,
)


def decoded(setup: Setup, make: Callable[[Path, bool], Task], title: str) -> Measured:
    """Measure packed int16 and float32 fields, delivered as float32."""
    results = interleaved(make(setup.folder, setup.quick), READERS, setup.repetitions)
    ours, python, xarray, _ = results
    goals = [Goal("tf.data, shuffled / netCDF4-python in order", ours.over(python), 2)]
    if xarray.answers:
        goals.append(Goal("tf.data, shuffled / xarray's load", ours.over(xarray), 1))
    return Measured(f"{title}: int16 with scale and offset, and float32; batches of 64 grids", results, goals)


CASES: dict[str, list[Callable[[Setup], Measured]]] = {
    "netcdf": [
        partial(decoded, make=climate.classic, title="Classic netCDF, interleaved records"),
        partial(decoded, make=climate.deflated, title="netCDF-4, shuffle and gzip-1"),
    ],
}
