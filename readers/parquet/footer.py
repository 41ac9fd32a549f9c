"""Footer of a Parquet file: the schema, and where the column chunks lie.

Decoding needs the footer, which may have megabytes. So the index has its byte range alone: a rank reads the footers of
the files whose rows it decodes, and keeps those that it has used last.
Format: https://parquet.apache.org/docs/file-format/
"""

from __future__ import annotations

import os
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from matex_data.declared import declared
from matex_data.errors import DecodeError, FormatError
from matex_data.locks import Lock
from matex_data.storage.files import open_binary, reading

MAGIC = b"PAR1"
ENCRYPTED = b"PARE"
TAIL = 8  # bytes at the end: length of the metadata, magic
GUESS = 64 << 10  # bytes at the end of the file, which usually contain the footer
KEPT = 64  # footers in memory


@declared
@dataclass(frozen=True)
class Footer:
    """Byte range of a footer.

    Parameters
    ----------
    path : of the file.
    begin, nbytes : of the metadata and what follows them.
    checksum : CRC-32 of these bytes.
    """

    path: str
    begin: int
    nbytes: int
    checksum: int

    def sources(self) -> Sequence[str]:
        return (self.path,)

    def metadata(self) -> Any:
        """Return the ``FileMetaData``, which is read unless this process has it.

        Raises
        ------
        DecodeError : the bytes are not those that were indexed.
        DataError : the file cannot be read.
        """
        with _lock:
            kept = _footers.setdefault(self, _Kept())
            _footers.move_to_end(self)
            while len(_footers) > KEPT:
                _footers.popitem(last=False)
        with kept.lock:  # threads that need the same footer wait for the first one
            if kept.metadata is None:
                kept.metadata = self._read()
            return kept.metadata

    def _read(self) -> Any:
        with reading(self.path), open_binary(self.path) as file:
            file.seek(self.begin)
            data = file.read(self.nbytes)
        if zlib.crc32(data) != self.checksum:
            raise DecodeError(
                "the footer has changed since the file was indexed",
                file=self.path,
                byte=self.begin,
                remedy="open the data set again, and do not write to its files meanwhile",
            )
        return _parsed(data)


class _Kept:
    """Footer in memory, once a thread has read it."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.metadata: Any = None


_footers: OrderedDict[Footer, _Kept] = OrderedDict()
_lock = Lock()


def read_footer(path: str) -> tuple[Footer, Any]:
    """Return the footer of a file, and its ``FileMetaData``.

    Raises
    ------
    FormatError : the file is no Parquet file, or its footer is damaged.
    DataError : it cannot be read.
    """
    with reading(path), open_binary(path) as file:
        size = file.seek(0, os.SEEK_END)
        data = _last(file, size, GUESS)
        length = int.from_bytes(data[-TAIL:-4], "little") + TAIL
        if data[-4:] == MAGIC and len(data) < length <= size - len(MAGIC):
            data = _last(file, size, length)
    if data[-4:] == ENCRYPTED:
        raise FormatError("the footer is encrypted", file=path, remedy="write a copy without encryption")
    if data[-4:] != MAGIC or not TAIL < length <= size - len(MAGIC):
        raise FormatError(
            "the file has no footer of Parquet",
            file=path,
            byte=max(0, size - TAIL),
            expected=f"the length of the metadata and {MAGIC!r}",
            found=repr(data[-TAIL:]),
            remedy="the file may be truncated: copy it again from its source",
        )
    data = data[-length:]
    try:
        metadata = _parsed(data)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FormatError(
            "the footer is damaged", file=path, byte=size - length, found=error, remedy="restore it from its source"
        ) from error
    return Footer(path, size - length, length, zlib.crc32(data)), metadata


def _last(file: Any, size: int, nbytes: int) -> bytes:
    file.seek(max(0, size - nbytes))
    data: bytes = file.read(nbytes)
    return data


def _parsed(data: bytes) -> Any:
    return pq.read_metadata(pa.BufferReader(MAGIC + data))
