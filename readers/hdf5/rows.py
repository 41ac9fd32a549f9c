"""Rows that the HDF5 library reads, and the files that stay open for them."""

from __future__ import annotations

from abc import abstractmethod
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
from matex_data.errors import DataError, DecodeError
from matex_data.index.chunked import MemberPath, member
from matex_data.index.library import LibraryRows, OpenFiles
from matex_data.readers.hdf5.files import object_at, open_indexed
from matex_data.readers.hdf5.names import HDF5_ERRORS
from matex_data.readers.hdf5.types import element_type, read_elements
from matex_data.readers.hdf5.virtual import SourceFiles
from matex_data.readers.matlab.cells import cell_rows
from matex_data.storage.files import undecodable

MAX_ROWS = 1 << 63


@dataclass(frozen=True, eq=False)
class DatasetRows(LibraryRows):
    """Rows that h5py reads.

    Parameters
    ----------
    path, name : of the file, and of the dataset in it, or of what stands for the samples.
    block_rows : rows of a chunk, of about 256 KiB, or of samples that lie in no order.
    """

    path: str
    name: str
    rows: int
    block_rows: int
    problem = "HDF5 cannot read the rows"

    def sources(self) -> Sequence[str]:
        return (self.path,)

    def opened(self, name: str) -> h5py.Dataset:
        """Return a dataset of the file, which stays open."""
        return opened_dataset(self, self.path, name)

    @abstractmethod
    def take(self, start: int, stop: int) -> Array:
        """Read rows like `read`; raise any of `HDF5_ERRORS`."""

    def read(self, start: int, stop: int) -> Array:
        try:
            return self.take(start, stop)
        except DataError:
            raise
        except HDF5_ERRORS as error:
            facts = {"field": self.name, "row": start, "found": error, "remedy": None}
            raise undecodable(DecodeError, self.problem, self.path, error, **facts) from error


@declared
@dataclass(frozen=True, eq=False)
class Hdf5Rows(DatasetRows):
    """Rows of a dataset that h5py reads and converts.

    Parameters
    ----------
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

    dtype: np.dtype[Any]
    ragged: bool = False
    axis: int = 0
    member: MemberPath = ()
    column: int | None = None
    partial: bool = False
    source_files: SourceFiles | None = None
    inner: int = 0
    mislabelled: tuple[MemberPath, ...] = ()

    def inner_bytes(self) -> int:
        return self.inner

    def take(self, start: int, stop: int) -> Array:
        missing = None if self.source_files is None else self._missing_source(self.source_files, start, stop)
        if missing is not None:
            problem, found = "a source of the virtual dataset is missing", f"no file {missing!r}"
            raise DecodeError(problem, file=self.path, field=self.name, row=start, found=found)
        return self.of(self.opened(self.name), start, stop)

    def of(self, dataset: h5py.Dataset, start: int, stop: int) -> Array:
        """Return rows of the dataset, which is open."""
        rows = self._read(dataset, start, stop)
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
        # By h5py: HDF5 swaps members that are not in the order of their offsets where it reads into a type of its own.
        return np.moveaxis(dataset[(slice(None),) * self.axis + (slice(start, stop),)], self.axis, 0)


OPEN = OpenFiles[tuple[h5py.File, h5py.Dataset]](16, shared=True)


def opened_dataset(rows: LibraryRows, path: str, name: str) -> h5py.Dataset:
    """Return an open dataset. Its file stays open while ``rows`` exists, among those used last."""

    def opened() -> tuple[h5py.File, h5py.Dataset]:
        file = open_indexed(path)
        dataset = object_at(file, name, file.__getitem__)
        missing_filters(dataset)  # registers the filters of hdf5plugin if they are needed
        if dataset.is_virtual:
            register_filters()  # its sources may need them
        return file, dataset

    return OPEN.get(ref(rows, OPEN.forget), opened)[1]


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


@dataclass(frozen=True, eq=False)
class ItemRows(DatasetRows):
    """Samples of which each is a dataset that h5py reads: a compressed array, or texts.

    Parameters
    ----------
    ragged : the arrays differ in shape.
    nbytes : size of all of them in memory.
    """

    dtype: np.dtype[Any]
    ragged: bool
    nbytes: int
    problem = "HDF5 cannot read the arrays"

    def inner_bytes(self) -> int:
        return self.nbytes

    @abstractmethod
    def items(self, start: int, stop: int) -> list[Array]:
        """Return the arrays of samples."""

    def take(self, start: int, stop: int) -> Array:
        arrays = self.items(start, stop)
        return cell_rows(arrays, [array.shape for array in arrays], self.dtype, not self.ragged)
