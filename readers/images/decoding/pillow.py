"""Images decoded by Pillow, which is the reference for all others."""

from __future__ import annotations

import io
import re
import warnings

import numpy as np
from PIL import Image, ImageFile, ImageOps
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from matex_data.errors import DecodeError, FormatError
from matex_data.readers.images.decoding.options import GAP, ImageOptions
from matex_data.readers.images.decoding.orientation import TURNED, image_orientation, turn
from matex_data.readers.images.decoding.picture import Header, Pixels, check_pixels, header_of_mode
from matex_data.readers.images.decoding.png import MAY_TURN, decode_deep, deep_mode

PLUGINS: dict[str, type[ImageFile.ImageFile]] = {
    "bmp": BmpImageFile,
    "gif": GifImageFile,
    "jpeg": JpegImageFile,
    "png": PngImageFile,
    "webp": WebPImageFile,
}
"""Opened by their class: `Image.open` tries one after the other, and has a limit of pixels for the whole process."""
OTHERS = ("AVIF", "DIB", "ICO", "JPEG2000", "PPM", "QOI")
"""Further formats with a signature of their own, as Pillow gives them."""


def ignore_warnings(category: type[Warning], module: str = "") -> None:
    """Ignore warnings of a library about what it reads nevertheless. Filters of the user come first."""
    pattern = re.compile(module) if module else None
    if ("ignore", None, category, pattern, 0) not in warnings.filters:  # adding one shows old warnings once more
        warnings.filterwarnings("ignore", category=category, module=module, append=True)


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


def image_header(data: bytes | memoryview, kind: str, max_pixels: int, page: int) -> Header:
    """Return the header of a page."""
    image = open_image(data, kind, max_pixels)
    pages, mode = _seek(image, page, max_pixels)
    width, height = image.size
    if (kind != "png" or MAY_TURN.search(data)) and image_orientation(image) in TURNED:  # of PNG it needs the pixels
        width, height = height, width
    if kind == "png" and pages == 1 and (deep := deep_mode(data)) is not None:
        return Header(deep, height, width, len(deep), np.dtype("u2"))
    return header_of_mode(mode, width, height, pages)


def decode_by_pillow(data: bytes | memoryview, kind: str, options: ImageOptions, page: int) -> Image.Image | Pixels:
    """Return a page, turned as its orientation says; a large JPEG scaled down."""
    image = open_image(data, kind, options.max_pixels)
    pages, mode = _seek(image, page, options.max_pixels)
    if kind == "jpeg":
        _reduce(image, options)
    if kind == "png" and pages == 1 and (deep := deep_mode(data)) is not None:
        pixels = decode_deep(data, deep)
        return Pixels(turn(pixels.array, image_orientation(image) if MAY_TURN.search(data) else 1), pixels.mode)
    image.load()
    check_pixels(*image.size, options.max_pixels)
    frame = image if pages == 1 or image.mode == mode else image.convert(mode)
    return ImageOps.exif_transpose(frame) if image_orientation(image) != 1 else frame


def _reduce(image: ImageFile.ImageFile, options: ImageOptions) -> None:
    """Let a JPEG that is much larger than wanted be scaled down while it is decoded."""
    turned = image_orientation(image) in TURNED
    width, height = image.size[::-1] if turned else image.size
    if options.size is not None and options.reduces(width, height):
        size = GAP * options.size[1], GAP * options.size[0]
        image.draft(None, size[::-1] if turned else size)


def _seek(image: ImageFile.ImageFile, page: int, max_pixels: int) -> tuple[int, str]:
    """Go to a page, and return the number of pages or frames, and the mode of each of them.

    Frames are RGB, or RGBA if the first one has transparent pixels, or the header announces them: as Pillow gives all
    but the first one.

    Raises
    ------
    DecodeError : there is no such page, or it has too many pixels.
    """
    pages, mode = int(getattr(image, "n_frames", 1)), image.mode
    if not 0 <= page < pages:
        raise DecodeError("the file has no such page", expected=f"a page below {pages}", found=f"page {page}")
    if pages > 1:
        mode = "RGBA" if mode in ("RGBA", "LA", "PA") or "transparency" in image.info else "RGB"
    if page:
        image.seek(page)
        check_pixels(*image.size, max_pixels)
    return pages, mode


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
    return FormatError(
        "the file is no image that can be read",
        expected="JPEG, PNG, TIFF, GIF, BMP, WebP or FITS",
        found=f"{kind}: {error!r}" if kind != "other" else repr(error),
        remedy="look at the file with another program, and write it again, or leave it out",
    )
