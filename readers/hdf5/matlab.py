"""Arrays of MATLAB 7.3: HDF5 datasets whose axes are in the opposite order, so that samples lie along the last one.

MATLAB marks each array by the attribute ``MATLAB_class``. An m x n matrix is stored as a dataset of shape (n, m), and
the first dimension of MATLAB, along which samples lie by default, is the last axis of HDF5. Characters are units of
UTF-16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import h5py
import numpy as np

from matex_data._types import Array
from matex_data.declared import declared
from matex_data.errors import DecodeError, FormatError
from matex_data.fields import Field
from matex_data.index.cache import ChunkCache
from matex_data.index.chunked import Chunked
from matex_data.index.combined import Converted
from matex_data.index.library import MemoryRows
from matex_data.index.model import Layout, ReadRequest, RowSelection
from matex_data.index.strided import Strided, Transposed
from matex_data.readers.decoding import DecodedLibraryRows
from matex_data.readers.hdf5.members import MATLAB_CLASS
from matex_data.readers.hdf5.names import has_attribute, reported, text_of
from matex_data.readers.hdf5.rows import DatasetRows, Hdf5Rows, ItemRows
from matex_data.readers.matlab.cells import cell_field, cell_shapes

HEADER_BYTES = 512  # text of MATLAB in front of the HDF5 file
CELL_ROWS = 256  # of a block of a cell array, whose elements lie in no order
INTERNAL_GROUPS = ("#refs#/", "#subsystem#/")  # contents of cells, and of objects
NUMBERS = {"double", "single", "logical", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}
ENCODINGS = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}  # of characters by their size in bytes
REMEDY = "save numbers, char arrays, or cell arrays of these as texts, for example with cellstr() or double()"


def is_matlab(dataset: h5py.Dataset) -> bool:
    """Return whether MATLAB wrote the dataset, as an array or as the contents of one."""
    if has_attribute(dataset, MATLAB_CLASS):
        return True
    is_file = dataset.file.userblock_size >= HEADER_BYTES
    return bool(is_file and has_attribute(dataset.parent, MATLAB_CLASS))


def is_single_value(dataset: h5py.Dataset) -> bool:
    """Return whether the array is one number or one text, as opposed to one for each of several samples."""
    kind, shape = _class(dataset), dataset.shape
    return bool(kind) and shape[-1] == 1 and (kind == "char" or set(shape) == {1})


def matlab_axis(dataset: h5py.Dataset, axis: int) -> int:
    """Return the axis of a dataset that MATLAB shows as another one, since it counts from the opposite end.

    Texts and cells lie along MATLAB's first axis. A vector has its numbers along the first axis, or else as they lie.
    """
    if _class(dataset) not in NUMBERS or not axis or has_attribute(dataset, b"MATLAB_empty"):
        return -1
    if dataset.ndim == 2 and 1 in dataset.shape:
        return int(np.argmax(dataset.shape))
    return -1 - axis


def matlab_rows(dataset: h5py.Dataset, path: str, field: Field, layout: Layout) -> tuple[Field, Layout]:
    """Return field and layout of rows with the other axes in MATLAB's order.

    Parameters
    ----------
    dataset : marked by MATLAB.
    field, layout : of the rows along an axis of the dataset.

    Raises
    ------
    FormatError : the dataset is empty, or belongs to an object, a sparse matrix or another array without rows.
    """
    kind = _class(dataset)
    if has_attribute(dataset, b"MATLAB_empty") and dataset.attrs["MATLAB_empty"]:
        raise FormatError("the MATLAB array is empty", file=path, field=field.name, found=f"size {_sizes(dataset)}")
    is_object = has_attribute(dataset, b"MATLAB_object_decode")
    if kind == "cell" and not is_object:
        return _cells(dataset, path, field)
    if kind == "char":
        return _texts(dataset, path, field, layout)
    if kind not in NUMBERS or is_object:
        raise _class_error(dataset, path, field.name, kind)
    has_bytes = isinstance(layout, Chunked | Strided | Transposed | MemoryRows)
    complex_type = _complex_type(field.dtype) if has_bytes else None
    if complex_type is not None:
        layout = _with_type(layout, complex_type)
    dtype = complex_type or (np.dtype(bool) if kind == "logical" else field.dtype)
    column = field.shape == (1,)
    shape = () if column else field.shape[::-1]
    return replace(field, shape=shape, dtype=dtype), MatlabRows(layout, column)


def _class(dataset: h5py.Dataset) -> str:
    """Return MATLAB's class of an array; an empty text for a dataset that is no array by itself."""
    return text_of(dataset.attrs.get("MATLAB_class", b""))


def _sizes(dataset: h5py.Dataset) -> str:
    return " x ".join(str(n) for n in np.ravel(dataset[...]).tolist())


def _class_error(dataset: h5py.Dataset, path: str, name: str, kind: str) -> FormatError:
    is_sparse = has_attribute(dataset.parent, b"MATLAB_sparse")
    found = "a sparse matrix" if is_sparse else f"class {kind!r}" if kind else "an element of a struct array"
    expected = "an array of numbers, logicals or characters, or a cell array of texts"
    return FormatError(
        "there are no rows in this MATLAB object", file=path, field=name, expected=expected, found=found, remedy=REMEDY
    )


def _complex_type(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return the complex dtype with the same bytes as a record of real and imaginary part; None for other dtypes."""
    if dtype.names != ("real", "imag") or dtype["real"] != dtype["imag"] or dtype["real"].kind != "f":
        return None
    real = dtype["real"]
    return np.dtype(f"c{2 * real.itemsize}") if real.isnative and dtype.itemsize == 2 * real.itemsize else None


def _with_type(layout: Layout, dtype: np.dtype[Any]) -> Layout:
    """Return the layout with elements of a dtype of the same bytes."""
    if isinstance(layout, Chunked):
        return replace(layout, dtype=dtype, fill=np.asarray(layout.fill).view(dtype)[()])
    if isinstance(layout, MemoryRows):
        return MemoryRows(np.ascontiguousarray(layout.values).view(dtype))
    return replace(layout, dtype=dtype) if isinstance(layout, Strided | Transposed) else layout


@declared
@dataclass(frozen=True)
class MatlabRows(Converted):
    """Rows whose axes are in MATLAB's order.

    Parameters
    ----------
    layout : of the rows with their axes in the order of the file.
    column : of a column vector, whose rows are single numbers.
    """

    column: bool

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        stored = out[:, None] if self.column else out.transpose(0, *range(out.ndim - 1, 0, -1))
        return self.layout.requests(rows, stored, cache)


def _texts(dataset: h5py.Dataset, path: str, field: Field, layout: Layout) -> tuple[Field, Layout]:
    """Return a char matrix as texts, a row of MATLAB each, with the blanks at their ends."""
    if dataset.ndim != 2 or field.dtype.kind != "u":
        raise _class_error(dataset, path, field.name, f"char of {dataset.ndim} dimensions")
    block = (dataset.chunks or dataset.shape)[1]
    source = Hdf5Rows(path, dataset.name, dataset.shape[1], block, field.dtype, axis=1)
    texts = DecodedLibraryRows(source, CharDecoder())
    return Field(field.name, (), np.dtype(object), attributes=field.attributes), texts


@declared
@dataclass(frozen=True)
class CharDecoder:
    """Decoder of characters to texts in UTF-8."""

    def decode(self, stored: Array) -> Array:
        """Return object[n], the text in each row of characters."""
        out = np.empty(len(stored), object)
        out[:] = [_text(row) for row in stored]
        return out


def _text(characters: Array) -> bytes:
    """Return characters, in the order of a text, in UTF-8."""
    little = characters.astype(characters.dtype.newbyteorder("<"), copy=False).tobytes()
    return little.decode(ENCODINGS[characters.dtype.itemsize], "surrogatepass").encode("utf-8", "surrogatepass")


def _cells(dataset: h5py.Dataset, path: str, field: Field) -> tuple[Field, Layout]:
    """Return the field of a cell array: arrays of numbers in a vector of cells, or texts."""
    references = dataset[...].ravel()
    first = dataset.file[references[0]]
    if dataset.ndim != 2 or 1 not in dataset.shape or _class(first) not in NUMBERS:
        return _texts_of_cell(dataset, path, field)
    problem = "the cell array has elements that are no samples of one field"
    with reported(problem, path, field.name, remedy=REMEDY):
        items = [_checked_cell(dataset.file[reference]) for reference in references]
        shapes = cell_shapes([_cell_shape(item) for item in items])
        dtype = np.result_type(*{_cell_dtype(item) for item in items})
    found = cell_field(field.name, shapes, dtype)
    found = replace(found, attributes={**field.attributes, **found.attributes})
    nbytes = sum(prod(shape) for shape in shapes) * dtype.itemsize
    kind = min(CELL_ROWS, len(items)), dtype, found.ragged, nbytes, len(shapes[0])
    return found, CellArrays(path, dataset.name, len(items), *kind)


def _checked_cell(item: Any) -> h5py.Dataset:
    """Return an array of numbers in a cell; raise ``TypeError`` if it is none."""
    kind = _class(item) if isinstance(item, h5py.Dataset) else "struct"
    if kind not in NUMBERS or item.is_virtual or item.id.get_create_plist().get_external_count():
        raise TypeError(f"an element of class {kind!r}, or in another file")
    if item.dtype.names is not None:
        raise TypeError("an element of complex numbers")
    return item


def _cell_shape(item: h5py.Dataset) -> tuple[int, ...]:
    is_empty = has_attribute(item, b"MATLAB_empty") and item.attrs["MATLAB_empty"]
    return tuple(int(n) for n in item[...].ravel()) if is_empty else tuple(item.shape[::-1])


def _cell_dtype(item: h5py.Dataset) -> np.dtype[Any]:
    kind = _class(item)
    if kind == "logical":
        return np.dtype(bool)
    return np.dtype({"double": "f8", "single": "f4"}.get(kind, kind))


@declared
@dataclass(frozen=True, eq=False)
class CellArrays(ItemRows):
    """Arrays of numbers in a vector of cells, whose name is that of the references to them.

    Parameters
    ----------
    axes : of a sample.
    """

    axes: int

    def items(self, start: int, stop: int) -> list[Array]:
        dataset = self.opened(self.name)
        flat = (0, slice(start, stop)) if dataset.shape[0] == 1 else (slice(start, stop), 0)
        return [self._array(_checked_cell(dataset.file[reference])) for reference in dataset[flat]]

    def _array(self, item: h5py.Dataset) -> Array:
        shape = _cell_shape(item)
        array = item[...].T if prod(shape) else np.empty(shape)
        return array.reshape(-1) if self.axes == 1 else array.reshape(shape)


def _texts_of_cell(dataset: h5py.Dataset, path: str, field: Field) -> tuple[Field, Layout]:
    column = field.shape == (1,)
    shape = () if column else field.shape[::-1]
    rows = CellRows(path, dataset.name, dataset.shape[-1], min(CELL_ROWS, dataset.shape[-1]), shape)
    try:
        rows.read(0, min(1, rows.rows))
    except DecodeError as error:
        raise FormatError(error.problem, file=path, field=field.name, found=error.found, remedy=REMEDY) from error
    return Field(field.name, shape, np.dtype(object), attributes=field.attributes), rows


@declared
@dataclass(frozen=True, eq=False)
class CellRows(DatasetRows):
    """Texts of a cell array, whose elements are datasets of their own; its name is that of the references to them.

    Parameters
    ----------
    shape : of a row in MATLAB's order.
    """

    shape: tuple[int, ...]
    problem = "the cell array has elements that are no texts"

    def take(self, start: int, stop: int) -> Array:
        dataset = self.opened(self.name)
        references = np.moveaxis(dataset[..., start:stop], -1, 0)
        ordered = references.transpose(0, *range(references.ndim - 1, 0, -1)).reshape(-1)
        texts = np.empty(len(ordered), object)
        texts[:] = [_text_of(dataset.file[reference]) for reference in ordered]
        return texts.reshape(stop - start, *self.shape)


def _text_of(item: Any) -> bytes:
    """Return the text that an element of a cell array is; raise ``TypeError`` if it is no text of one line."""
    kind = _class(item) if isinstance(item, h5py.Dataset) else "struct"
    if kind != "char":
        raise TypeError(f"an element of class {kind!r}")
    if item.is_virtual or item.id.get_create_plist().get_external_count():
        raise TypeError("a text in another file")
    if has_attribute(item, b"MATLAB_empty") and item.attrs["MATLAB_empty"]:
        return b""
    if item.ndim != 2 or item.shape[1] != 1:
        raise TypeError(f"a char array of size {' x '.join(map(str, item.shape[::-1]))}")
    return _text(item[:, 0])
