"""Variables of classic netCDF files: plain arrays, or interleaved records along the record dimension."""

from __future__ import annotations

import io
from dataclasses import dataclass
from math import prod
from typing import IO, Any

import numpy as np

from matex_data._types import Array
from matex_data.errors import FormatError
from matex_data.fields import Field
from matex_data.index.model import Layout
from matex_data.index.scatter import Convert
from matex_data.index.strided import Strided, Transposed, c_strides
from matex_data.readers.decoding import Decoding
from matex_data.readers.dimensions.cf import CfDecoding
from matex_data.readers.dimensions.variables import FileContent, Variable
from matex_data.readers.netcdf.header import CdfVariable, read_header
from matex_data.readers.text.unpacked import UnpackedFile, UnpackedRows, content
from matex_data.storage.files import open_binary, size_of_open

GZIP_MAGIC = b"\x1f\x8b"
BLOCK_BYTES = 1 << 20  # of records that are read as one
PAGE_BYTES = 4096  # of a longer record the file system need not read all


def read_content(path: str) -> FileContent:
    """Read variables and dimensions of a classic netCDF file, plain or compressed as a whole.

    Raises
    ------
    DecodeError : the file does not unpack.
    PartitionError : its content does not fit into memory.
    FormatError : the file is no classic netCDF file, or is damaged.
    """
    with open_binary(path) as stored:
        file, packing = content(path, stored)
        size = size_of_open(file)
        header = read_header(file, path, size)
    variables = [_variable(path, found, header.record_bytes, size, packing) for found in header.variables]
    unlimited = [] if header.unlimited is None else [header.unlimited]
    return FileContent(path, variables, header.dimensions, unlimited)


def _variable(path: str, found: CdfVariable, record_bytes: int, size: int, packing: str) -> ClassicVariable:
    step = record_bytes if found.record else prod(found.shape[1:]) * found.dtype.itemsize
    common = (found.name, found.dimensions, found.shape, found.dtype, found.attributes)
    variable = ClassicVariable(*common, path=path, offset=found.offset, step=step, packing=packing)
    if variable.nbytes and variable.end > size:
        raise FormatError(
            "the file is truncated",
            file=path,
            field=found.name,
            byte=size,
            expected=f"{variable.end} bytes",
            found=f"{size} bytes",
            remedy="copy it again from its source",
        )
    return variable


@dataclass(frozen=True)
class ClassicVariable(Variable):
    """Variable of a classic netCDF file.

    Parameters
    ----------
    path : of the file.
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

    def rows(self, axis: int, decoding: CfDecoding) -> tuple[Field, Layout]:
        shape = self.shape[:axis] + self.shape[axis + 1 :]
        stored, convert = self.dtype, decoding.convert
        if decoding.dtype.kind == "S":
            shape, stored = shape[:-1] if decoding.letters else shape, decoding.dtype
        elif convert is None and not stored.isnative:
            convert = Decoding(decoding.dtype)
        field = Field(self.name, shape, decoding.dtype, attributes=decoding.attributes)
        layout = self._layout(axis, shape, stored, convert)
        return field, UnpackedRows(layout, UnpackedFile(self.path, self.packing)) if self.packing else layout

    def _layout(self, axis: int, shape: tuple[int, ...], stored: np.dtype[Any], convert: Convert | None) -> Layout:
        """Return the layout of rows of a shape along an axis."""
        if axis == 0:
            return Strided(self.shape[0], self.offset, self.step, stored, shape, convert=convert)
        before, after = self.shape[:axis], shape[axis:]
        order = tuple(range(len(shape)))
        return Transposed(self.shape[axis], self.offset, before, after, self.step, stored, order, convert)

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
