"""The header of classic netCDF files: CDF-1, CDF-2 (64-bit offsets) and CDF-5 (64-bit data).

After the grammar in https://docs.unidata.ucar.edu/netcdf-c/current/file_format_specifications.html and, for CDF-5,
https://cucis.eecs.northwestern.edu/projects/PnetCDF/CDF-5.html. All numbers are big-endian.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import numpy as np

from matex_data.errors import FormatError

DIMENSION, VARIABLE, ATTRIBUTE = 10, 11, 12
TYPES = {1: "i1", 2: "S1", 3: ">i2", 4: ">i4", 5: ">f4", 6: ">f8", 7: "u1", 8: ">u2", 9: ">u4", 10: ">i8", 11: ">u8"}
CLASSIC_TYPES = 6  # the others came with CDF-5
READ_BYTES = 1 << 16
TAGS = {DIMENSION: "dimensions", VARIABLE: "variables", ATTRIBUTE: "attributes"}


@dataclass(frozen=True)
class CdfVariable:
    """One variable as the header has it.

    Parameters
    ----------
    dimensions : names, slowest axis first.
    shape : their lengths, with the number of records for the record dimension.
    dtype : as stored.
    begin : byte position of the first number.
    record : whether it has the record dimension, and so is spread over the records.
    """

    name: str
    dimensions: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    attributes: Mapping[str, Any]
    begin: int
    record: bool

    @property
    def slab_bytes(self) -> int:
        """Bytes of the variable, or of its part of one record; without padding."""
        return prod(self.shape[1:] if self.record else self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class CdfHeader:
    """What the header says.

    Parameters
    ----------
    dimensions : their lengths by name.
    unlimited : name of the record dimension, or None.
    record_bytes : from one record to the next.
    """

    dimensions: Mapping[str, int]
    unlimited: str | None
    attributes: Mapping[str, Any]
    variables: tuple[CdfVariable, ...]
    record_bytes: int


def read_header(file: BinaryIO, path: str, size: int) -> CdfHeader:
    """The header of a file of ``size`` bytes.

    Raises
    ------
    FormatError : it is not a classic netCDF file, or its header contradicts the grammar.
    """
    return _Header(file, path, size).parse()


class _Header:
    """Reads the header from its begin to its end; as much of the file as that takes."""

    def __init__(self, file: BinaryIO, path: str, size: int) -> None:
        self._file = file
        self._path = path
        self._size = size
        self._data = b""
        self._at = 0
        self._version = 0

    def parse(self) -> CdfHeader:
        magic = self._take(4)
        self._version = magic[3]
        if magic[:3] != b"CDF" or self._version not in (1, 2, 5):
            raise self._error("the file is not a netCDF file", "the bytes 'CDF' and version 1, 2 or 5", repr(magic))
        records = self._count(streaming=True)
        dimensions = [self._dimension() for _ in range(self._list(DIMENSION))]
        unlimited = [name for name, length in dimensions if length == 0]
        if len(unlimited) > 1:
            raise self._error("the file has several record dimensions", "at most one of length 0", unlimited)
        attributes = self._attributes()
        variables = [self._variable(dimensions) for _ in range(self._list(VARIABLE))]
        record_bytes = _record_bytes(variables)
        if records is None:
            records = self._streamed(variables, record_bytes)
        return CdfHeader(
            dimensions={name: length or records for name, length in dimensions},
            unlimited=unlimited[0] if unlimited else None,
            attributes=attributes,
            variables=tuple(_with_records(variable, records) for variable in variables),
            record_bytes=record_bytes,
        )

    def _streamed(self, variables: list[CdfVariable], record_bytes: int) -> int:
        """Number of records of a file that was written as a stream: all that it has room for."""
        begins = [variable.begin for variable in variables if variable.record]
        last = max((v.begin + v.slab_bytes for v in variables if v.record), default=0)
        if not begins or not record_bytes or last > self._size:
            return 0
        return 1 + (self._size - last) // record_bytes

    def _dimension(self) -> tuple[str, int]:
        return self._name(), self._length()

    def _attributes(self) -> dict[str, Any]:
        return dict(self._attribute() for _ in range(self._list(ATTRIBUTE)))

    def _attribute(self) -> tuple[str, Any]:
        name, dtype = self._name(), self._type()
        stored = self._padded(self._length() * dtype.itemsize)
        if dtype.kind == "S":
            return name, stored.decode("utf-8", "replace").rstrip("\0")
        values = np.frombuffer(stored, dtype).astype(dtype.newbyteorder("="))
        return name, values[0] if len(values) == 1 else values

    def _variable(self, dimensions: list[tuple[str, int]]) -> CdfVariable:
        name = self._name()
        ids = [self._length() for _ in range(self._bounded(self._length(), 4, "axes"))]
        if any(i >= len(dimensions) for i in ids):
            raise self._error(f"the variable {name!r} has an axis that is none", f"below {len(dimensions)}", ids)
        attributes, dtype = self._attributes(), self._type()
        self._length(signed=False)  # its size: the shape says it, also where this number is too small for it
        begin = self._integer(4 if self._version == 1 else 8)
        shape = tuple(dimensions[i][1] for i in ids)
        if 0 in shape[1:]:
            raise self._error(f"the variable {name!r} has the record dimension behind another", "it first", ids)
        names = tuple(dimensions[i][0] for i in ids)
        variable = CdfVariable(name, names, shape, dtype, attributes, begin, bool(shape) and shape[0] == 0)
        if begin < 0 or (variable.slab_bytes and not variable.record and begin < 32):
            raise self._error(f"the variable {name!r} begins within the header", "a position behind it", begin)
        return variable

    def _list(self, tag: int) -> int:
        """Number of elements of a list that begins here."""
        found, count = self._integer(4), self._length()
        if found == tag or (found == 0 and count == 0):
            return self._bounded(count, 8, TAGS[tag])
        raise self._error(f"the list of {TAGS[tag]} does not begin as it must", f"tag {tag}, or 0 and 0", found)

    def _name(self) -> str:
        name = self._padded(self._length()).partition(b"\0")[0]  # some programs counted the end of a C string
        try:
            return name.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._error("a name in the header is no text", "UTF-8", repr(name[:40])) from error

    def _type(self) -> np.dtype[Any]:
        number = self._integer(4)
        known = len(TYPES) if self._version == 5 else CLASSIC_TYPES
        if not 1 <= number <= known:
            raise self._error("the header names a type that there is not", f"a number from 1 to {known}", number)
        return np.dtype(TYPES[number])

    def _count(self, streaming: bool = False) -> int | None:
        width = 8 if self._version == 5 else 4
        number = self._integer(width)
        if streaming and number == -1:
            return None
        return self._not_negative(number)

    def _length(self, signed: bool = True) -> int:
        number = self._integer(8 if self._version == 5 else 4)
        return self._not_negative(number) if signed else number

    def _not_negative(self, number: int) -> int:
        if number < 0:
            raise self._error("a count in the header is negative", "0 or more", number)
        return number

    def _bounded(self, count: int, least: int, what: str) -> int:
        """The count, if as many things of ``least`` bytes have room in the file."""
        if count * least > self._size - self._at:
            raise self._error(f"the header announces more {what} than the file has room for", "fewer", count)
        return count

    def _integer(self, width: int) -> int:
        return int.from_bytes(self._take(width), "big", signed=True)

    def _padded(self, count: int) -> bytes:
        """That many bytes; what fills them up to a multiple of 4 may be anything, as the library has it."""
        found = self._take(self._bounded(count, 1, "bytes"))
        self._take(-count % 4)
        return found

    def _take(self, count: int) -> bytes:
        while len(self._data) < self._at + count:
            more = self._file.read(max(READ_BYTES, count))
            if not more:
                remedy = "the file is truncated: copy it again from its source"
                raise self._error("the file ends within its header", f"{count} more bytes", "its end", remedy)
            self._data += more
        self._at += count
        return self._data[self._at - count : self._at]

    def _error(self, problem: str, expected: object, found: object, remedy: str | None = None) -> FormatError:
        at = max(0, self._at - 4)
        return FormatError(problem, file=self._path, byte=at, expected=expected, found=found, remedy=remedy)


def _record_bytes(variables: list[CdfVariable]) -> int:
    """From one record to the next: each variable is padded to 4 bytes, but not a single one."""
    slabs = [variable.slab_bytes for variable in variables if variable.record]
    return slabs[0] if len(slabs) == 1 else sum(slab + -slab % 4 for slab in slabs)


def _with_records(variable: CdfVariable, records: int) -> CdfVariable:
    if not variable.record:
        return variable
    shape = (records, *variable.shape[1:])
    fields = (variable.name, variable.dimensions, shape, variable.dtype, variable.attributes, variable.begin)
    return CdfVariable(*fields, record=True)
