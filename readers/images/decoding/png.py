"""PNG with colours of 16 bits per channel, by libpng through imagecodecs; Pillow cuts them to 8.

Source of the format: the PNG specification, third edition, sections 5 and 11.
"""

from __future__ import annotations

import re

import imagecodecs
import numpy as np

from matex_data.readers.images.decoding.picture import Pixels

COLOURS = {2: "RGB", 4: "LA", 6: "RGBA"}
"""Modes of the colour types with several channels."""
MAY_TURN = re.compile(rb"eXIf|Raw profile type exif|tiff:Orientation")
"""Marks of a file that may have an orientation."""


def deep_mode(data: bytes | memoryview) -> str | None:
    """Return the mode of a file of one frame with several channels of 16 bits; None for all others."""
    head = bytes(data[12:26])
    if len(head) < 14 or head[:4] != b"IHDR" or head[12] != 16 or head[13] not in COLOURS:
        return None
    return COLOURS[head[13]]


def decode_deep(data: bytes | memoryview, mode: str) -> Pixels:
    """Return the pixels as uint16. A transparent colour (tRNS) is left out, as Pillow does."""
    decoded = imagecodecs.png_decode(data)
    return Pixels(np.ascontiguousarray(decoded[..., : len(mode)]), mode)
