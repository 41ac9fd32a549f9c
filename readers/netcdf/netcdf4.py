"""Variables of netCDF-4 files: HDF5 datasets whose axes have dimension scales.

Storage of dimensions and coordinate variables: section "netCDF-4 format" in
https://docs.unidata.ucar.edu/netcdf-c/current/file_format_specifications.html.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import h5py
import numpy as np

from matex_data._types import Array
from matex_data.errors import FormatError
from matex_data.fields import NAMES_OF_CODES, Field
from matex_data.index.chunked import Chunked, axis_first
from matex_data.index.model import Layout
from matex_data.locks import cached_property
from matex_data.machine import check_fits
from matex_data.readers.dimensions.variables import FileContent, Variable
from matex_data.readers.hdf5.checks import all_values
from matex_data.readers.hdf5.chunks import fill_value
from matex_data.readers.hdf5.names import HDF5_ERRORS, dataset_names, has_attribute, links_of
from matex_data.readers.hdf5.reader import attributes, dataset_rows

NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable"
NO_COORDINATE = "_nc4_non_coord_"  # prefix of a variable with the name of a dimension that is not its own
ROOT_MARKS = (b"_NCProperties", b"_nc3_strict")
MARKS = (b"_Netcdf4Dimid", b"_Netcdf4Coordinates")
MAX_PROBES = 64  # objects of the root group that are searched for the marks of netCDF-4
INTERNAL_ATTRIBUTES = {
    "CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST", "DIMENSION_LABELS",
    "_Netcdf4Dimid", "_Netcdf4Coordinates", "_nc3_strict", "_NCProperties", "_NCCOPY",
}  # fmt: skip
"""Attributes of the storage: those of netCDF itself, and of the dimension scales of HDF5."""
DEFAULT_FILL = {
    "i1": -127, "i2": -32767, "i4": -2147483647, "i8": -9223372036854775806,
    "u1": 255, "u2": 65535, "u4": 4294967295, "u8": 18446744073709551614,
    "f4": 9.969209968386869e36, "f8": 9.969209968386869e36,
}  # fmt: skip
"""Values of netCDF for elements that were never written."""


def is_netcdf4(file: h5py.File) -> bool:
    """Return whether an HDF5 file was written as netCDF-4.

    The library marks the root group (``_NCProperties``, since 4.4.1), variables and dimensions. A dimension scale is no
    mark: plain HDF5 files have them too.
    """
    return any(h5py.h5a.exists(file.id, mark) for mark in ROOT_MARKS) or _has_marked_dataset(file.id)


def _has_marked_dataset(group: h5py.h5g.GroupID) -> bool:
    """Return whether one of the first datasets of a group is a variable or a dimension of netCDF."""
    for _, link, _ in links_of(group, most=MAX_PROBES):
        if h5py.h5g.get_objinfo(group, link, follow_link=False).type == h5py.h5g.DATASET:
            dataset = h5py.h5d.open(group, link)
            if any(h5py.h5a.exists(dataset, mark) for mark in MARKS):
                return True
            if _is_scale(h5py.Dataset(dataset)) and _is_dimension_only(h5py.Dataset(dataset)):
                return True
    return False


def read_content(file: h5py.File, path: str) -> FileContent:
    """Read variables and dimensions of an HDF5 file by the rules of netCDF-4.

    Raises
    ------
    FormatError : the objects of the file cannot be listed.
    """
    datasets = {name: file[name] for name in dataset_names(file, path)}
    scales = {name: dataset for name, dataset in datasets.items() if _is_scale(dataset)}
    axes = _AxisNames(scales)
    variables = [
        Hdf5Variable(
            name=_without_prefix(name),
            dimensions=axes.of(name, dataset),
            shape=dataset.shape,
            dtype=dataset.dtype,
            attributes=UserAttributes(dataset),
            path=path,
            dataset=dataset,
        )
        for name, dataset in datasets.items()
        if dataset.shape is not None and not (name in scales and _is_dimension_only(dataset))
    ]
    lengths = axes.lengths(variables)
    variables = [replace(v, shape=tuple(lengths[name] for name in v.dimensions)) for v in variables]
    unlimited = [name for name, scale in scales.items() if scale.maxshape and scale.maxshape[0] is None]
    return FileContent(path, variables, lengths, unlimited)


def _without_prefix(name: str) -> str:
    group, slash, last = name.rpartition("/")
    return group + slash + last.removeprefix(NO_COORDINATE)


def _is_scale(dataset: h5py.Dataset) -> bool:
    return has_attribute(dataset, b"CLASS") and dataset.attrs["CLASS"] == b"DIMENSION_SCALE"


def _is_dimension_only(dataset: h5py.Dataset) -> bool:
    """Return whether the dataset, a dimension scale, is a dimension without a variable."""
    name = dataset.attrs.get("NAME", b"")
    return bytes(name).startswith(NO_VARIABLE.encode()) if isinstance(name, bytes) else False


class UserAttributes(Mapping[str, Any]):
    """Attributes of a dataset without those of the storage; arrays of one number as that number.

    They are read when one that exists is asked for: they take longer than all else of a file from which a few of many
    variables are read.
    """

    def __init__(self, dataset: h5py.Dataset) -> None:
        self._dataset = dataset

    @cached_property
    def _values(self) -> dict[str, Any]:
        stored = attributes(self._dataset, most=None)
        return {key: _single(value) for key, value in stored.items() if key not in INTERNAL_ATTRIBUTES}

    def __getitem__(self, key: str) -> Any:
        if "_values" in vars(self) or key in NAMES_OF_CODES or has_attribute(self._dataset, key.encode()):
            return self._values[key]
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _single(value: Any) -> Any:
    """Return the number or text of an array of one, and any other value as it is."""
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.names is None:
        return value.reshape(-1)[0]
    return value[0] if isinstance(value, list) and len(value) == 1 else value


class _AxisNames:
    """Names of the axes of datasets: their dimension scales, or names by length for axes without one."""

    def __init__(self, scales: Mapping[str, h5py.Dataset]) -> None:
        self._scales = scales
        self._by_number = {
            int(scale.attrs["_Netcdf4Dimid"]): name for name, scale in scales.items() if "_Netcdf4Dimid" in scale.attrs
        }
        self._by_address = {_address(scale.id): name for name, scale in scales.items()}
        self._phony: dict[tuple[int, int], str] = {}

    def of(self, name: str, dataset: h5py.Dataset) -> tuple[str, ...]:
        """Return the dimensions of a dataset."""
        numbers = dataset.attrs["_Netcdf4Coordinates"] if has_attribute(dataset, MARKS[1]) else None
        if numbers is not None and all(int(number) in self._by_number for number in numbers):
            return tuple(self._by_number[int(number)] for number in numbers)
        names = [name] if name in self._scales else self._attached(dataset)
        unnamed: list[int] = []
        for axis, length in enumerate(dataset.shape or ()):
            if axis >= len(names):
                names.append("")
            if not names[axis]:
                unnamed.append(length)
                names[axis] = self._phony_name(length, unnamed.count(length))
        return tuple(names)

    def _attached(self, dataset: h5py.Dataset) -> list[str]:
        """Return the names of the scales of the dataset's axes; an empty name for an axis without one."""
        try:
            lists = dataset.attrs.get("DIMENSION_LIST", [])
            return [self._by_address.get(_target(dataset, refs[0]), "") if len(refs) else "" for refs in lists]
        except HDF5_ERRORS:
            return []  # the numbers are intact with a damaged list of scales

    def _phony_name(self, length: int, occurrence: int) -> str:
        """Return the name that netCDF gives to an axis without scale, equal for axes of equal length."""
        return self._phony.setdefault((length, occurrence), f"phony_dim_{len(self._phony)}")

    def lengths(self, variables: list[Hdf5Variable]) -> dict[str, int]:
        """Return the length of each dimension, the largest of all variables: unlimited ones may differ in length."""
        lengths = {name: int(scale.shape[0]) if scale.shape else 0 for name, scale in self._scales.items()}
        for variable in variables:
            for name, length in zip(variable.dimensions, variable.shape, strict=True):
                lengths[name] = max(lengths.get(name, 0), length)
        return lengths


def _address(dataset: h5py.h5d.DatasetID) -> tuple[int, int]:
    """Return the address of an object in its file. To find its name, HDF5 would search the whole file."""
    return h5py.h5g.get_objinfo(dataset, b".").objno  # type: ignore[no-any-return]


def _target(dataset: h5py.Dataset, reference: h5py.Reference) -> tuple[int, int]:
    """Return the address of the object that a reference in the dataset's file points to."""
    return _address(h5py.h5r.dereference(reference, dataset.id))


@dataclass(frozen=True)
class Hdf5Variable(Variable):
    """Variable in a dataset, whose shape may be less: along unlimited dimensions the rest is fill."""

    path: str
    dataset: h5py.Dataset

    def stored_rows(self, axis: int) -> tuple[Field, Layout]:
        name = self.dataset.name.strip("/")
        field, layout = dataset_rows(self.dataset, self.path, name, dict(self.attributes), axis=axis)
        if isinstance(layout, Chunked) and self._is_unwritten():
            layout = replace(layout, fill=self._fill_value())
        shape = self.shape[:axis] + self.shape[axis + 1 :] + field.shape[len(self.shape) - 1 :]
        return replace(field, name=self.name, shape=shape), self._extended(layout, axis)

    def values(self) -> Array:
        if self._is_unwritten():
            return np.full(self.shape, self._fill_value(), self.dtype)
        stored = all_values(self.dataset, self.path)
        if self.dataset.shape == self.shape:
            return stored
        check_fits(self.nbytes, "the variable", file=self.path, field=self.name, remedy="restore the file")
        fill = b"" if self.dtype.hasobject else fill_value(self.dataset, self.dtype, ())
        if self.dataset.chunks is None or fill is None or self._is_never_filled():
            raise self._shorter()
        values = np.full(self.shape, fill, self.dtype)
        values[tuple(map(slice, stored.shape))] = stored
        return values

    def _is_unwritten(self) -> bool:
        """Return whether HDF5 has neither storage nor a fill value (``NC_NOFILL``), so that netCDF shows its own."""
        status, fill = self.dataset.id.get_space_status(), self.dataset.id.get_create_plist().fill_value_defined()
        if status != h5py.h5d.SPACE_STATUS_NOT_ALLOCATED or fill == h5py.h5d.FILL_VALUE_USER_DEFINED:
            return False
        return self._is_never_filled() and self.dtype.str[1:] in DEFAULT_FILL  # h5py's default is zeros

    def _is_never_filled(self) -> bool:
        """Return whether the rest of a chunk that is not full has any content, as with ``NC_NOFILL``."""
        never: int = h5py.h5d.FILL_TIME_NEVER
        return bool(self.dataset.id.get_create_plist().get_fill_time() == never)

    def _fill_value(self) -> Any:
        return self.dtype.type(self.attributes.get("_FillValue", DEFAULT_FILL[self.dtype.str[1:]]))

    def _extended(self, layout: Layout, axis: int) -> Layout:
        """Return the layout of the rows along an axis with the shape of the variable: further elements are fill."""
        if self.dataset.shape == self.shape:
            return layout
        if isinstance(layout, Chunked) and not self._is_never_filled():
            longer = replace(layout, shape=(*axis_first(self.shape, axis), *layout.shape[len(self.shape) :]))
            if not len(layout.number):
                return longer
            grids = [[-(-n // c) for n, c in zip(one.shape, one.chunk_shape, strict=True)] for one in (layout, longer)]
            return replace(longer, number=np.ravel_multi_index(np.unravel_index(layout.number, grids[0]), grids[1]))
        raise self._shorter()

    def _shorter(self) -> FormatError:
        return FormatError(
            "the field is shorter than its dimensions",
            file=self.path,
            field=self.name,
            expected=f"the shape {self.shape}, or numbers in chunks that netCDF fills",
            found=f"the shape {self.dataset.shape}",
            remedy="name other fields with inputs=, and give static=False; or read it as plain HDF5 with format='hdf5'",
        )
