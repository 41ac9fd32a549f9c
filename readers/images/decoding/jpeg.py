"""JPEG: libjpeg-turbo by imagecodecs where it gives the pixels of Pillow.

Source of the format: ITU-T T.81, annex B.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import imagecodecs
import numpy as np

from matex_data._types import Array
from matex_data.codecs.scratch import thread_scratch
from matex_data.readers.images.decoding.options import ImageOptions
from matex_data.readers.images.decoding.picture import TURNED, Pixels, check_pixels, segment_orientation, upright

BASELINE, EXTENDED, PROGRESSIVE = 0xC0, 0xC1, 0xC2
FRAMES = (BASELINE, EXTENDED, PROGRESSIVE)
START_OF_SCAN, EXIF_OR_XMP = 0xDA, 0xE1
END_OF_IMAGE = b"\xff\xd9"
PLAIN = frozenset([*FRAMES, START_OF_SCAN, 0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE])
"""Markers of plain files: frame, scan, tables, restart interval, applications, comment."""
SCAN_END = re.compile(rb"\xff[^\x00\xd0-\xd7]")
"""Marker that ends the data of a scan: neither a stuffed zero nor a restart marker."""
LARGEST = 65500
"""Pixels of a side that Pillow's libjpeg decodes (``JPEG_MAX_DIMENSION``); other builds go on to 65535."""
EXIF_NAME = b"Exif\0\0"
XMP_NAME = b"http://ns.adobe.com/xap/1.0/\0"


@dataclass(frozen=True)
class JpegHeader:
    """Frame header, before orientation."""

    width: int
    height: int
    components: int
    orientation: int = 1

    @property
    def mode(self) -> str:
        """Mode of Pillow."""
        return "L" if self.components == 1 else "RGB"

    @property
    def turned(self) -> tuple[int, int]:
        """Width and height after orientation."""
        return (self.height, self.width) if self.orientation in TURNED else (self.width, self.height)


def jpeg_header(data: bytes | memoryview, whole: bool) -> JpegHeader | None:
    """Return the header of a plain file: 8 bits, 1 or 3 components, each segment where it belongs; else None.

    Parameters
    ----------
    whole : go on to the end of the image, and return None if it is missing.
    """
    header: JpegHeader | None = None
    applications: list[bytes] = []
    at = 2
    while (end := _segment_end(data, at)) is not None:
        marker = data[at + 1]
        if marker in FRAMES:
            if header is not None or (header := _frame(bytes(data[at + 4 : end]))) is None:
                return None
        elif marker == EXIF_OR_XMP:
            applications.append(bytes(data[at + 4 : end]))
        elif marker == START_OF_SCAN:
            if header is None or not whole:
                break
            found = SCAN_END.search(data, end)
            if found is None:
                return None
            end = found.start()
        at = end
    if header is None or (whole and data[at : at + 2] != END_OF_IMAGE):
        return None
    return _upright(header, applications) if applications else header


def _segment_end(data: bytes | memoryview, at: int) -> int | None:
    """Return the position after a segment; None: no segment of a plain file begins here."""
    if at + 4 > len(data) or data[at] != 0xFF or data[at + 1] not in PLAIN:
        return None
    length = data[at + 2] << 8 | data[at + 3]
    end = at + 2 + length
    return end if length >= 2 and end <= len(data) else None


def _frame(segment: bytes) -> JpegHeader | None:
    if len(segment) < 6 or segment[0] != 8 or segment[5] not in (1, 3) or len(segment) != 6 + 3 * segment[5]:
        return None
    header = JpegHeader(int.from_bytes(segment[3:5]), int.from_bytes(segment[1:3]), segment[5])
    return header if min(header.width, header.height) > 0 and max(header.width, header.height) <= LARGEST else None


def _upright(header: JpegHeader, segments: list[bytes]) -> JpegHeader | None:
    """Return the header with its orientation; None: there are several segments that may tell it."""
    exif = [segment for segment in segments if segment.startswith(EXIF_NAME)]
    xmp = [segment for segment in segments if segment.startswith(XMP_NAME)]
    if len(exif) > 1 or len(xmp) > 1:
        return None
    return replace(header, orientation=segment_orientation(b"".join(exif), b"".join(xmp)))


def decode_plain(data: bytes | memoryview, options: ImageOptions, out: Array | None) -> Pixels | None:
    """Return the pixels of a plain file, without Python's lock; None: Pillow decodes the file, or refuses it.

    The pixels may lie in ``out``, or in scratch memory that the next call of this thread overwrites, unless the result
    is not written to ``out`` and not resized.

    Raises
    ------
    DecodeError : the image is too large.
    """
    header = jpeg_header(data, whole=True)
    if header is None or (options.mode == "gray" and header.mode != "L") or options.reduces(*header.turned):
        return None
    check_pixels(header.width, header.height, options.max_pixels)
    try:
        pixels = imagecodecs.jpeg8_decode(data, out=_memory(header, options, out))
    except imagecodecs.Jpeg8Error:
        return None
    return Pixels(upright(pixels, header.orientation), header.mode)


def _memory(header: JpegHeader, options: ImageOptions, out: Array | None) -> Array | None:
    """Return memory for the pixels: new memory of this size would cost a fifth of the decoding, in page faults."""
    shape = (header.height, header.width) if header.components == 1 else (header.height, header.width, 3)
    resized = options.size is not None and (options.size != header.turned[::-1] or options.takes_section)
    if out is not None and not resized and header.orientation == 1 and options.dtype is None:
        fits = out.dtype == np.uint8 and out.flags.c_contiguous and out.shape[:2] == shape[:2]
        if fits and out.size == math.prod(shape):
            return out.reshape(shape)
    return thread_scratch(math.prod(shape)).reshape(shape) if out is not None or resized else None
