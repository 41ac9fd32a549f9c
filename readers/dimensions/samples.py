"""Samples of variables over named dimensions: those of netCDF files, and of other formats with CF conventions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from matex_data._types import Array
from matex_data.errors import FormatError
from matex_data.fields import COORDINATES, LISTED, SAMPLE_COORDINATE, Field
from matex_data.index.interleaved import group_interleaved
from matex_data.index.model import FileIndex, Index, Layout
from matex_data.index.subset import subset_rows
from matex_data.machine import check_fits
from matex_data.readers.catalogue import check_known, warn_of
from matex_data.readers.dimensions.cf import PACKING_ATTRIBUTES, CfDecoding, cf_decoding
from matex_data.readers.dimensions.contiguous import Observations
from matex_data.readers.dimensions.selection import ReadCoordinate, Selection, selection_of
from matex_data.readers.dimensions.variables import FileContent, Variable
from matex_data.warning import warn

COMMON_ATTRIBUTES = ("units", "calendar", "standard_name", "positive", "flag_values", "flag_masks", "flag_meanings")
MAX_STATIC_BYTES = 64 << 20  # of one variable without samples, which every rank holds in memory
CHECKED_BYTES = 1 << 20  # of a static variable for which the free memory is checked
DECODED_RATIO = 5  # memory of a static variable per stored byte, at most: two bytes stored, eight decoded


@dataclass(frozen=True)
class VariableOptions:
    """Options of a reader of variables.

    Parameters
    ----------
    sample_dim : dimension that counts the samples. None: the one whose coordinate is a time by its units ("hours since
        2000-01-01"), else the unlimited one, else the first one of all variables. Dimensions of groups that have its
        name and its values are the same one.
    decode : decode times, packed and missing numbers, and letters along the last axis to texts. False: values as they
        are stored.
    decode_times : convert times to seconds since 1970. None: as ``decode``.
    mask_and_scale : undo packing (``scale_factor``, ``add_offset``, ``_Unsigned``), and replace missing numbers by NaN.
        None: as ``decode``.
    valid_range : whether decoded numbers outside of ``valid_min``, ``valid_max`` or ``valid_range`` are missing. None:
        only of variables that become floats and have neither ``_FillValue`` nor ``missing_value``.
    static : read the variables without the sample dimension too, up to ``MAX_STATIC_BYTES`` each. A data set uses
        those of its first file.
    static_as_inputs : take the variables without the sample dimension that are named for fields of every sample.
    sel : values of coordinates by dimension: one (the axis is dropped), a list, or a slice, both ends included:
        ``{"level": [500, 850], "lat": slice(20, 70)}``. Values are exact; along a descending coordinate a slice may
        begin at either end. Of the sample dimension dates as text, such as ``slice("2015", "2016-06")``. Only the
        bytes of the selection are read, where they lie as such.
    isel : positions, likewise, by dimension of a sample: an int, a list, a slice as of Python, or a bool for
        each entry.
    dtype : of packed variables and of other floats of 64 bits but times: "float32". They are decoded in double
        precision, and then rounded. None: as xarray decodes them.
    coordinate : add the coordinate of the samples, if there is one, to the variables that are named: windows need it.
    method : "nearest": a value of ``sel`` stands for the nearest of the coordinate, as in xarray; ends of slices, and
        values of the sample dimension, do not. None: values are exact.
    names : of the variables that are asked for; None: all.

    Raises
    ------
    FormatError : ``dtype`` is no float of 32 or 64 bits.
    """

    sample_dim: str | None = None
    decode: bool = True
    decode_times: bool | None = None
    mask_and_scale: bool | None = None
    valid_range: bool | None = None
    static: bool = True
    static_as_inputs: bool = False
    sel: Mapping[str, Any] | None = None
    isel: Mapping[str, Any] | None = None
    dtype: str | None = None
    coordinate: bool = False
    method: str | None = None
    names: Sequence[str] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.method not in (None, "nearest"):
            raise FormatError("sel= has no such method", expected='method="nearest"', found=repr(self.method))
        if self.dtype not in (None, "float32", "float64"):
            raise FormatError("unknown dtype of decoded numbers", expected='dtype="float32"', found=repr(self.dtype))

    @property
    def times(self) -> bool:
        """Choice to decode times."""
        return self.decode if self.decode_times is None else self.decode_times

    @property
    def packing(self) -> bool:
        """Choice to decode packed and missing numbers."""
        return self.decode if self.mask_and_scale is None else self.mask_and_scale


def index_content(content: FileContent, options: VariableOptions) -> Index:
    """Return the index of the variables of a file along one of its dimensions.

    Raises
    ------
    FieldNotFound : there is no variable of a name of ``options.names``.
    FormatError : the sample dimension is not determined, or a named variable does not have it.
    """
    path = content.path
    selected = _select(content, options.names) if options.names is not None else content.variables
    observations, requested = Observations.of(content, options.sample_dim)
    dimension = content.sample_dimension(selected, requested)
    time_attributes = _attributes_of_bounds(content.variables)

    def decoding(variable: Variable, axis: int | None) -> CfDecoding:
        return _decoding(variable, axis, path, time_attributes, options)

    def values(variable: Variable) -> tuple[Array, Mapping[str, Any]]:
        of_variable = decoding(variable, None)
        return of_variable.decode(variable.values()), of_variable.attributes

    used = {name for variable in selected for name in variable.dimensions}
    along, nearest = content.alike(dimension), options.method is not None
    selection = selection_of(content, dimension, along, used, options.sel, options.isel, values, nearest)
    observations.check(selection.axes)
    fields: dict[str, Field] = {}
    layouts: dict[str, Layout] = {}
    unread: dict[str, str] = {}
    for variable in _with_coordinate(selected, content, dimension) if options.coordinate else selected:
        axis = next((number for number, name in enumerate(variable.dimensions) if name in along), None)
        if axis is not None:
            field, layout = variable.rows(axis, decoding(variable, axis))
            inner = (*variable.dimensions[:axis], *variable.dimensions[axis + 1 :])
            field, layouts[variable.name] = selection.field(field, layout, inner)
            if _is_coordinate(variable, dimension):
                field = replace(field, attributes={**field.attributes, SAMPLE_COORDINATE: True})
            fields[variable.name] = field
        elif observations.has(variable):
            of_file = variable.rows(0, decoding(variable, 0))
            reason = observations.add(variable, selection.entries(*of_file, variable.dimensions[1:]))
            if reason is not None and options.names is not None:
                raise FormatError(
                    "the variable cannot be read",
                    file=path,
                    field=variable.name,
                    found=reason,
                    remedy="leave it out with inputs= and targets=",
                )
            unread |= {} if reason is None else {variable.name: reason}
        elif options.names is not None and not options.static_as_inputs:
            raise _no_samples(path, variable, dimension)
    warn_of(path, unread, "variable")
    for name, (field, layout) in observations.fields().items():
        fields[name], layouts[name] = field, layout if selection.rows is None else subset_rows(layout, selection.rows)
    if not fields:
        found = f"{len(content.variables)} variables without it"
        raise FormatError(
            "the file has no samples",
            file=path,
            expected=f"a variable along {dimension!r}",
            found=found,
            remedy="name the dimension of the samples with sample_dim=",
        )
    static = {
        variable.name: selection.values(values(variable)[0], variable.dimensions)
        for variable in content.variables
        if options.static
        and along.isdisjoint(variable.dimensions)
        and not observations.has(variable)
        and _fits_static(variable, path)
    }
    indexed = [variable for variable in selected if variable.name in fields]
    facts = _facts(content, indexed, fields, {*along, *observations.counts}, options.packing, selection, values)
    rows = content.dimensions[dimension] if selection.rows is None else len(selection.rows)
    files = [FileIndex(path, rows, group_interleaved(layouts))]
    return Index(fields, files, static, facts)


def _is_coordinate(variable: Variable, dimension: str) -> bool:
    return variable.name.strip("/") == dimension and variable.dimensions == (dimension,)


def _with_coordinate(variables: Sequence[Variable], content: FileContent, dimension: str) -> list[Variable]:
    """Return the variables, and behind them the coordinate of the samples if it exists and is not one of them."""
    known = any(_is_coordinate(variable, dimension) for variable in variables)
    return [*variables, *(v for v in content.variables if not known and _is_coordinate(v, dimension))]


def _facts(
    content: FileContent,
    indexed: Sequence[Variable],
    fields: Mapping[str, Field],
    dimensions: set[str],
    packing: bool,
    selection: Selection,
    decoded: ReadCoordinate,
) -> dict[str, str]:
    """Return facts that all files of a data set have in common: units, calendars, and the other coordinates."""
    keys = COMMON_ATTRIBUTES if packing else COMMON_ATTRIBUTES + PACKING_ATTRIBUTES
    facts = {}
    for variable in indexed:
        attributes = fields[variable.name].attributes
        facts.update({f"{key!r} of {variable.name!r}": str(attributes[key]) for key in keys if key in attributes})
    others = {name for variable in indexed for name in variable.dimensions} - dimensions
    auxiliary = {name for variable in indexed for name in str(variable.attributes.get("coordinates", "")).split()}
    for variable in content.variables:
        is_auxiliary = variable.name.rpartition("/")[2] in auxiliary and dimensions.isdisjoint(variable.dimensions)
        is_coordinate = any(map(variable.is_coordinate, others)) or (is_auxiliary and variable.dimensions)
        if is_coordinate and variable.nbytes <= MAX_STATIC_BYTES:
            values = np.atleast_1d(selection.values(decoded(variable)[0], variable.dimensions))
            is_text = values.dtype.kind == "S" or values.dtype.hasobject  # as long as the longest one of its file
            data = repr(values.tolist()).encode() if is_text else values.astype(_native(values.dtype)).tobytes()
            digest = hashlib.sha256(data).hexdigest()[:16]
            facts[f"{COORDINATES} {variable.name!r}"] = f"{values.size} values (checksum {digest})"
    if selection.listed is not None:
        facts[LISTED] = selection.listed
    return facts


def _select(content: FileContent, names: Sequence[str]) -> list[Variable]:
    """Return the variables of these names, with or without leading slashes."""
    known = {variable.name: variable for variable in content.variables}
    check_known(content.path, (name.strip("/") for name in names), known, "variable")
    return [replace(known[name.strip("/")], name=name) for name in names]


def _no_samples(path: str, variable: Variable, dimension: str) -> FormatError:
    return FormatError(
        "the field has no samples",
        file=path,
        field=variable.name,
        expected=f"a variable along {dimension!r}, which counts the samples",
        found=f"dimensions {variable.dimensions}" if variable.dimensions else "a single value",
        remedy="take it from Dataset.static, or give it to every sample with static_as_inputs=True, or name one of its "
        "dimensions with sample_dim=",
    )


def _fits_static(variable: Variable, path: str) -> bool:
    """Return whether the variable is small enough for ``Dataset.static``; warn if it is not. Raise ``PartitionError``
    if the variable does not fit into the free memory.
    """
    if variable.nbytes > MAX_STATIC_BYTES:
        text = f"{path}: the variable {variable.name!r} has no samples, and with {variable.nbytes} bytes is too large"
        warn(f"{text} for Dataset.static; it is left out")
    elif variable.nbytes >= CHECKED_BYTES:
        nbytes, remedy = DECODED_RATIO * variable.nbytes, "leave out the variables without samples with static=False"
        check_fits(nbytes, "the static variable", file=path, field=variable.name, remedy=remedy)
    return variable.nbytes <= MAX_STATIC_BYTES


def _attributes_of_bounds(variables: Sequence[Variable]) -> dict[str, dict[str, Any]]:
    """Return units and calendar for the variables that hold bounds of times: CF lets them have none of their own."""
    found = {}
    for variable in variables:
        if "bounds" not in variable.attributes:
            continue
        attributes = {key: variable.attributes[key] for key in ("units", "calendar") if key in variable.attributes}
        if " since " in str(attributes.get("units")):
            group = variable.name.rpartition("/")[0]
            found[f"{group}/{variable.attributes['bounds']}".strip("/")] = attributes
    return found


def _decoding(
    variable: Variable,
    axis: int | None,
    path: str,
    time_attributes: Mapping[str, dict[str, Any]],
    options: VariableOptions,
) -> CfDecoding:
    """Return the decoding of a variable with sample axis ``axis``; None: a static variable."""
    dtype = variable.dtype
    numbers = dtype.kind in "iuf" and (options.times or options.packing)
    if not numbers and not (dtype.kind == "S" and options.decode):
        return CfDecoding(_native(dtype), None, dict(variable.attributes))
    if dtype.kind == "S":
        length = variable.shape[-1] if variable.shape and axis != len(variable.shape) - 1 else 0
        letters = dtype.itemsize == 1 and length > 0
        return CfDecoding(np.dtype(f"S{length}") if letters else dtype, None, dict(variable.attributes), letters)
    attributes = {**time_attributes.get(variable.name.strip("/"), {}), **variable.attributes}
    found = cf_decoding(dtype, attributes, path, variable.name, options.valid_range, options.times, options.packing)
    return found.narrowed() if options.dtype == "float32" else found


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in native byte order, that of texts for those of fixed length; compound dtypes unchanged."""
    if dtype.kind == "U":
        return np.dtype(object)
    return np.dtype(dtype.newbyteorder("=").str) if dtype.kind in "iufbcS" else dtype
