"""TIFF: by Pillow, or by tifffile where Pillow would cut the numbers or does not know their layout.

Source of the format: TIFF 6.0, sections 2 and 8.
"""

from __future__ import annotations

import io
import logging
import re
import struct
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile

from matex_data.errors import DecodeError, FormatError
from matex_data.readers.formats import missing_package
from matex_data.readers.images.decoding.picture import (
    MODES,
    TURNED,
    Header,
    Pixels,
    check_pixels,
    header_of_mode,
    upright,
)
from matex_data.storage.objects import Slices

SUBFILE_TYPE, BITS, PHOTOMETRIC, DESCRIPTION, ORIENTATION, SAMPLES, SAMPLE_FORMAT = 254, 258, 262, 270, 274, 277, 339
EXTRA_SAMPLES, ASSOCIATED_ALPHA = 338, 1
SEGMENTS = ((273, 279), (324, 325))
"""Tags of the offsets and sizes of strips, and of tiles."""
IMAGE_DEPTH, TILE_DEPTH = 32997, 32998
"""Tags of volumes, of Silicon Graphics."""
MIN_IS_WHITE = 0
LONG, REDUCED = 4, 1
"""Type of an integer of 32 bits, and the bit of the subfile type that marks a smaller version of another image."""
UNSIGNED, SIGNED = 1, 2
MAX_SAMPLES = 4
"""Limit of the numbers of an image, in units of ``max_pixels``."""
LEAST_CHANNELS = {2: 3, 5: 4, 6: 3, 8: 3}
"""By photometric interpretation: RGB, separated inks, YCbCr, Lab."""
HYPERSTACK = re.compile(r'ImageJ=|\{"shape": ')
"""Begin of a description that may announce further images, of ImageJ and tifffile."""
NO_LAYOUT = ("unknown pixel mode", "unknown data organization", "Invalid value for samples per pixel")
"""Reasons of Pillow for layouts that it does not know, in contrast to damaged files."""

logging.getLogger("tifffile").addHandler(logging.NullHandler())  # else each oddity of a file is printed


class ImageFileDirectory(NamedTuple):
    """Directory of one of the images in a file.

    Attributes
    ----------
    number : in the chain, from 0.
    offset : byte position in the file.
    is_reduced : the image is a smaller version of another one: a thumbnail, or an overview.
    """

    number: int
    offset: int
    is_reduced: bool


def directories(data: bytes | memoryview | Slices) -> Iterator[ImageFileDirectory]:
    """Yield the directories of a file, in the order of their chain.

    A directory that refers to an earlier one is the last, as in Pillow.

    Raises
    ------
    FormatError : the chain leaves the file.
    """
    order = "<" if bytes(data[:2]) == b"II" else ">"
    big = 43 in data[2:4]
    at, count_format, entry, next_format = (8, "Q", 20, "Q") if big else (4, "H", 12, "I")
    seen: set[int] = set()
    number = 0
    while True:
        try:
            (offset,) = _unpacked(order + next_format, data, at)
            if offset == 0 or offset in seen:
                return
            (entries,) = _unpacked(order + count_format, data, offset)
        except struct.error:
            raise FormatError(
                "the list of pages leaves the file",
                byte=at,
                expected=f"a position below {len(data)}",
                remedy="the file may be cut off: write it again, or read its first page alone (pages='first')",
            ) from None
        seen.add(offset)
        begin = offset + struct.calcsize("=" + count_format)
        yield ImageFileDirectory(number, offset, _is_reduced(data, begin, order, big))
        at, number = begin + entry * entries, number + 1


def pages(directories: Iterable[ImageFileDirectory]) -> Iterator[ImageFileDirectory]:
    """Yield the directories of pages: images that are no smaller versions of others, or else the first one."""
    first, found = None, False
    for directory in directories:
        first = first or directory
        if not directory.is_reduced:
            found = True
            yield directory
    if first and not found:
        yield first


def _directory(data: bytes | memoryview, page: int) -> ImageFileDirectory | None:
    """Return the directory of a page; None: it is the first one of the file, which needs no list. Raise ``DecodeError``
    if there are fewer pages.
    """
    try:
        if not page and not next(directories(data)).is_reduced:
            return None
    except (FormatError, StopIteration):  # Pillow tells what is wrong
        return None
    found = list(islice(pages(directories(data)), page + 1))
    if not 0 <= page < len(found):
        raise DecodeError("the file has no such page", expected=f"a page below {len(found)}", found=f"page {page}")
    return found[page]


def _number(data: bytes | memoryview, page: int) -> int:
    """Return the number of a page among all images of the file."""
    directory = _directory(data, page)
    return 0 if directory is None else directory.number


def _unpacked(form: str, data: bytes | memoryview | Slices, at: int) -> tuple[Any, ...]:
    """Return the numbers at a byte; raise ``struct.error`` beyond the end."""
    return struct.unpack(form, data[at : at + struct.calcsize(form)])


def _is_reduced(data: bytes | memoryview | Slices, entry: int, order: str, big: bool) -> bool:
    """Return whether the first entry of a directory, by its tag the lowest, says "reduced-resolution image"."""
    try:
        tag, kind, count, value = _unpacked(order + ("HHQI" if big else "HHII"), data, entry)
    except struct.error:
        return False
    return tag == SUBFILE_TYPE and kind == LONG and count == 1 and bool(value & REDUCED)


def count_pages(data: bytes | memoryview) -> int:
    """Return the number of images: of pages, or of the images behind the only page of a hyperstack."""
    number = len(list(pages(directories(data))))
    return _images(data, _opened(data, 0)) if number == 1 else number


def _images(data: bytes | memoryview, first: TiffImageFile | None) -> int:
    """Return the number of images of a file with one page, which Pillow has opened unless it is None."""
    if first is not None and not HYPERSTACK.match(str(first.tag_v2.get(DESCRIPTION))):
        return 1
    with _file(data) as file:
        return images_behind(file)


def images_behind(file: Any) -> int:
    """Return the number of images behind the only page of a file as tifffile has opened it.

    ImageJ writes hyperstacks of more than 4 GB like that, and tifffile any stack with ``truncate=True``: raw images one
    behind the other, and their number in the description of the first one.
    """
    page, series = file.pages.first, file.series
    if len(file.pages) != 1 or len(series) != 1 or series[0].dataoffset != page.dataoffsets[0]:
        return 1
    return max(1, int(series[0].nbytes) // int(page.nbytes))


def _is_behind(data: bytes | memoryview, page: int) -> bool:
    """Return whether an image lies behind the only page of a file."""
    return page > 0 and len(list(islice(directories(data), 2))) == 1 and page < count_pages(data)


def open_page(data: bytes | memoryview, page: int) -> TiffImageFile:
    """Return a page as an image of Pillow, with its tags read. The first one needs no list of pages."""
    stream = io.BytesIO(data)
    directory = _directory(data, page)
    if directory is not None:
        order = "<" if bytes(data[:2]) == b"II" else ">"
        at, kind = (8, "Q") if 43 in data[2:4] else (4, "I")
        struct.pack_into(order + kind, stream.getbuffer(), at, directory.offset)
    return TiffImageFile(stream)


def _opened(data: bytes | memoryview, page: int) -> TiffImageFile | None:
    """Return a page as an image of Pillow; None: tifffile reads it."""
    try:
        image = open_page(data, page)
    except SyntaxError as error:
        if str(error) in NO_LAYOUT or isinstance(error.__cause__, LookupError):
            return None
        raise
    if max(image.tag_v2.get(IMAGE_DEPTH, 1), image.tag_v2.get(TILE_DEPTH, 1)) > 1:
        raise _volume(f"{image.tag_v2.get(IMAGE_DEPTH, 1)} planes in one page")
    without_code = image.info.get("compression") == "webp"  # in the libtiff of Pillow
    return None if _would_cut(image) or without_code else image


def _volume(found: str) -> FormatError:
    return FormatError(
        "the TIFF page is a volume",
        expected="pages of one plane each",
        found=found,
        remedy="write each plane as a page: tifffile.imwrite(path, tifffile.imread(path), photometric='minisblack')",
    )


def _would_cut(image: TiffImageFile) -> bool:
    """Return whether Pillow would cut the numbers or channels of this image, or take unsigned ones for signed ones."""
    tags: Any = image.tag_v2
    if tags.get(SAMPLES, 1) > len(image.getbands()):
        return True
    bits, forms = max(tags.get(BITS, (1,))), tags.get(SAMPLE_FORMAT, (UNSIGNED,))
    if bits > 8 and image.mode not in ("I", "F", "I;16", "I;16B"):
        return True
    return (bits == 8 and SIGNED in forms) or (bits == 32 and UNSIGNED in forms)


def tiff_header(data: bytes | memoryview, max_pixels: int, counted: bool) -> Header:
    """Return the header of the first page; its number of pages is 1 unless they are to be ``counted``."""
    number = len(list(pages(directories(data)))) if counted else 1
    image = _opened(data, 0)
    if counted and number == 1:
        number = _images(data, image)
    if image is not None:  # Pillow has turned the size already
        check_pixels(*image.size, max_pixels)
        return header_of_mode(image.mode, *image.size, number)
    with _file(data) as file:
        found = _page(file, _number(data, 0), len(data), max_pixels)
        height, width, channels = _shape(found)
        if _orientation(found) in TURNED:
            height, width = width, height
        return Header(_mode(found), height, width, channels, _dtype(found), number)


def decode_tiff(data: bytes | memoryview, max_pixels: int, page: int) -> Image.Image | Pixels:
    """Return a page with the numbers that are stored, turned as its orientation says."""
    if _is_behind(data, page):
        return _decode_behind(data, max_pixels, page)
    image = _opened(data, page)
    if image is None:
        return _decode_by_tifffile(data, max_pixels, page)
    check_pixels(*image.size, max_pixels)
    if _would_swap(image):
        pixels = _decode_by_tifffile(data, max_pixels, page)
        return Pixels(pixels.array.astype(MODES[image.mode][1], copy=False), pixels.mode)
    if _lacks_segments(image):
        return _decode_sparse(data, max_pixels, page, image)
    image.load()  # turns it, too
    return _as_stored(image) if image.tag_v2.get(PHOTOMETRIC) == MIN_IS_WHITE and image.mode in ("1", "L") else image


def _as_stored(image: TiffImageFile) -> Image.Image:
    """Return the numbers of an image whose least number is white, which Pillow inverts and scales to 8 bits."""
    array = np.asarray(image)
    if array.dtype == bool:
        return Image.fromarray(~array)
    bits = max(image.tag_v2.get(BITS, (8,)))
    return Image.fromarray(~array // (255 // (2**bits - 1)))


def _would_swap(image: TiffImageFile) -> bool:
    """Return whether Pillow would take numbers that libtiff delivers in native byte order for big-endian ones."""
    compressed = image.info.get("compression", "raw") != "raw"
    return image.mode in ("I", "F") and compressed and image.tag_v2.prefix == b"MM" and sys.byteorder == "little"


def _lacks_segments(image: TiffImageFile) -> bool:
    """Return whether strips or tiles were never written: GDAL leaves out those without data, where Pillow would take
    the begin of the file for their pixels.
    """
    tags: Any = image.tag_v2
    stored = [(tags.get(at, ()), size) for at, size in SEGMENTS]
    return any((0, 0) in zip(offsets, tags.get(size, ()), strict=False) for offsets, size in stored if 0 in offsets)


def _decode_sparse(data: bytes | memoryview, max_pixels: int, page: int, image: TiffImageFile) -> Image.Image | Pixels:
    """Return a page with zeros, or the value of the tag GDAL_NODATA, for strips and tiles that were never written."""
    pixels = _decode_by_tifffile(data, max_pixels, page)
    array = pixels.array.astype(MODES[image.mode][1], copy=False)
    if image.mode == "RGBA" and ASSOCIATED_ALPHA in image.tag_v2.get(EXTRA_SAMPLES, ()):
        return Image.frombytes("RGBA", array.shape[1::-1], array.tobytes(), "raw", "RGBa")
    if image.mode not in ("1", "L", "P"):
        return Pixels(array, pixels.mode or image.mode)
    if image.mode == "L" and image.tag_v2.get(PHOTOMETRIC) != MIN_IS_WHITE:
        array = array * np.uint8(255 // (2 ** max(image.tag_v2.get(BITS, (8,))) - 1))  # as Pillow does it
    picture = Image.fromarray(array)
    if image.palette is not None:
        picture.putpalette(image.palette.palette, image.palette.rawmode or "RGB")
    return picture


def _decode_by_tifffile(data: bytes | memoryview, max_pixels: int, page: int) -> Pixels:
    with _file(data) as file:
        found = _page(file, _number(data, page), len(data), max_pixels)
        array = found.asarray(squeeze=False, maxworkers=1)[:, 0]
        pixels = np.moveaxis(array, 0, 2)[..., 0] if array.shape[3] == 1 else array[0]
        if _shape(found)[2] is None:
            pixels = pixels[..., 0]
        return Pixels(upright(pixels.astype(_dtype(found), copy=False), _orientation(found)), _mode(found))


def _decode_behind(data: bytes | memoryview, max_pixels: int, number: int) -> Image.Image | Pixels:
    """Return an image that lies behind the only page of a file, raw as that one."""
    header = tiff_header(data, max_pixels, counted=False)
    with _file(data) as file:
        page = _page(file, 0, len(data), max_pixels)
        at, stored = page.dataoffsets[0] + number * page.nbytes, np.dtype(page.dtype).newbyteorder(file.byteorder)
        if at + page.nbytes > len(data):
            raise DecodeError("the image is not in the file", byte=at, expected=f"{page.nbytes} bytes", found="too few")
        values = np.frombuffer(data, stored, page.size, at).reshape(page.shape)
        array = np.ascontiguousarray(upright(values.astype(header.dtype), _orientation(page)))
        return Image.fromarray(array) if array.dtype == np.uint8 else Pixels(array, _mode(page))


def _file(data: bytes | memoryview) -> Any:
    """Return the file as tifffile opens it."""
    try:
        import tifffile
    except ModuleNotFoundError as error:
        raise missing_package("images", error) from error
    return tifffile.TiffFile(io.BytesIO(data), _multifile=False)


def _page(file: Any, number: int, size: int, max_pixels: int) -> Any:
    """Return a page of tifffile, checked before it is decoded; raise ``DecodeError`` if it is too large, or its data
    leave the file, ``FormatError`` if it holds something else than an image of real numbers.
    """
    page = file.pages[number]
    check_pixels(page.imagewidth, page.imagelength, max_pixels)
    samples, depth, _, _, channels = page.shaped
    if depth != 1 or page.tiledepth > 1:
        raise _volume(f"{page.dtype} of shape {page.shape}")
    if page.dtype is None or page.dtype.kind not in "biuf" or (samples > 1 and channels > 1):
        raise FormatError(
            "the TIFF page is no image",
            expected="real numbers, in two dimensions",
            found=f"{page.dtype} {page.shaped}",
            remedy="write its numbers as an array: numpy.save('image.npy', tifffile.imread(path))",
        )
    if page.planarconfig not in (1, 2) or samples * channels < LEAST_CHANNELS.get(page.photometric, 1):
        raise FormatError(
            "the tags of the TIFF page contradict each other",
            expected="channels together or in planes, and as many as the colours need",
            found=f"{samples * channels} channels, {page.photometric!r}, planes {page.planarconfig!r}",
        )
    if page.imagewidth * page.imagelength * samples * channels > MAX_SAMPLES * max_pixels:
        raise DecodeError(
            "the image is too large: it may be a decompression bomb",
            expected=f"at most {MAX_SAMPLES} numbers for each of max_pixels={max_pixels}",
            found=f"{page.imagewidth} x {page.imagelength} x {samples * channels} numbers",
            remedy="if the file can be trusted, open it with a larger max_pixels=",
        )
    _check_segments(page, size)
    return page


def _check_segments(page: Any, size: int) -> None:
    """Raise unless each strip or tile is there, or was never written: those of no bytes at position 0."""
    offsets, counts, wanted = page.dataoffsets, page.databytecounts, int(np.prod(page.chunked))
    if min(len(offsets), len(counts)) < wanted:
        raise DecodeError(
            "strips or tiles are missing", expected=f"{wanted} of them", found=min(len(offsets), len(counts))
        )
    for offset, count in zip(offsets[:wanted], counts[:wanted], strict=True):
        if (offset or count) and (offset <= 0 or count <= 0 or offset + count > size):
            raise DecodeError(
                "a strip or tile is not in the file",
                byte=offset,
                expected=f"{count} bytes in {size}",
                found="too few",
                remedy="write the file again, or leave it out (on_error='skip' passes over damaged samples)",
            )


def _shape(page: Any) -> tuple[int, int, int | None]:
    """Return height, width and channels, before orientation."""
    channels = page.shaped[0] * page.shaped[4]
    return page.imagelength, page.imagewidth, None if channels == 1 else channels


def _dtype(page: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(page.dtype)
    return dtype.newbyteorder("=")


def _orientation(page: Any) -> int:
    tag = page.tags.get(ORIENTATION)
    return tag.value if tag is not None and isinstance(tag.value, int) and 1 <= tag.value <= 8 else 1


def _mode(page: Any) -> str:
    """Return the mode of Pillow that has these channels; "" if there is none."""
    name, channels = getattr(page.photometric, "name", ""), _shape(page)[2] or 1
    if name in ("MINISBLACK", "MINISWHITE"):
        return {1: "L", 2: "LA"}.get(channels, "")
    if name == "RGB":
        return {3: "RGB", 4: "RGBA"}.get(channels, "RGB" if channels > 4 else "")
    return "CMYK" if name == "SEPARATED" and channels >= 4 else ""
