"""Conversion of decoded pixels to the mode that the user asks for."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from matex_data._types import Array
from matex_data.errors import FormatError
from matex_data.readers.images.decoding.picture import MODES, Header, Pixels

NARROW = frozenset(mode for mode, (_, dtype) in MODES.items() if dtype in ("uint8", "bool"))
"""Modes that Pillow converts without a loss of bits."""
WEIGHTS = np.array([299, 587, 114], "f8") / 1000
"""Of red, green and blue in gray: ITU-R 601-2."""
PILLOW_MODES = {"rgb": "RGB", "gray": "L"}
CHANNELS = {"rgb": 3, "gray": 1}


def converted_shape(header: Header, mode: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype of an image in the wanted mode."""
    if mode == "native":
        return header.shape, header.dtype
    dtype = np.dtype("u1") if header.dtype == bool else header.dtype
    return (header.height, header.width, CHANNELS[mode]), dtype


def convert_image(image: Image.Image, mode: str) -> Image.Image | Pixels:
    """Return an image of Pillow in the wanted mode; one with more than 8 bits per channel as an array."""
    if image.mode not in NARROW:
        array = np.asarray(image)
        return convert_pixels(Pixels(array.astype(array.dtype.newbyteorder("="), copy=False), "L"), mode)
    if mode == "native" or image.mode == PILLOW_MODES[mode]:
        return image
    if image.mode == "La":  # gray times alpha, which Pillow converts by way of this mode alone
        image = image.convert("LA")
    try:
        return image.convert(PILLOW_MODES[mode])
    except ValueError as error:
        raise _no_conversion(image.mode, mode) from error


def convert_pixels(pixels: Pixels, mode: str) -> Pixels:
    """Return an array in the wanted mode, in the dtype that it has.

    Raises
    ------
    FormatError : the channels have no known meaning.
    """
    if mode == "native":
        return pixels
    array = pixels.array
    if pixels.mode in ("L", "LA"):
        gray = array if array.ndim == 2 else array[..., 0]
        return Pixels(np.repeat(gray[..., None], CHANNELS[mode], axis=2), mode)
    if pixels.mode == "CMYK":
        colours = _without_black(array)
    elif pixels.mode in ("RGB", "RGBA"):
        colours = array[..., :3]
    else:
        raise _no_conversion(pixels.mode or f"{array.shape[2:]} channels", mode)
    return Pixels(np.ascontiguousarray(colours) if mode == "rgb" else luma(colours), mode)


def luma(colours: Array) -> Array:
    """Return the gray of colours of shape (height, width, 3), as (height, width, 1), rounded for integers."""
    gray = (colours @ WEIGHTS)[..., None]
    return as_dtype(gray, colours.dtype)


def as_dtype(values: Array, dtype: np.dtype[Any]) -> Array:
    """Return floating-point numbers as ``dtype``: rounded and kept within its range if it is an integer type."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        values = np.clip(np.rint(values), limits.min, limits.max)
    return values.astype(dtype, copy=False)


def _without_black(inks: Array) -> Array:
    """Return red, green and blue of cyan, magenta, yellow and black, as Pillow computes them."""
    most = float(np.iinfo(inks.dtype).max) if inks.dtype.kind in "iu" else 1.0
    paper = most - inks.astype("f8")
    return as_dtype(paper[..., :3] * paper[..., 3:4] / most, inks.dtype)


def _no_conversion(stored: str, mode: str) -> FormatError:
    return FormatError(
        f"the image cannot be converted to {mode!r}",
        expected="gray, a palette, RGB or CMYK, with or without alpha",
        found=stored,
        remedy="open it with mode='native'",
    )
