"""Images decoded by Pillow, which is the reference for all others."""

from __future__ import annotations

import io
import warnings

from PIL import Image, ImageFile, ImageOps
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from matex_data.errors import DecodeError, FormatError
from matex_data.readers.images.decoding.picture import Header, check_pixels, header_of_mode

PLUGINS: dict[str, type[ImageFile.ImageFile]] = {
    "bmp": BmpImageFile,
    "gif": GifImageFile,
    "jpeg": JpegImageFile,
    "png": PngImageFile,
    "tiff": TiffImageFile,
    "webp": WebPImageFile,
}
"""Opened by their class: `Image.open` tries one after the other, and has a limit of pixels for the whole process."""
OTHERS = ("AVIF", "ICO", "JPEG2000", "PPM", "QOI")
"""Further formats with a signature of their own, as Pillow gives them."""
TURNED = (5, 6, 7, 8)
"""Orientations of Exif that exchange height and width."""

# Pillow warns of what it reads nevertheless. Filters of the user come first.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.", append=True)
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning, append=True)


def open_image(data: bytes | memoryview, kind: str, max_pixels: int) -> ImageFile.ImageFile:
    """Return the image with its header read, at the first page."""
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
    pages = page_count(image)
    seek(image, page, pages, max_pixels)
    mode = frame_mode(image) if pages > 1 and kind != "tiff" else image.mode
    width, height = image.size
    if kind != "tiff" and orientation(image) in TURNED:  # Pillow has turned the size of a TIFF already
        width, height = height, width
    return header_of_mode(mode, width, height, pages)


def decode(data: bytes | memoryview, kind: str, max_pixels: int, page: int) -> Image.Image:
    """Return a page, turned as its orientation says."""
    image = open_image(data, kind, max_pixels)
    pages = page_count(image)
    seek(image, page, pages, max_pixels)
    image.load()
    framed = image.convert(frame_mode(image)) if pages > 1 and kind != "tiff" else image
    if orientation(image) != 1:
        return ImageOps.exif_transpose(framed)
    return framed


def page_count(image: ImageFile.ImageFile) -> int:
    """Return the number of pages or frames."""
    return int(getattr(image, "n_frames", 1))


def seek(image: ImageFile.ImageFile, page: int, pages: int, max_pixels: int) -> None:
    """Go to a page.

    Raises
    ------
    DecodeError : there is no such page, or it has too many pixels.
    """
    if not 0 <= page < pages:
        raise DecodeError("the file has no such page", expected=f"a page below {pages}", found=f"page {page}")
    if page:
        image.seek(page)
        check_pixels(*image.size, max_pixels)


def frame_mode(image: ImageFile.ImageFile) -> str:
    """Return the mode of all frames of an animated image."""
    transparent = image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info
    return "RGBA" if transparent else "RGB"


def orientation(image: Image.Image) -> int:
    """Return the orientation of an image, 1 to 8; 1 where there is none, or it is damaged."""
    try:
        value = image.getexif().get(0x0112, 1)
    except Exception:  # Exif data hold anything
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def no_image(kind: str, error: Exception) -> FormatError:
    """Return the error for what is no image."""
    return FormatError(
        "the file is no image that can be read",
        expected="JPEG, PNG, TIFF, GIF, BMP, WebP or FITS",
        found=f"{kind}: {error!r}" if kind != "other" else repr(error),
        remedy="look at the file with another program, and write it again, or leave it out",
    )
