"""FITS images by astropy.

Source of the format: FITS standard 4.0, sections 4 and 7. The first row of the data is the first row of the array, as
astropy and NumPy have it; most viewers draw it at the bottom.
"""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np

from matex_data.errors import DecodeError, FormatError
from matex_data.readers.formats import missing_package
from matex_data.readers.images.decoding.picture import Header, Pixels, check_pixels
from matex_data.warning import ignore_warnings


def fits_header(data: bytes | memoryview, max_pixels: int) -> Header:
    """Return the header of the first image; its dtype is that of one pixel, scaled as astropy does."""
    with _file(data) as file:
        image = _first_image(file, len(data), max_pixels)
        corner = image.section[tuple(slice(0, 1) for _ in image.shape)]
        height, width = image.shape[-2:]
        return Header("L", height, width, None, corner.dtype.newbyteorder("="))


def decode_fits(data: bytes | memoryview, max_pixels: int) -> Pixels:
    """Return the first image, scaled by BZERO and BSCALE as astropy does, in native byte order."""
    with _file(data) as file:
        image = _first_image(file, len(data), max_pixels)
        values = np.asarray(image.data).reshape(image.shape[-2:])
        return Pixels(np.ascontiguousarray(values.astype(values.dtype.newbyteorder("="), copy=False)), "L")


def _file(data: bytes | memoryview) -> Any:
    """Return the file as astropy opens it."""
    try:
        from astropy.io import fits
        from astropy.utils.exceptions import AstropyWarning
    except ModuleNotFoundError as error:
        raise missing_package("images", error) from error
    ignore_warnings(AstropyWarning)
    return fits.open(io.BytesIO(data), memmap=False, lazy_load_hdus=True)


def _first_image(file: Any, size: int, max_pixels: int) -> Any:
    """Return the first part of the file that is an image, checked before its data are read; raise ``FormatError`` if
    there is none, or it has more than two dimensions, ``DecodeError`` if it is too large, or cut off.
    """
    for part in file:
        if part.is_image and part.header.get("NAXIS", 0) and math.prod(part.shape):
            shape = part.shape
            if len(shape) < 2 or math.prod(shape[:-2]) != 1:
                raise FormatError(
                    "the FITS image has not two dimensions",
                    expected="(height, width)",
                    found=f"shape {shape}",
                    remedy="write its planes to images of their own",
                )
            check_pixels(shape[-1], shape[-2], max_pixels)
            end = part.fileinfo()["datLoc"] + (0 if _is_compressed(part) else part.size)
            if end > size:
                raise DecodeError("the FITS image is cut off", expected=f"{end} bytes", found=f"{size} bytes")
            return part
    raise FormatError(
        "the FITS file has no image",
        expected="an image in one of its parts",
        found=f"{len(file)} parts without one",
        remedy="tables are no images: leave the file out",
    )


def _is_compressed(part: Any) -> bool:
    return type(part).__name__ == "CompImageHDU"  # its size is that of the image, not that of the stored bytes
