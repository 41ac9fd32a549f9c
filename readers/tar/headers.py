"""Headers of a tar shard: where each member of each sample lies. A shard that is compressed is indexed in memory.

Layout of the samples: https://github.com/webdataset/webdataset. Format of the archive: section "pax" of POSIX.1-2017.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

from matex_data.errors import RESTORE, DataError, FormatError, NoSamples
from matex_data.locks import Lock
from matex_data.readers.text.compression import stored_as, unpacked
from matex_data.storage.files import open_binary, size_of_open, unreadable
from matex_data.warning import warn

BLOCK_BYTES = 512  # of which an archive consists
NAMES = "members such as '000001.jpg' and '000001.cls'"
READ_BYTES = 1 << 20  # of the zeros behind the end of the archive


class ByteRange(NamedTuple):
    """Bytes of a member in the shard."""

    offset: int
    nbytes: int


@dataclass
class Shard:
    """Members of a shard, by sample.

    Parameters
    ----------
    rows : number of the sample of each key, in the order of the archive.
    members : byte range by the number of the sample, for each field.
    foreign : names of files that belong to no sample, hidden ones left out.
    """

    rows: dict[str, int] = field(default_factory=dict)
    members: dict[str, dict[int, ByteRange]] = field(default_factory=dict)
    foreign: list[str] = field(default_factory=list)

    def add(self, path: str, name: str, where: ByteRange) -> None:
        """Add a member; raise ``FormatError`` if the sample has a member of this extension already."""
        split = split_name(name)
        if split is None:
            if not name.rpartition("/")[2].startswith("."):
                self.foreign.append(name)
            return
        key, extension = split
        row = self.rows.setdefault(key, len(self.rows))
        if row in (members := self.members.setdefault(extension, {})):
            raise FormatError(
                "two members of the shard have the same name",
                file=path,
                field=extension,
                row=row,
                byte=where.offset,
                found=repr(name),
                remedy="write the shard again, each member once",
            )
        members[row] = where


def split_name(name: str) -> tuple[str, str] | None:
    """Return key and extension of a member, divided at the first dot of its base name; None for hidden files.

    >>> split_name("train/cat.0001.input.png")
    ('train/cat', '0001.input.png')
    >>> split_name("train/._cat.png")
    """
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return (folder + slash + stem, extension.lower()) if stem and extension else None


def read_shard(path: str, file: IO[bytes]) -> Shard:
    """Read all headers of a tar archive, by seeking over its members.

    Parameters
    ----------
    file : open archive, at its begin.

    Raises
    ------
    FormatError : the archive is damaged, truncated or no tar file, or has no samples.
    OSError : the file cannot be read.
    """
    shard = Shard()
    for name, where in _members(path, file):
        shard.add(path, name, where)
    if not shard.rows and not shard.foreign:
        raise NoSamples("the shard has no samples", file=path, expected=NAMES, remedy="leave the shard out")
    if not shard.rows:
        raise FormatError(
            "the shard has no samples",
            file=path,
            expected=NAMES,
            found=f"{len(shard.foreign)} other files, such as {shard.foreign[0]!r}",
            remedy="give each file a name of a key and an extension, or unpack the archive and open the files in it",
        )
    if shard.foreign:
        warn(f"{len(shard.foreign)} files in {path!r} belong to no sample, such as {shard.foreign[0]!r}")
    return shard


def _members(path: str, file: IO[bytes]) -> Iterator[tuple[str, ByteRange]]:
    """Yield name and byte range of each regular file, and of each hard link to one; raise ``FormatError`` if a sample
    has a link that the archive does not resolve, beside what else may be wrong.
    """
    seen: dict[str, ByteRange] = {}
    size, end = size_of_open(file), 0
    try:
        archive: Any = tarfile.TarFile(fileobj=file, mode="r")
        while (info := archive.next()) is not None:
            archive.members.clear()  # which would hold an object of a kilobyte for each member
            if info.size < 0 or archive.offset <= end:
                raise _header_error(path, "the header of a member is damaged", end, f"a size of {info.size} bytes")
            end = archive.offset
            where = seen.get(info.linkname) if info.islnk() else ByteRange(info.offset_data, info.size)
            if info.issym() or where is None:
                if split_name(info.name) is not None:
                    raise FormatError(
                        "a member of the shard is a link",
                        file=path,
                        byte=info.offset,
                        expected="files, or hard links to files in front of them",
                        found=f"{info.name!r}, a link to {info.linkname!r}",
                        remedy="write the shard again with what links lead to, as tar --dereference does",
                    )
                continue
            if not (info.isreg() or info.islnk()):
                continue
            if info.issparse():
                raise FormatError(
                    "a member is stored as a sparse file",
                    file=path,
                    byte=info.offset,
                    expected="files whose bytes lie one behind the other",
                    found=repr(info.name),
                    remedy="write the shard again without tar's option --sparse",
                )
            seen[info.name] = where
            yield info.name, where
    except (DataError, OSError):
        raise
    except Exception as error:  # tarfile raises many kinds on a damaged header
        raise _header_error(path, "the file is no tar file, or truncated", end, error) from error
    _check_end(path, file, archive.offset, size)


def _check_end(path: str, file: IO[bytes], end: int, size: int) -> None:
    """Check that the archive ends with a block of zeros, and that nothing but zeros follows.

    Python's tarfile takes a damaged header for the end of the archive.
    """
    file.seek(end)
    first = file.read(BLOCK_BYTES)
    if len(first) < BLOCK_BYTES:
        raise _header_error(path, "the shard is truncated: it lacks the mark of its end", end, f"{size} bytes")
    if any(first):
        raise _header_error(path, "the header of a member is damaged", end, repr(first[:32]))
    at = end + BLOCK_BYTES
    while data := file.read(READ_BYTES):
        if data.strip(b"\0"):
            at += len(data) - len(data.lstrip(b"\0"))
            raise FormatError(
                "the shard has data behind the mark of its end",
                file=path,
                byte=at,
                expected="zeros",
                found=repr(data.lstrip(b"\0")[:16]),
                remedy="join archives with tar --concatenate, or open each of them as a shard",
            )
        at += len(data)


def _header_error(path: str, problem: str, byte: int, found: object) -> FormatError:
    expected = f"{NAMES}, and two blocks of zeros behind them"
    return FormatError(problem, file=path, byte=byte, expected=expected, found=found, remedy=RESTORE)


HEAD_BYTES = 16  # that tell a compression
CONTENT = "the decompressed archive"
REMEDY = "unpack the shards (gunzip, bunzip2, unxz, zstd -d): ranks read nothing but their own samples of them then"
_AT_ONCE = [Lock() for _ in range(4)]  # shards in memory, however many threads index files


@dataclass(frozen=True)
class Archive:
    """An open archive.

    Parameters
    ----------
    file : its bytes, decompressed.
    packing : compression of the shard, such as "gzip"; "" if there is none.
    stored : size of the shard in the storage, in bytes.
    """

    file: IO[bytes]
    packing: str
    stored: int


@contextmanager
def open_archive(path: str) -> Iterator[Archive]:
    """Open a shard. One that is compressed is decompressed to memory, since every step back would begin anew.

    Raises
    ------
    DataError : the file cannot be read or decompressed. An error within the context gets the name of the file, and
        says where its byte is counted.
    PartitionError : the decompressed shard does not fit into memory.
    """
    packing = ""
    try:
        with open_binary(path) as file:
            packing, stored = stored_as(file.read(HEAD_BYTES), "utf-8"), size_of_open(file)
            file.seek(0)
            if not packing:
                yield Archive(file, packing, stored)
                return
            with _AT_ONCE[zlib.crc32(path.encode()) % len(_AT_ONCE)]:
                content = unpacked(file, packing, "the unpacked shard", REMEDY)
                yield Archive(content, packing, stored)
    except DataError as error:
        if not packing:
            raise
        error.at(path, None).within(CONTENT)
        raise
    except OSError as error:
        raise unreadable(path, error) from error
