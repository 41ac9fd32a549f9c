"""Contents of PyTables files beside the data, and data frames and series that pandas has written by ``to_hdf``.

PyTables has indexes of tables, pickled attributes, and texts as lists of numbers. Of a frame, columns are fields by the
names in the frame: both formats keep columns of one type in a block. In the format "table" a row of the frame is a
record, and a block is a member of it; in the format "fixed" a block is a matrix. The names are in attributes and in
datasets beside the blocks. Layout: ``pandas/io/pytables.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import h5py
import numpy as np

from matex_data._types import Array
from matex_data.declared import declared
from matex_data.errors import DecodeError, FormatError
from matex_data.fields import Field
from matex_data.locks import cached_property
from matex_data.readers import pickles
from matex_data.readers.hdf5.checks import all_values
from matex_data.readers.hdf5.members import Compound
from matex_data.readers.hdf5.names import HDF5_ERRORS, has_attribute, object_of, reported, text_of
from matex_data.readers.hdf5.rows import opened_dataset
from matex_data.readers.hdf5.types import element_type, stored_type
from matex_data.readers.kept import KeptRows
from matex_data.warning import warn

MARK = b"PYTABLES_FORMAT_VERSION"  # attribute of the root group
HIDDEN = ("_i_", "_p_")  # begin of the names of groups that PyTables does not show, such as the index of a table
TEXTS = {"vlstring": "latin-1", "vlunicode": "utf-32-le"}
"""Encodings of texts that are lists of numbers, by the attribute ``PSEUDOATOM``."""


def is_pytables(file: h5py.File) -> bool:
    """Return whether PyTables wrote the file."""
    return bool(has_attribute(file, MARK))


def is_hidden(name: str) -> bool:
    """Return whether a dataset of a file of PyTables belongs to what it does not show.

    >>> is_hidden("jets/_i_table/pt/sorted"), is_hidden("jets/table")
    (True, False)
    """
    return any(word.startswith(HIDDEN) for word in name.split("/"))


def text_encoding(dataset: h5py.Dataset) -> str | None:
    """Return the encoding of texts that are lists of numbers; None for any other dataset."""
    return TEXTS.get(_pseudo_atom(dataset))


def is_pickled(dataset: h5py.Dataset) -> bool:
    """Return whether the rows of a dataset are pickled objects."""
    return _pseudo_atom(dataset) == "object"


def _pseudo_atom(dataset: h5py.Dataset) -> str:
    return text_of(dataset.attrs["PSEUDOATOM"]) if has_attribute(dataset, b"PSEUDOATOM") else ""


def unpickled(value: Any) -> Any:
    """Return the Python object that PyTables has pickled to an attribute; the attribute itself if it is no pickle."""
    return pickles.load(bytes(value)) if isinstance(value, bytes) and value.endswith(b".") else value


@declared
@dataclass(frozen=True)
class ListedTexts:
    """Decoder of texts that PyTables has stored as lists of numbers.

    Parameters
    ----------
    encoding : of the bytes of the numbers.
    """

    encoding: str

    def decode(self, stored: Array) -> Array:
        """Return object[n], the texts in UTF-8; bytes of "latin-1" as they are."""
        texts = np.empty(len(stored), object)
        texts[:] = [self._text(numbers) for numbers in stored]
        return texts

    def _text(self, numbers: Array) -> bytes:
        data = np.asarray(numbers).tobytes()
        return data if self.encoding == "latin-1" else data.decode(self.encoding, "surrogatepass").encode()


AXES = ("axis1", "axis1_label0", "index", "index_label0")  # datasets with an element for each row
KINDS = {"frame", "series", "frame_table", "series_table"}  # values of the attribute ``pandas_type``
LEVEL = "level_0"  # name of an index without name beside a column "index", as of ``DataFrame.reset_index``


@dataclass(frozen=True)
class FrameColumn:
    """Column of a frame, or its index.

    Parameters
    ----------
    table : block that has it, with a member for each of its columns.
    member : name of the member of the table; None: the column has the dataset for itself, or is pickled.
    kind : dtype of the column by pandas, such as "bool" or "datetime64[ns]"; "": that of the file.
    categories : values of a categorical column, whose codes are its numbers; None: another column.
    pickled : the block holds pickled objects, of which this is a row.
    """

    table: Compound
    member: str | None
    kind: str = ""
    categories: tuple[Any, ...] | None = None
    pickled: int | None = None

    @property
    def rows(self) -> int:
        """Number of rows of the frame, for a block of pickled objects."""
        group = self.table.dataset.parent
        return len(next(group[axis] for axis in AXES if axis in group))

    def of_field(self, stored: Field) -> Field:
        """Return the field of the column, with its units or categories, for that of its numbers in the file."""
        facts: dict[str, Any] = {}
        if self.kind.startswith(("datetime64", "timedelta64")):
            unit = self.kind.partition("[")[2][:2].rstrip("],") or "ns"
            facts["units"] = f"{unit} since 1970-01-01" if self.kind.startswith("datetime") else unit
        if self.categories is not None:
            facts["enum"] = {str(name): code for code, name in enumerate(self.categories)}
        return replace(stored, dtype=np.dtype(bool) if self.kind == "bool" else stored.dtype, attributes=facts)


@dataclass(frozen=True)
class DataFrames:
    """Frames of an open file."""

    file: h5py.File
    path: str
    _columns: dict[str, Mapping[str, FrameColumn]] = field(default_factory=dict)

    def listed(self, names: Sequence[str]) -> list[str]:
        """Return the fields of a file with these datasets: those of a frame are its columns.

        The columns of a single frame have their own names, otherwise the name of the frame stands in front.
        """
        members: dict[str, list[str]] = {}
        others: list[str] = []
        for name in names:
            key = self._group(name)
            (others if key is None else members.setdefault(key, [])).append(name)
        for key, datasets in members.items():
            prefix = "" if len(members) == 1 else f"{key}/"
            try:
                others += [f"{prefix}{column}" for column in self.columns(key)]
            except FormatError as error:
                others += datasets
                reason = " ".join(str(error).split())
                warn(f"{self.path}: {key!r} is read as its datasets are stored: {reason}")
        return others

    def find(self, name: str) -> FrameColumn | None:
        """Return the column of that name, with or without the name of a single frame in front; None if it is none."""
        plain = name.strip("/")
        words = plain.split("/")
        outer = ("/".join(words[:count]) for count in range(len(words) - 1, 0, -1))
        key = next((key for key in outer if self._is_frame(key)), None)
        try:
            if key is not None:
                return self.columns(key).get(plain.removeprefix(f"{key}/"))
            return None if self._single is None else self.columns(self._single).get(plain)
        except FormatError:
            if isinstance(object_of(self.file, plain), h5py.Dataset):
                return None  # as it is stored
            raise

    def columns(self, key: str) -> Mapping[str, FrameColumn]:
        """Return the columns of a frame, its index first; raise ``FormatError`` if the frame cannot be read."""
        if key not in self._columns:
            group = self.file[key]
            try:
                with reported("the data frame cannot be read", self.path, key):
                    read = _table_columns if "table" in text_of(group.attrs["pandas_type"]) else _fixed_columns
                    pairs = list(read(group))
            except FormatError as error:
                error.at(self.path, key)
                raise
            names = [name for name, _ in pairs]
            double = next((name for name in names if names.count(name) > 1), None)
            if double is not None:
                raise FormatError("the data frame has two columns of one name", file=self.path, field=key, found=double)
            self._columns[key] = dict(pairs)
        return self._columns[key]

    def _group(self, name: str) -> str | None:
        """Return the name of the outermost frame that a dataset belongs to; None for any other dataset."""
        words = name.split("/")
        keys = ("/".join(words[:count]) for count in range(1, len(words)))
        return next((key for key in keys if self._is_frame(key)), None)

    def _is_frame(self, key: str) -> bool:
        if not self._may_have_frames:
            return False
        with suppress(*HDF5_ERRORS):
            group = self.file.get(key)
            return isinstance(group, h5py.Group) and text_of(group.attrs.get("pandas_type", "")) in KINDS
        return False

    @cached_property
    def _may_have_frames(self) -> bool:
        return is_pytables(self.file)

    @cached_property
    def _single(self) -> str | None:
        """Name of the only frame of the file; None if there are more, or none."""
        if not self._may_have_frames:
            return None
        keys = list(_frame_keys(self.file, ""))
        return keys[0] if len(keys) == 1 else None


def _frame_keys(group: h5py.Group, prefix: str) -> Iterator[str]:
    for name in group:
        item = group.get(name) if group.get(name, getclass=True) is h5py.Group else None
        if item is None or is_hidden(name):
            continue
        if text_of(item.attrs.get("pandas_type", "")) in KINDS:
            yield f"{prefix}{name}"
        else:
            yield from _frame_keys(item, f"{prefix}{name}/")


def _table_columns(group: h5py.Group) -> Iterator[tuple[str, FrameColumn]]:
    """Yield the columns of a frame in the format "table", in their order in the frame."""
    dataset = group["table"]
    stored = stored_type(dataset.id.get_type(), terminated=True)
    if stored is None or stored.fields is None or list(stored.names or ()) != list(element_type(dataset).names or ()):
        raise TypeError("its table has members that are no numbers or texts of one length")
    is_multiple = "multi" in text_of(group.attrs["table_type"])
    columns: dict[str, tuple[str, int | None]] = {}  # member, and element of it
    for member in (name for name in stored.names or () if name != "index"):
        names = unpickled(dataset.attrs[f"{member}_kind"])
        inner = stored[member].shape
        for i, name in enumerate(names):
            columns[_column_name(name)] = (member, i if inner else None)
    order = [_column_name(name) for _, names in unpickled(group.attrs["non_index_axes"]) for name in names]
    others = columns.keys() - set(order)
    names = [name for name in order if name in columns] + [name for name in columns if name in others]
    split: dict[str, tuple[np.dtype[Any], int]] = {}
    if not is_multiple:
        split[LEVEL if "index" in columns else "index"] = stored.fields["index"][:2]
    for name in names:
        member, element = columns[name]
        inner_type, offset = stored.fields[member][:2]
        split[name] = (inner_type.base, offset + (element or 0) * inner_type.base.itemsize)
    formats, offsets = [dtype for dtype, _ in split.values()], [offset for _, offset in split.values()]
    record: Any = {"names": list(split), "formats": formats, "offsets": offsets, "itemsize": stored.itemsize}
    table = Compound(dataset, record=np.dtype(record))
    for name in split:
        if name not in columns:
            yield name, FrameColumn(table, name, text_of(dataset.attrs.get("index_kind", "")))
            continue
        member = columns[name][0]
        is_category = text_of(dataset.attrs.get(f"{member}_meta", "")) == "category"
        categories = _categories(group, member) if is_category else None
        yield name, FrameColumn(table, name, text_of(dataset.attrs.get(f"{member}_dtype", "")), categories)


def _categories(group: h5py.Group, member: str) -> tuple[Any, ...]:
    values = all_values(group[f"meta/{member}/meta/table"], "")["values"].tolist()
    return tuple(value.decode("utf-8", "replace") if isinstance(value, bytes) else value for value in values)


def _fixed_columns(group: h5py.Group) -> Iterator[tuple[str, FrameColumn]]:
    """Yield the columns of a frame, or the values of a series, in the format "fixed", in their order in the frame."""
    is_series = text_of(group.attrs["pandas_type"]) == "series"
    blocks = [] if is_series else [f"block{i}" for i in range(min(int(group.attrs["nblocks"]), len(group)))]
    for axis in AXES:
        group.get(axis)  # asks where it leads: the group of `FrameColumn.rows` does not
    columns = {name: column for block in blocks for name, column in _block_columns(group, block)}
    if is_series:
        name = unpickled(group.attrs.get("name", b"N."))
        columns = {_column_name(name or "values"): _whole(group["values"])}
    yield from _fixed_index(group, "index" if is_series else "axis1", columns)
    order = list(columns) if is_series else _labels(group, "axis0")
    yield from ((name, columns[name]) for name in order)


def _fixed_index(group: h5py.Group, axis: str, columns: Mapping[str, Any]) -> Iterator[tuple[str, FrameColumn]]:
    if not _has_levels(group, axis):
        yield LEVEL if "index" in columns else "index", _whole(group[axis])
        return
    for i in range(int(group.attrs[f"{axis}_nlevels"])):
        level, codes = group[f"{axis}_level{i}"], group[f"{axis}_label{i}"]
        name = unpickled(level.attrs.get("name", b"N."))
        categories = tuple(_column_name(value) for value in _values(level))
        yield _column_name(name or f"level_{i}"), FrameColumn(Compound(codes), None, categories=categories)


def _whole(dataset: h5py.Dataset) -> FrameColumn:
    """Return the column that is all of a dataset of one axis."""
    if "shape" in dataset.attrs:
        raise ValueError("it has no rows")
    kind = text_of(dataset.attrs.get("value_type", "")) or text_of(dataset.attrs.get("kind", ""))
    return FrameColumn(Compound(dataset), None, _kind(dataset, kind), pickled=0 if is_pickled(dataset) else None)


def _block_columns(group: h5py.Group, block: str) -> Iterator[tuple[str, FrameColumn]]:
    dataset = group[f"{block}_values"]
    names = _labels(group, f"{block}_items")
    if "shape" in dataset.attrs:
        raise ValueError("it has no rows")
    if not dataset.attrs.get("transposed", False):
        raise ValueError("its blocks have a row for each column, as those of very old versions of pandas")
    kind = _kind(dataset, text_of(dataset.attrs.get("value_type", "")))
    table = Compound(dataset, columns=tuple(names))
    for i, name in enumerate(names):
        objects = is_pickled(dataset)
        yield name, FrameColumn(table, None if objects else name, kind, pickled=i if objects else None)


def _kind(dataset: h5py.Dataset, kind: str) -> str:
    is_bool = isinstance(dataset.id.get_type(), h5py.h5t.TypeBitfieldID)
    return "bool" if is_bool else kind


def _has_levels(group: h5py.Group, axis: str) -> bool:
    return text_of(group.attrs.get(f"{axis}_variety", "")) == "multi"


def _labels(group: h5py.Group, axis: str) -> list[str]:
    """Return the names on an axis of columns."""
    if not _has_levels(group, axis):
        return [_column_name(name) for name in _values(group[axis])]
    numbers = range(int(group.attrs[f"{axis}_nlevels"]))
    levels = [_values(group[f"{axis}_level{i}"]) for i in numbers]
    codes = [all_values(group[f"{axis}_label{i}"], "").tolist() for i in numbers]
    rows = (zip(levels, row, strict=True) for row in zip(*codes, strict=True))
    return [_column_name([level[i] if i >= 0 else np.nan for level, i in row]) for row in rows]


def _values(dataset: h5py.Dataset) -> list[Any]:
    """Return what an axis, or a level of it, has."""
    if is_pickled(dataset):
        return list(np.ravel(pickles.load(bytes(all_values(dataset, "")[0]))))
    return [] if "shape" in dataset.attrs else list(all_values(dataset, "").tolist())


def _column_name(name: Any) -> str:
    """Return the name of a column as text; its levels are joined by slashes."""
    if isinstance(name, tuple | list):
        return "/".join(_column_name(word) for word in name)
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)


@declared
@dataclass(frozen=True, eq=False)
class PickledRows(KeptRows):
    """Texts of a block that pandas has pickled as a whole.

    Parameters
    ----------
    column : of the block.
    """

    name: str
    rows: int
    column: int
    row_bytes = 1  # all rows are one block

    def decode(self) -> Array:
        with reported("the column of objects cannot be read", self.path, self.name, DecodeError):
            block = pickles.load(bytes(opened_dataset(self, self.path, self.name)[0]))
            values = block[:, self.column] if block.ndim > 1 else block
            texts = np.empty(len(values), object)
            texts[:] = [_text(value) for value in values]
        return texts


def _text(value: Any) -> bytes:
    """Return a text in UTF-8, and nothing for a missing one."""
    if isinstance(value, str):
        return value.encode()
    if value is None or (isinstance(value, float) and value != value):
        return b""
    raise TypeError(f"a value that is no text: {value!r}")
