"""Index of HDF5 files: byte ranges of the rows of their datasets.

Contiguous and chunked datasets become byte ranges if NumPy has the stored type; h5py reads all other datasets. File
format: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from matex_data.errors import DataError, DecodeError, FormatError, truncated
from matex_data.fields import Field, expand_names, is_pattern
from matex_data.index.chunked import MemberPath, axis_first
from matex_data.index.library import MemoryRows
from matex_data.index.model import FileIndex, Index, Layout
from matex_data.index.strided import along_axis
from matex_data.index.subset import subset_rows
from matex_data.index.whole import FILE, GROUP, whole_file
from matex_data.readers.catalogue import shown, warn_of
from matex_data.readers.decoding import decode_layout
from matex_data.readers.hdf5.checks import all_values, check_filters, check_raw_files, check_sources
from matex_data.readers.hdf5.chunks import begin_of, check_begin, check_chunks, chunked_layout, unwritten_layout
from matex_data.readers.hdf5.files import OPEN_FOR_WRITING, open_file
from matex_data.readers.hdf5.frames import (
    DataFrames,
    FrameColumn,
    ListedTexts,
    PickledRows,
    is_hidden,
    is_pickled,
    is_pytables,
    text_encoding,
)
from matex_data.readers.hdf5.groups import index_groups
from matex_data.readers.hdf5.jagged import Layouts, Pairings
from matex_data.readers.hdf5.links import Links
from matex_data.readers.hdf5.matlab import INTERNAL_GROUPS, is_matlab, is_single_value, matlab_axis, matlab_rows
from matex_data.readers.hdf5.members import Compound, find_field, leaf_names, member_error, member_layouts, member_type
from matex_data.readers.hdf5.names import HDF5_ERRORS, dataset_names, object_of, reported, text_of
from matex_data.readers.hdf5.rows import Hdf5Rows
from matex_data.readers.hdf5.source_rows import source_layout
from matex_data.readers.hdf5.types import (
    REFERENCES,
    array_element,
    element_type,
    has_bytes_of,
    mislabelled,
    other_objects,
    read_first,
    unreadable_members,
)
from matex_data.storage.files import undecodable
from matex_data.storage.objects import is_url
from matex_data.storage.trust import Trust

BLOCK_BYTES = 256 * 1024  # per read through the library, about
PROBE_BYTES = 64 * 1024 * 1024  # largest chunk that is decoded as a check
PROBE_ROWS = 16  # samples of variable length whose mean length is measured
MAX_ATTRIBUTES = 64  # of a table, which are those of each of its members
MAX_ATTRIBUTE_BYTES = 1024
MEMBERS = "members"  # attribute of a table: the names by which its members are fields
UNEQUAL_LENGTHS = (
    'offsets={"hits": "n_hits"} divides the elements of lists; sample="group", if each group of the file is a sample'
)
NO_AXIS = "the field has no sample axis"
NO_SAMPLE_AXIS = "members of tables have their samples along the first axis, whatever sample_axis= says"


def index(
    path: str,
    names: Sequence[str] | None = None,
    offsets: Mapping[str, Any] | None = None,
    allow_missing_sources: bool = False,
    sample_axis: int = 0,
    sample: str | None = None,
    group: str | None = None,
    swmr: bool = False,
    trust: Trust | None = None,
) -> Index:
    """Index the rows of datasets of an HDF5 file along an axis.

    Parameters
    ----------
    names : datasets by their path in the file, for example ``"run1/images"``, members of compound tables, for example
        ``"jets/pt"``, or patterns of these, ``"jets/*"``. None: every dataset that has a first axis and can be read; a
        warning lists those that cannot. Scalars are left out, a dataset with more than one name is read once, and soft
        and external links are followed only if ``names`` has them, but numbered external links of a group, such as
        ``data_000001`` of an Eiger's master file, are one field, ``"entry/data/data"``.
    offsets : where samples of variable length begin. A key is the content: a dataset, a table, or a group of datasets.
        A value is the dataset of offsets or counts, ``"jets/offsets"``, which may say what it holds,
        ``("jets/n", "counts")``, or the datasets of first elements and counts. None: known conventions; {}: none.
    allow_missing_sources : samples of a virtual dataset whose source is missing have the fill value; False: they are an
        error.
    sample_axis : axis of the arrays along which the samples lie, as NumPy counts, of arrays of MATLAB in the order that
        MATLAB shows: -1 is the last one. Vectors, of one axis, have one number for each sample.
    sample : "file": the datasets of a file are one sample, of whatever lengths, with single numbers and texts.
        "group": a group is a sample, and the datasets that all of them have are the fields, as of molecules or of
        demonstrations. None: a sample is a row along ``sample_axis``.
    group : of ``sample="group"``, that whose groups are the samples. None: the one that has most groups.
    swmr : another program writes the file ("single writer, multiple readers" of HDF5), or has ended without closing it:
        the samples are those that all fields have as the file is opened, and the file may grow from then on. False: a
        file that is being written, and one that changes while it is read, are an error.
    trust : where bytes may come from beside the folder of the file.

    Raises
    ------
    DataError : the file leads to another one that is not trusted.
    FieldNotFound : there is no dataset of that name.
    FormatError : the file is damaged or no HDF5 file, a dataset cannot be read or has no rows, or offsets do not fit.
    """
    if group is not None and sample != GROUP:
        remedy = 'give sample="group" as well, or name its datasets with inputs=, such as inputs="run1/*"'
        raise FormatError(
            "group= has the samples of sample='group'", file=path, found=f"sample={sample!r}", remedy=remedy
        )
    if sample_axis and sample is not None:
        raise FormatError("sample_axis= has the samples of rows", file=path, found=f"sample={sample!r} as well")
    if offsets is not None and sample == GROUP:
        problem, remedy = "offsets= has no samples of groups", "leave it out: arrays of groups may differ in shape"
        raise FormatError(problem, file=path, expected="sample=None or 'file'", found="sample='group'", remedy=remedy)
    try:
        with open_file(path, trust, swmr=swmr) as file:
            if sample == GROUP:
                return index_groups(file, path, names, group)
            is_known = names is not None and all(name in file for name in names)
            links = Links({}, ()) if is_known else Links.of(file)
            pairings = Pairings.of(file, path, offsets)
            frames = DataFrames(file, path)
            contents = _Contents(file, path, pairings, frames, links, allow_missing_sources, sample_axis)
            if names is None:
                links.tell_others(path)
            chosen = contents.listed() if names is None else contents.expanded(names)
            single = _single_values(file, chosen) if sample == FILE else {}
            chosen = [name for name in chosen if name not in single]
            rows = contents.all(chosen) if names is None and (chosen or not single) else contents.named(chosen)
            rows = {**pairings.pair(rows, whole=names is None), **single}
    except DataError:
        raise
    except HDF5_ERRORS as error:
        raise _file_error(path, error) from error
    layouts = {name: layout for name, (_, layout) in rows.items()}
    fields = {name: field for name, (field, _) in rows.items()}
    if swmr and sample != FILE:
        complete = range(min(layout.rows for layout in layouts.values()))
        layouts = {name: subset_rows(layout, complete) for name, layout in layouts.items()}
    if sample == FILE:
        return whole_file(path, fields, layouts, single)
    try:
        return Index(fields, [FileIndex(path, next(iter(layouts.values())).rows, layouts)])
    except FormatError as error:
        raise error.add_remedy(UNEQUAL_LENGTHS) from None


@dataclass(frozen=True)
class _Contents:
    """Fields of an open file.

    Parameters
    ----------
    pairings, frames, links : what its datasets stand for.
    allow_missing, sample_axis : see `index`.
    """

    file: h5py.File
    path: str
    pairings: Pairings
    frames: DataFrames
    links: Links
    allow_missing: bool
    sample_axis: int

    def listed(self) -> list[str]:
        """Return the fields to read if none is asked for."""
        names = [name for name in dataset_names(self.file, self.path) if not name.startswith(INTERNAL_GROUPS)]
        if is_pytables(self.file):
            names = self.frames.listed([name for name in names if not is_hidden(name)])
        return [*self.pairings.listed(names), *self.links.series]

    def expanded(self, names: Sequence[str]) -> Sequence[str]:
        """Return the names with patterns replaced by datasets that match, or by members of tables if none does."""
        if not any(map(is_pattern, names)):
            return names
        datasets = self.listed()
        tables = dict(_tables(self.file, datasets))
        members = [f"{name}/{leaf}" for name, table in tables.items() for leaf in table.names()]
        expanded: list[str] = []
        unread: dict[str, FormatError] = {}
        for name in names:
            is_dataset = any(fnmatchcase(dataset, name) for dataset in datasets) or name in self.file
            expanded += expand_names([name], datasets if is_dataset else members, self.path)
            if not is_dataset:
                of_tables = [_unreadable_members(table.dataset, self.path, begin) for begin, table in tables.items()]
                unread |= {
                    key: error for errors in of_tables for key, error in errors.items() if fnmatchcase(key, name)
                }
        self._warn_of(unread)
        return list(dict.fromkeys(expanded))

    def all(self, names: Sequence[str]) -> Layouts:
        """Return those of these fields that can be read; warn of others that may hold samples."""
        unread: dict[str, FormatError] = {}
        rows = self.named(names, unread)
        if not rows:
            reasons = {name: NO_AXIS if error.problem == NO_AXIS else _reason(error) for name, error in unread.items()}
            found = shown(reasons) or "no dataset at all"
            expected = "a dataset with a sample axis"
            raise FormatError(
                "the file has no samples",
                file=self.path,
                expected=expected,
                found=found,
                remedy="say what a sample is: sample_axis=, offsets=, sample='group' or sample='file'",
            )
        self._warn_of({name: error for name, error in unread.items() if error.problem != NO_AXIS})
        return rows

    def named(self, names: Sequence[str], unread: dict[str, FormatError] | None = None) -> Layouts:
        """Return the fields of these names; errors of single fields go to ``unread``, or are raised without it."""
        found: Layouts = {}
        left_out: dict[str, FormatError] = {}
        tables: dict[tuple[str, bool], tuple[Compound, dict[str, MemberPath]]] = {}
        columns: dict[str, FrameColumn] = {}

        def of_link(dataset: h5py.Dataset, link: str) -> tuple[Field, Layout]:
            return dataset_rows(dataset, self.path, link, allow_missing=self.allow_missing)

        for name in names:
            try:
                if name.strip("/") in self.links.series:
                    field, layout = self.links.rows(self.file, self.path, name.strip("/"), of_link, _byte_ranges)
                    found[name] = replace(field, name=name), layout
                    continue
                column, stored = self.frames.find(name), self.pairings.dataset_name(name)
                if column is not None:
                    columns[name] = column
                    item: Any = column.table if column.member is None else (column.table, (column.member,))
                else:
                    item = find_field(self.file, self.path, stored)
                if isinstance(item, Compound):
                    found[name] = _whole_column(item.dataset, self.path, name, columns[name])
                elif isinstance(item, h5py.Dataset):
                    field, layout = self._rows(item, stored, whole=unread is not None)
                    known = {**field.attributes, **self._names_of_codes(stored)}
                    found[name] = replace(field, name=name, attributes=known), layout
                    left_out |= _unreadable_members(item, self.path, name)
                else:
                    table, member_path = item
                    if self.sample_axis and table.dataset.ndim > 1:
                        expected = "a table of one axis, or the whole table"
                        raise FormatError(NO_SAMPLE_AXIS, file=self.path, field=name, expected=expected)
                    tables.setdefault((table.dataset.name, name in columns), (table, {}))[1][name] = member_path
            except FormatError as error:
                if unread is None:
                    raise
                unread[name] = error
        for table, members in tables.values():
            try:
                found |= member_rows(table, self.path, members, self.allow_missing)
            except FormatError as error:
                if unread is None:
                    raise
                unread |= dict.fromkeys(members, error)
        for name, column in columns.items():
            if name in found:
                field, layout = found[name]
                found[name] = (column.of_field(field), layout)
        if unread is None:
            self._warn_of(left_out)
        else:
            unread |= left_out
        return {name: found[name] for name in names if name in found}

    def _rows(self, dataset: h5py.Dataset, name: str, whole: bool) -> tuple[Field, Layout]:
        """Return the field and the layout of a dataset, of an array of MATLAB in its order of axes. ``whole``: all
        fields of the file are read: references, and single numbers and texts of MATLAB are left out.
        """
        path, of_matlab = self.path, is_matlab(dataset)
        axis = matlab_axis(dataset, self.sample_axis) if of_matlab else self.sample_axis if dataset.ndim > 1 else 0
        field, layout = dataset_rows(dataset, path, name, allow_missing=self.allow_missing, axis=axis)
        if is_pickled(dataset):
            raise FormatError(
                "the dataset holds pickled objects",
                file=path,
                field=name,
                expected="numbers or texts",
                remedy="write numbers or texts in place of them, or leave it out with inputs= and targets=",
            )
        if whole and not of_matlab and field.attributes.get("type") == REFERENCES:
            problem = f"the dataset holds {REFERENCES}, which h5py follows"
            raise FormatError(problem, file=path, field=name, expected="numbers or texts")
        encoding = text_encoding(dataset) if field.ragged and not field.shape else None
        if encoding is not None:
            texts = Field(name, (), np.dtype(object), attributes=field.attributes)
            return texts, decode_layout(layout, None, ListedTexts(encoding))
        if not of_matlab:
            return field, layout
        if whole and is_single_value(dataset):
            raise _axis_error(dataset, path, name)
        with reported("the MATLAB array cannot be read", path, name):
            return matlab_rows(dataset, path, field, layout)

    def _names_of_codes(self, name: str) -> dict[str, Any]:
        """Return what AnnData keeps beside codes as the attribute of an enumeration; of other datasets nothing."""
        group, _, last = name.rpartition("/")
        if last != "codes" or text_of(self.file[group or "/"].attrs.get("encoding-type", "")) != "categorical":
            return {}
        names = all_values(self.file[f"{group}/categories"], self.path).tolist()
        return {"enum": {n.decode() if isinstance(n, bytes) else str(n): code for code, n in enumerate(names)}}

    def _warn_of(self, unread: Mapping[str, FormatError]) -> None:
        """Warn of datasets and members that may hold samples and cannot be read."""
        warn_of(self.path, {name: _reason(error) for name, error in unread.items()})


def _reason(error: FormatError) -> str:
    facts = {"expected": error.expected, "found": error.found, "remedy": error.remedy}
    return "; ".join([error.problem, *(f"{key}: {fact}" for key, fact in facts.items() if fact is not None)])


def _tables(file: h5py.File, names: Sequence[str]) -> Iterator[tuple[str, Compound]]:
    """Yield the compound tables among the named objects, with their names."""
    for name in names:
        dataset = object_of(file, name)
        with suppress(*HDF5_ERRORS):
            if isinstance(dataset, h5py.Dataset) and element_type(dataset).names is not None:
                yield name, Compound(dataset)


def _whole_column(dataset: h5py.Dataset, path: str, name: str, column: FrameColumn) -> tuple[Field, Layout]:
    """Return the field and the layout of a column of a data frame with a dataset of its own."""
    if column.pickled is None:
        stored, layout = dataset_rows(dataset, path, dataset.name)
        return replace(stored, name=name), layout
    rows = PickledRows(path, dataset.name, column.rows, column.pickled)
    try:
        rows.read(0, rows.rows)
    except DecodeError as error:
        raise FormatError(error.problem, file=path, field=name, expected="texts", found=error.found) from error
    return Field(name, (), np.dtype(object)), rows


def _unreadable_members(dataset: h5py.Dataset, path: str, name: str) -> dict[str, FormatError]:
    members = {f"{name}/{member_name}": found for member_name, found in unreadable_members(dataset.id.get_type())}
    return {member_name: member_error(path, member_name, found) for member_name, found in members.items()}


def _single_values(file: h5py.File, names: Sequence[str]) -> Layouts:
    """Return the datasets among the names that are one number or one text, as a row each."""
    found: Layouts = {}
    for name in names:
        dataset = file.get(name)
        if not isinstance(dataset, h5py.Dataset) or dataset.shape != ():
            continue
        stored, item, ragged = array_element(element_type(file[name]))
        if not ragged and not item and (stored.kind in "biufcS" or h5py.check_string_dtype(dataset.dtype)):
            value = np.asarray([dataset[()]], object if stored.hasobject else stored.newbyteorder("="))
            found[name] = Field(name, (), value.dtype, attributes=attributes(dataset)), MemoryRows(value)
    return found


def dataset_rows(
    dataset: h5py.Dataset,
    path: str,
    name: str,
    field_attributes: Mapping[str, Any] | None = None,
    allow_missing: bool = False,
    axis: int = 0,
) -> tuple[Field, Layout]:
    """Return the field and the layout of the rows of a dataset of the open file ``path`` along an axis.

    Parameters
    ----------
    field_attributes : attributes of the field; None: those of the dataset.
    allow_missing : sources of a virtual dataset that do not exist hold the fill value; False: they are an error.
    axis : along which the rows lie; -1: the last one. The library reads virtual datasets but along the first one.

    Raises
    ------
    FormatError : the dataset has no axis, or cannot be read.
    """
    with reported("the dataset cannot be read", path, name):
        if not dataset.shape:
            raise _axis_error(dataset, path, name)
        if not -dataset.ndim <= axis < dataset.ndim:
            problem, found = "the dataset has too few axes for sample_axis=", f"shape {dataset.shape}"
            raise FormatError(problem, file=path, field=name, found=found)
        axis %= dataset.ndim
        memory = element_type(dataset)
        stored, item, ragged = array_element(memory)
        native = stored if stored.names is not None else np.dtype(stored.newbyteorder("=").str)
        if field_attributes is None:
            field_attributes = attributes(dataset)
            if memory.names is not None:
                leaves = Compound(dataset).names()
                field_attributes = {**field_attributes, MEMBERS: [f"{name}/{leaf}" for leaf in leaves]}
        objects = other_objects(memory)
        if objects is not None:
            field_attributes = {**field_attributes, "nested": True, "type": objects}
        field = Field(name, (*axis_first(dataset.shape, axis)[1:], *item), native, ragged, field_attributes)
        partial = any(unreadable_members(dataset.id.get_type()))
        layout = None if partial else _byte_ranges(dataset, path, name, axis)
        if layout is None:
            layout = replace(_library_rows(dataset, path, name, field, allow_missing, axis), partial=partial)
        return field, layout


def member_rows(table: Compound, path: str, members: Mapping[str, MemberPath], allow_missing: bool = False) -> Layouts:
    """Return field and layout of members of a table of the open file ``path``, read together where that is possible.

    Parameters
    ----------
    members : paths of the members, by the name of their field.
    allow_missing : as of `dataset_rows`.

    Raises
    ------
    FormatError : the table cannot be read.
    """
    dataset, first = table.dataset, next(iter(members))
    with reported("the table cannot be read", path, first):
        fields = {name: _member_field(table, name, member_path) for name, member_path in members.items()}
        outside = dataset.is_virtual or dataset.id.get_create_plist().get_external_count()
        layouts = member_layouts(table, path, members) if not outside and _is_in(path, dataset) else {}
        for name, layout in layouts.items():
            _check_end(layout, dataset, path, name)
        for name in members.keys() - layouts.keys():
            layouts[name] = _library_rows(
                dataset, path, name, fields[name], allow_missing, table=table, member_path=members[name]
            )
    return {name: (fields[name], layouts[name]) for name in members}


def _member_field(table: Compound, name: str, member_path: MemberPath) -> Field:
    dtype, shape = member_type(table, member_path)
    stored, item, ragged = array_element(dtype)
    native = stored if stored.names is not None else np.dtype(stored.newbyteorder("=").str)
    found = attributes(table.dataset, dtype)
    if native.names is not None:
        found = {**found, MEMBERS: [f"{name}/{inner}" for inner in leaf_names(native)]}
    return Field(name, (*shape, *item), native, ragged, found)


def _axis_error(dataset: h5py.Dataset, path: str, name: str) -> FormatError:
    found = "no data (a null dataspace)" if dataset.shape is None else "a single value"
    expected = "a dataset whose first axis counts the samples"
    return FormatError(NO_AXIS, file=path, field=name, expected=expected, found=found)


def _byte_ranges(dataset: h5py.Dataset, path: str, name: str, axis: int = 0) -> Layout | None:
    """Return a layout of byte ranges, of a source of a virtual dataset too; None if only the library reads the rows."""
    memory = element_type(dataset)
    stored, item, ragged = array_element(memory)
    plist = dataset.id.get_create_plist()
    storage = plist.get_layout()
    if ragged or not has_bytes_of(dataset.id.get_type(), memory):
        return None
    if plist.get_external_count() or not _is_in(path, dataset):
        return None
    if dataset.is_virtual:
        return None if axis else source_layout(dataset, path, lambda source, at: _byte_ranges(source, at, name))
    layout: Layout | None = None
    if storage == h5py.h5d.CHUNKED:
        layout = chunked_layout(dataset, path, stored, item, axis)
    elif storage == h5py.h5d.COMPACT:
        values = np.asarray(dataset[...], stored.newbyteorder("=") if stored.names is None else stored)
        return MemoryRows(np.ascontiguousarray(np.moveaxis(values, axis, 0)))
    elif storage == h5py.h5d.CONTIGUOUS:
        layout = _contiguous_layout(dataset, stored, item, axis)
    if layout is not None:
        _check_end(layout, dataset, path, name)
    return layout


def _is_in(path: str, dataset: h5py.Dataset) -> bool:
    """Return whether the dataset is stored in that file, and not in the target of an external link."""
    if is_url(path):
        return True  # links to other files are refused
    name = os.fsdecode(h5py.h5f.get_name(dataset.id))
    return name == path or Path(name).samefile(path)


def _contiguous_layout(dataset: h5py.Dataset, stored: np.dtype[Any], item: tuple[int, ...], axis: int) -> Layout | None:
    offset = begin_of(dataset.id)
    if offset is None:
        return unwritten_layout(dataset, stored, item, axis)
    check_begin(offset - dataset.file.userblock_size, "it begins")
    return along_axis(dataset.shape, axis, offset, prod((*dataset.shape[1:], *item)) * stored.itemsize, stored, item)


def _check_end(layout: Layout, dataset: h5py.Dataset, path: str, name: str) -> None:
    if is_url(path):
        return  # its size is known from its stamp
    # One call for each dataset: a path takes a message to a server.
    size = os.fstat(dataset.file.id.get_vfd_handle()).st_size
    if layout.end() > size:
        raise truncated(path, size, layout.end(), name)


def _library_rows(
    dataset: h5py.Dataset,
    path: str,
    name: str,
    field: Field,
    allow_missing: bool,
    axis: int = 0,
    table: Compound | None = None,
    member_path: MemberPath = (),
) -> Hdf5Rows:
    """Return rows that h5py reads, of the dataset or a member of it, after a check that it can read the dataset."""
    check_filters(dataset, path, name)
    if table is not None and table.record is not None:
        problem = "the table of the data frame cannot be read as bytes"
        raise FormatError(problem, file=path, field=name, found=dataset.name)
    check_raw_files(dataset, path, name)
    sources = check_sources(dataset, path, name, allow_missing) if dataset.is_virtual else None
    if dataset.chunks is not None:
        check_chunks(dataset, path)
    if dataset.size and prod(dataset.chunks or ()) * element_type(dataset).itemsize <= PROBE_BYTES:
        read_first(dataset)
    plain = dataset.shape[axis] if axis else BLOCK_BYTES // max(1, field.row_bytes)
    block = max(1, min(dataset.chunks[axis] if dataset.chunks else plain, dataset.shape[axis]))
    rows = Hdf5Rows(path, name, dataset.shape[axis], block, field.dtype, field.ragged, axis, source_files=sources)
    if table is not None:
        column = None if table.columns is None else table.columns.index(member_path[0])
        rows = replace(rows, name=dataset.name, member=member_path if column is None else (), column=column)
    dtype = element_type(dataset) if table is None else member_type(table, member_path)[0]
    rows = replace(rows, mislabelled=mislabelled(dtype))
    return replace(rows, inner=_estimate_inner(rows, dataset)) if field.ragged else rows


def _estimate_inner(rows: Hdf5Rows, dataset: h5py.Dataset) -> int:
    """Return the size of the elements of all samples, in bytes, by the length of the first ones; 0 if unreadable."""
    try:
        samples = rows.of(dataset, 0, min(rows.rows, PROBE_ROWS)).reshape(-1)
    except (*HDF5_ERRORS, DecodeError):
        return 0
    length = sum(np.size(sample) for sample in samples)
    return rows.rows * length * rows.dtype.itemsize // max(1, min(rows.rows, PROBE_ROWS))


def attributes(
    dataset: h5py.Dataset, dtype: np.dtype[Any] | None = None, most: int | None = MAX_ATTRIBUTES
) -> Mapping[str, Any]:
    """Return the attributes that are numbers, texts or short arrays of them.

    The names of an enumeration type are the attribute ``"enum"``.

    Parameters
    ----------
    dtype : of the field; None: that of the dataset.
    most : number of attributes of the dataset that are read; None: all.
    """
    found: dict[str, Any] = {}
    names = h5py.check_enum_dtype(element_type(dataset) if dtype is None else dtype)
    if names is not None:
        found["enum"] = dict(sorted(names.items(), key=lambda pair: pair[1]))
    with suppress(*HDF5_ERRORS):  # the rows are intact without their attributes
        for key in itertools.islice(list(dataset.attrs), most):
            value = _attribute(dataset, key)
            if value is not None:
                found[key] = value
    return found


def _attribute(dataset: h5py.Dataset, key: str) -> Any:
    try:
        attribute = dataset.attrs.get_id(key)
        kind = attribute.dtype
        if attribute.get_storage_size() > MAX_ATTRIBUTE_BYTES or (kind.hasobject and not h5py.check_string_dtype(kind)):
            return None  # never read: HDF5 crashes on some damaged references and lists
        value = dataset.attrs[key]
    except HDF5_ERRORS:
        return None
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        texts = value.reshape(-1).tolist()
        return texts if all(isinstance(text, str) for text in texts) else None
    if isinstance(value, np.bytes_ | bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str | np.number | np.bool_ | np.ndarray) else None


def _file_error(path: str, error: Exception) -> DataError:
    """Return the error for a file that HDF5 cannot open, with the cause where its message has it."""
    text = str(error)
    ends = re.search(r"truncated file: eof = (\d+).*stored_eof = (\d+)", text)
    if ends:
        return FormatError(
            "the file is truncated",
            file=path,
            expected=f"{ends[2]} bytes",
            found=f"{ends[1]} bytes",
            remedy="copy it again from its source",
        )
    if OPEN_FOR_WRITING in text:
        remedy = "close the program that writes it, after a crash by h5clear -s"
        if "already open for SWMR" not in text:  # its writer allows readers
            remedy = f"give swmr=True for the samples so far; or {remedy}"
        return FormatError("the file is marked as open for writing", file=path, found=error, remedy=remedy)
    problem = "the file cannot be opened as HDF5"
    remedy = "if it is an HDF5 file, it is damaged: restore it from its source"
    return undecodable(FormatError, problem, path, error, expected="an HDF5 file", found=error, remedy=remedy)
