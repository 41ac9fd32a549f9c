"""The variables of classic netCDF files: plain arrays, those with the record dimension interleaved."""

from __future__ import annotations

import gzip
import io
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from matex_data._types import Array
from matex_data.errors import FormatError
from matex_data.fields import Field
from matex_data.index.library import MemoryRows
from matex_data.index.model import Layout
from matex_data.index.strided import Strided
from matex_data.index.transposed import Transposed
from matex_data.readers.netcdf.cf import Decoding, Meaning
from matex_data.readers.netcdf.header import CdfHeader, CdfVariable, read_header
from matex_data.readers.netcdf.variables import Content, Variable

GZIP = b"\x1f\x8b"
MOST_UNPACKED = 256 << 20  # bytes of a gzipped file that are held in memory


def content(path: str) -> Content:
    """What is in a classic netCDF file, or in one that was gzipped as a whole.

    Raises
    ------
    FormatError : it is none, or it is damaged.
    """
    with Path(path).open("rb") as file:
        if file.read(2) == GZIP:
            return _unpacked(path)
        file.seek(0)
        size = Path(path).stat().st_size
        header = read_header(file, path, size)
    return _content(path, header, [_variable(path, v, header.record_bytes, size) for v in header.variables])


def _content(path: str, header: CdfHeader, variables: list[Variable]) -> Content:
    unlimited = [] if header.unlimited is None else [header.unlimited]
    return Content(path, variables, header.dimensions, unlimited)


def _unpacked(path: str) -> Content:
    try:
        with gzip.open(path) as packed:
            data = packed.read(MOST_UNPACKED + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise FormatError("the file cannot be unzipped", file=path, found=error) from error
    if len(data) > MOST_UNPACKED:
        raise FormatError(
            "the gzipped file is too large to be held in memory",
            file=path,
            expected=f"at most {MOST_UNPACKED} bytes unzipped",
            remedy="unzip it: parts of a gzipped file cannot be read",
        )
    header = read_header(io.BytesIO(data), path, len(data))
    stored = [_variable(path, v, header.record_bytes, len(data)) for v in header.variables]
    return _content(path, header, [_InMemory.of(variable, data) for variable in stored])


def _variable(path: str, found: CdfVariable, record_bytes: int, size: int) -> ClassicVariable:
    step = record_bytes if found.record else prod(found.shape[1:]) * found.dtype.itemsize
    names = (found.name, found.dimensions, found.shape, found.dtype, found.attributes)
    variable = ClassicVariable(*names, path=path, begin=found.begin, step=step)
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
    """A variable in the file ``path`` from byte ``begin`` on; ``step`` bytes from one first index to the next."""

    path: str
    begin: int
    step: int

    @property
    def end(self) -> int:
        """First byte after it."""
        inner = prod(self.shape[1:]) * self.dtype.itemsize
        return self.begin + (self.shape[0] - 1) * self.step + inner if self.shape else self.begin + inner

    def rows(self, axis: int, meaning: Meaning) -> tuple[Field, Layout]:
        shape = self.shape[:axis] + self.shape[axis + 1 :]
        stored, convert = self.dtype, meaning.decoding
        if meaning.dtype.kind == "S":
            shape, stored = shape[:-1] if meaning.dtype.itemsize > 1 else shape, meaning.dtype
        elif convert is None and not stored.isnative:
            convert = Decoding(meaning.dtype)
        field = Field(self.name, shape, meaning.dtype, attributes=meaning.attributes)
        if axis == 0:
            return field, Strided(self.shape[0], self.begin, self.step, stored, shape, convert=convert)
        before, after = self.shape[:axis], shape[axis:]
        order = tuple(range(len(shape)))
        return field, Transposed(self.shape[axis], self.begin, before, after, self.step, stored, order, convert)

    def values(self) -> Array:
        with Path(self.path).open("rb") as file:
            return self._taken(file)

    def _taken(self, file: BinaryIO) -> Array:
        """All numbers, from a file or what stands for one."""
        row = np.dtype((self.dtype, self.shape[1:]))
        rows = self.shape[0] if self.shape else 1
        if self.step == row.itemsize or rows == 1:
            file.seek(self.begin)
            return np.frombuffer(file.read(rows * row.itemsize), self.dtype).reshape(self.shape)
        found = np.empty(self.shape, self.dtype)
        for i in range(rows):
            file.seek(self.begin + i * self.step)
            found[i] = np.frombuffer(file.read(row.itemsize), self.dtype).reshape(self.shape[1:])
        return found


@dataclass(frozen=True)
class _InMemory(Variable):
    """A variable of a gzipped file."""

    numbers: Any

    @classmethod
    def of(cls, variable: ClassicVariable, data: bytes) -> _InMemory:
        """The variable whose file has these bytes."""
        names = (variable.name, variable.dimensions, variable.shape, variable.dtype, variable.attributes)
        return cls(*names, numbers=variable._taken(io.BytesIO(data)))

    def rows(self, axis: int, meaning: Meaning) -> tuple[Field, Layout]:
        held = np.moveaxis(meaning.of(self.numbers), axis, 0)
        return Field(self.name, held.shape[1:], meaning.dtype, attributes=meaning.attributes), MemoryRows(held)

    def values(self) -> Array:
        return np.asarray(self.numbers)
