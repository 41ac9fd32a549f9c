"""Rows that the HDF5 library reads, and the files that stay open for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from weakref import ref

import h5py
import numpy as np

from matex_data._types import Array
from matex_data.declared import declared
from matex_data.errors import DecodeError
from matex_data.index.chunked import MemberPath, member
from matex_data.index.library import LibraryRows
from matex_data.readers.hdf5.files import object_at, open_indexed
from matex_data.readers.hdf5.names import HDF5_ERRORS
from matex_data.readers.hdf5.types import element_type, read_elements
from matex_data.readers.hdf5.virtual import SourceFiles

MAX_OPEN_FILES = 16  # per process
MAX_ROWS = 1 << 63


@declared
@dataclass(frozen=True, eq=False)
class Hdf5Rows(LibraryRows):
    """Rows of a dataset that h5py reads and converts.

    Parameters
    ----------
    path, name : of the file, and of the dataset in it.
    rows : number of rows.
    block_rows : rows of a chunk, or of about 256 KiB.
    dtype : of the field; if ``ragged``, of one element of a sample.
    ragged : each element is an array of its own length.
    axis : sample axis of the dataset.
    member : names that lead to the member of a compound type that is read; (): all of it.
    column : of a matrix, which is read alone; None: all of it.
    partial : a table without the members for which h5py has no type.
    source_files : of a virtual dataset, which have to exist; None: they need not.
    inner : size of the elements of all ragged samples in memory, in bytes, estimated.
    mislabelled : lists in an element that come in the other byte order, whatever h5py says.
    """

    path: str
    name: str
    rows: int
    block_rows: int
    dtype: np.dtype[Any]
    ragged: bool = False
    axis: int = 0
    member: MemberPath = ()
    column: int | None = None
    partial: bool = False
    source_files: SourceFiles | None = None
    inner: int = 0
    mislabelled: tuple[MemberPath, ...] = ()

    def sources(self) -> Sequence[str]:
        return (self.path,)

    def inner_bytes(self) -> int:
        return self.inner

    def read(self, start: int, stop: int) -> Array:
        missing = None if self.source_files is None else self._missing_source(self.source_files, start, stop)
        if missing is not None:
            problem, found = "a source of the virtual dataset is missing", f"no file {missing!r}"
            raise DecodeError(problem, file=self.path, field=self.name, row=start, found=found)
        try:
            rows = self._read(opened_dataset(self, self.path, self.name), start, stop)
        except HDF5_ERRORS as error:
            raise DecodeError(
                "HDF5 cannot read the rows", file=self.path, field=self.name, row=start, found=error
            ) from error
        for path in self.mislabelled:
            lists = member(rows, path)
            for at in np.ndindex(lists.shape):
                lists[at] = lists[at].byteswap()
        if not self.ragged:
            return rows.astype(self.dtype, copy=False)
        if not self.dtype.hasobject:
            flat = rows.reshape(-1)
            for i, item in enumerate(flat):
                flat[i] = np.asarray(item, self.dtype)
        return rows

    def _missing_source(self, sources: SourceFiles, start: int, stop: int) -> str | None:
        return sources.missing(start, stop) if self.axis == 0 else sources.missing(0, MAX_ROWS)

    def _read(self, dataset: h5py.Dataset, start: int, stop: int) -> Array:
        if self.column is not None:
            return np.asarray(dataset[start:stop, self.column])
        if self.member:
            first: Any = [(self.member[0], element_type(dataset)[self.member[0]])]
            return member(read_elements(dataset, start, stop, np.dtype(first)), self.member)
        if self.partial:
            return read_elements(dataset, start, stop, element_type(dataset))
        return np.moveaxis(dataset[(slice(None),) * self.axis + (slice(start, stop),)], self.axis, 0)


_open: OrderedDict[ref[LibraryRows], tuple[h5py.File, h5py.Dataset]] = OrderedDict()


def opened_dataset(rows: LibraryRows, path: str, name: str) -> h5py.Dataset:
    """Return an open dataset. Its file stays open while ``rows`` exists and is among those used last."""
    key = ref(rows, lambda dead: _open.pop(dead, None))
    if key not in _open:
        file = open_indexed(path)
        _open[key] = (file, object_at(file, name, file.__getitem__))
        missing_filters(_open[key][1])  # registers the filters of hdf5plugin if they are needed
        if _open[key][1].is_virtual:
            register_filters()  # its sources may need them
        if len(_open) > MAX_OPEN_FILES:
            _open.popitem(last=False)
    _open.move_to_end(key)
    return _open[key][1]


def register_filters() -> None:
    """Register the filters of hdf5plugin with HDF5, if it is installed."""
    with suppress(ImportError):
        import_module("hdf5plugin")


def missing_filters(dataset: h5py.Dataset) -> list[tuple[int, str]]:
    """Return number and name of each filter of the dataset that HDF5 lacks, also with the plugins of hdf5plugin."""
    plist = dataset.id.get_create_plist()
    steps = [plist.get_filter(i) for i in range(plist.get_nfilters())]
    if all(h5py.h5z.filter_avail(step[0]) for step in steps):
        return []
    register_filters()
    return [
        (number, name.decode("utf-8", "replace") or "without a name")
        for number, _, _, name in steps
        if not h5py.h5z.filter_avail(number)
    ]
