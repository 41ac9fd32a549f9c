"""Kinds of images, told by the first bytes of a file."""

from __future__ import annotations

from typing import Any

from matex_data._types import Array
from matex_data.errors import FormatError

Data = bytes | bytearray | memoryview | Array
"""Bytes of a whole file: a bytes object, or a buffer or array of uint8."""

MAGIC = {
    b"\xff\xd8\xff": "jpeg",
    b"\x89PNG\r\n\x1a\n": "png",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
    b"II+\0": "tiff",  # BigTIFF
    b"MM\0+": "tiff",
    b"MM*\0": "tiff",  # the version in the wrong byte order, which Pillow reads
    b"II\0*": "tiff",
    b"GIF87a": "gif",
    b"GIF89a": "gif",
    b"BM": "bmp",
    b"SIMPLE  =": "fits",
}
HEAD_BYTES = 32


def image_kind(head: bytes) -> str:
    """Return the kind of an image: "jpeg", "png", "tiff", "gif", "bmp", "webp", "fits", or "other".

    Parameters
    ----------
    head : the first bytes of the file, at least ``HEAD_BYTES`` of them if there are so many.

    Examples
    --------
    >>> image_kind(b"GIF89a")
    'gif'
    """
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "webp"
    return next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), "other")


def as_buffer(data: Data) -> bytes | memoryview:
    """Return the bytes without copying them; raise ``FormatError`` if the file is empty."""
    source: Any = data
    buffer = source if isinstance(source, bytes) else memoryview(source).cast("B")
    if not len(buffer):
        raise FormatError(
            "the file is empty", expected="an image", found="0 bytes", remedy="write the file again, or leave it out"
        )
    return buffer
