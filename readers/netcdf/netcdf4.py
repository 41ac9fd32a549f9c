"""The variables of netCDF-4 files: HDF5 datasets, whose axes are named by dimension scales.

https://docs.unidata.ucar.edu/netcdf-c/current/file_format_specifications.html (netCDF-4 format) says how dimensions,
and variables that share their names, are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import h5py
import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import FormatError
from matex_data.fields import Field
from matex_data.index.chunked import Chunked
from matex_data.index.library import LibraryRows, MemoryRows
from matex_data.index.model import Layout
from matex_data.index.strided import Strided
from matex_data.index.transposed import Transposed
from matex_data.readers.hdf5.names import FAILURES, dataset_names
from matex_data.readers.hdf5.reader import attributes, dataset_rows
from matex_data.readers.hdf5.rows import Hdf5Rows, open_file
from matex_data.readers.netcdf.cf import Meaning
from matex_data.readers.netcdf.variables import Content, Variable

NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable"
NO_COORDINATE = "_nc4_non_coord_"  # before the name of a variable that has the name of a dimension it does not have
ROOT_MARKS = (b"_NCProperties", b"_nc3_strict")
MARKS = (b"_Netcdf4Dimid", b"_Netcdf4Coordinates")
LOOKED_AT = 64  # objects of the root group, to tell whether the file is netCDF-4
INTERNAL = {
    "CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST", "DIMENSION_LABELS",
    "_Netcdf4Dimid", "_Netcdf4Coordinates", "_nc3_strict", "_NCProperties", "_NCCOPY",
}  # fmt: skip
"""Attributes that netCDF and the dimension scales of HDF5 need for themselves."""
FILL = {
    "i1": -127, "i2": -32767, "i4": -2147483647, "i8": -9223372036854775806,
    "u1": 255, "u2": 65535, "u4": 4294967295, "u8": 18446744073709551614,
    "f4": 9.969209968386869e36, "f8": 9.969209968386869e36,
}  # fmt: skip
"""What netCDF shows where nothing was written."""


def is_netcdf4(path: str) -> bool:
    """Whether an HDF5 file was written as netCDF-4; False where it cannot be opened.

    The library marks the root group (``_NCProperties``, since 4.4.1), variables and dimensions. A dimension scale alone
    says nothing: plain HDF5 files have them, too.
    """
    try:
        with open_file(path) as file:
            return any(h5py.h5a.exists(file.id, mark) for mark in ROOT_MARKS) or _has_marked_dataset(file.id)
    except FAILURES:
        return False


def _has_marked_dataset(group: h5py.h5g.GroupID) -> bool:
    """Whether one of the first datasets of a group is a variable or a dimension of netCDF."""
    for link in _first_links(group):
        if h5py.h5g.get_objinfo(group, link, follow_link=False).type == h5py.h5g.DATASET:
            found = h5py.h5d.open(group, link)
            if any(h5py.h5a.exists(found, mark) for mark in MARKS):
                return True
            if h5py.h5a.exists(found, b"NAME") and _is_bare(h5py.Dataset(found)):
                return True
    return False


def _first_links(group: h5py.h5g.GroupID) -> list[bytes]:
    links: list[bytes] = []

    def visit(name: bytes) -> int | None:
        links.append(name)
        return 1 if len(links) >= LOOKED_AT else None

    group.links.iterate(visit)
    return links


def content(file: h5py.File, path: str) -> Content:
    """What is in an HDF5 file, seen as netCDF.

    Raises
    ------
    FormatError : its objects cannot be listed.
    """
    found = {name: file[name] for name in dataset_names(file, path)}
    scales = {name: dataset for name, dataset in found.items() if dataset.attrs.get("CLASS") == b"DIMENSION_SCALE"}
    axes = _Axes(scales)
    variables = [
        Hdf5Variable(
            name=_shown(name),
            dimensions=axes.of(name, dataset),
            shape=dataset.shape,
            dtype=dataset.dtype,
            attributes=_visible(dataset),
            path=path,
            dataset=dataset,
        )
        for name, dataset in found.items()
        if dataset.shape is not None and not _is_bare(dataset)
    ]
    lengths = axes.lengths(variables)
    unlimited = [name for name, scale in scales.items() if scale.maxshape and scale.maxshape[0] is None]
    return Content(path, [replace(v, lengths=lengths) for v in variables], lengths, unlimited)


def _shown(name: str) -> str:
    group, slash, last = name.rpartition("/")
    return group + slash + last.removeprefix(NO_COORDINATE)


def _is_bare(dataset: h5py.Dataset) -> bool:
    """Whether it is a dimension without a variable."""
    name = dataset.attrs.get("NAME", b"") if dataset.attrs.get("CLASS") == b"DIMENSION_SCALE" else b""
    return bytes(name).startswith(NO_VARIABLE.encode()) if isinstance(name, bytes) else False


def _visible(dataset: h5py.Dataset) -> dict[str, Any]:
    """The attributes that the user wrote; arrays of one number as that number."""
    shown = {key: value for key, value in attributes(dataset).items() if key not in INTERNAL}
    for key, value in shown.items():
        if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.names is None:
            shown[key] = value.reshape(-1)[0]
        elif isinstance(value, list) and len(value) == 1:
            shown[key] = value[0]
    return shown


class _Axes:
    """Names the axes of datasets by their dimension scales, or by their lengths where they have none."""

    def __init__(self, scales: Mapping[str, h5py.Dataset]) -> None:
        self._scales = scales
        self._by_number = {
            int(scale.attrs["_Netcdf4Dimid"]): name for name, scale in scales.items() if "_Netcdf4Dimid" in scale.attrs
        }
        self._by_address = {_address(scale.id): name for name, scale in scales.items()}
        self._phony: dict[tuple[int, int], str] = {}

    def of(self, name: str, dataset: h5py.Dataset) -> tuple[str, ...]:
        """The dimensions of a dataset."""
        numbers = dataset.attrs.get("_Netcdf4Coordinates")
        if numbers is not None and all(int(number) in self._by_number for number in numbers):
            return tuple(self._by_number[int(number)] for number in numbers)
        names = [name] if name in self._scales else self._attached(dataset)
        unnamed: list[int] = []
        for axis, length in enumerate(dataset.shape or ()):
            if axis >= len(names):
                names.append("")
            if not names[axis]:
                unnamed.append(length)
                names[axis] = self._made_up(length, unnamed.count(length))
        return tuple(names)

    def _attached(self, dataset: h5py.Dataset) -> list[str]:
        """The names of the scales that the dataset's axes point to; empty where there is none."""
        try:
            lists = dataset.attrs.get("DIMENSION_LIST", [])
            return [self._by_address.get(_led_to(dataset, points[0]), "") if len(points) else "" for points in lists]
        except FAILURES:
            return []  # a damaged list of scales does no harm to the numbers

    def _made_up(self, length: int, occurrence: int) -> str:
        """The name that netCDF gives to an axis without one: the same for axes of equal length."""
        return self._phony.setdefault((length, occurrence), f"phony_dim_{len(self._phony)}")

    def lengths(self, variables: list[Hdf5Variable]) -> dict[str, int]:
        """Of each dimension: a variable over an unlimited one may have been written less far than others."""
        lengths = {name: int(scale.shape[0]) if scale.shape else 0 for name, scale in self._scales.items()}
        for variable in variables:
            for name, length in zip(variable.dimensions, variable.shape, strict=True):
                lengths[name] = max(lengths.get(name, 0), length)
        return lengths


def _address(found: h5py.h5d.DatasetID) -> tuple[int, int]:
    """Where an object is in its file; for the name of what a reference leads to HDF5 searches the whole file."""
    return h5py.h5g.get_objinfo(found, b".").objno  # type: ignore[no-any-return]


def _led_to(dataset: h5py.Dataset, reference: h5py.Reference) -> tuple[int, int]:
    """The address of the object that a reference in the dataset's file leads to."""
    return _address(h5py.h5r.dereference(reference, dataset.id))


@dataclass(frozen=True)
class Hdf5Variable(Variable):
    """A dataset of the open file ``path``; ``lengths`` are those of all dimensions."""

    path: str
    dataset: h5py.Dataset
    lengths: Mapping[str, int] = field(default_factory=dict)

    def rows(self, axis: int, meaning: Meaning) -> tuple[Field, Layout]:
        found, part = dataset_rows(self.dataset, self.path, self.dataset.name.strip("/"), self.attributes)
        if isinstance(part, Chunked) and self._unwritten():
            part = replace(part, fill=self._fill())
        part = _longer(_along(part, axis, self), self.lengths[self.dimensions[axis]], self)
        shape = (*self.shape, *found.shape[len(self.shape) - 1 :])
        shape = shape[:axis] + shape[axis + 1 :]
        if found.ragged or meaning.dtype.kind not in "iufbS":
            return replace(found, name=self.name, shape=shape, attributes=self.attributes), part
        if meaning.dtype.kind == "S":
            return _texts(Field(self.name, shape, found.dtype, attributes=self.attributes), part, meaning)
        decoded = Field(self.name, shape, meaning.dtype, attributes=meaning.attributes)
        return decoded, part if meaning.decoding is None else _decoded(part, meaning)

    def values(self) -> Array:
        if self._unwritten():
            return np.full(self.shape, self._fill(), self.dtype)
        return np.asarray(self.dataset[...])

    def _unwritten(self) -> bool:
        """Whether HDF5 has made no room for it yet, and netCDF shows its own fill value."""
        status = self.dataset.id.get_space_status()
        return status == h5py.h5d.SPACE_STATUS_NOT_ALLOCATED and self.dtype.str[1:] in FILL

    def _fill(self) -> Any:
        return self.dtype.type(self.attributes.get("_FillValue", FILL[self.dtype.str[1:]]))


def _decoded(part: Layout, meaning: Meaning) -> Layout:
    """The same rows, decoded."""
    if isinstance(part, Strided | Chunked | Transposed):
        return replace(part, convert=meaning.decoding)
    if isinstance(part, MemoryRows):
        return MemoryRows(meaning.of(part.values))
    return DecodedRows(part, meaning) if isinstance(part, LibraryRows) else part


@dataclass(frozen=True, eq=False)
class DecodedRows(LibraryRows):
    """Rows that a library reads, decoded after that."""

    source: LibraryRows
    meaning: Meaning

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.source.rows

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return self.source.block_rows

    def read(self, start: int, stop: int) -> Array:
        return self.meaning.of(self.source.read(start, stop))


def _along(part: Layout, axis: int, variable: Hdf5Variable) -> Layout:
    """The rows along another axis than the first."""
    if axis == 0:
        return part
    shape = variable.shape
    if isinstance(part, MemoryRows):
        return MemoryRows(np.ascontiguousarray(np.moveaxis(part.values, axis, 0)))
    if isinstance(part, Strided):
        inner = part.shape[len(shape) - 1 :]
        before, after = shape[:axis], (*shape[axis + 1 :], *inner)
        order = tuple(range(len(before) + len(after)))
        return Transposed(shape[axis], part.offset, before, after, part.stride, part.dtype, order)
    if isinstance(part, Hdf5Rows):
        return replace(part, rows=shape[axis], block_rows=(variable.dataset.chunks or shape)[axis], axis=axis)
    return _chunks_along(part, axis) if isinstance(part, Chunked) else part


def _chunks_along(part: Chunked, axis: int) -> Chunked:
    """The same chunks, numbered with another axis first."""
    grid = [-(-n // c) for n, c in zip(part.shape, part.chunk_shape, strict=True)]
    order = (axis, *(a for a in range(len(grid)) if a != axis))
    places = np.unravel_index(part.number, grid) if len(part.number) else tuple(part.number for _ in grid)
    number: Integers = np.zeros(len(part.number), np.int64)
    for a in order:
        number = number * grid[a] + places[a]
    ranked = np.argsort(number, kind="stable")
    return replace(
        part,
        shape=tuple(part.shape[a] for a in order),
        chunk_shape=tuple(part.chunk_shape[a] for a in order),
        number=number[ranked],
        offset=part.offset[ranked],
        nbytes=part.nbytes[ranked],
        mask=part.mask[ranked],
        axis=axis,
    )


def _longer(part: Layout, rows: int, variable: Hdf5Variable) -> Layout:
    """As many rows as the unlimited dimension has; those that were never written are the fill value."""
    if part.rows == rows:
        return part
    if isinstance(part, Chunked):
        return replace(part, shape=(rows, *part.shape[1:]))
    raise FormatError(
        "the field is shorter than its dimension",
        file=variable.path,
        field=variable.name,
        expected=f"{rows} rows",
        found=f"{part.rows} rows, and data that only the HDF5 library can read",
    )


def _texts(found: Field, part: Layout, meaning: Meaning) -> tuple[Field, Layout]:
    """Letters along the last axis as texts, where whole texts lie together."""
    dtype, length = meaning.dtype, meaning.dtype.itemsize
    if found.shape and found.shape[-1] == length and found.dtype.itemsize == 1 < length:
        shape = found.shape[:-1]
        texts = replace(found, shape=shape, dtype=dtype)
        if isinstance(part, Strided):
            return texts, replace(part, dtype=dtype, shape=shape)
        if isinstance(part, Chunked) and part.chunk_shape[-1] == length:
            return texts, replace(part, dtype=dtype, shape=part.shape[:-1], chunk_shape=part.chunk_shape[:-1], fill=b"")
        if isinstance(part, MemoryRows | LibraryRows):
            return texts, _decoded(part, meaning)
    return found, part
