"""Samples that are datasets of their own: arrays of groups, and of the cells of MATLAB."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from matex_data._types import Array
from matex_data.errors import DecodeError
from matex_data.index.library import LibraryRows
from matex_data.readers.hdf5.names import HDF5_ERRORS
from matex_data.readers.hdf5.rows import opened_dataset
from matex_data.readers.matlab.cells import cell_rows


@dataclass(frozen=True, eq=False)
class ItemRows(LibraryRows):
    """Samples of which each is a dataset that h5py reads: a compressed array, or texts.

    Parameters
    ----------
    path, name : of the file, and of what stands for the samples in it.
    rows, block_rows : number of samples, and of those of a block, which lie in no order.
    dtype : of the field.
    ragged : the arrays differ in shape.
    nbytes : size of all of them in memory.
    """

    path: str
    name: str
    rows: int
    block_rows: int
    dtype: np.dtype[Any]
    ragged: bool
    nbytes: int

    def sources(self) -> Sequence[str]:
        return (self.path,)

    def inner_bytes(self) -> int:
        return self.nbytes

    def opened(self, name: str) -> h5py.Dataset:
        """Return a dataset of the file, which stays open."""
        return opened_dataset(self, self.path, name)

    @abstractmethod
    def items(self, start: int, stop: int) -> list[Array]:
        """Return the arrays of samples."""

    def read(self, start: int, stop: int) -> Array:
        try:
            arrays = self.items(start, stop)
            return cell_rows(arrays, [array.shape for array in arrays], self.dtype, not self.ragged)
        except HDF5_ERRORS as error:
            problem = "HDF5 cannot read the arrays"
            raise DecodeError(problem, file=self.path, field=self.name, row=start, found=error) from error
