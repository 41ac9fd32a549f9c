"""Index of MATLAB files of the versions 4 to 7, which SciPy decodes as a whole; version 7.3 is HDF5.

Format: MAT-file level 4 and 5, https://www.mathworks.com/help/pdf_doc/matlab/matfile_format.pdf.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import scipy.io
import scipy.sparse

from matex_data._types import Array
from matex_data.declared import declared
from matex_data.errors import DataError, FormatError
from matex_data.fields import Schema, is_pattern
from matex_data.index.model import Index, Layout
from matex_data.index.stamps import Stamp
from matex_data.index.whole import FILE, whole_file
from matex_data.readers.catalogue import Catalogue
from matex_data.readers.decoded_files import DecodedFile, DecodedFileRows, rows_of
from matex_data.readers.matlab.cells import cell_field, cell_rows, cell_shapes
from matex_data.readers.matlab.elements import inflated
from matex_data.storage.files import is_of_system, open_whole, reading

RESTORE = "the file is damaged: restore it from its source"


def index(path: str, names: Sequence[str] | None = None, *, sample_axis: int = 0, sample: str | None = None) -> Index:
    """Index the arrays of a MATLAB file. One rank decodes it for their shapes; later, each rank decodes it once.

    Parameters
    ----------
    names : arrays, and those in structures as ``structure/member``. None: all but single numbers and texts.
    sample_axis : axis of the arrays along which the samples lie, as NumPy counts: -1 is the last one. Vectors, of one
        row or of one column, have a number for each sample.
    sample : "file": the arrays of a file are one sample, of whatever lengths, with single numbers and texts. None: a
        sample is a row along the axis.

    Raises
    ------
    FieldNotFound : there is no array of that name.
    FormatError : the file is damaged, or the arrays differ in their numbers of samples.
    """
    with reading(path):
        stamp = Stamp.of(path)
    some = names is not None and not any(map(is_pattern, names))
    file = MatlabFile(
        path, stamp, sample_axis, tuple(sorted({n.partition("/")[0] for n in names or ()} if some else ()))
    )
    arrays, unread = file.contents()
    if some and not set(names or ()) <= {*arrays, *unread}:
        arrays, unread = replace(file, variables=()).contents()
    layouts = {name: _layout(file, name, array) for name, array in arrays.items()}
    entries = {name: (layout.field, partial(layouts.__getitem__, name)) for name, layout in layouts.items()}
    several = [name for name, array in arrays.items() if len(array) > 1]

    def as_sample(fields: Schema, layouts: Mapping[str, Layout]) -> Index:
        return whole_file(path, fields, layouts, [name for name in fields if arrays[name].shape == (1,)])

    listed, finish = (None, as_sample) if sample == FILE else (several or None, None)
    return Catalogue.of(path, {**entries, **unread}, "variable", listed, finish).index(names)


def _layout(file: MatlabFile, name: str, array: Array) -> DecodedFileRows:
    if not array.dtype.hasobject or not isinstance(array[0], np.ndarray):
        return rows_of(file, name, array)
    field = cell_field(name, [cell.shape for cell in array], array[0].dtype)
    return DecodedFileRows(file, field, len(array), sum(cell.nbytes for cell in array))


@declared
@dataclass(frozen=True)
class MatlabFile(DecodedFile):
    """MATLAB file.

    Parameters
    ----------
    sample_axis : of its arrays.
    variables : that are decoded; (): all.
    """

    sample_axis: int
    variables: tuple[str, ...] = ()

    def decode(self) -> dict[str, Array]:
        return self.contents()[0]

    def contents(self) -> tuple[dict[str, Array], dict[str, str]]:
        """Return the arrays with their sample axis first, and the reason for each variable that has none.

        Raises
        ------
        FormatError : SciPy does not decode the file.
        """
        try:
            with open_whole(self.path) as stored:
                file = inflated(stored, self.variables)
                variables = scipy.io.loadmat(file, mat_dtype=False, variable_names=self.variables or None)
                file.seek(0)
                logical = {name for name, _, kind in scipy.io.whosmat(file) if kind == "logical"}
        except (MemoryError, DataError):
            raise
        except Exception as error:  # SciPy raises many kinds on damaged bytes
            if is_of_system(error):
                raise DataError("the file cannot be read", file=self.path, found=error) from error
            problem = "the file cannot be read as MATLAB's"
            raise FormatError(problem, file=self.path, found=error, remedy=RESTORE) from error
        arrays: dict[str, Array] = {}
        unread: dict[str, str] = {}
        for name, value in variables.items():
            if name.startswith("__"):
                continue
            for inner, found in _arrays(name, value):
                try:
                    array = self._rows(found)
                    arrays[inner] = array.astype(bool) if inner in logical else array
                except _NoRowsError as reason:
                    unread[inner] = str(reason)
        return arrays, unread

    def _rows(self, value: Any) -> Array:
        if scipy.sparse.issparse(value):
            raise _NoRowsError("a sparse matrix: save full(x)")
        if not isinstance(value, np.ndarray) or not value.size or not value.ndim:
            raise _NoRowsError("an empty array")
        if value.dtype.names is not None:
            raise _NoRowsError("an array of structures")
        if value.dtype.kind == "O" and _holds_arrays(value):
            return _cells(value)
        if value.dtype.kind in "OU":
            value = _texts(value)
        elif value.dtype.kind not in "biufc":
            raise _NoRowsError(f"values of the type {value.dtype}")
        if value.ndim == 2 and 1 in value.shape:
            return _native(value.reshape(-1))
        if not -value.ndim <= self.sample_axis < value.ndim:
            raise _NoRowsError(f"an array of {value.ndim} axes")
        return _native(np.ascontiguousarray(np.moveaxis(value, self.sample_axis, 0)))


class _NoRowsError(Exception):
    """Value that has no rows; the message says what it is."""


def _arrays(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the members of a structure by their names, and any other value as it is."""
    if isinstance(value, np.ndarray) and value.dtype.names is not None and value.size == 1:
        for member in value.dtype.names:
            yield from _arrays(f"{name}/{member}", value.reshape(-1)[0][member])
    else:
        yield name, value


def _holds_arrays(value: Array) -> bool:
    """Return whether a vector of cells has arrays of numbers alone."""
    cells = value.ravel().tolist()
    numeric = all(isinstance(cell, np.ndarray) and cell.dtype.kind in "biufc" for cell in cells)
    return numeric and value.ndim == 2 and 1 in value.shape


def _cells(value: Array) -> Array:
    cells = value.ravel().tolist()
    try:
        shapes = cell_shapes([cell.shape for cell in cells])
    except ValueError as error:
        raise _NoRowsError(str(error)) from error
    dtype = np.result_type(*[cell.dtype.newbyteorder("=") for cell in cells])
    return cell_rows(cells, shapes, dtype, len(set(shapes)) == 1)


def _texts(value: Array) -> Array:
    """Return texts, or cells with one text each, as byte strings in UTF-8."""
    found = np.empty(value.size, object)
    for i, cell in enumerate(value.ravel().tolist()):
        if isinstance(cell, np.ndarray) and cell.dtype.kind == "U" and cell.size <= 1:
            cell = str(cell.reshape(-1)[0]) if cell.size else ""
        if not isinstance(cell, str):
            raise _NoRowsError("cells of other values than texts")
        found[i] = cell.encode()
    return found.reshape(value.shape)


def _native(array: Array) -> Array:
    return array.astype(array.dtype.newbyteorder("="), copy=False)
