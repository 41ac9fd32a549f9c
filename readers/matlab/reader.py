"""Index of MATLAB files of the versions 4 to 7, which SciPy decodes as a whole; version 7.3 is HDF5.

A variable is a data element: its type and its length in bytes, four each, and as many bytes. A compressed element holds
another one, and is inflated to the size that it declares.
Format: MAT-file level 4 and 5, https://www.mathworks.com/help/pdf_doc/matlab/matfile_format.pdf.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, Any

import numpy as np
import scipy.io
import scipy.sparse
from scipy.io.matlab import MatlabFunction, MatlabOpaque, MatReadWarning

from matex_data._types import Array
from matex_data.codecs.bounded import decompress
from matex_data.declared import declared
from matex_data.errors import RESTORE, DataError, DecodeError, FormatError
from matex_data.fields import Field, is_pattern
from matex_data.index.library import LibraryRows
from matex_data.index.model import Index
from matex_data.index.stamps import Stamp
from matex_data.index.whole import FILE, whole_file
from matex_data.machine import check_fits
from matex_data.readers.catalogue import Catalogue, Unreadable
from matex_data.readers.kept import BLOCK_BYTES, kept_file
from matex_data.readers.matlab.cells import cell_field, cell_rows, cell_shapes, has_cells
from matex_data.storage.files import open_whole, reading, undecodable
from matex_data.warning import ignore_warnings

HEADER = 128  # bytes of a file in front of its elements
TAG = 8  # bytes
ORDERS = {b"IM": "<", b"MI": ">"}  # what stands at the end of the header
UINT32, MATRIX, COMPRESSED = 6, 14, 15
TYPES = {1, 2, 3, 4, 5, 6, 7, 9, 12, 13, MATRIX, 16, 17, 18}  # of elements within a variable
FLAGS = 16  # bytes of the element with the flags, the first one of a variable
COMPLEX = 0x0800  # flag of an array with imaginary parts
HEADING = 3  # elements of an array in front of its content: flags, lengths of the axes, name
NUMBERS = {4: 1, 5: 3, **dict.fromkeys(range(6, 16), 1)}
"""Elements of content by the class of an array: of text, a sparse matrix, or numbers; without imaginary parts."""
HEAD = 4096  # bytes of a variable that have its name
OBJECTS = (MatlabFunction, MatlabOpaque)  # arrays of SciPy with members, which are no structures
REMEDY = "name the variables that you need with inputs= and targets=, or save the file as version 7.3"


def inflated(stored: IO[bytes], names: Collection[str]) -> IO[bytes]:
    """Return a file with some of the variables of another one, none of them compressed; version 4 as it is.

    Parameters
    ----------
    names : of the variables; empty: all.

    Raises
    ------
    PartitionError : the variables do not fit into memory.
    ValueError, struct.error, zlib.error : the file is damaged.
    """
    header = stored.read(HEADER)
    order = ORDERS.get(header[-2:], "")
    if len(header) < HEADER or not order:
        stored.seek(0)
        return stored
    content = io.BytesIO()
    content.write(header)
    while tag := stored.read(TAG):
        kind, nbytes = struct.unpack(f"{order}II", tag)
        data = np.frombuffer(stored.read(nbytes), np.uint8)
        if len(data) < nbytes:
            raise ValueError(f"an element of {nbytes} bytes, of which the file has {len(data)}")
        is_compressed = kind == COMPRESSED
        if is_compressed:
            head = zlib.decompressobj().decompress(data.data, HEAD)
            kind, nbytes = struct.unpack(f"{order}II", head[:TAG])
        else:
            head = tag + data[:HEAD].tobytes()
        if kind == MATRIX and names and _name(head, order) not in names:
            continue
        check_fits(content.tell() + nbytes, "the variables of the file", remedy=REMEDY)
        element = decompress("zlib", data, TAG + nbytes).data if is_compressed else tag + data.tobytes()
        _check_elements(element, order)
        content.write(element)
    content.seek(0)
    return content


def _check_elements(element: bytes | memoryview, order: str) -> None:
    """Raise ``ValueError`` unless an element consists of those that its arrays need, each of its length.

    SciPy, which reads one element behind the other and does not ask where an array ends, would crash.
    """
    pending: list[tuple[int, int, int | None]] = [(0, len(element), None)]
    while pending:
        at, end, numbers = pending.pop()
        count = 0
        while at < end:
            if at + TAG > end:
                raise ValueError(f"no element at byte {at} of its variable, where one is due")
            kind, nbytes = struct.unpack_from(f"{order}II", element, at)
            is_small = kind >> 16  # up to four bytes stand in the tag
            kind &= 0xFFFF
            if kind not in TYPES or (kind == MATRIX and numbers is not None):
                raise ValueError(f"an element of the type {kind}, at byte {at} of its variable")
            if kind == MATRIX and not is_small and nbytes:
                pending.append((at + TAG, at + TAG + nbytes, _numbers_of(element, at + TAG, order)))
            at += TAG if is_small else TAG + nbytes + -nbytes % TAG
            count += 1
        if at >= end + TAG or (numbers is not None and count < HEADING + numbers):
            raise ValueError(f"an array with fewer elements than it needs, which ends at byte {end} of its variable")


def _numbers_of(element: bytes | memoryview, at: int, order: str) -> int | None:
    """Return how many elements with numbers an array has, by its flags; None: it has other arrays."""
    kind, nbytes, flags = struct.unpack_from(f"{order}III", element, at)
    if (kind, nbytes) != (UINT32, FLAGS - TAG):
        raise ValueError(f"no flags at byte {at} of its variable, where an array begins")
    numbers = NUMBERS.get(flags & 0xFF)
    return numbers if numbers is None else numbers + bool(flags & COMPLEX)


def _name(head: bytes, order: str) -> str:
    """Return the name of a variable, of which the flags and the lengths of the axes stand in front."""
    at = TAG + FLAGS
    (axes,) = struct.unpack_from(f"{order}I", head, at + 4)
    at += TAG + axes + -axes % TAG
    kind, nbytes = struct.unpack_from(f"{order}II", head, at)
    small = kind >> 16  # up to four bytes stand in the tag
    return head[at + 4 : at + 4 + small].decode() if small else head[at + TAG : at + TAG + nbytes].decode()


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
    named = names is not None and not any(map(is_pattern, names))
    file = MatlabFile(
        path, stamp, sample_axis, tuple(sorted({n.partition("/")[0] for n in names or ()} if named else ()))
    )
    arrays, unread = file.contents()
    if named and not set(names or ()) <= {*arrays, *unread}:
        arrays, unread = replace(file, variables=()).contents()
    layouts = {name: _layout(file, name, array) for name, array in arrays.items()}
    entries = {name: (layout.field, partial(layouts.__getitem__, name)) for name, layout in layouts.items()}
    longer = [name for name, array in arrays.items() if len(array) > 1]
    numbers = {name for name, array in arrays.items() if array.shape == (1,) and not has_cells(array)}
    as_sample = partial(whole_file, path, single=numbers)
    listed, finish = (None, as_sample) if sample == FILE else (longer or None, None)
    return Catalogue.of(path, {**entries, **unread}, "variable", listed, finish).index(names)


def _layout(file: MatlabFile, name: str, array: Array) -> MatlabArray:
    if not has_cells(array):
        return MatlabArray(file, Field(name, array.shape[1:], array.dtype), len(array))
    field = cell_field(name, [cell.shape for cell in array], array[0].dtype)
    return MatlabArray(file, field, len(array), sum(cell.nbytes for cell in array) if field.ragged else 0)


@declared
@dataclass(frozen=True)
class MatlabFile:
    """MATLAB file, which SciPy decodes as a whole.

    Parameters
    ----------
    stamp : of the file when it was indexed.
    sample_axis : of its arrays.
    variables : that are decoded; (): all.
    """

    path: str
    stamp: Stamp
    sample_axis: int
    variables: tuple[str, ...] = ()

    def sources(self) -> Sequence[str]:
        return (self.path,)

    def arrays(self) -> dict[str, Array]:
        """Return the arrays by name, which are decoded unless they are kept."""
        return kept_file(self, lambda: self.contents()[0])

    def contents(self) -> tuple[dict[str, Array], dict[str, str]]:
        """Return the arrays with their sample axis first, and the reason for each variable that has none.

        Raises
        ------
        FormatError : SciPy does not decode the file.
        """
        try:
            ignore_warnings(MatReadWarning, message='Duplicate variable name "None"')  # of objects
            ignore_warnings(np.exceptions.ComplexWarning, r"scipy\.io\.", "Casting complex values")  # of ``typed``
            with open_whole(self.path) as stored:
                file = inflated(stored, self.variables)
                variables = scipy.io.loadmat(file, mat_dtype=False, variable_names=self.variables or None)
                compact = [name for name, value in variables.items() if any(map(_is_compact, _arrays(name, value)))]
                file.seek(0)
                typed = scipy.io.loadmat(file, mat_dtype=True, variable_names=compact) if compact else {}
        except DataError:
            raise
        except Exception as error:  # SciPy raises many kinds on damaged bytes
            remedy = f"{RESTORE}; if Octave has written it as text, save it there with save -v7"
            raise undecodable(
                FormatError, "the file cannot be read as MATLAB's", self.path, error, remedy=remedy
            ) from error
        arrays: dict[str, Array] = {}
        unread: dict[str, str] = {}
        for name, value in variables.items():
            if name.startswith("__"):
                continue
            if isinstance(value, MatlabOpaque):  # SciPy calls all of them "None", and gives the last one
                name = os.fsdecode(value["s0"].item())
            of_class = dict(_arrays(name, typed.get(name, value)))
            for inner, found in _arrays(name, value):
                try:
                    arrays[inner] = self._rows(_with_class(found, of_class[inner]))
                except Unreadable as reason:
                    unread[inner] = str(reason)
        return arrays, unread

    def _rows(self, value: Any) -> Array:
        if isinstance(value, OBJECTS):
            raise Unreadable("an object of MATLAB: save its values, such as char(x)")
        if scipy.sparse.issparse(value):
            raise Unreadable("a sparse matrix: save full(x)")
        if not isinstance(value, np.ndarray) or not value.size or not value.ndim:
            raise Unreadable("an empty array")
        if value.dtype.names is not None:
            raise Unreadable("an array of structures")
        if value.dtype.kind == "O" and _holds_arrays(value):
            return _cells(value)
        if value.dtype.kind in "OU":
            value = _texts(value)
        elif value.dtype.kind not in "biufc":
            raise Unreadable(f"values of the type {value.dtype}")
        if value.ndim == 2 and 1 in value.shape:
            return _native(value.reshape(-1))
        if not -value.ndim <= self.sample_axis < value.ndim:
            raise Unreadable(f"an array of {value.ndim} axes")
        return _native(np.ascontiguousarray(np.moveaxis(value, self.sample_axis, 0)))


@declared
@dataclass(frozen=True, eq=False)
class MatlabArray(LibraryRows):
    """Rows of an array of a file.

    Parameters
    ----------
    field : name, shape and dtype.
    nbytes : size of the elements of all ragged samples.
    """

    file: MatlabFile
    field: Field
    rows: int
    nbytes: int = 0

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        row_bytes = self.nbytes // max(1, self.rows) or self.field.row_bytes
        return max(1, min(self.rows, BLOCK_BYTES // max(1, row_bytes)))

    def inner_bytes(self) -> int:
        return self.nbytes

    def stored_bytes(self) -> int:
        return self.rows * self.field.row_bytes

    def read(self, start: int, stop: int) -> Array:
        array = self.file.arrays().get(self.field.name)
        of_cells = not self.field.ragged and array is not None and has_cells(array)
        kinds = set() if array is None else {(array.shape[1:], array.dtype)}
        if array is not None and of_cells:
            kinds = {(cell.shape, cell.dtype) for cell in array}
        if array is None or len(array) != self.rows or kinds != {(self.field.shape, self.field.array_dtype)}:
            remedy = "open the data set again"
            raise DecodeError("the file has changed", file=self.file.path, field=self.field.name, remedy=remedy)
        return np.stack(list(array[start:stop])) if of_cells else array[start:stop]


def _arrays(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the members of a structure by their names, and any other value as it is."""
    is_struct = isinstance(value, np.ndarray) and value.dtype.names is not None and not isinstance(value, OBJECTS)
    if is_struct and value.size == 1:
        for member in value.dtype.names:
            yield from _arrays(f"{name}/{member}", value.reshape(-1)[0][member])
    else:
        yield name, value


def _is_compact(named: tuple[str, Any]) -> bool:
    """Return whether an array may be stored in another type than that of its class: as integers, or in cells."""
    return isinstance(named[1], np.ndarray) and named[1].dtype.kind in "iuO"


def _with_class(stored: Any, typed: Any) -> Any:
    """Return an array in the type of its class; complex ones, of which SciPy converts a part alone, as they are."""
    if not isinstance(stored, np.ndarray) or stored.dtype.kind == "c":
        return stored
    if stored.dtype.kind != "O":
        return typed
    cells = np.empty(stored.shape, object)
    for at in np.ndindex(stored.shape):
        cells[at] = _with_class(stored[at], typed[at])
    return cells


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
        raise Unreadable(str(error)) from error
    dtype = np.result_type(*[cell.dtype.newbyteorder("=") for cell in cells])
    if dtype.kind in "fc" and any(cell.dtype.kind in "iu" and cell.dtype.itemsize == 8 for cell in cells):
        raise Unreadable("cells of integers of 64 bits beside others, of which no type has all numbers")
    return cell_rows(cells, shapes, dtype, dense=False)  # in another file they may differ


def _texts(value: Array) -> Array:
    """Return texts, or cells with one text each, as byte strings in UTF-8."""
    found = np.empty(value.size, object)
    for i, cell in enumerate(value.ravel().tolist()):
        if isinstance(cell, np.ndarray) and cell.dtype.kind == "U" and cell.size <= 1:
            cell = str(cell.reshape(-1)[0]) if cell.size else ""
        if not isinstance(cell, str):
            raise Unreadable("cells of other values than texts")
        found[i] = cell.encode()
    return found.reshape(value.shape)


def _native(array: Array) -> Array:
    return array.astype(array.dtype.newbyteorder("="), copy=False)
