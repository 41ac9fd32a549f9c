"""Plain arrays: NumPy's .npy and .npz, and raw binary. Never pickles.

.npy after https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html, .npz is a zip file of such.
"""

from __future__ import annotations

import ast
import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np

from matex_data.crosswise import Crosswise
from matex_data.errors import FieldNotFound, FormatError, near_matches
from matex_data.fields import Field
from matex_data.index import File, Index, Part
from matex_data.layouts import Strided
from matex_data.readers.cf import Decoding
from matex_data.readers.unpacked import UnpackedRows

NUMPY, ZIP = b"\x93NUMPY", b"PK\x03\x04"
EMPTY_ZIP = b"PK\x05\x06"
LONGEST_HEADER = 1 << 20


def index(
    path: str,
    names: Sequence[str] | None = None,
    *,
    field: str = "data",
    dtype: Any = None,
    shape: Sequence[int] = (),
    offset: int = 0,
) -> Index:
    """The rows of an .npy file, of the arrays in an .npz file, or of a raw binary file.

    Parameters
    ----------
    names : the arrays of an .npz file that are wanted; None: all that have a first axis.
    field : name of the only field of the other two.
    dtype, shape : of one sample of a raw binary file, for example ``">f4"`` and ``(64, 64)``.
    offset : bytes before the first sample of a raw binary file.

    Raises
    ------
    FieldNotFound : there is no such array.
    FormatError : the file is damaged, holds Python objects, or is raw and its dtype is not given.
    """
    with Path(path).open("rb") as file:
        head = file.read(8)
    if dtype is not None:
        fields, parts = _one(path, names, field, _raw(path, np.dtype(dtype), tuple(shape), offset))
    elif head.startswith(NUMPY):
        with Path(path).open("rb") as file:
            fields, parts = _one(path, names, field, _header(file, path))
    elif head.startswith((ZIP, EMPTY_ZIP)):
        fields, parts = _members(path, names)
    else:
        raise FormatError(
            "the file is no NumPy array",
            file=path,
            expected=f"{NUMPY!r} (.npy) or {ZIP!r} (.npz) at its begin, or dtype= and shape= of a raw file",
            found=repr(head),
        )
    return Index(fields, [File(path, next(iter(parts.values())).rows, parts)])


@dataclass(frozen=True)
class Array:
    """An array that lies in a file from byte ``offset`` on.

    Parameters
    ----------
    dtype : as stored.
    shape : of all of it.
    fortran : the first axis is the fastest.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    offset: int

    def field(self, name: str) -> Field:
        """One sample of it."""
        return Field(name, self.shape[1:], self.dtype.newbyteorder("="))

    def part(self) -> Part:
        """Where its rows are."""
        rows, *row = self.shape
        swapped = not self.dtype.isnative and self.dtype.kind in "iuf"
        convert = Decoding(self.dtype.newbyteorder("=")) if swapped else None
        if not self.fortran or not row:
            return Strided(rows, self.offset, prod(row) * self.dtype.itemsize, self.dtype, tuple(row), convert=convert)
        order = tuple(reversed(range(len(row))))
        step = prod(self.shape[:-1]) * self.dtype.itemsize
        return Crosswise(rows, self.offset, tuple(reversed(row)), (), step, self.dtype, order, convert)


def _one(path: str, names: Sequence[str] | None, name: str, array: Array) -> tuple[dict[str, Field], dict[str, Part]]:
    if names is not None and list(names) != [name]:
        other = next(n for n in names if n != name)
        raise FieldNotFound("the file has no such field", file=path, field=other, expected=f"{name!r}, its only one")
    if not array.shape:
        raise FormatError("the array has no sample axis", file=path, expected="at least one axis", found="one number")
    return {name: array.field(name)}, {name: array.part()}


def _raw(path: str, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int) -> Array:
    row, size = prod(shape) * dtype.itemsize, Path(path).stat().st_size - offset
    if dtype.hasobject or row <= 0 or size < 0 or size % row:
        raise FormatError(
            "the file is not made of whole samples",
            file=path,
            expected=f"{offset} bytes and a multiple of {row} ({dtype} of shape {shape})",
            found=f"{size + offset} bytes",
            remedy="give the dtype=, shape= and offset= that the file was written with",
        )
    return Array(dtype, (size // row, *shape), False, offset)


def _header(file: IO[bytes], path: str, member: str | None = None) -> Array:
    """The header of an .npy file; ``offset`` is counted from its begin."""
    try:
        magic = file.read(8)
        width = 2 if magic[6] == 1 else 4
        length = int.from_bytes(file.read(width), "little")
        if magic[:6] != NUMPY or magic[6] not in (1, 2, 3) or length > LONGEST_HEADER:
            raise ValueError(f"begins with {magic!r}")
        text = file.read(length).decode("utf-8" if magic[6] == 3 else "latin-1")
        said = ast.literal_eval(text.strip())
        dtype = np.lib.format.descr_to_dtype(said["descr"])
        shape = tuple(int(n) for n in said["shape"])
        if min(shape, default=0) < 0:
            raise ValueError(f"shape {shape}")
        found = Array(dtype, shape, bool(said["fortran_order"]), 8 + width + length)
    except (ValueError, SyntaxError, KeyError, TypeError, IndexError, UnicodeDecodeError) as error:
        raise FormatError("the header of the array is damaged", file=path, field=member, found=error) from error
    if dtype.hasobject:
        raise FormatError(
            "the array holds Python objects",
            file=path,
            field=member,
            expected="numbers, booleans or fixed-length strings",
            found=str(dtype),
            remedy="objects are pickles, which can run any code, and are not read: save it with a plain dtype",
        )
    return found


def _members(path: str, names: Sequence[str] | None) -> tuple[dict[str, Field], dict[str, Part]]:
    fields: dict[str, Field] = {}
    parts: dict[str, Part] = {}
    try:
        with zipfile.ZipFile(path) as file, Path(path).open("rb") as stored:
            members = {info.filename.removesuffix(".npy"): info for info in file.infolist() if not info.is_dir()}
            for name in _wanted(path, names, members):
                with file.open(members[name]) as member:
                    array = _header(member, path, name)
                if array.shape:
                    fields[name], parts[name] = array.field(name), _member_part(stored, path, members[name], array)
                elif names is not None:
                    raise FormatError("the array has no sample axis", file=path, field=name, found="one number")
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise FormatError("the file is a damaged zip file", file=path, found=error) from error
    if not fields:
        raise FormatError("the file has no samples", file=path, expected="an array with a first axis", found="none")
    return fields, parts


def _wanted(path: str, names: Sequence[str] | None, members: dict[str, zipfile.ZipInfo]) -> list[str]:
    for name in names or ():
        if name not in members:
            near = near_matches(name, members)
            raise FieldNotFound("the file has no such array", file=path, field=name, expected=f"one of {near}")
    return list(members) if names is None else list(names)


def _member_part(stored: IO[bytes], path: str, info: zipfile.ZipInfo, array: Array) -> Part:
    """Where the rows of a member are: a byte range of the zip file, unless it is compressed."""
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        return UnpackedRows(path, info.filename, array.shape, array.dtype, array.offset, array.fortran)
    stored.seek(info.header_offset)
    local = stored.read(30)
    if len(local) < 30 or not local.startswith(ZIP):
        raise FormatError("the file is a damaged zip file", file=path, byte=info.header_offset, found=repr(local[:4]))
    begin = info.header_offset + 30 + sum(struct.unpack("<HH", local[26:30]))
    needed = prod(array.shape) * array.dtype.itemsize + array.offset
    if info.file_size < needed or begin + needed > os.fstat(stored.fileno()).st_size:
        raise FormatError(
            "the array is truncated",
            file=path,
            field=info.filename.removesuffix(".npy"),
            expected=f"{needed} bytes",
            found=f"{info.file_size} bytes",
        )
    return Array(array.dtype, array.shape, array.fortran, begin + array.offset).part()
