"""Orientation of a photograph, as its Exif data tell it."""

from __future__ import annotations

import re

import numpy as np
from PIL import Image

from matex_data._types import Array

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


def turn(array: Array, orientation: int) -> Array:
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
