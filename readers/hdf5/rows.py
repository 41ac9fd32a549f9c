"""Rows that the HDF5 library reads."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from weakref import ref

import h5py
import numpy as np

from matex_data._types import Array
from matex_data.errors import DecodeError
from matex_data.index.library import LibraryRows
from matex_data.readers.hdf5.names import FAILURES

OPEN_FILES = 16  # that one process keeps open for reading through the library


@dataclass(frozen=True, eq=False)
class Hdf5Rows(LibraryRows):
    """Rows of a dataset that h5py reads and converts.

    Parameters
    ----------
    path, name : of the file, and of the dataset in it.
    rows : number of rows.
    block_rows : rows of a chunk, or as many as make a fair read.
    dtype : as delivered; of one element of a sample, if ``ragged``.
    ragged : each element is an array of a length of its own.
    axis : of the dataset that is the sample axis.
    """

    path: str
    name: str
    rows: int
    block_rows: int
    dtype: np.dtype[Any]
    ragged: bool = False
    axis: int = 0

    def read(self, start: int, stop: int) -> Array:
        try:
            rows: Array = np.moveaxis(_dataset(self)[(slice(None),) * self.axis + (slice(start, stop),)], self.axis, 0)
        except FAILURES as error:
            raise DecodeError(
                "HDF5 cannot read the rows", file=self.path, field=self.name, row=start, found=error
            ) from error
        if not self.ragged:
            return rows.astype(self.dtype, copy=False)
        if not self.dtype.hasobject:
            flat = rows.reshape(-1)
            for i, item in enumerate(flat):
                flat[i] = np.asarray(item, self.dtype)
        return rows


def open_file(path: str) -> h5py.File:
    """The file, to be read without locks: many parallel file systems have none."""
    try:
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        if "locking flag" not in str(error):
            raise
        return h5py.File(path, "r")  # this process has it open already, with locks


_open: OrderedDict[ref[Hdf5Rows], tuple[h5py.File, h5py.Dataset]] = OrderedDict()


def _dataset(part: Hdf5Rows) -> h5py.Dataset:
    """The dataset, its file kept open as long as the part lives and is among those used last."""
    key = ref(part, lambda dead: _open.pop(dead, None))
    if key not in _open:
        file = open_file(part.path)
        _open[key] = (file, file[part.name])
        missing_filters(_open[key][1])  # so that they are there
        if len(_open) > OPEN_FILES:
            _open.popitem(last=False)
    _open.move_to_end(key)
    return _open[key][1]


def missing_filters(dataset: h5py.Dataset) -> list[tuple[int, str]]:
    """Number and name of each filter of the dataset that HDF5 does not have, not even from the plugins installed."""
    plist = dataset.id.get_create_plist()
    steps = [plist.get_filter(i) for i in range(plist.get_nfilters())]
    if all(h5py.h5z.filter_avail(step[0]) for step in steps):
        return []
    with suppress(ImportError):
        import_module("hdf5plugin")
    return [
        (number, name.decode("utf-8", "replace") or "without a name")
        for number, _, _, name in steps
        if not h5py.h5z.filter_avail(number)
    ]
