"""netCDF, classic and netCDF-4: variables along a dimension that counts the samples, decoded by the CF conventions."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from matex_data.errors import DataError, FieldNotFound, FormatError, near_matches
from matex_data.fields import Field
from matex_data.index.interleaved import group_interleaved
from matex_data.index.model import FileIndex, Index, Layout
from matex_data.machine import check_fits
from matex_data.readers.hdf5.names import FAILURES
from matex_data.readers.hdf5.rows import open_file
from matex_data.readers.netcdf import classic, netcdf4
from matex_data.readers.netcdf.cf import USED_UP, Meaning, meaning
from matex_data.readers.netcdf.variables import Content, Variable

AGREED = ("units", "calendar", "standard_name", "positive", "flag_values", "flag_masks", "flag_meanings")
STATIC_BYTES = 64 << 20  # of one variable without samples that every rank holds in memory
CHECKED_BYTES = 1 << 20  # to look at the free memory costs more than smaller ones can take
DECODED = 5  # of static numbers, at most: two bytes as they are stored, and eight once decoded
MARK = b"\x89HDF\r\n\x1a\n"


def index(
    path: str,
    names: Sequence[str] | None = None,
    *,
    sample_dim: str | None = None,
    decode: bool = True,
    decode_times: bool | None = None,
    mask_and_scale: bool | None = None,
    valid_range: bool | None = None,
    static: bool = True,
) -> Index:
    """The samples of a netCDF file along one of its dimensions.

    Parameters
    ----------
    names : variables, those of groups as ``"forecast/t2m"``. None: every one that has the sample dimension. The others
        are static: they come as they are, unless they are larger than ``STATIC_BYTES``.
    sample_dim : the dimension that counts the samples. None: the unlimited one, else the first one of all variables.
    decode : False: everything comes as it is stored, unless the next two say otherwise. True: also letters along the
        last axis become texts.
    decode_times : make times seconds since 1970. None: as ``decode`` says.
    mask_and_scale : undo packing (``scale_factor``, ``add_offset``, ``_Unsigned``), and make missing numbers
        not-a-number. None: as ``decode`` says.
    valid_range : whether decoded numbers out of ``valid_min``, ``valid_max`` or ``valid_range`` are missing. None: only
        of variables that become floats and have neither ``_FillValue`` nor ``missing_value``.
    static : read the variables without the sample dimension, too. Those of the first file of a data set are enough.

    Raises
    ------
    FieldNotFound : there is no variable of that name.
    FormatError : the file is damaged or no netCDF file, or it does not say which dimension counts the samples.
    """
    times = decode if decode_times is None else decode_times
    packing = decode if mask_and_scale is None else mask_and_scale
    wanted = _Wanted(names, sample_dim, _Decode(decode, times, packing, valid_range), static)
    with Path(path).open("rb") as file:
        mark = file.read(3)
    if mark == b"CDF" or mark[:2] == classic.GZIP:
        return _index(classic.content(path), wanted)
    if not _is_hdf5(path):
        raise FormatError(
            "the file is not a netCDF file",
            file=path,
            expected="'CDF' or the mark of HDF5 at its begin",
            found=repr(mark),
        )
    try:
        with open_file(path) as hdf5:
            return _index(netcdf4.content(hdf5, path), wanted)
    except DataError:
        raise
    except FAILURES as error:
        raise FormatError("the file cannot be read as netCDF-4", file=path, found=error) from error


def _is_hdf5(path: str) -> bool:
    with Path(path).open("rb") as file:
        for destination in (0, 512, 1024, 2048):
            file.seek(destination)
            if file.read(len(MARK)) == MARK:
                return True
    return False


@dataclass(frozen=True)
class _Decode:
    """What is made of stored values: texts of letters, seconds of times, numbers of packed or missing ones."""

    letters: bool
    times: bool
    packing: bool
    valid_range: bool | None


@dataclass(frozen=True)
class _Wanted:
    """What the user asks for, see ``index``."""

    names: Sequence[str] | None
    sample_dim: str | None
    decode: _Decode
    static: bool


def _index(content: Content, asked: _Wanted) -> Index:
    wanted = _named(content, asked.names) if asked.names is not None else content.variables
    dimension = content.sample_dimension(wanted, asked.sample_dim)
    units = _units_of_bounds(content.variables)
    fields: dict[str, Field] = {}
    parts: dict[str, Layout] = {}
    for variable in wanted:
        if dimension in variable.dimensions:
            axis = variable.dimensions.index(dimension)
            told = _meaning(variable, axis, content.path, units, asked.decode)
            fields[variable.name], parts[variable.name] = variable.rows(axis, told)
        elif asked.names is not None:
            raise _no_samples(content.path, variable, dimension)
    if not fields:
        found = f"{len(content.variables)} variables without it"
        raise FormatError(
            "the file has no samples", file=content.path, expected=f"a variable along {dimension!r}", found=found
        )
    static = {
        variable.name: _meaning(variable, None, content.path, units, asked.decode).of(variable.values())
        for variable in content.variables
        if asked.static and dimension not in variable.dimensions and _fits(variable, content.path)
    }
    facts = _facts(content, [v for v in wanted if v.name in fields], fields, dimension, asked.decode)
    return Index(
        fields, [FileIndex(content.path, content.dimensions[dimension], group_interleaved(parts))], static, facts
    )


def _facts(
    content: Content, wanted: Sequence[Variable], fields: Mapping[str, Field], dimension: str, decode: _Decode
) -> dict[str, str]:
    """What has to be the same in other files: units and the like, and the coordinates of the other dimensions."""
    keys = AGREED if decode.packing else AGREED + USED_UP
    facts = {}
    for variable in wanted:
        said = fields[variable.name].attributes
        facts.update({f"{key!r} of {variable.name!r}": str(said[key]) for key in keys if key in said})
    others = {name for variable in wanted for name in variable.dimensions} - {dimension}
    for variable in content.variables:
        if variable.name in others and len(variable.dimensions) == 1 and variable.nbytes <= STATIC_BYTES:
            numbers = variable.values()
            numbers = np.ascontiguousarray(numbers, _delivered(numbers.dtype))
            digest = hashlib.sha256(numbers.tobytes()).hexdigest()[:16] if not numbers.dtype.hasobject else ""
            facts[f"the coordinates {variable.name!r}"] = f"{len(numbers)} values (checksum {digest})"
    return facts


def _named(content: Content, names: Sequence[str]) -> list[Variable]:
    """The variables of these names; a leading slash makes no difference."""
    known = {variable.name: variable for variable in content.variables}
    for name in names:
        if name.strip("/") not in known:
            near = near_matches(name.strip("/"), known)
            raise FieldNotFound(
                "the file has no such variable", file=content.path, field=name, expected=f"one of {near}"
            )
    return [replace(known[name.strip("/")], name=name) for name in names]


def _no_samples(path: str, variable: Variable, dimension: str) -> FormatError:
    return FormatError(
        "the field has no samples",
        file=path,
        field=variable.name,
        expected=f"a variable along {dimension!r}, which counts the samples",
        found=f"dimensions {variable.dimensions}" if variable.dimensions else "a single value",
        remedy="take it from Dataset.static, or name one of its dimensions with sample_dim=",
    )


def _fits(variable: Variable, path: str) -> bool:
    if variable.nbytes > STATIC_BYTES:
        text = f"{path}: the variable {variable.name!r} has no samples, and with {variable.nbytes} bytes is too large"
        warnings.warn(f"{text} for Dataset.static; it is left out", stacklevel=2)
    elif variable.nbytes >= CHECKED_BYTES:
        remedy = "leave out what belongs to no sample: static=False"
        check_fits(DECODED * variable.nbytes, "the static variable", file=path, field=variable.name, remedy=remedy)
    return variable.nbytes <= STATIC_BYTES


def _units_of_bounds(variables: Sequence[Variable]) -> dict[str, dict[str, Any]]:
    """Units and calendar by the names of variables that hold the bounds of times, and need not say them themselves."""
    found = {}
    for variable in variables:
        told = {key: variable.attributes[key] for key in ("units", "calendar") if key in variable.attributes}
        if "bounds" in variable.attributes and " since " in str(told.get("units")):
            group = variable.name.rpartition("/")[0]
            found[f"{group}/{variable.attributes['bounds']}".strip("/")] = told
    return found


def _meaning(
    variable: Variable,
    axis: int | None,
    path: str,
    units: Mapping[str, dict[str, Any]],
    decode: _Decode,
) -> Meaning:
    """What a variable holds; ``axis`` is that of the samples, or None if it has none."""
    dtype = variable.dtype
    numbers = dtype.kind in "iuf" and (decode.times or decode.packing)
    if not numbers and not (dtype.kind == "S" and decode.letters):
        return Meaning(_delivered(dtype), None, variable.attributes)
    if dtype.kind == "S":
        together = dtype.itemsize == 1 and variable.shape and variable.shape[-1] > 1 and axis != len(variable.shape) - 1
        return Meaning(np.dtype(f"S{variable.shape[-1]}") if together else dtype, None, variable.attributes)
    attributes = {**units.get(variable.name, {}), **variable.attributes}
    return meaning(dtype, attributes, path, variable.name, decode.valid_range, decode.times, decode.packing)


def _delivered(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """In native byte order; other kinds as they are."""
    return np.dtype(dtype.newbyteorder("=").str) if dtype.kind in "iufbcS" else dtype
