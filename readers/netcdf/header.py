"""Header of classic netCDF files: CDF-1, CDF-2 (64-bit offsets) and CDF-5 (64-bit data), plain or in gzip.

The grammar is in https://docs.unidata.ucar.edu/netcdf-c/current/file_format_specifications.html and, for CDF-5,
in https://cucis.eecs.northwestern.edu/projects/PnetCDF/CDF-5.html. All numbers are big-endian.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import IO, Any

import numpy as np

from matex_data.errors import RESTORE, FormatError, truncated
from matex_data.readers.dimensions.variables import FileContent
from matex_data.readers.netcdf.classic import ClassicVariable
from matex_data.readers.text.unpacked import content
from matex_data.storage.files import open_binary, size_of_open

DIMENSION, VARIABLE, ATTRIBUTE = 10, 11, 12
TYPES = {1: "i1", 2: "S1", 3: ">i2", 4: ">i4", 5: ">f4", 6: ">f8", 7: "u1", 8: ">u2", 9: ">u4", 10: ">i8", 11: ">u8"}
CLASSIC_TYPES = 6  # of CDF-1 and CDF-2; CDF-5 has all
STREAMING = -1  # in place of the number of records, of a file that was written as a stream
READ_BYTES = 1 << 16
TAGS = {DIMENSION: "dimensions", VARIABLE: "variables", ATTRIBUTE: "attributes"}


def read_content(path: str) -> FileContent:
    """Read variables and dimensions of a classic netCDF file, plain or compressed as a whole.

    Raises
    ------
    DecodeError : the file does not unpack.
    PartitionError : its content does not fit into memory.
    FormatError : the file is no classic netCDF file, or its header contradicts the grammar, or it is truncated.
    """
    with open_binary(path) as stored:
        file, packing = content(path, stored)
        size = size_of_open(file)
        variables, dimensions, unlimited = _HeaderParser(file, path, size, packing).parse()
    for variable in variables:
        if variable.nbytes and variable.end > size:
            raise truncated(path, size, variable.end, variable.name)
    return FileContent(path, variables, dimensions, unlimited)


class _HeaderParser:
    """Recursive descent parser, which reads as much of the file as the header takes."""

    def __init__(self, file: IO[bytes], path: str, size: int, packing: str) -> None:
        self._file = file
        self._path = path
        self._size = size
        self._packing = packing
        self._data = b""
        self._position = 0
        self._version = 0

    def parse(self) -> tuple[list[ClassicVariable], dict[str, int], list[str]]:
        """Return the variables, the length of each dimension, and the name of the record dimension, if there is one."""
        magic = self._take(4)
        self._version = magic[3]
        if magic[:3] != b"CDF" or self._version not in (1, 2, 5):
            raise self._error("the file is not a netCDF file", "the bytes 'CDF' and version 1, 2 or 5", repr(magic))
        records = self._length(least=STREAMING)
        dimensions = [self._dimension() for _ in range(self._list(DIMENSION))]
        unlimited = [name for name, length in dimensions if length == 0]
        if len(unlimited) > 1:
            raise self._error("the file has more than one record dimension", "at most one of length 0", unlimited)
        self._attributes()  # of the file
        variables = [self._variable(dimensions) for _ in range(self._list(VARIABLE))]
        of_records = [variable for variable in variables if variable.shape[:1] == (0,)]
        # Each row is padded to 4 bytes, except that of a lone variable.
        padded = sum(v.step + -v.step % 4 for v in of_records)
        step = of_records[0].step if len(of_records) == 1 else padded
        if records == STREAMING:  # its size tells
            last = max((v.offset + v.step for v in of_records), default=0)
            records = 1 + (self._size - last) // step if last and step and last <= self._size else 0
        for number, variable in enumerate(variables):
            if variable.shape[:1] == (0,):
                variables[number] = replace(variable, shape=(records, *variable.shape[1:]), step=step)
        return variables, {name: length or records for name, length in dimensions}, unlimited

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

    def _variable(self, dimensions: list[tuple[str, int]]) -> ClassicVariable:
        """Return a variable, of which the record dimension has the length 0 until the number of records is known."""
        name = self._name()
        ids = [self._length() for _ in range(self._bounded(self._length(), 4, "axes"))]
        if any(i >= len(dimensions) for i in ids):
            raise self._error(f"the variable {name!r} has an unknown dimension", f"below {len(dimensions)}", ids)
        attributes, dtype = self._attributes(), self._type()
        self._number()  # size in bytes; the shape has it too, also where it exceeds this number
        offset = self._integer(4 if self._version == 1 else 8)
        shape = tuple(dimensions[i][1] for i in ids)
        if 0 in shape[1:]:
            raise self._error(f"the variable {name!r} has the record dimension after another", "it first", ids)
        names = tuple(dimensions[i][0] for i in ids)
        step = prod(shape[1:]) * dtype.itemsize
        variable = ClassicVariable(name, names, shape, dtype, attributes, self._path, offset, step, self._packing)
        if offset < 0 or (variable.nbytes and offset < 32):
            raise self._error(f"the variable {name!r} begins within the header", "an offset behind it", offset)
        return variable

    def _list(self, tag: int) -> int:
        """Return the number of elements of the list at this position."""
        found, count = self._integer(4), self._length()
        if found == tag or (found == 0 and count == 0):
            return self._bounded(count, 8, TAGS[tag])
        raise self._error(f"the list of {TAGS[tag]} has the wrong tag", f"tag {tag}, or 0 and 0", found)

    def _name(self) -> str:
        name = self._padded(self._length()).partition(b"\0")[0]  # some programs include the zero byte of a C string
        try:
            return name.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._error("a name in the header is not a text", "UTF-8", repr(name[:40])) from error

    def _type(self) -> np.dtype[Any]:
        number = self._integer(4)
        known = len(TYPES) if self._version == 5 else CLASSIC_TYPES
        if not 1 <= number <= known:
            raise self._error("the header names an unknown type", f"a number from 1 to {known}", number)
        return np.dtype(TYPES[number])

    def _length(self, least: int = 0) -> int:
        number = self._number()
        if number < least:
            raise self._error("a count in the header is negative", "0 or more", number)
        return number

    def _number(self) -> int:
        return self._integer(8 if self._version == 5 else 4)

    def _bounded(self, count: int, min_bytes: int, title: str) -> int:
        """Return the count after a check that the file can hold so many items of at least ``min_bytes`` each."""
        if count * min_bytes > self._size - self._position:
            raise self._error(f"the header announces more {title} than the file can hold", "fewer", count)
        return count

    def _integer(self, width: int) -> int:
        return int.from_bytes(self._take(width), "big", signed=True)

    def _padded(self, count: int) -> bytes:
        """Return the next ``count`` bytes, and skip the padding to a multiple of 4 without a check, as the library."""
        data = self._take(self._bounded(count, 1, "bytes"))
        self._take(-count % 4)
        return data

    def _take(self, count: int) -> bytes:
        while len(self._data) < self._position + count:
            more = self._file.read(max(READ_BYTES, count))
            if not more:
                remedy = "the file is truncated: copy it again from its source"
                raise self._error("the file ends within its header", f"{count} more bytes", "its end", remedy)
            self._data += more
        self._position += count
        return self._data[self._position - count : self._position]

    def _error(self, problem: str, expected: object, found: object, remedy: str = RESTORE) -> FormatError:
        byte = max(0, self._position - 4)
        return FormatError(problem, file=self._path, byte=byte, expected=expected, found=found, remedy=remedy)
