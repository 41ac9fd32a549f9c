"""HDF5: which bytes of a file hold which rows of its datasets.

Contiguous and chunked datasets become byte ranges where the stored type is one that NumPy has; the rest is read
through h5py: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html
"""

from __future__ import annotations

import itertools
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from matex_data.errors import DataError, FormatError
from matex_data.fields import Field
from matex_data.index.library import MemoryRows
from matex_data.index.model import FileIndex, Index, Layout
from matex_data.index.strided import Strided
from matex_data.readers.hdf5.chunks import chunked, unwritten
from matex_data.readers.hdf5.names import FAILURES, dataset_names, find
from matex_data.readers.hdf5.rows import Hdf5Rows, missing_filters, open_file

BLOCK_BYTES = 256 * 1024  # about as much is read through the library in one go
PROBE_BYTES = 64 * 1024 * 1024  # a larger chunk is not decoded just to see whether that works
MOST_ATTRIBUTES = 64
ATTRIBUTE_BYTES = 1024
SHOWN = 8  # datasets that an error or a warning names
NO_AXIS = "the field has no sample axis"
HDF5PLUGIN = {307, 32001, 32004, 32008, 32013, 32015, 32017, 32018, 32024, 32026, 32028, 32033}  # filters it brings
REGISTRY = "https://github.com/HDFGroup/hdf5_plugins"


def index(path: str, names: Sequence[str] | None = None) -> Index:
    """The rows of the datasets ``names`` of an HDF5 file, counted along their first axis.

    Parameters
    ----------
    names : datasets by their path in the file, for example ``"run1/images"``. None: every dataset that has a first
        axis and can be read; a warning names those that cannot. Scalars and the like are left out, and a dataset that
        can be reached under several names is taken once; soft and external links are followed only if they are named.

    Raises
    ------
    FieldNotFound : there is no dataset of that name.
    FormatError : the file is damaged or no HDF5 file, or a dataset cannot be read or has no rows.
    """
    try:
        with open_file(path) as file:
            fields, parts = _named(file, path, names) if names is not None else _all(file, path)
    except DataError:
        raise
    except FAILURES as error:
        raise _file_error(path, error) from error
    return Index(fields, [FileIndex(path, next(iter(parts.values())).rows, parts)])


def _named(file: h5py.File, path: str, names: Sequence[str]) -> tuple[dict[str, Field], dict[str, Layout]]:
    found = {name: dataset_rows(find(file, path, name), path, name) for name in names}
    return {name: field for name, (field, _) in found.items()}, {name: part for name, (_, part) in found.items()}


def _all(file: h5py.File, path: str) -> tuple[dict[str, Field], dict[str, Layout]]:
    fields, parts = {}, {}
    unread: dict[str, FormatError] = {}
    for name in dataset_names(file, path):
        try:
            fields[name], parts[name] = dataset_rows(find(file, path, name), path, name)
        except FormatError as error:
            unread[name] = error
    if not fields:
        shown = [f"{name!r}: {error.problem}" for name, error in list(unread.items())[:SHOWN]]
        found = "; ".join(shown) or "no dataset at all"
        raise FormatError("the file has no samples", file=path, expected="a dataset with a sample axis", found=found)
    _warn_of({name: error for name, error in unread.items() if error.problem != NO_AXIS}, path)
    return fields, parts


def _warn_of(unread: Mapping[str, FormatError], path: str) -> None:
    """Say which datasets are left out though they may hold samples, and why."""
    if not unread:
        return
    lines = [f"{path}: {len(unread)} dataset{'s' * (len(unread) > 1)} cannot be read, and are left out"]
    for name, error in list(unread.items())[:SHOWN]:
        facts = {"expected": error.expected, "found": error.found, "remedy": error.remedy}
        shown = [f"{key}: {fact}" for key, fact in facts.items() if fact is not None]
        lines.append("; ".join([f"  {name!r}: {error.problem}", *shown]))
    if len(unread) > SHOWN:
        lines.append(f"  and {len(unread) - SHOWN} more")
    lines.append("  choose the fields with inputs= and targets=")
    warnings.warn("\n".join(lines), stacklevel=2)


def dataset_rows(
    dataset: h5py.Dataset, path: str, name: str, said: Mapping[str, Any] | None = None
) -> tuple[Field, Layout]:
    """What a dataset of the open file ``path`` holds, and where its rows are.

    Parameters
    ----------
    said : the attributes of the field; None: those of the dataset.

    Raises
    ------
    FormatError : it has no first axis, or cannot be read.
    """
    try:
        if not dataset.shape:
            raise _axis_error(dataset, path, name)
        return _field_and_part(dataset, path, name, attributes(dataset) if said is None else said)
    except FAILURES as error:
        raise FormatError("the dataset cannot be read", file=path, field=name, found=error) from error


def _axis_error(dataset: h5py.Dataset, path: str, name: str) -> FormatError:
    found = "no data (a null dataspace)" if dataset.shape is None else "a single value"
    expected = "a dataset whose first axis counts the samples"
    return FormatError(NO_AXIS, file=path, field=name, expected=expected, found=found)


def _field_and_part(dataset: h5py.Dataset, path: str, name: str, said: Mapping[str, Any]) -> tuple[Field, Layout]:
    stored, item, ragged = _element(dataset.dtype)
    delivered = stored if stored.names is not None else np.dtype(stored.newbyteorder("=").str)
    shape = (*dataset.shape[1:], *item)
    field = Field(name, shape, delivered, ragged, said)
    plain = not ragged and _as_numpy_stores(dataset)
    part = _byte_ranges(dataset, path, name, stored, item) if plain else None
    if part is None:
        part = _through_library(dataset, path, name, field)
    return field, part


def _element(dtype: np.dtype[Any]) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """Dtype of one number, shape of one element, and whether elements are sequences of lengths of their own."""
    sequence_of = h5py.check_vlen_dtype(dtype)
    if sequence_of is not None and h5py.check_string_dtype(dtype) is None:
        return np.dtype(sequence_of), (), True
    base = dtype
    item: tuple[int, ...] = ()
    while base.subdtype is not None:
        inner, shape = base.subdtype
        base, item = inner, item + shape
    if base.names is None:
        base = np.dtype(base.str)  # drops what h5py notes on the dtype
    return base, item, False


def _as_numpy_stores(dataset: h5py.Dataset) -> bool:
    """Whether the bytes in the file are those of a NumPy array: same width, precision, padding and byte order."""
    if dataset.dtype.hasobject:
        return False
    stored = dataset.id.get_type()
    if isinstance(stored, h5py.h5t.TypeOpaqueID):
        return True
    return bool(stored == h5py.h5t.py_create(dataset.dtype, logical=True))


def _byte_ranges(
    dataset: h5py.Dataset, path: str, name: str, stored: np.dtype[Any], item: tuple[int, ...]
) -> Layout | None:
    """Where the rows are in the file; None if only the library can say."""
    plist = dataset.id.get_create_plist()
    layout = plist.get_layout()
    if plist.get_external_count() or not _is_in(path, dataset):
        return None
    part: Layout | None = None
    if layout == h5py.h5d.CHUNKED:
        part = chunked(dataset, path, stored, item)
    elif layout == h5py.h5d.COMPACT:
        return MemoryRows(np.asarray(dataset[...], stored.newbyteorder("=") if stored.names is None else stored))
    elif layout == h5py.h5d.CONTIGUOUS:
        part = _contiguous(dataset, stored, item)
    if part is not None:
        _check_end(part, path, name)
    return part


def _is_in(path: str, dataset: h5py.Dataset) -> bool:
    """Whether the dataset lies in that file, and not in one that an external link leads to."""
    name = os.fsdecode(h5py.h5f.get_name(dataset.id))
    return name == path or Path(name).samefile(path)


def _contiguous(dataset: h5py.Dataset, stored: np.dtype[Any], item: tuple[int, ...]) -> Layout | None:
    offset = dataset.id.get_offset()
    if offset is None:
        return unwritten(dataset, stored, item)
    shape = (*dataset.shape[1:], *item)
    return Strided(dataset.shape[0], offset, prod(shape) * stored.itemsize, stored, shape)


def _check_end(part: Layout, path: str, name: str) -> None:
    size = Path(path).stat().st_size
    if part.end() > size:
        raise FormatError(
            "the file is shorter than its datasets",
            file=path,
            field=name,
            expected=f"at least {part.end()} bytes",
            found=f"{size} bytes",
            remedy="the file is truncated: copy it again from its source",
        )


def _through_library(dataset: h5py.Dataset, path: str, name: str, field: Field) -> Hdf5Rows:
    """The rows as h5py reads them, once it has shown that it can."""
    lacking = missing_filters(dataset)
    if lacking:
        advice = "pip install hdf5plugin, or " if HDF5PLUGIN.issuperset(number for number, _ in lacking) else ""
        raise FormatError(
            "the dataset went through a filter that is not installed",
            file=path,
            field=name,
            expected="a filter that this HDF5 has",
            found=", ".join(f"filter {number} ({text})" for number, text in lacking),
            remedy=f"{advice}set HDF5_PLUGIN_PATH to the folder of the filter's plugin, see {REGISTRY}",
        )
    _check_external(dataset, path, name)
    chunk = dataset.chunks or (max(1, BLOCK_BYTES // max(1, field.row_bytes)),)
    if dataset.size and prod(chunk) * dataset.dtype.itemsize <= PROBE_BYTES:
        dataset[(slice(0, 1),) * dataset.ndim]
    block = max(1, min(chunk[0], dataset.shape[0]))
    return Hdf5Rows(path, name, dataset.shape[0], block, field.dtype, field.ragged)


def _check_external(dataset: h5py.Dataset, path: str, name: str) -> None:
    """HDF5 finds raw data files in the folder HDF5_EXTFILE_PREFIX, or else in the working directory."""
    plist = dataset.id.get_create_plist()
    prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "").replace("${ORIGIN}", str(Path(path).resolve().parent))
    for i in range(plist.get_external_count()):
        raw = Path(prefix) / os.fsdecode(plist.get_external(i)[0])
        if not raw.exists():
            raise FormatError(
                "the raw data file of the dataset is missing",
                file=path,
                field=name,
                expected=str(raw),
                found=f"no such file from the folder {str(Path.cwd())!r}",
                remedy="start in the folder where it is, or set HDF5_EXTFILE_PREFIX to that folder",
            )


def attributes(dataset: h5py.Dataset) -> Mapping[str, Any]:
    """Attributes that are numbers, texts or short arrays of them; the names of an enumeration as ``"enum"``."""
    found: dict[str, Any] = {}
    names = h5py.check_enum_dtype(dataset.dtype)
    if names is not None and len(names) <= MOST_ATTRIBUTES:
        found["enum"] = dict(names)
    for key in itertools.islice(_attribute_names(dataset), MOST_ATTRIBUTES):
        value = _attribute(dataset, key)
        if value is not None:
            found[key] = value
    return found


def _attribute_names(dataset: h5py.Dataset) -> list[str]:
    try:
        return list(dataset.attrs)
    except FAILURES:
        return []  # a damaged attribute does no harm to the rows


def _attribute(dataset: h5py.Dataset, key: str) -> Any:
    try:
        attribute = dataset.attrs.get_id(key)
        kind = attribute.dtype
        if attribute.get_storage_size() > ATTRIBUTE_BYTES or (kind.hasobject and not h5py.check_string_dtype(kind)):
            return None  # what is not shown is not read either: HDF5 does not survive every damaged reference or list
        value = dataset.attrs[key]
    except FAILURES:
        return None
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        texts = value.reshape(-1).tolist()
        return texts if all(isinstance(text, str) for text in texts) else None
    if isinstance(value, np.bytes_ | bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str | np.number | np.bool_ | np.ndarray) else None


def _file_error(path: str, error: Exception) -> FormatError:
    """What keeps the file from being opened, in plain words where HDF5 says enough."""
    text = str(error)
    if not Path(path).exists():
        return FormatError("there is no such file", file=path, found=error)
    ends = re.search(r"truncated file: eof = (\d+).*stored_eof = (\d+)", text)
    if ends:
        return FormatError(
            "the file is truncated",
            file=path,
            expected=f"{ends[2]} bytes",
            found=f"{ends[1]} bytes",
            remedy="copy it again from its source",
        )
    if "already open for" in text:
        remedy = "close the program that writes it; if that has died, clear the mark with h5clear -s"
        return FormatError("the file is marked as being written", file=path, found=error, remedy=remedy)
    return FormatError("the file cannot be opened as HDF5", file=path, expected="an HDF5 file", found=error)
