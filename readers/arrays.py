"""Plain arrays: NumPy's .npy and .npz, and raw binary. Never pickles.

.npy after https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html, .npz is a zip file of such.
"""

from __future__ import annotations

import ast
import os
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np

from matex_data.errors import DataError, DecodeError, FieldNotFound, FormatError, near_matches
from matex_data.fields import Field
from matex_data.index.model import FileIndex, Index, Layout
from matex_data.index.strided import Strided
from matex_data.index.transposed import Transposed
from matex_data.readers.netcdf.cf import Decoding
from matex_data.readers.whole_file import UnpackedRows, most_unpacked, skip

NUMPY, ZIP = b"\x93NUMPY", b"PK\x03\x04"
EMPTY_ZIP = b"PK\x05\x06"
LONGEST_HEADER = 1 << 20
KINDS = "biufcmMSUV"  # of dtypes that are bytes alone, as of ``numpy.dtype.kind``
MOST_EMPTY = 1 << 20  # samples without any bytes, of which a header can claim as many as it likes
RESTORE = "the file is damaged: restore it from its source"


def index(
    path: str,
    names: Sequence[str] | None = None,
    *,
    field: str = "data",
    dtype: Any = None,
    shape: Sequence[int] = (),
    offset: int = 0,
    verify: bool = True,
) -> Index:
    """The rows of an .npy file, of the arrays in an .npz file, or of a raw binary file.

    Parameters
    ----------
    names : the arrays of an .npz file that are wanted; None: all that have a first axis.
    field : name of the only field of the other two.
    dtype, shape : of one sample of a raw binary file, for example ``">f4"`` and ``(64, 64)``.
    offset : bytes before the first sample of a raw binary file.
    verify : compare the checksums of the arrays in an .npz file that are not compressed, which takes the one rank that
        opens the file a pass over them; those of compressed ones are compared anyhow.

    Raises
    ------
    FieldNotFound : there is no such array.
    FormatError : the file is damaged, holds Python objects, or is raw and its dtype is not given.
    """
    with Path(path).open("rb") as file:
        head = file.read(8)
    if dtype is not None:
        fields, parts = _one(path, names, field, _raw(path, dtype, tuple(shape), offset))
    elif head.startswith(NUMPY):
        with Path(path).open("rb") as file:
            fields, parts = _one(path, names, field, _header(file, path, None, os.fstat(file.fileno()).st_size))
    elif head.startswith((ZIP, EMPTY_ZIP)):
        fields, parts = _members(path, names, verify)
    else:
        raise FormatError(
            "the file is no NumPy array",
            file=path,
            expected=f"{NUMPY!r} (.npy) or {ZIP!r} (.npz) at its begin, or dtype= and shape= of a raw file",
            found=repr(head),
        )
    return Index(fields, [FileIndex(path, next(iter(parts.values())).rows, parts)])


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

    @property
    def end(self) -> int:
        """First byte after it."""
        return self.offset + prod(self.shape) * self.dtype.itemsize

    def field(self, name: str) -> Field:
        """One sample of it."""
        return Field(name, self.shape[1:], self.dtype.newbyteorder("="))

    def part(self) -> Layout:
        """Where its rows are."""
        rows, *row = self.shape
        swapped = not self.dtype.isnative and self.dtype.kind in "iuf"
        convert = Decoding(self.dtype.newbyteorder("=")) if swapped else None
        if not self.fortran or not row:
            return Strided(rows, self.offset, prod(row) * self.dtype.itemsize, self.dtype, tuple(row), convert=convert)
        order = tuple(reversed(range(len(row))))
        step = prod(self.shape[:-1]) * self.dtype.itemsize
        return Transposed(rows, self.offset, tuple(reversed(row)), (), step, self.dtype, order, convert)


def _one(path: str, names: Sequence[str] | None, name: str, array: Array) -> tuple[dict[str, Field], dict[str, Layout]]:
    if names is not None and list(names) != [name]:
        other = next(n for n in names if n != name)
        raise FieldNotFound("the file has no such field", file=path, field=other, expected=f"{name!r}, its only one")
    check_shape(path, None, array.shape, array.dtype)
    return {name: array.field(name)}, {name: array.part()}


def _raw(path: str, dtype: Any, shape: tuple[int, ...], offset: int) -> Array:
    size = Path(path).stat().st_size
    try:
        stored = np.dtype(dtype)
    except Exception as error:  # NumPy raises several kinds
        raise FormatError(
            "there is no such dtype", file=path, expected='dtype=">f4", for example', found=error
        ) from error
    row = prod(shape) * stored.itemsize
    if stored.hasobject or row <= 0 or not 0 <= offset <= size or (size - offset) % row:
        raise FormatError(
            "the file is not made of whole samples",
            file=path,
            expected=f"{offset} bytes and a multiple of {row} ({stored} of shape {shape})",
            found=f"{size} bytes",
            remedy="give the dtype=, shape= and offset= that the file was written with",
        )
    array = Array(stored, ((size - offset) // row, *shape), False, offset)
    check_shape(path, None, array.shape, stored)
    return array


def check_shape(path: str, field: str | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise ``FormatError`` unless samples of an array can be held, whatever its header says."""
    found = None
    if not shape:
        found = "one number, which has no sample axis"
    elif dtype.kind not in KINDS or dtype.subdtype is not None or not dtype.itemsize:
        found = f"dtype {dtype}"
    elif not prod(shape) and shape[0] > MOST_EMPTY:
        found = f"{shape[0]} samples of no bytes"
    else:
        try:
            np.empty((0, *shape[1:]), dtype)
        except ValueError as error:  # too many axes, or too many numbers
            found = f"shape {shape[:8]}{'...' if len(shape) > 8 else ''}: {error}"
    if found is not None:
        expected = "numbers, booleans or fixed-length strings along a sample axis"
        raise FormatError(
            "the array has no samples that can be read", file=path, field=field, expected=expected, found=found
        )


def _header(file: IO[bytes], path: str, member: str | None, size: int) -> Array:
    """Parse the header of an .npy file of ``size`` bytes; ``offset`` is counted from its begin.

    Nothing is believed that the size of the file does not bear out.
    """
    try:
        magic = file.read(8)
        width = 2 if magic[6] == 1 else 4
        length = int.from_bytes(file.read(width), "little")
        if magic[:6] != NUMPY or magic[6] not in (1, 2, 3) or magic[7] != 0 or length > LONGEST_HEADER:
            raise ValueError(f"begins with {magic!r}")
        text = file.read(length).decode("utf-8" if magic[6] == 3 else "latin-1")
        array = Array(*_said(text), 8 + width + length)
    except Exception as error:  # a damaged header is any text, and Python and NumPy raise anything on it
        raise FormatError("the header of the array is damaged", file=path, field=member, found=error) from error
    if array.dtype.hasobject:
        raise FormatError(
            "the array holds Python objects",
            file=path,
            field=member,
            expected="numbers, booleans or fixed-length strings",
            found=str(array.dtype),
            remedy="objects are pickles, which can run any code, and are not read: save it with a plain dtype",
        )
    if array.shape:
        check_shape(path, member, array.shape, array.dtype)
    if array.end > size:
        raise FormatError(
            "the array is truncated",
            file=path,
            field=member,
            byte=size,
            expected=f"{array.end} bytes",
            found=f"{size} bytes",
            remedy=RESTORE,
        )
    return array


def _said(text: str) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """Return dtype, shape and order as a header says them; exactly what NumPy accepts."""
    said = ast.literal_eval(text)
    if not isinstance(said, dict) or set(said) != {"descr", "fortran_order", "shape"}:
        raise ValueError(f"expected a dict of descr, fortran_order and shape, found {text[:80]!r}")
    shape, fortran = said["shape"], said["fortran_order"]
    if not isinstance(shape, tuple) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError(f"shape {shape}")
    if not isinstance(fortran, bool):
        raise ValueError(f"fortran_order {fortran!r}")
    return np.lib.format.descr_to_dtype(said["descr"]), tuple(int(n) for n in shape), fortran


def _members(path: str, names: Sequence[str] | None, verify: bool) -> tuple[dict[str, Field], dict[str, Layout]]:
    fields: dict[str, Field] = {}
    parts: dict[str, Layout] = {}
    try:
        with zipfile.ZipFile(path) as file, Path(path).open("rb") as stored:
            members = {info.filename.removesuffix(".npy"): info for info in file.infolist() if not info.is_dir()}
            for name in _wanted(path, names, members):
                array = _member(file, path, name, members[name], verify)
                if array.shape:
                    fields[name], parts[name] = array.field(name), _member_part(stored, path, members[name], array)
                elif names is not None:
                    raise FormatError("the array has no sample axis", file=path, field=name, found="one number")
    except (DataError, MemoryError):
        raise
    except Exception as error:  # zipfile raises anything on a damaged file
        raise FormatError("the file is a damaged zip file", file=path, found=error, remedy=RESTORE) from error
    if not fields:
        raise FormatError("the file has no samples", file=path, expected="an array with a first axis", found="none")
    return fields, parts


def _member(file: zipfile.ZipFile, path: str, name: str, info: zipfile.ZipInfo, verify: bool) -> Array:
    """Return what the header of a member says. No rank reads all of a stored one: its checksum is compared here."""
    possible = info.compress_size
    if info.compress_type == zipfile.ZIP_DEFLATED:
        possible = most_unpacked(possible)
    elif info.compress_type != zipfile.ZIP_STORED:
        possible = info.file_size
    if info.file_size > possible:
        raise FormatError(
            "the file is a damaged zip file",
            file=path,
            field=name,
            expected=f"at most {possible} bytes, of {info.compress_size} that are stored",
            found=f"{info.file_size} bytes",
            remedy=RESTORE,
        )
    with file.open(info) as member:
        array = _header(member, path, name, info.file_size)
        if verify and info.compress_type == zipfile.ZIP_STORED:
            try:
                skip(member)
            except (zipfile.BadZipFile, EOFError) as error:
                raise DecodeError(
                    "the stored array is damaged", file=path, field=name, found=error, remedy=RESTORE
                ) from error
    return array


def _wanted(path: str, names: Sequence[str] | None, members: dict[str, zipfile.ZipInfo]) -> list[str]:
    for name in names or ():
        if name not in members:
            near = near_matches(name, members)
            raise FieldNotFound("the file has no such array", file=path, field=name, expected=f"one of {near}")
    return list(members) if names is None else list(names)


def _member_part(stored: IO[bytes], path: str, info: zipfile.ZipInfo, array: Array) -> Layout:
    """Where the rows of a member are: a byte range of the zip file, unless it is compressed."""
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        return UnpackedRows(path, info.filename, array.shape, array.dtype, array.offset, array.fortran)
    stored.seek(info.header_offset)
    local = stored.read(30)
    if len(local) < 30 or not local.startswith(ZIP):
        raise FormatError("the file is a damaged zip file", file=path, byte=info.header_offset, found=repr(local[:4]))
    begin = info.header_offset + 30 + sum(struct.unpack("<HH", local[26:30]))
    if begin + array.end > os.fstat(stored.fileno()).st_size:
        raise FormatError("the file is a damaged zip file", file=path, field=info.filename, found="it ends early")
    return Array(array.dtype, array.shape, array.fortran, begin + array.offset).part()
