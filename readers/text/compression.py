"""Files that are compressed, or texts in UTF-16 or UTF-32: no part of them can be read alone."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from typing import IO, Any

import numpy as np

from matex_data._types import Bytes
from matex_data.errors import DataError, DecodeError
from matex_data.machine import check_fits

READ_BYTES = 16 << 20  # decompressed by one call
LEAST_HEAD = 4 << 10  # bytes to recognize a format, also of a file that is shorter in compressed form

_MAGIC = {"gzip": b"\x1f\x8b", "bz2": b"BZh", "xz": b"\xfd7zXZ\x00", "zstd": b"\x28\xb5\x2f\xfd"}
_BYTE_ORDER_MARKS = {"utf-32": (b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff"), "utf-16": (b"\xff\xfe", b"\xfe\xff")}
_OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {
    "gzip": lambda stored: gzip.GzipFile(fileobj=stored),
    "bz2": lambda stored: bz2.BZ2File(stored),
    "xz": lambda stored: lzma.LZMAFile(stored),  # noqa: SIM115
    "zstd": lambda stored: _open_zstd(stored),
}
_DECODING_ERRORS = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)
_MOST_GZIP = 1 << 32  # bytes of content, whose number gzip stores in 32 bits


def _open_zstd(stored: IO[bytes]) -> Any:
    import pyarrow as pa  # which the readers of other compressed texts do without

    return pa.input_stream(stored, compression="zstd")


def stored_as(head: bytes, encoding: str | None) -> str:
    """Return the compression or wide encoding of a file, by its first bytes; "" if its bytes are plain text."""
    for name, magic in _MAGIC.items():
        if head.startswith(magic):
            return name
    if encoding is not None:
        return encoding if encoding.startswith(("utf-16", "utf-32")) else ""
    return next((name for name, marks in _BYTE_ORDER_MARKS.items() if head.startswith(marks)), "")


def unpacked(file: IO[bytes], stored: str, item: str, remedy: str) -> io.BytesIO:
    """Return the content of a file, decompressed or transcoded to UTF-8 once, as long as it fits into memory.

    Parameters
    ----------
    file : open, at its begin.
    stored : its compression or wide encoding, as ``stored_as`` returns.
    item : name of the content, for errors.
    remedy : alternative, if it does not fit.

    Raises
    ------
    DecodeError : the file is damaged.
    PartitionError : the content does not fit into memory.
    """
    content = io.BytesIO()
    try:
        if stored not in _OPENERS:
            data = file.read()
            check_fits(2 * len(data), item, remedy=remedy)
            return io.BytesIO(data.decode(stored).encode())
        with _OPENERS[stored](file) as stream:
            while part := stream.read(READ_BYTES):
                content.write(part)
                check_fits(content.tell(), item, remedy=remedy)
    except _DECODING_ERRORS as error:
        if isinstance(error, DataError) or getattr(error, "errno", None) is not None:  # of the system
            raise
        raise _damaged(stored, error) from error
    content.seek(0)
    return content


def unpack(data: Bytes, stored: str, nbytes: int) -> Bytes:
    """Decompress a whole file whose content has ``nbytes`` bytes. Python's lock is free meanwhile.

    Raises
    ------
    DecodeError : the file is damaged, or its content has another length.
    """
    content = np.empty(nbytes, np.uint8)
    if stored == "gzip" and _inflate_at_once(data, content):
        return content
    found = 0
    try:
        with _OPENERS[stored](io.BytesIO(data.data)) as stream:
            while part := stream.read(READ_BYTES):
                content[found : found + len(part)] = np.frombuffer(part, np.uint8)[: max(0, nbytes - found)]
                found += len(part)
    except _DECODING_ERRORS as error:
        raise _damaged(stored, error) from error
    if found != nbytes:
        raise _damaged(stored, f"{found} bytes in place of {nbytes}")
    return content


def _inflate_at_once(data: Bytes, content: Bytes) -> bool:
    """Decompress a gzip file by libdeflate, which compares the checksum; return False if it has to be done by zlib.

    A file may be damaged, or consist of several members, of which libdeflate decompresses the first one.
    """
    import imagecodecs  # takes longer to import than all else that the readers of texts need

    if len(content) >= _MOST_GZIP or not imagecodecs.DEFLATE.available:
        return False
    try:
        return len(imagecodecs.gzip_decode(data, out=content)) == len(content)
    except (imagecodecs.DeflateError, ValueError):
        return False


def _damaged(stored: str, found: object) -> DecodeError:
    return DecodeError("the file does not unpack", expected=stored, found=found, remedy="copy it again")


def plain_head(head: bytes) -> bytes:
    """Decompress or transcode the first bytes of a file as far as they go; return b"" if they are damaged."""
    stored, limit = stored_as(head, None), max(len(head), LEAST_HEAD)
    try:
        if stored == "gzip":
            return zlib.decompressobj(wbits=31).decompress(head, limit)
        if stored == "bz2":
            return bz2.BZ2Decompressor().decompress(head, limit)
        if stored == "xz":
            return lzma.LZMADecompressor().decompress(head, limit)
        if stored == "zstd":
            return bytes(_OPENERS[stored](io.BytesIO(head)).read(limit))
        return head.decode(stored, "ignore").encode() if stored else head
    except (*_DECODING_ERRORS, ModuleNotFoundError):
        return b""
