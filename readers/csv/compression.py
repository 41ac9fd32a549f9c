"""Text files that have to be unpacked or transcoded as a whole."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from matex_data._types import Bytes
from matex_data.errors import DataError, DecodeError
from matex_data.machine import check_fits

PIECE_BYTES = 16 << 20  # unpacked in one go

_MAGIC = {"gzip": b"\x1f\x8b", "bz2": b"BZh", "xz": b"\xfd7zXZ\x00", "zstd": b"\x28\xb5\x2f\xfd"}
_MARKS = {"utf-32": (b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff"), "utf-16": (b"\xff\xfe", b"\xfe\xff")}
_OPENERS: dict[str, Callable[[bytes], Any]] = {
    "gzip": lambda stored: gzip.GzipFile(fileobj=io.BytesIO(stored)),
    "bz2": lambda stored: bz2.BZ2File(io.BytesIO(stored)),
    "xz": lambda stored: lzma.LZMAFile(io.BytesIO(stored)),  # noqa: SIM115
    "zstd": lambda stored: pa.input_stream(pa.BufferReader(stored), compression="zstd"),
}


def packing(head: bytes, encoding: str | None) -> str:
    """What has to be undone before a file is text of one byte for each ASCII character; "" if nothing."""
    for name, mark in _MAGIC.items():
        if head.startswith(mark):
            return name
    if encoding is not None:
        wide = encoding.lower().replace("_", "-").startswith(("utf-16", "utf-32", "utf16", "utf32"))
        return encoding if wide else ""
    return next((name for name, marks in _MARKS.items() if head.startswith(marks)), "")


def unpacked(data: Bytes, packed: str) -> Bytes:
    """The text of a whole file.

    Raises
    ------
    DecodeError : it is not what it says it is.
    PartitionError : it does not fit into the memory.
    """
    stored: Any = data.tobytes()
    try:
        if packed in _OPENERS:
            with _OPENERS[packed](stored) as file:
                stored = _whole(file)
        else:
            check_fits(
                3 * len(stored), "the transcoded text", remedy="convert the file to UTF-8, of which ranks read blocks"
            )
            stored = stored.decode(packed).encode()
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, DataError):
            raise
        raise DecodeError("the file does not unpack", expected=packed, found=error, remedy="copy it again") from error
    return np.frombuffer(stored, np.uint8)


def _whole(file: Any) -> bytes:
    """Read a stream of unknown length to its end; at the end there are two copies for a moment."""
    pieces, total = [], 0
    while piece := file.read(PIECE_BYTES):
        pieces.append(piece)
        total += len(piece)
        check_fits(total, "the unpacked text", remedy="unpack the file: ranks read blocks of it then")
    return b"".join(pieces)
