"""Bytes of a Zarr store by key: a folder of files, or a zip file.

https://zarr-specs.readthedocs.io/en/latest/v3/stores/index.html
"""

from __future__ import annotations

import os
import zipfile
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from matex_data._types import Bytes
from matex_data.codecs.scratch import Memory, new_memory
from matex_data.declared import declared
from matex_data.errors import RESTORE, DecodeError, FormatError
from matex_data.index.stamps import PartState, part_state
from matex_data.locks import cached_property
from matex_data.storage import files as storage
from matex_data.storage import objects
from matex_data.storage.files import is_folder, open_binary, open_zip, reading, reading_if_present
from matex_data.storage.objects import is_url
from matex_data.storage.trust import NONE, Trust

MARKS = ("zarr.json", ".zmetadata", ".zgroup", ".zarray")
"""Names of which a store has one."""
REPOSITORY_MARKS = ("repo", "refs/branch.main/ref.json")
"""Names of which an Icechunk repository has one, beside its folder of snapshots."""
MAX_READ = 1 << 30  # bytes of one call: the system reads at most 2 GiB
_HAS_DESCRIPTOR, _IS_UTF8 = 0x08, 0x800  # flags of a member of a zip file
_ZIP64_EXTRA = 20  # bytes of the extra field that has sizes of 64 bits
_LOCAL_HEADER = 30  # bytes of the fixed begin of a member of a zip file, the lengths of name and extra field at 26


@declared
class Extent(NamedTuple):
    """Byte range of a file.

    Attributes
    ----------
    checksum : CRC-32 of the bytes, plus 1; 0: none is known.
    inflated : number of bytes that a deflate stream in the range gives, with that checksum; 0: it is none.
    """

    path: str
    offset: int
    nbytes: int
    checksum: int = 0
    inflated: int = 0


class Store(ABC):
    """Bytes by key, such as ``temperature/c/0/1``.

    Attributes
    ----------
    path : as the user names it.
    trust : where its bytes may lie, beside its own folder.
    by_key : whether values are read by `get` alone: chunks have neither files nor byte ranges.
    """

    path: str
    trust: Trust = NONE
    by_key = False

    def sources(self) -> Sequence[str]:
        return (self.path,)

    @property
    def folder(self) -> str | None:
        """Folder in which names of arrays are folders of files; None: they are mere names."""
        return None

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """Read the value of a key; None if there is none."""

    def state(self, _: str) -> PartState | None:
        """Return the state of the file of a key; None: it has none of its own that shows changes."""
        return None

    def read(self, key: str, memory: Memory) -> Bytes | None:
        """Read the value of a key, uint8[n], of files to memory of the caller; None if there is none."""
        value = self.get(key)
        return None if value is None else np.frombuffer(value, np.uint8)

    @abstractmethod
    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders within a folder, sorted; "" is the root."""

    @abstractmethod
    def extents(self, folder: str) -> Iterator[tuple[str, Extent | bytes]] | None:
        """Return the keys within a folder, without its name, and their bytes or their ranges; None: all are files."""


@declared
@dataclass(frozen=True)
class Directory(Store):
    """Folder, in which each key is a file.

    Parameters
    ----------
    trust : where its files may lie.
    """

    path: str
    trust: Trust = NONE

    @property
    def folder(self) -> str:
        return self.path

    def get(self, key: str) -> bytes | None:
        path = f"{self.path}/{key}"
        with reading_if_present(path), suppress(NotADirectoryError, IsADirectoryError):
            return storage.read_bytes(path)
        return None

    def state(self, key: str) -> PartState | None:
        return None if is_url(self.path) else part_state(self.path, key)  # a prefix of a bucket has no stamp

    def read(self, key: str, memory: Memory) -> Bytes | None:
        return read_file(f"{self.path}/{key}", memory)

    def folders(self, folder: str) -> list[str]:
        if is_url(self.path):
            return objects.folders_of(f"{self.path}/{folder}")
        with os.scandir(Path(self.path, folder)) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())

    def extents(self, folder: str) -> None:
        return None


class ListedStore(Store):
    """Store of which one file lists all keys."""

    @abstractmethod
    def read_keys(self) -> Keys:
        """Read the list."""

    @cached_property
    def _keys(self) -> Keys:
        with reading(self.path):
            return self.read_keys()

    def get(self, key: str) -> bytes | None:
        entry = self._keys.get(key)
        if entry is None or isinstance(entry, bytes):
            return entry
        data = read(entry)
        return None if data is None else data.tobytes()

    def folders(self, folder: str) -> list[str]:
        return self._keys.folders(folder)

    def extents(self, folder: str) -> Iterator[tuple[str, Extent | bytes]]:
        return self._keys.within(folder)


@declared
@dataclass(frozen=True)
class ZipFile(ListedStore):
    """Zip file, in which each key is a member."""

    path: str

    def read_keys(self) -> Keys:
        try:
            with open_binary(self.path) as raw, open_zip(raw) as file:
                return Keys(_within_folder(dict(self._extents(file, raw))))
        except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError) as error:
            raise FormatError("the zip file is damaged", file=self.path, found=error) from error

    def _extents(self, file: zipfile.ZipFile, raw: BinaryIO) -> Iterator[tuple[str, Extent | bytes]]:
        members = file.infolist()
        ordered = sorted(member.header_offset for member in members)
        following = dict(zip(ordered, [*ordered[1:], file.start_dir], strict=True))
        for member in members:
            deflated = member.compress_type == zipfile.ZIP_DEFLATED
            if not deflated and member.compress_type != zipfile.ZIP_STORED:
                raise FormatError(
                    "the members of the zip file are compressed in another way than by deflate",
                    file=self.path,
                    expected="members as they are: their chunks are compressed by codecs of Zarr",
                    found=f"{member.filename!r} with compression method {member.compress_type}",
                    remedy="unpack it, or write it with zip -0",
                )
            begin = _likely_begin(member, following[member.header_offset]) or self._begin(member, raw)
            inflated = member.file_size if deflated else 0
            yield member.filename, Extent(self.path, begin, member.compress_size, member.CRC + 1, inflated)

    def _begin(self, member: zipfile.ZipInfo, raw: BinaryIO) -> int:
        """Return where the data of a member begin, by the header in front of them."""
        raw.seek(member.header_offset)
        header = raw.read(_LOCAL_HEADER)
        if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
            raise FormatError("the zip file is damaged", file=self.path, byte=member.header_offset)
        return member.header_offset + _LOCAL_HEADER + int(np.frombuffer(header[26:30], "<u2").sum())


def _likely_begin(member: zipfile.ZipInfo, following: int) -> int | None:
    """Return where the data of a member begin, by the central directory alone; None if that does not tell.

    The data end where the next member begins, unless a descriptor follows them. What is left in front of them is the
    header with the name and an extra field, of a length that writers use; the checksum shows any other case.

    Parameters
    ----------
    following : byte position of the next member, or of the central directory.
    """
    if member.flag_bits & _HAS_DESCRIPTOR:
        return None
    begin = following - member.compress_size
    name = member.orig_filename.encode("utf-8" if member.flag_bits & _IS_UTF8 else "cp437", "replace")
    extra = begin - member.header_offset - _LOCAL_HEADER - len(name)
    return begin if extra in (0, len(member.extra), _ZIP64_EXTRA) else None


class Keys:
    """Values of a store by key, of which those in a folder are found without a look at all others.

    Parameters
    ----------
    values : bytes, or where they lie.

    Examples
    --------
    >>> keys = Keys({"a/b/0.0": b"1", "a/b/.zarray": b"2", "a/.zgroup": b"3", "a0": b"4"})
    >>> keys.folders(""), keys.folders("a"), list(keys.within("a/b"))
    (['a'], ['b'], [('.zarray', b'2'), ('0.0', b'1')])
    """

    def __init__(self, values: Mapping[str, Extent | bytes]) -> None:
        self._values = values
        self._sorted = sorted(values)

    def get(self, key: str) -> Extent | bytes | None:
        """Return the value of a key; None if there is none."""
        return self._values.get(key)

    def within(self, folder: str) -> Iterator[tuple[str, Extent | bytes]]:
        """Yield the keys within a folder, without its name, and their values."""
        prefix = f"{folder}/" if folder else ""
        for number in range(*self._range(prefix)):
            key = self._sorted[number]
            yield key[len(prefix) :], self._values[key]

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders within a folder, sorted."""
        prefix = f"{folder}/" if folder else ""
        number, end = self._range(prefix)
        found = []
        while number < end:
            name, slash, _ = self._sorted[number][len(prefix) :].partition("/")
            if slash:
                found.append(name)
                number = self._range(f"{prefix}{name}/")[1]
            else:
                number += 1
        return sorted(found)

    def _range(self, prefix: str) -> tuple[int, int]:
        """Return the first of the sorted keys that begin with a text, and the first one behind them."""
        if not prefix:
            return 0, len(self._sorted)
        last = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        return bisect_left(self._sorted, prefix), bisect_left(self._sorted, last)


def _within_folder(members: dict[str, Extent | bytes]) -> dict[str, Extent | bytes]:
    """Return the members of a store that was zipped with its folder, by their names within it; others as they are."""
    folders = {name.partition("/")[0] for name in members if name.partition("/")[2] in MARKS}
    if len(folders) != 1 or not members.keys().isdisjoint(MARKS):
        return members
    prefix = f"{folders.pop()}/"
    return {name.removeprefix(prefix): extent for name, extent in members.items() if name.startswith(prefix)}


def is_store(path: str) -> bool:
    """Return whether a directory is a store, a group or an array of one, or an Icechunk repository.

    Examples
    --------
    >>> is_store("/")
    False
    """
    return _has_any(path, MARKS) or is_repository(path)


def is_repository(path: str) -> bool:
    """Return whether a directory is an Icechunk repository."""
    return _has_any(path, REPOSITORY_MARKS) and is_folder(f"{path.rstrip('/')}/snapshots")


def _has_any(folder: str, names: Sequence[str]) -> bool:
    if is_url(folder):
        return any(objects.is_object(f"{folder.rstrip('/')}/{name}") for name in names)
    return any(os.access(f"{folder}/{name}", os.F_OK) for name in names)


def read(extent: Extent, memory: Memory = new_memory) -> Bytes | None:
    """Read a byte range, uint8[n], decompressed if it is a deflate stream; None if there is no such file.

    Parameters
    ----------
    memory : receives the bytes of files.

    Raises
    ------
    DecodeError : the file is shorter, or the bytes have another checksum.
    DataError : it cannot be read.
    """
    data = _read(extent, memory)
    if data is not None and extent.inflated:
        data = _inflate(data, extent)
    if data is not None and extent.checksum and zlib.crc32(data.data) + 1 != extent.checksum:
        raise DecodeError("a checksum is wrong", file=extent.path, byte=extent.offset, remedy=RESTORE)
    return data


def _inflate(data: Bytes, extent: Extent) -> Bytes:
    try:  # at most as many bytes as there should be, and one more, whatever a damaged stream says
        plain = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data.data, extent.inflated + 1)
    except zlib.error as error:
        problem = "a member of the zip file does not decompress"
        raise DecodeError(problem, file=extent.path, byte=extent.offset, found=error, remedy=RESTORE) from error
    return np.frombuffer(plain, np.uint8)


def _read(extent: Extent, memory: Memory) -> Bytes | None:
    if is_url(extent.path):
        return _read_object(extent)
    with reading_if_present(extent.path):
        descriptor = os.open(extent.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _read_all(descriptor, extent, memory)
        finally:
            os.close(descriptor)
    return None


def read_file(path: str, memory: Memory = new_memory) -> Bytes | None:
    """Read a whole file, uint8[n]; None if there is no such file. See `read`."""
    if is_url(path):
        return _read_object(Extent(path, 0, -1))
    return read(Extent(path, 0, size_of(path)), memory)


def size_of(path: str) -> int:
    """Return the size of a file, in bytes; 0 if there is no such file.

    Raises
    ------
    DataError : the system does not tell.
    """
    with reading_if_present(path):
        return storage.size_of(path)
    return 0


def _read_object(extent: Extent) -> Bytes | None:
    """Read a byte range of an object, the whole of it if that has -1 bytes; see `read`."""
    path, offset, nbytes, *_ = extent
    with reading_if_present(path):
        data = objects.read(path) if nbytes < 0 else objects.read_ranges(path, [offset], [nbytes])[0]
        if len(data) < nbytes:
            raise DecodeError("the file is truncated", file=path, byte=offset + len(data), expected=f"{nbytes} bytes")
        return np.frombuffer(data, np.uint8)
    return None


def _read_all(descriptor: int, extent: Extent, memory: Memory) -> Bytes:
    size = os.fstat(descriptor).st_size
    if extent.offset < 0 or extent.nbytes < 0 or extent.offset + extent.nbytes > size:
        expected = f"{extent.offset + extent.nbytes} bytes"
        raise DecodeError(
            "the file is truncated", file=extent.path, byte=size, expected=expected, found=f"{size} bytes"
        )
    data, done = memory(extent.nbytes), 0
    while done < extent.nbytes:
        step = os.preadv(descriptor, [data[done : done + MAX_READ].data], extent.offset + done)
        if not step:
            raise DecodeError("the file was truncated while it was read", file=extent.path, byte=extent.offset + done)
        done += step
    return data
