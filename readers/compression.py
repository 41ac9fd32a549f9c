"""Texts that are compressed, or in UTF-16 or UTF-32: no part of them can be read alone."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from matex_data._types import Bytes
from matex_data.errors import DataError, DecodeError
from matex_data.machine import check_fits

READ_BYTES = 16 << 20  # decompressed by one call
LEAST_HEAD = 4 << 10  # bytes to recognize a format, also of a file that is shorter in compressed form

_MAGIC = {"gzip": b"\x1f\x8b", "bz2": b"BZh", "xz": b"\xfd7zXZ\x00", "zstd": b"\x28\xb5\x2f\xfd"}
_BYTE_ORDER_MARKS = {"utf-32": (b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff"), "utf-16": (b"\xff\xfe", b"\xfe\xff")}
_OPENERS: dict[str, Callable[[bytes], Any]] = {
    "gzip": lambda stored: gzip.GzipFile(fileobj=io.BytesIO(stored)),
    "bz2": lambda stored: bz2.BZ2File(io.BytesIO(stored)),
    "xz": lambda stored: lzma.LZMAFile(io.BytesIO(stored)),  # noqa: SIM115
    "zstd": lambda stored: _open_zstd(stored),
}
_DECODING_ERRORS = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)


def _open_zstd(stored: bytes) -> Any:
    import pyarrow as pa  # which the readers of other compressed texts do without

    return pa.input_stream(pa.BufferReader(stored), compression="zstd")


def stored_as(head: bytes, encoding: str | None) -> str:
    """Return the compression or wide encoding of a file, by its first bytes; "" if its bytes are plain text."""
    for name, magic in _MAGIC.items():
        if head.startswith(magic):
            return name
    if encoding is not None:
        return encoding if encoding.startswith(("utf-16", "utf-32")) else ""
    return next((name for name, marks in _BYTE_ORDER_MARKS.items() if head.startswith(marks)), "")


def plain_text(data: Bytes, stored: str) -> Bytes:
    """Decompress or transcode a whole file.

    Parameters
    ----------
    stored : as ``stored_as`` returns.

    Raises
    ------
    DecodeError : the file is damaged.
    PartitionError : the text does not fit into memory.
    """
    content: Any = data.tobytes()
    try:
        if stored in _OPENERS:
            with _OPENERS[stored](content) as file:
                content = _read_all(file)
        else:
            remedy = "convert the file to UTF-8, of which ranks read blocks"
            check_fits(3 * len(content), "the transcoded text", remedy=remedy)
            content = content.decode(stored).encode()
    except _DECODING_ERRORS as error:
        if isinstance(error, DataError):
            raise
        raise DecodeError("the file does not unpack", expected=stored, found=error, remedy="copy it again") from error
    return np.frombuffer(content, np.uint8)


def _read_all(file: Any) -> bytes:
    """Read a stream of unknown length to its end, as long as the text fits into memory."""
    parts, total = [], 0
    while part := file.read(READ_BYTES):
        parts.append(part)
        total += len(part)
        check_fits(total, "the unpacked text", remedy="unpack the file: ranks read blocks of it then")
    return b"".join(parts)


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
            return bytes(_OPENERS[stored](head).read(limit))
        return head.decode(stored, "ignore").encode() if stored else head
    except (*_DECODING_ERRORS, ModuleNotFoundError):
        return b""
