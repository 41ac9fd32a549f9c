"""Variables of classic netCDF files: plain arrays, or interleaved records along the record dimension."""

from __future__ import annotations

import gzip
import io
import zlib
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import numpy as np

from matex_data._types import Array
from matex_data.errors import FormatError
from matex_data.fields import Field
from matex_data.index.library import MemoryRows
from matex_data.index.model import Layout
from matex_data.index.strided import Strided, Transposed
from matex_data.readers.decoding import Decoding
from matex_data.readers.dimensions.cf import CfDecoding
from matex_data.readers.dimensions.variables import FileContent, Variable
from matex_data.readers.netcdf.header import CdfHeader, CdfVariable, read_header
from matex_data.storage.files import open_binary, open_sequential, size_of_open

GZIP_MAGIC = b"\x1f\x8b"
MAX_GUNZIPPED_BYTES = 256 << 20  # of a gzipped file, which is held in memory


def read_content(path: str) -> FileContent:
    """Read variables and dimensions of a classic netCDF file, plain or gzipped as a whole.

    Raises
    ------
    FormatError : the file is no classic netCDF file, or is damaged.
    """
    with open_binary(path) as file:
        if file.read(2) == GZIP_MAGIC:
            return _gunzipped(path)
        file.seek(0)
        size = size_of_open(file)
        header = read_header(file, path, size)
    return _content(path, header, [_variable(path, v, header.record_bytes, size) for v in header.variables])


def _content(path: str, header: CdfHeader, variables: list[Variable]) -> FileContent:
    unlimited = [] if header.unlimited is None else [header.unlimited]
    return FileContent(path, variables, header.dimensions, unlimited)


def _gunzipped(path: str) -> FileContent:
    try:
        with open_sequential(path) as packed, gzip.GzipFile(fileobj=packed) as file:
            data = file.read(MAX_GUNZIPPED_BYTES + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise FormatError("the file cannot be unzipped", file=path, found=error) from error
    if len(data) > MAX_GUNZIPPED_BYTES:
        raise FormatError(
            "the gzipped file is too large to be held in memory",
            file=path,
            expected=f"at most {MAX_GUNZIPPED_BYTES} bytes unzipped",
            remedy="unzip it: single rows of a gzipped file cannot be read",
        )
    header = read_header(io.BytesIO(data), path, len(data))
    stored = [_variable(path, v, header.record_bytes, len(data)) for v in header.variables]
    return _content(path, header, [MemoryVariable.of(variable, data) for variable in stored])


def _variable(path: str, found: CdfVariable, record_bytes: int, size: int) -> ClassicVariable:
    step = record_bytes if found.record else prod(found.shape[1:]) * found.dtype.itemsize
    common = (found.name, found.dimensions, found.shape, found.dtype, found.attributes)
    variable = ClassicVariable(*common, path=path, offset=found.offset, step=step)
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
    """

    path: str
    offset: int
    step: int

    @property
    def end(self) -> int:
        """First byte after the variable."""
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        return self.offset + (self.shape[0] - 1) * self.step + row_bytes if self.shape else self.offset + row_bytes

    def rows(self, axis: int, decoding: CfDecoding) -> tuple[Field, Layout]:
        shape = self.shape[:axis] + self.shape[axis + 1 :]
        stored, convert = self.dtype, decoding.convert
        if decoding.dtype.kind == "S":
            shape, stored = shape[:-1] if decoding.dtype.itemsize > 1 else shape, decoding.dtype
        elif convert is None and not stored.isnative:
            convert = Decoding(decoding.dtype)
        field = Field(self.name, shape, decoding.dtype, attributes=decoding.attributes)
        if axis == 0:
            return field, Strided(self.shape[0], self.offset, self.step, stored, shape, convert=convert)
        before, after = self.shape[:axis], shape[axis:]
        order = tuple(range(len(shape)))
        return field, Transposed(self.shape[axis], self.offset, before, after, self.step, stored, order, convert)

    def values(self) -> Array:
        with open_binary(self.path) as file:
            return self.read_from(file)

    def read_from(self, file: BinaryIO) -> Array:
        """Read all values from an open file with the content of ``path``."""
        row = np.dtype((self.dtype, self.shape[1:]))
        rows = self.shape[0] if self.shape else 1
        if self.step == row.itemsize or rows == 1:
            file.seek(self.offset)
            return np.frombuffer(file.read(rows * row.itemsize), self.dtype).reshape(self.shape)
        values = np.empty(self.shape, self.dtype)
        for i in range(rows):
            file.seek(self.offset + i * self.step)
            values[i] = np.frombuffer(file.read(row.itemsize), self.dtype).reshape(self.shape[1:])
        return values


@dataclass(frozen=True)
class MemoryVariable(Variable):
    """Variable of a gzipped file, with its values in memory."""

    stored: Any

    @classmethod
    def of(cls, variable: ClassicVariable, data: bytes) -> MemoryVariable:
        """Return the variable with its values from ``data``, the unzipped file."""
        common = (variable.name, variable.dimensions, variable.shape, variable.dtype, variable.attributes)
        return cls(*common, stored=variable.read_from(io.BytesIO(data)))

    def rows(self, axis: int, decoding: CfDecoding) -> tuple[Field, Layout]:
        rows = np.moveaxis(decoding.decode(self.stored), axis, 0)
        return Field(self.name, rows.shape[1:], decoding.dtype, attributes=decoding.attributes), MemoryRows(rows)

    def values(self) -> Array:
        return np.asarray(self.stored)
