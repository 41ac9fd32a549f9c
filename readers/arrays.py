"""Plain arrays: NumPy's .npy and .npz, and raw binary. Never reads pickles.

Format of .npy: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html. An .npz file is a zip file of
.npy files.
"""

from __future__ import annotations

import ast
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from typing import IO, Any, BinaryIO

import numpy as np

from matex_data._types import Bytes
from matex_data.declared import declared
from matex_data.errors import RESTORE, DataError, DecodeError, FormatError, truncated
from matex_data.fields import Field
from matex_data.index.model import Layout
from matex_data.index.strided import Strided, Transposed
from matex_data.index.whole import FILE, whole_file
from matex_data.locks import Lock
from matex_data.machine import check_fits
from matex_data.readers.catalogue import Catalogue, Entry, shown
from matex_data.readers.decoding import Decoding
from matex_data.readers.text.unpacked import UnpackedFile, UnpackedRows, wrong_length
from matex_data.storage.files import (
    open_binary,
    open_sequential,
    open_zip,
    size_of,
    size_of_open,
    undecodable,
)

NUMPY_MAGIC, ZIP_MAGIC = b"\x93NUMPY", b"PK\x03\x04"
EMPTY_ZIP_MAGIC = b"PK\x05\x06"
MAX_HEADER_BYTES = 1 << 20
OBJECTS = "the array holds Python objects"
PLAIN_KINDS = "biufcmMSUV"  # of ``numpy.dtype.kind``, without pointers to objects
READ_BYTES = 4 << 20  # decompressed by one call
MAX_DEFLATE_RATIO = 1032  # see https://zlib.net/zlib_tech.html
MAX_EMPTY_ROWS = 1 << 20  # samples of no bytes, of which a damaged header can claim any number

_LONG = re.compile(r"(?<=\d)L(?=\s*[,)])")  # behind an integer, as Python 2 wrote it
_PARSING = Lock()  # until Python 3.12.1, two threads that parse at once may fail (CPython's issue 106905)


def index(
    path: str,
    *,
    field: str = "data",
    dtype: Any = None,
    shape: Sequence[int] = (),
    offset: int = 0,
    verify: bool = True,
    sample: str | None = None,
) -> Catalogue:
    """Index an .npy file, the arrays in an .npz file, or a raw binary file.

    Parameters
    ----------
    field : name of the only field of an .npy or raw file.
    dtype, shape : of one sample of a raw binary file, for example ``">f4"`` and ``(64, 64)``.
    offset : bytes before the first sample of a raw binary file.
    verify : compare the checksums of uncompressed arrays in an .npz file, which reads them once on one rank. The
        checksums of compressed arrays are always compared.
    sample : "file": the arrays of a file are one sample, of whatever lengths, and single numbers are fields as well.
        None: a sample is a row along the first axis.

    Raises
    ------
    FormatError : the file is damaged, holds Python objects, or is raw and ``dtype`` is missing.
    """
    array, whole = None, sample == FILE
    with open_binary(path) as file:
        head = file.read(8)
        if head.startswith(NUMPY_MAGIC) and dtype is None:
            file.seek(0)
            array = read_header(file, path, None, size_of_open(file))
    if dtype is not None:
        array = _raw_array(path, dtype, tuple(shape), offset)
    if array is not None:
        rows = _as_row(array) if whole else array
        check_shape(path, None, rows.shape, rows.dtype)
        entries: dict[str, Entry] = {field: (rows.field(field), rows.layout)}
        listed, numbers = [field], set[str]() if array.shape else {field}
    elif head.startswith((ZIP_MAGIC, EMPTY_ZIP_MAGIC)):
        entries, listed, numbers = _members(path, whole, verify)
    else:
        raise FormatError(
            "the file is no NumPy array",
            file=path,
            expected=f"{NUMPY_MAGIC!r} (.npy) or {ZIP_MAGIC!r} (.npz) at the start, or dtype= and shape= of a raw file",
            found=repr(head),
        )
    finish = partial(whole_file, path, single=numbers) if whole else None
    return Catalogue.of(path, entries, "array", listed, finish)


@dataclass(frozen=True)
class StoredArray:
    """Uncompressed array in a file.

    Parameters
    ----------
    dtype : as stored.
    shape : of the whole array, sample axis first.
    fortran : the first axis varies fastest.
    offset : byte position of the first element.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    offset: int

    @property
    def end(self) -> int:
        """First byte after the array."""
        return self.offset + prod(self.shape) * self.dtype.itemsize

    def field(self, name: str) -> Field:
        """Return the field of which each row of the array is a sample."""
        return Field(name, self.shape[1:], self.dtype.newbyteorder("="))

    def layout(self) -> Layout:
        """Return the layout of the rows."""
        rows, *row = self.shape
        swapped = not self.dtype.isnative and self.dtype.kind in "iuf"
        convert = Decoding(self.dtype.newbyteorder("=")) if swapped else None
        if not self.fortran or not row:
            return Strided(rows, self.offset, prod(row) * self.dtype.itemsize, self.dtype, tuple(row), convert=convert)
        order = tuple(reversed(range(len(row))))
        step = prod(self.shape[:-1]) * self.dtype.itemsize
        return Transposed(rows, self.offset, tuple(reversed(row)), (), step, self.dtype, order, convert)


def _raw_array(path: str, dtype: Any, shape: tuple[int, ...], offset: int) -> StoredArray:
    size = size_of(path)
    try:
        stored = np.dtype(dtype)
    except Exception as error:  # NumPy raises many kinds
        raise FormatError(
            "there is no such dtype", file=path, expected='dtype=">f4", for example', found=error
        ) from error
    row_bytes = prod(shape) * stored.itemsize
    if stored.hasobject or row_bytes <= 0 or not 0 <= offset <= size or (size - offset) % row_bytes:
        raise FormatError(
            "the file does not consist of whole samples",
            file=path,
            expected=f"{offset} bytes and a multiple of {row_bytes} ({stored} of shape {shape})",
            found=f"{size} bytes",
            remedy="give the dtype=, shape= and offset= that the file was written with",
        )
    array = StoredArray(stored, ((size - offset) // row_bytes, *shape), False, offset)
    check_shape(path, None, array.shape, stored)
    return array


def check_shape(path: str, field: str | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise ``FormatError`` unless NumPy can hold samples of an array with this shape and dtype in its header."""
    found = None
    if not shape:
        found = "one number, which has no sample axis"
    elif dtype.kind not in PLAIN_KINDS or dtype.subdtype is not None or not dtype.itemsize:
        found = f"dtype {dtype}"
    elif not prod(shape) and shape[0] > MAX_EMPTY_ROWS:
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


def read_header(file: IO[bytes], path: str, member: str | None, size: int) -> StoredArray:
    """Read the header of an .npy file of ``size`` bytes. ``offset`` of the result counts from the start of ``file``.

    Every length in the header is checked against the size, so that a damaged one allocates no memory.
    """
    try:
        magic = file.read(8)
        width = 2 if magic[6] == 1 else 4
        length = int.from_bytes(file.read(width), "little")
        if magic[:6] != NUMPY_MAGIC or magic[6] not in (1, 2, 3) or magic[7] != 0 or length > MAX_HEADER_BYTES:
            raise ValueError(f"begins with {magic!r}")
        text = file.read(length).decode("utf-8" if magic[6] == 3 else "latin-1")
        array = StoredArray(*_parse_header(text), 8 + width + length)
    except Exception as error:  # Python and NumPy raise many kinds on arbitrary text
        raise undecodable(FormatError, "the header of the array is damaged", path, error, field=member) from error
    if array.dtype.hasobject:
        raise FormatError(
            OBJECTS,
            file=path,
            field=member,
            expected="numbers, booleans or fixed-length strings",
            found=str(array.dtype),
            remedy="save it with a plain dtype: objects are pickles, which can run any code, and are never read",
        )
    if array.shape:
        check_shape(path, member, array.shape, array.dtype)
    if array.end > size:
        raise truncated(path, size, array.end, member)
    return array


@lru_cache(256)  # the arrays of a tar shard have few headers, and millions of samples
def _parse_header(text: str) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """Return dtype, shape and order of an .npy header, and accept exactly the headers that NumPy accepts."""
    with _PARSING:
        try:
            header = ast.literal_eval(text)
        except SyntaxError:
            header = ast.literal_eval(_LONG.sub("", text))
    if not isinstance(header, dict) or set(header) != {"descr", "fortran_order", "shape"}:
        raise ValueError(f"expected a dict of descr, fortran_order and shape, found {text[:80]!r}")
    shape, fortran = header["shape"], header["fortran_order"]
    if not isinstance(shape, tuple) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError(f"shape {shape}")
    if not isinstance(fortran, bool):
        raise ValueError(f"fortran_order {fortran!r}")
    return np.lib.format.descr_to_dtype(header["descr"]), tuple(int(n) for n in shape), fortran


def _members(path: str, whole: bool, verify: bool) -> tuple[dict[str, Entry], list[str], set[str]]:
    """Return the arrays of an .npz file, the names of those to read, damaged ones among them, and of single numbers.

    Parameters
    ----------
    whole : the file is one sample, so that single numbers are fields as well.
    """
    entries: dict[str, Entry] = {}
    listed: list[str] = []
    numbers: set[str] = set()
    with _zip_errors(path), open_binary(path) as file, open_zip(file) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if info.is_dir():
                continue
            try:
                array = _member_array(archive, path, name, info)
            except DataError as error:
                if not info.filename.endswith(".npy"):
                    entries[name] = "it is no array of NumPy"
                elif error.problem == OBJECTS:
                    entries[name] = f"{OBJECTS}: pickles, which can run any code, are never read"
                else:
                    entries[name] = error
                    listed.append(name)
                continue
            if not array.shape:
                numbers.add(name)
            if array.shape or whole:
                layout = partial(_member_layout, path, info, array, verify)
                entries[name] = _as_row(array).field(name), layout
                listed.append(name)
            else:
                entries[name] = FormatError(
                    "the array has no sample axis",
                    file=path,
                    field=name,
                    found="one number",
                    remedy='leave it out, or take each file as a sample: sample="file"',
                )
    if not listed:
        found = shown({name: entry for name, entry in entries.items() if isinstance(entry, str)}) or "none"
        raise FormatError(
            "the file has no samples",
            file=path,
            expected="an array with a first axis",
            found=found,
            remedy='write arrays with an axis that counts the samples, or take each file as a sample: sample="file"',
        )
    return entries, listed, numbers


@contextmanager
def _zip_errors(path: str) -> Iterator[None]:
    """Raise ``FormatError`` for what ``zipfile`` raises on a damaged file."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # of many kinds
        raise undecodable(FormatError, "the file is a damaged zip file", path, error) from error


def _member_array(archive: zipfile.ZipFile, path: str, name: str, info: zipfile.ZipInfo) -> StoredArray:
    """Read the header of a member."""
    limit = info.compress_size
    if info.compress_type == zipfile.ZIP_DEFLATED:
        limit *= MAX_DEFLATE_RATIO
    elif info.compress_type != zipfile.ZIP_STORED:
        limit = info.file_size
    if info.file_size > limit:
        raise FormatError(
            "the file is a damaged zip file",
            file=path,
            field=name,
            expected=f"at most {limit} bytes, of {info.compress_size} that are stored",
            found=f"{info.file_size} bytes",
            remedy=RESTORE,
        )
    with archive.open(info) as member:
        return read_header(member, path, name, info.file_size)


def _member_layout(path: str, info: zipfile.ZipInfo, array: StoredArray, verify: bool) -> Layout:
    """Return the layout of a member: a byte range of the zip file, unless it is compressed. ``verify``: compare the
    checksum of an uncompressed member, since no rank reads all of it later.
    """
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        return UnpackedRows(_as_row(array).layout(), ZipMember(path, "zip", array.end, False, info.filename))
    with _zip_errors(path), open_binary(path) as file:
        file.seek(info.header_offset)
        local = file.read(30)
        if len(local) < 30 or not local.startswith(ZIP_MAGIC):
            problem, found = "the file is a damaged zip file", repr(local[:4])
            raise FormatError(problem, file=path, byte=info.header_offset, found=found)
        start = info.header_offset + 30 + sum(struct.unpack("<HH", local[26:30]))
        if start + array.end > size_of_open(file):
            raise FormatError("the file is a damaged zip file", file=path, field=info.filename, found="it ends early")
        if verify:
            file.seek(start)
            _verify(file, path, info)
    return _as_row(replace(array, offset=start + array.offset)).layout()


@declared
@dataclass(frozen=True, eq=False)
class ZipMember(UnpackedFile):
    """Compressed array in a zip file, of which ``length`` bytes are those of the array and its header.

    Parameters
    ----------
    member : its name in the zip file.
    """

    member: str = ""

    def _unpack(self) -> Bytes:
        """Return the bytes of the member, after its checksum has been compared."""
        field, nbytes = self.member.removesuffix(".npy"), self.length or 0
        remedy = "decompress the file (or save it with np.savez), so that each rank reads only its own rows"
        check_fits(nbytes, "the decompressed array", file=self.path, field=field, remedy=remedy)
        data, found = np.empty(nbytes, np.uint8), 0
        try:
            with open_sequential(self.path) as stored, open_zip(stored) as archive, archive.open(self.member) as file:
                while part := file.read(READ_BYTES):
                    data[found : found + len(part)] = np.frombuffer(part, np.uint8)[: max(0, nbytes - found)]
                    found += len(part)
        except Exception as error:  # the libraries raise many kinds on a damaged stream
            raise undecodable(DecodeError, "the array does not decompress", self.path, error, field=field) from error
        if found < nbytes:
            raise wrong_length(self.path, field, nbytes, found)
        return data


def _verify(file: BinaryIO, path: str, info: zipfile.ZipInfo) -> None:
    """Raise ``DecodeError`` unless a member, which begins where the file is, has its checksum."""
    checksum, left = 0, info.file_size
    while left and (data := file.read(min(left, READ_BYTES))):
        checksum, left = zlib.crc32(data, checksum), left - len(data)
    if left or checksum != info.CRC:
        name, found = info.filename.removesuffix(".npy"), f"the checksum {checksum:#010x}"
        raise DecodeError(
            "the stored array is damaged",
            file=path,
            field=name,
            expected=f"the checksum {info.CRC:#010x}",
            found=f"{left} bytes less" if left else found,
            remedy=RESTORE,
        )


def _as_row(array: StoredArray) -> StoredArray:
    """Return a single number as a row; other arrays as they are."""
    return array if array.shape else replace(array, shape=(1,))
