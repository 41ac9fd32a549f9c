"""Rows that the HDF5 library reads, and the files that it keeps open for them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
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
from matex_data.readers.hdf5.names import HDF5_ERRORS
from matex_data.readers.hdf5.types import element_type, read_elements
from matex_data.readers.hdf5.virtual import SourceFiles
from matex_data.storage.files import open_binary
from matex_data.storage.objects import is_url

MAX_OPEN_FILES = 16  # per process
MAX_ROWS = 1 << 63
OWN_DRIVER = "matex_data"
MOST_LINKS = 16  # one behind the other, as in HDF5


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


_kept = threading.local()  # the file that this thread keeps open, and its path


@contextmanager
def kept_open(path: str) -> Iterator[h5py.File]:
    """Context manager: keep a file open in this thread, and let `open_file` return it meanwhile."""
    with _open_file(path) as file:
        _kept.path, _kept.file = path, file
        try:
            yield file
        finally:
            _kept.path = _kept.file = None


def open_file(path: str) -> AbstractContextManager[h5py.File]:
    """Return a context manager of a file that is open for reading."""
    return nullcontext(_kept.file) if getattr(_kept, "path", None) == path else _open_file(path)


def _open_file(path: str) -> h5py.File:
    """Open a file for reading, without locks: many parallel file systems do not support them.

    HDF5 shares one open file among all that open it in a process, and refuses other flags of locking. It does so for
    each driver: the one that could log, and reads as the default one does, leaves the default one to the user.
    """
    h5py.register_driver(OWN_DRIVER, _set_own_driver)
    if is_url(path):
        return _ObjectOfStore(open_binary(path), "r")
    return h5py.File(path, "r", driver=OWN_DRIVER, locking=False)


class _ObjectOfStore(h5py.File):  # type: ignore[misc]
    """HDF5 file in a store, without links to other files: HDF5 would follow them within this one."""

    def __getitem__(self, name: Any) -> Any:
        if isinstance(name, str):
            self._refuse_links(name)
        return super().__getitem__(name)

    def _refuse_links(self, name: str, depth: int = 0) -> None:
        if depth > MOST_LINKS:
            raise KeyError(f"{name!r}: the links lead in a circle")
        parts = name.strip("/").split("/")
        for end in range(1, len(parts) + 1):
            path = "/".join(parts[:end])
            link = self.get(path, getlink=True) if path else None
            if isinstance(link, h5py.ExternalLink):
                raise KeyError(f"{path!r} is a link to another file, {link.filename!r}, which is not read from a store")
            if isinstance(link, h5py.SoftLink):
                target = link.path if link.path.startswith("/") else "/".join([*parts[: end - 1], link.path])
                self._refuse_links("/".join([target, *parts[end:]]), depth + 1)
                return


def _set_own_driver(plist: h5py.h5p.PropFAID) -> None:
    plist.set_fapl_log(b"", 0, 0)  # without flags nothing is logged, and no log file is made


_open: OrderedDict[ref[LibraryRows], tuple[h5py.File, h5py.Dataset]] = OrderedDict()


def opened_dataset(rows: LibraryRows, path: str, name: str) -> h5py.Dataset:
    """Return an open dataset. Its file stays open while ``rows`` exists and is among those used last."""
    key = ref(rows, lambda dead: _open.pop(dead, None))
    if key not in _open:
        file = _open_file(path)
        _open[key] = (file, file[name])
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
