"""Text files that have to be unpacked or transcoded as a whole."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from typing import Any

import numpy as np
import pyarrow as pa

from matex_data.errors import DecodeError
from matex_data.readers.ranks import Bytes

_MAGIC = {"gzip": b"\x1f\x8b", "bz2": b"BZh", "xz": b"\xfd7zXZ\x00", "zstd": b"\x28\xb5\x2f\xfd"}
_MARKS = {"utf-32": (b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff"), "utf-16": (b"\xff\xfe", b"\xfe\xff")}


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
    """
    stored: Any = data.tobytes()
    try:
        if packed == "gzip":
            stored = gzip.decompress(stored)
        elif packed == "bz2":
            stored = bz2.decompress(stored)
        elif packed == "xz":
            stored = lzma.decompress(stored)
        elif packed == "zstd":
            stored = pa.input_stream(pa.BufferReader(stored), compression="zstd").read()
        else:
            stored = stored.decode(packed).encode()
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise DecodeError("the file does not unpack", expected=packed, found=error, remedy="copy it again") from error
    return np.frombuffer(stored, np.uint8)
