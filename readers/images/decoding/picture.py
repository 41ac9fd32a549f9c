"""Decoded pixels on their way from a decoder to the user, what a header tells of them, and how Exif data turn them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from matex_data._types import Array
from matex_data.errors import DecodeError

MODES: dict[str, tuple[int | None, str]] = {
    "1": (None, "bool"),
    "L": (None, "uint8"),
    "P": (None, "uint8"),
    "LA": (2, "uint8"),
    "La": (2, "uint8"),
    "PA": (2, "uint8"),
    "RGB": (3, "uint8"),
    "YCbCr": (3, "uint8"),
    "LAB": (3, "uint8"),
    "HSV": (3, "uint8"),
    "RGBA": (4, "uint8"),
    "RGBa": (4, "uint8"),
    "RGBX": (4, "uint8"),
    "CMYK": (4, "uint8"),
    "I;16": (None, "uint16"),
    "I;16L": (None, "uint16"),
    "I;16B": (None, "uint16"),
    "I;16N": (None, "uint16"),
    "I": (None, "int32"),
    "F": (None, "float32"),
}
"""Channels (None: no axis for them) and dtype of the modes of Pillow."""


@dataclass(frozen=True)
class Header:
    """Size and kind of the pixels of a page, after orientation, before mode and size.

    Parameters
    ----------
    mode : of Pillow, or "" for other channels.
    height, width : in pixels.
    channels : None: the array has no axis for them.
    dtype : in native byte order.
    """

    mode: str
    height: int
    width: int
    channels: int | None
    dtype: np.dtype[Any]
    pages: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return (self.height, self.width) if self.channels is None else (self.height, self.width, self.channels)


@dataclass(frozen=True)
class Pixels:
    """Pixels that are no image of Pillow: more than 8 bits per channel.

    Parameters
    ----------
    array : (height, width) or (height, width, channels), in native byte order.
    mode : "L", "LA", "RGB", "RGBA", "CMYK", or "" for other channels.
    """

    array: Array
    mode: str


def header_of_mode(mode: str, width: int, height: int, pages: int = 1) -> Header:
    """Return the header of an image of Pillow."""
    channels, dtype = MODES[mode]
    return Header(mode, height, width, channels, np.dtype(dtype), pages)


def check_pixels(width: int, height: int, limit: int) -> None:
    """Raise unless an image has pixels, and not too many of them.

    Raises
    ------
    DecodeError : it is empty, or a decompression bomb.
    """
    if width < 1 or height < 1:
        raise DecodeError("the image has no pixels", expected="at least 1 x 1", found=f"{width} x {height} pixels")
    if width * height > limit:
        raise DecodeError(
            "the image is too large: it may be a decompression bomb",
            expected=f"at most max_pixels={limit} pixels",
            found=f"{width} x {height} = {width * height} pixels",
            remedy="if the file can be trusted, open it with a larger max_pixels=",
        )


ORIENTATION = 0x0112
TURNED = (5, 6, 7, 8)
"""Orientations that exchange height and width."""
XMP = re.compile(rb'tiff:Orientation(="|>)([0-9])')


def image_orientation(image: Image.Image) -> int:
    """Return the orientation, 1 to 8, of an image of Pillow; 1 where there is none, or where it is damaged."""
    try:
        return _checked(image.getexif().get(ORIENTATION, 1))
    except MemoryError:
        raise
    except Exception:  # Exif data hold anything
        return 1


def segment_orientation(exif: bytes, xmp: bytes) -> int:
    """Return the orientation of an Exif segment, which begins with ``Exif``, or else that of XMP data."""
    table = Image.Exif()
    try:
        if exif:
            table.load(exif)
        if ORIENTATION in table:
            return _checked(table[ORIENTATION])
    except MemoryError:
        raise
    except Exception:
        return 1
    found = XMP.search(xmp)
    return _checked(int(found[2])) if found else 1


def _checked(value: object) -> int:
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def upright(array: Array, orientation: int) -> Array:
    """Return an array (height, width[, channels]) turned upright, as `PIL.ImageOps.exif_transpose` does."""
    if orientation == 1:
        return array
    if orientation in TURNED:
        array = array.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        array = array[::-1]
    if orientation in (2, 3, 6, 7):
        array = array[:, ::-1]
    return np.ascontiguousarray(array)
