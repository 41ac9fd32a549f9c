"""Every netCDF file of the corpus against xarray and netCDF4-python, along every dimension, on 1 and 3 ranks."""

from __future__ import annotations

import functools
import gzip
import json
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cftime
import netCDF4
import numpy as np
import pytest
import xarray
from mpi4py import MPI
from numpy.typing import NDArray

from matex_data import DataError, open_dataset
from tests.support.corpus import CORPUS, needs_corpus
from tests.support.ranks import Pools
from tests.support.serial import same

FOLDER = CORPUS / "netcdf"
RECORDS = json.loads((FOLDER / "MANIFEST.json").read_text()) if FOLDER.is_dir() else []
BROKEN = [r["file"] for r in RECORDS if "open_error" in (r["ref"] or {})]
WHOLE = [r["file"] for r in RECORDS if r["file"] not in BROKEN]
UNWRITTEN = {("unidata/f03tst_open_mem.nc", "var2")}  # the library returns uninitialized memory
NO_SAMPLES = (
    "the file has no samples",
    "the file is truncated",
    "names an unknown type",
    "more than one record dimension",
)

pytestmark = needs_corpus
Arrays = dict[str, NDArray[Any]]


def _library(file: str, folder: Path) -> Path:
    """Return the file, or an unzipped copy of a gzipped one, which netCDF4-python can read."""
    path = FOLDER / file
    if path.suffix != ".gz":
        return path
    (folder / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    return folder / path.stem


def _variables(group: Any) -> Iterator[tuple[str, Any, list[str]]]:
    """Yield name, variable and full names of the dimensions of every numeric variable."""
    for name, variable in group.variables.items():
        numeric = isinstance(variable.dtype, np.dtype) and variable.dtype.kind in "iuf"
        if numeric and not variable._isvlen:
            yield f"{group.path}/{name}".strip("/"), variable, [_full(group, dim) for dim in variable.dimensions]
    for inner in group.groups.values():
        yield from _variables(inner)


def _full(group: Any, dimension: str) -> str:
    while dimension not in group.dimensions:
        group = group.parent
    return f"{group.path}/{dimension}".strip("/")


def _decoded(path: Path, name: str) -> NDArray[Any] | None:
    """Return a variable as xarray decodes it, times in seconds since 1970; None if it cannot open the file."""
    group, _, last = name.rpartition("/")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with xarray.open_dataset(path, engine="netcdf4", group=group or None) as found:
                values = found[last].to_numpy()
        except (TypeError, KeyError):
            return None
    if values.dtype.kind == "M":
        seconds = (values - np.datetime64("1970-01-01")).astype("timedelta64[ns]").astype(float) / 1e9
        return np.where(np.isnat(values), np.nan, seconds)
    if values.dtype.kind == "O" and values.size:
        calendar = values.reshape(-1)[0].calendar
        return np.asarray(cftime.date2num(values, "seconds since 1970-01-01", calendar=calendar), float)
    return values


def _load(comm: MPI.Intracomm, path: str, selected: dict[str, list[str]], decode: bool) -> dict[str, Arrays]:
    """Load this rank's rows of the selected variables, by sample dimension."""
    found = {}
    for dim, names in selected.items():
        data = open_dataset(path, format="netcdf", inputs=names, sample_dim=dim, decode=decode, comm=comm)
        found[dim] = data.load()
    return found


@functools.lru_cache(maxsize=1)  # for the numbers of ranks, which follow each other
def _expected(file: str, decode: bool) -> dict[str, Arrays]:
    """Return all variables as the libraries read them, by the dimension that counts the samples."""
    expected: dict[str, Arrays] = {}
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")  # of types that netCDF4-python skips
        library = _library(file, Path(folder))
        with netCDF4.Dataset(library) as source:
            source.set_auto_maskandscale(False)
            for name, variable, dims in _variables(source):
                values = _decoded(library, name) if decode else np.asarray(variable[...])
                for axis, dim in enumerate(dims):
                    if values is not None and dims.index(dim) == axis and (file, name) not in UNWRITTEN:
                        expected.setdefault(dim, {})[name] = np.moveaxis(values, axis, 0)
    return expected


@pytest.mark.parametrize(
    ("decode", "size"),
    [(True, 1), (True, 3), pytest.param(False, 1, marks=pytest.mark.slow), (False, 3)],
    ids=["decoded-1", "decoded-3", "raw-1", "raw-3"],
)
@pytest.mark.parametrize("file", WHOLE)
def test_numbers_against_the_libraries(file: str, decode: bool, size: int, ranks: Pools) -> None:
    expected = _expected(file, decode)
    selected = {dim: list(arrays) for dim, arrays in expected.items()}
    by_rank = ranks(size).run(_load, str(FOLDER / file), selected, decode)
    for dim, arrays in expected.items():
        for name, values in arrays.items():
            found = np.concatenate([arrays[dim][name] for arrays in by_rank])
            assert found.dtype == values.dtype.newbyteorder("="), name
            times = decode and not same(found, values) and np.allclose(found, values, 1e-15, 1e-6, equal_nan=True)
            assert same(found, values) or times, (name, dim)


@pytest.mark.parametrize("file", WHOLE)
def test_static_variables(file: str, tmp_path: Path) -> None:
    try:
        data = open_dataset(FOLDER / file, format="netcdf", comm=MPI.COMM_SELF, decode=False)
    except DataError as error:
        assert "sample_dim=" in str(error) or any(text in str(error) for text in NO_SAMPLES)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with netCDF4.Dataset(_library(file, tmp_path)) as source:
            source.set_auto_maskandscale(False)
            for name, variable, _ in _variables(source):
                assert (name in data.schema) != (name in data.static)
                if name in data.static:
                    assert same(data.static[name], np.asarray(variable[...]))


def _open(comm: MPI.Intracomm, path: str) -> int:
    return len(open_dataset(path, comm=comm))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("file", BROKEN)
def test_broken_files_are_a_clear_error_on_every_rank(file: str, size: int, ranks: Pools) -> None:
    errors = ranks(size).outcomes(_open, str(FOLDER / file), timeout=10)
    assert all(isinstance(error, DataError) and error.file == str(FOLDER / file) for error in errors), errors
    assert len({str(error) for error in errors}) == 1
