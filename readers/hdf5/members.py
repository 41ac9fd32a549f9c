"""Members of compound tables, and columns of matrices, as fields of their own: ``jets/pt`` of the table ``jets``.

A member keeps a constant distance from one record to the next, so its rows are byte ranges as those of a dataset are.
Members of one table are read together: the bytes of a record, or a chunk, once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import h5py
import numpy as np

from matex_data.errors import FieldNotFound, FormatError, near_matches
from matex_data.index.chunked import Chunked, ChunkedMembers, MemberPath, member
from matex_data.index.interleaved import InterleavedRecords, RecordField
from matex_data.index.library import MemoryRows
from matex_data.index.model import Layout
from matex_data.index.strided import c_strides
from matex_data.index.table import Column
from matex_data.readers.hdf5.chunks import begin_of, check_begin, chunked_layout, unwritten_layout
from matex_data.readers.hdf5.names import HDF5_ERRORS, find, has_attribute, object_of
from matex_data.readers.hdf5.types import element_type, read_elements, stored_type, unreadable_members

GAP_BYTES = 4096  # between members, or records, that are read rather than skipped: storage reads whole pages
MAX_COLUMNS = 1024  # of a matrix whose columns can be selected
MATLAB_CLASS = b"MATLAB_class"  # attribute of a matrix whose columns are rows of HDF5
COLUMN_NAMES = "properties"  # attribute with the names of a matrix's columns, in LHEH5 (arXiv:2309.13154)


@dataclass(frozen=True)
class Compound:
    """Dataset whose elements are records.

    Parameters
    ----------
    dataset : of a compound type, or a matrix whose columns count as members.
    columns : names of the columns of a matrix; None: a compound type.
    record : a compound type whose members are those of the table by other names, or elements of these; None: that of
        the dataset.
    """

    dataset: h5py.Dataset
    columns: tuple[str, ...] | None = None
    record: np.dtype[Any] | None = None

    @classmethod
    def of(cls, dataset: h5py.Dataset) -> Compound | None:
        """Return the table that a dataset is; None if it has no members."""
        if not dataset.shape or has_attribute(dataset, MATLAB_CLASS):
            return None
        dtype = element_type(dataset)
        if dtype.names is not None:
            return cls(dataset)
        if dataset.ndim == 2 and dataset.shape[1] <= MAX_COLUMNS and dtype.kind in "biufcS":
            return cls(dataset, column_names(dataset) or tuple(map(str, range(dataset.shape[1]))))
        return None

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of a record in memory."""
        if self.record is not None:
            return self.record
        dtype = element_type(self.dataset)
        return dtype if self.columns is None else np.dtype([(name, dtype) for name in self.columns])

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of the records in one row."""
        return () if self.columns is not None else tuple(self.dataset.shape[1:])

    def names(self) -> list[str]:
        """Return the names of all members that have no members themselves."""
        return leaf_names(self.dtype)

    def path(self, name: str) -> MemberPath | None:
        """Return the names that lead to a member, of which some may have a slash; None if there is no such member."""
        return _path(self.dtype, name.split("/"))


def column_names(dataset: h5py.Dataset) -> tuple[str, ...] | None:
    """Return the names of a matrix's columns that its attribute ``properties`` lists; None without such a list."""
    with suppress(*HDF5_ERRORS):
        if COLUMN_NAMES not in dataset.attrs or dataset.ndim != 2:
            return None
        values = np.atleast_1d(dataset.attrs[COLUMN_NAMES])
        names = tuple(v.decode() if isinstance(v, bytes) else str(v) for v in values.tolist())
        return names if len(set(names)) == dataset.shape[1] else None
    return None


def find_field(file: h5py.File, path: str, name: str) -> h5py.Dataset | tuple[Compound, MemberPath]:
    """Return the dataset of that name, or else the table that has such a member, and the path of the member.

    Raises
    ------
    FieldNotFound : there is no such dataset or member.
    FormatError : the object is no dataset, or cannot be opened.
    """
    found = object_of(file, name)
    if isinstance(found, h5py.Dataset):
        return found
    of_table = None if found is not None else _find_table(file, name)
    if of_table is None:
        return find(file, path, name)
    table, begin, rest = of_table
    member_path = table.path(rest)
    if member_path is not None:
        return table, member_path
    for unreadable, error in unreadable_members(table.dataset.id.get_type()):
        if rest == unreadable:
            raise member_error(path, name, error)
    names = [f"{begin}/{member_name}" for member_name in table.names()]
    problem = "the table has no such member" if table.columns is None else "the matrix has no such column"
    raise FieldNotFound(problem, file=path, field=name, expected=f"one of {near_matches(name, names)}")


def member_error(path: str, name: str, found: str) -> FormatError:
    """Return the error for a member for which h5py has no type."""
    remedy = "the other members of the table can be read; store this one as an integer or a float, such as seconds"
    return FormatError("the member has a type that h5py cannot read", file=path, field=name, found=found, remedy=remedy)


def _find_table(file: h5py.File, name: str) -> tuple[Compound, str, str] | None:
    """Return the table that a name of the form ``table/member`` begins with, its name, and that of the member.

    None if the name does not begin with that of a table.
    """
    words = name.split("/")
    for count in range(len(words) - 1, 0, -1):
        begin = "/".join(words[:count])
        found = object_of(file, begin) if begin else None
        if isinstance(found, h5py.Dataset):
            table = Compound.of(found)
            return None if table is None else (table, begin, "/".join(words[count:]))
        if found is not None:
            return None
    return None


def leaf_names(dtype: np.dtype[Any]) -> list[str]:
    """Return the names of all members of a dtype that have no members themselves.

    >>> leaf_names(np.dtype([("id", "i4"), ("p", [("x", "f4"), ("y", "f4")])]))
    ['id', 'p/x', 'p/y']
    """
    return ["/".join(path) for path in _leaves(dtype)]


def _leaves(dtype: np.dtype[Any]) -> Iterator[MemberPath]:
    for name in dtype.names or ():
        inner = dtype[name].base
        if inner.names is None:
            yield (name,)
        else:
            yield from ((name, *path) for path in _leaves(inner))


def _path(dtype: np.dtype[Any], words: list[str]) -> MemberPath | None:
    for count in range(len(words), 0, -1):
        name = "/".join(words[:count])
        if name in (dtype.names or ()):
            if count == len(words):
                return (name,)
            rest = _path(dtype[name].base, words[count:])
            if rest is not None:
                return (name, *rest)
    return None


def member_type(table: Compound, path: MemberPath) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype of a member, which may have a shape of its own, and the shape of a row without that shape."""
    dtype, shape = table.dtype, table.row_shape
    for name in path:
        if dtype.subdtype is not None:
            shape += dtype.shape
        dtype = dtype.base[name]
    return dtype, shape


def member_layouts(table: Compound, path: str, members: Mapping[str, MemberPath]) -> dict[str, Layout]:
    """Return layouts of byte ranges of the file ``path`` for the members that have them.

    Parameters
    ----------
    members : paths of the selected members, by the name of their field.
    """
    dataset = table.dataset
    record = _stored_record(table)
    if record is None:
        return {}
    readable = {name: inner for name, inner in members.items() if _has_bytes(record, table, inner)}
    if not readable:
        return {}
    storage = dataset.id.get_create_plist().get_layout()
    if storage == h5py.h5d.COMPACT:
        return {name: MemoryRows(read_column(table, inner)) for name, inner in readable.items()}
    offset = begin_of(dataset.id) if storage == h5py.h5d.CONTIGUOUS else None
    if offset is not None:
        check_begin(offset - dataset.file.userblock_size, "it begins")
        return dict(_contiguous(table, record, readable, offset))
    stored = record if table.columns is None else record[0]
    is_chunked = storage == h5py.h5d.CHUNKED
    rows = chunked_layout(dataset, path, stored) if is_chunked else unwritten_layout(dataset, stored)
    if rows is None:
        return {}
    if table.columns is None:
        records = ChunkedMembers(rows, readable)
        return {name: Column(records, name) for name in readable}
    return dict(_columns_of_chunks(table, rows, readable))


def _stored_record(table: Compound) -> np.dtype[Any] | None:
    """Return the dtype of a record in the file, with the members that NumPy has types for; None if there are none."""
    if table.record is not None:
        return table.record
    if element_type(table.dataset).hasobject:
        return None  # HDF5 reports the positions in memory, which differ from those in the file
    stored = stored_type(table.dataset.id.get_type())
    if table.columns is None or stored is None:
        return stored
    return np.dtype([(name, stored) for name in table.columns])


def _has_bytes(record: np.dtype[Any], table: Compound, path: MemberPath) -> bool:
    """Return whether the stored record has the member, with all members of its own."""
    for name in path:
        if name not in (record.base.names or ()):
            return False
        record = record.base[name]
    expected, _ = member_type(table, path)
    return list(_leaves(record.base)) == list(_leaves(expected.base))


def _record_field(record: np.dtype[Any], row_shape: tuple[int, ...], path: MemberPath) -> RecordField:
    offset, shape, strides = 0, row_shape, c_strides(row_shape, record.itemsize)
    for name in path:
        fields: Mapping[str, Any] = record.fields or {}
        record, begin = fields[name][:2]
        offset += begin
        while record.subdtype is not None:
            base, dims = record.subdtype
            shape, strides, record = shape + dims, strides + c_strides(dims, base.itemsize), base
    return RecordField(offset, record, shape, strides)


def _contiguous(
    table: Compound, record: np.dtype[Any], members: Mapping[str, MemberPath], offset: int
) -> Iterator[tuple[str, Layout]]:
    fields = {name: _record_field(record, table.row_shape, path) for name, path in members.items()}
    row_bytes = record.itemsize * int(np.prod(table.row_shape, dtype=np.int64))
    records = InterleavedRecords(table.dataset.shape[0], offset, row_bytes, fields, GAP_BYTES)
    return ((name, Column(records, name)) for name in members)


def _columns_of_chunks(
    table: Compound, rows: Chunked, members: Mapping[str, MemberPath]
) -> Iterator[tuple[str, Layout]]:
    """Yield columns of a matrix: those in the same chunks are decoded together."""
    columns, width = table.columns or (), rows.chunk_shape[1]
    cells = -(-rows.shape[1] // width)
    for cell in range(cells):
        own = {name: path for name, path in members.items() if columns.index(path[0]) // width == cell}
        if not own:
            continue
        names = [*columns[cell * width : (cell + 1) * width]]
        names += [f"{len(names) + i} beyond the edge" for i in range(width - len(names))]
        record = np.dtype([(name, rows.dtype) for name in names])
        stored = rows.number % cells == cell
        part = replace(
            rows,
            shape=rows.shape[:1],
            chunk_shape=rows.chunk_shape[:1],
            dtype=record,
            number=rows.number[stored] // cells,
            offset=rows.offset[stored],
            nbytes=rows.nbytes[stored],
            mask=rows.mask[stored],
            fill=np.full((), rows.fill, rows.dtype).repeat(width).view(record)[0],
        )
        records = ChunkedMembers(part, own)
        yield from ((name, Column(records, name)) for name in own)


def read_column(table: Compound, path: MemberPath) -> np.ndarray[Any, Any]:
    """Read a member through h5py: all rows of it."""
    dataset = table.dataset
    if table.columns is not None:
        return np.asarray(dataset[:, table.columns.index(path[0])])
    first: Any = [(path[0], element_type(dataset)[path[0]])]
    return np.ascontiguousarray(member(read_elements(dataset, 0, dataset.shape[0], np.dtype(first)), path))
