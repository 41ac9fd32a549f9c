"""Arrays of files that a library decodes as a whole: each rank decodes those of its rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from matex_data._types import Array
from matex_data.declared import declared
from matex_data.errors import DecodeError
from matex_data.fields import Field
from matex_data.index.library import LibraryRows
from matex_data.index.stamps import Stamp
from matex_data.readers.kept import kept

BLOCK_BYTES = 256 << 10  # of neighbouring rows that are shuffled as one block


@dataclass(frozen=True)
class DecodedFile(ABC):
    """File whose arrays a library decodes.

    Parameters
    ----------
    path : of the file.
    stamp : of the file when it was indexed.
    """

    path: str
    stamp: Stamp

    def sources(self) -> Sequence[str]:
        return (self.path,)

    @abstractmethod
    def decode(self) -> dict[str, Array]:
        """Return the arrays by name, the sample axis first.

        Raises
        ------
        DataError : the file is damaged or cannot be read.
        """

    def array(self, name: str) -> Array:
        """Return an array of the file, which is decoded unless it is kept.

        Raises
        ------
        DecodeError : the file has changed, and has no such array.
        """
        arrays = kept.get(self, self.decode)
        if name not in arrays:
            raise DecodeError("the file has changed", file=self.path, field=name, remedy="open the data set again")
        return arrays[name]


@declared
@dataclass(frozen=True, eq=False)
class DecodedFileRows(LibraryRows):
    """Rows of an array of a decoded file.

    Parameters
    ----------
    file : the file.
    field : name, shape and dtype.
    rows : number of rows.
    nbytes : size of the elements of all ragged samples.
    """

    file: DecodedFile
    field: Field
    rows: int
    nbytes: int = 0

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        row_bytes = self.nbytes // max(1, self.rows) or prod(self.field.shape) * self.field.dtype.itemsize
        return max(1, min(self.rows, BLOCK_BYTES // max(1, row_bytes)))

    def inner_bytes(self) -> int:
        return self.nbytes

    def stored_bytes(self) -> int:
        return self.rows * prod(self.field.shape) * self.field.dtype.itemsize

    def read(self, start: int, stop: int) -> Array:
        array = self.file.array(self.field.name)
        if array.shape != (self.rows, *self.field.shape) or array.dtype != self.field.array_dtype:
            remedy = "open the data set again"
            raise DecodeError("the file has changed", file=self.file.path, field=self.field.name, remedy=remedy)
        return array[start:stop]


def rows_of(file: DecodedFile, name: str, array: Array, attributes: dict[str, Any] | None = None) -> DecodedFileRows:
    """Return the layout of an array that the file has at the moment, in native byte order."""
    dtype = np.dtype(array.dtype.newbyteorder("="))
    return DecodedFileRows(file, Field(name, array.shape[1:], dtype, attributes=attributes or {}), len(array))
