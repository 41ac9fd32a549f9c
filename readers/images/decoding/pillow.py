"""Images decoded by Pillow, which is the reference for all others; PNG with 16 bits per channel by libpng.

Pillow cuts colours of 16 bits per channel to 8. Source: the PNG specification, third edition, sections 5 and 11.
"""

from __future__ import annotations

import io
import re
from typing import NamedTuple

import imagecodecs
import numpy as np
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from matex_data.errors import DecodeError, FormatError
from matex_data.readers.images.decoding.options import GAP, ImageOptions
from matex_data.readers.images.decoding.picture import (
    TURNED,
    Header,
    Pixels,
    check_pixels,
    header_of_mode,
    image_orientation,
    upright,
)
from matex_data.warning import ignore_warnings

COLOURS = {2: "RGB", 4: "LA", 6: "RGBA"}
"""Modes of the colour types with several channels."""
ORIENTED = re.compile(rb"eXIf|Raw profile type exif|tiff:Orientation")
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


PLUGINS: dict[str, type[ImageFile.ImageFile]] = {
    "bmp": BmpImageFile,
    "gif": GifImageFile,
    "jpeg": JpegImageFile,
    "png": PngImageFile,
    "webp": WebPImageFile,
}
"""Opened by their class: `Image.open` tries one after the other, and has a limit of pixels for the whole process."""
SEQUENTIAL = ("gif", "webp")
"""Kinds whose frames are the same in any order of access; those of APNG that are blended differ in Pillow 13."""
OTHERS = ("AVIF", "DIB", "ICO", "JPEG2000", "PPM", "QOI")
"""Further formats with a signature of their own, as Pillow gives them."""


def open_image(data: bytes | memoryview, kind: str, max_pixels: int) -> ImageFile.ImageFile:
    """Return the image with its header read, at the first page."""
    ignore_warnings(UserWarning, r"PIL\.")
    ignore_warnings(Image.DecompressionBombWarning)
    stream = io.BytesIO(data)
    plugin = PLUGINS.get(kind)
    image = plugin(stream) if plugin else Image.open(stream, formats=_others())
    check_pixels(*image.size, max_pixels)
    return image


def _others() -> list[str]:
    Image.init()
    return [name for name in OTHERS if name in Image.OPEN]


class _Opened(NamedTuple):
    """Image with its header read.

    Attributes
    ----------
    image : at any page.
    pages : number of pages or frames.
    mode : of each of them. Frames are RGB, or RGBA if the first one has transparent pixels, or the header announces
        them: as Pillow gives all but the first one.
    """

    image: ImageFile.ImageFile
    pages: int
    mode: str

    @classmethod
    def of(cls, data: bytes | memoryview, kind: str, max_pixels: int) -> _Opened:
        image = open_image(data, kind, max_pixels)
        pages, mode = int(getattr(image, "n_frames", 1)), image.mode
        if pages > 1:
            mode = "RGBA" if mode in ("RGBA", "LA", "PA") or "transparency" in image.info else "RGB"
        return cls(image, pages, mode)

    def seek(self, page: int, max_pixels: int) -> None:
        """Go to a page; raise ``DecodeError`` if there is none, or it has too many pixels."""
        if not 0 <= page < self.pages:
            raise DecodeError("the file has no such page", expected=f"a page below {self.pages}", found=f"page {page}")
        if self.pages > 1:
            self.image.seek(page)
            check_pixels(*self.image.size, max_pixels)


class FrameFile:
    """File that stays open while its frames are decoded, each of which follows from the ones before. For one thread.

    Frames in ascending order are decoded once each; 302 frames of a GIF took 38 s where each one opened the file anew.
    """

    def __init__(self) -> None:
        self._kept: tuple[bytes | memoryview, _Opened] | None = None

    def take(self, data: bytes | memoryview, kind: str, max_pixels: int) -> _Opened:
        """Return the file of these bytes, opened unless it was kept."""
        kept, self._kept = self._kept, None
        return kept[1] if kept is not None and kept[0] is data else _Opened.of(data, kind, max_pixels)

    def keep(self, data: bytes | memoryview, opened: _Opened) -> None:
        """Keep a file for its next frame; one that raised an error is not kept."""
        self._kept = data, opened


def image_header(data: bytes | memoryview, kind: str, max_pixels: int) -> Header:
    """Return the header of the first page."""
    opened = _Opened.of(data, kind, max_pixels)
    width, height = opened.image.size
    if (kind != "png" or ORIENTED.search(data)) and image_orientation(opened.image) in TURNED:  # of PNG: by the pixels
        width, height = height, width
    if kind == "png" and opened.pages == 1 and (deep := deep_mode(data)) is not None:
        return Header(deep, height, width, len(deep), np.dtype("u2"))
    return header_of_mode(opened.mode, width, height, opened.pages)


def decode_by_pillow(
    data: bytes | memoryview, kind: str, options: ImageOptions, page: int, frames: FrameFile
) -> Image.Image | Pixels:
    """Return a page, turned as its orientation says; a large JPEG scaled down."""
    opened = frames.take(data, kind, options.max_pixels)
    opened.seek(page, options.max_pixels)
    image, pages, mode = opened
    if kind == "jpeg":
        _reduce(image, options)
    if kind == "png" and pages == 1 and (deep := deep_mode(data)) is not None:
        pixels = decode_deep(data, deep)
        return Pixels(upright(pixels.array, image_orientation(image) if ORIENTED.search(data) else 1), pixels.mode)
    image.load()
    check_pixels(*image.size, options.max_pixels)
    if kind in SEQUENTIAL and pages > 1:
        frames.keep(data, opened)
    frame = image if pages == 1 or image.mode == mode else image.convert(mode)
    return ImageOps.exif_transpose(frame) if image_orientation(image) != 1 else frame


def _reduce(image: ImageFile.ImageFile, options: ImageOptions) -> None:
    """Let a JPEG that is much larger than wanted be scaled down while it is decoded."""
    turned = image_orientation(image) in TURNED
    width, height = image.size[::-1] if turned else image.size
    if options.size is not None and options.reduces(width, height):
        size = GAP * options.size[1], GAP * options.size[0]
        image.draft(None, size[::-1] if turned else size)


def too_large(error: Exception) -> DecodeError:
    """Return the error for a limit of Pillow itself, which holds for the whole process."""
    return DecodeError(
        "the image is too large: it may be a decompression bomb",
        expected=f"at most twice PIL.Image.MAX_IMAGE_PIXELS={Image.MAX_IMAGE_PIXELS} pixels",
        found=error,
        remedy="if the file can be trusted, set PIL.Image.MAX_IMAGE_PIXELS to a larger number, as well as max_pixels=",
    )


def no_image(kind: str, error: Exception) -> FormatError:
    """Return the error for what is no image."""
    cause = "no format that Pillow knows" if isinstance(error, UnidentifiedImageError) else repr(error)
    return FormatError(
        "the file is no image that can be read",
        expected="JPEG, PNG, TIFF, GIF, BMP, WebP or FITS",
        found=f"{kind}: {cause}" if kind != "other" else cause,
        remedy="look at the file with another program, and write it again, or leave it out",
    )
