"""Variables of classic netCDF files: plain arrays, or interleaved records along the record dimension."""

from __future__ import annotations

import io
from dataclasses import dataclass
from math import prod
from typing import IO

import numpy as np

from matex_data._types import Array
from matex_data.fields import Field
from matex_data.index.model import Layout
from matex_data.index.strided import along_axis, c_strides
from matex_data.readers.decoding import Decoding
from matex_data.readers.dimensions.variables import Variable
from matex_data.readers.text.unpacked import UnpackedFile, UnpackedRows
from matex_data.storage.files import open_binary

BLOCK_BYTES = 1 << 20  # of records that are read as one
PAGE_BYTES = 4096  # of a longer record the file system need not read all


@dataclass(frozen=True)
class ClassicVariable(Variable):
    """Variable of a classic netCDF file.

    Parameters
    ----------
    offset : byte position of the first value.
    step : bytes from one index of the first axis to the next.
    packing : compression of the file, in whose content the offset counts; "": none.
    """

    path: str
    offset: int
    step: int
    packing: str = ""

    @property
    def end(self) -> int:
        """First byte after the variable."""
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        return self.offset + (self.shape[0] - 1) * self.step + row_bytes if self.shape else self.offset + row_bytes

    def stored_rows(self, axis: int) -> tuple[Field, Layout]:
        convert = None if self.dtype.isnative else Decoding(self.dtype.newbyteorder("="))
        layout = along_axis(self.shape, axis, self.offset, self.step, self.dtype, convert=convert)
        shape = self.shape[:axis] + self.shape[axis + 1 :]
        field = Field(self.name, shape, self.dtype.newbyteorder("="), attributes=self.attributes)
        return field, UnpackedRows(layout, UnpackedFile(self.path, self.packing)) if self.packing else layout

    def values(self) -> Array:
        if self.packing:
            return self._read_from(io.BytesIO(UnpackedFile(self.path, self.packing).content().data))
        with open_binary(self.path) as file:
            return self._read_from(file)

    def _read_from(self, file: IO[bytes]) -> Array:
        rows, *inner = self.shape or (1,)
        row_bytes = prod(inner) * self.dtype.itemsize
        block = 1
        if self.step == row_bytes:
            block = max(1, rows)
        elif self.step <= PAGE_BYTES:
            block = BLOCK_BYTES // self.step
        strides = (self.step, *c_strides(inner, self.dtype.itemsize))
        values = np.empty((rows, *inner), self.dtype)
        for i in range(0, rows, block):
            count = min(block, rows - i)
            file.seek(self.offset + i * self.step)
            data = file.read((count - 1) * self.step + row_bytes)
            values[i : i + count] = np.ndarray((count, *inner), self.dtype, data, strides=strides)
        return values.reshape(self.shape)
