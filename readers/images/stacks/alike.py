"""Stacks: TIFF files whose pages are all alike, read by the byte ranges of their strips and tiles.

The metadata are read by tifffile. Format: TIFF 6.0, https://www.itu.int/itudoc/itu-t/com16/tiff-fx/docs/tiff6.pdf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tifffile

from matex_data._types import Integers
from matex_data.errors import DecodeError, FormatError, truncated
from matex_data.fields import Field
from matex_data.index.model import Layout
from matex_data.index.strided import Strided
from matex_data.readers.decoding import Decoding, narrow
from matex_data.readers.images.decoding import ImageOptions
from matex_data.readers.images.decoding.kinds import HEAD_BYTES, image_kind
from matex_data.readers.images.decoding.picture import check_pixels
from matex_data.readers.images.decoding.tiff import ImageFileDirectory, directories, images_behind, pages
from matex_data.readers.images.stacks.pages import StackPages, StoredPage
from matex_data.storage.files import open_binary, size_of_open
from matex_data.storage.objects import Slices, is_url

GRAYS, RGB = (0, 1), 2  # photometric interpretations; white is the least number or the largest one
UNASSOCIATED_ALPHA = 2  # an extra sample
RAW = 1  # no compression
LOSSLESS = frozenset((RAW, 5, 8, 32773, 32946, 34925, 50000))  # LZW, deflate, PackBits, deflate, LZMA, Zstandard


def stack_layout(path: str, options: ImageOptions) -> tuple[Field, Layout] | None:
    """Return the field "image" and the layout of a TIFF file whose rows are its pages.

    Returns
    -------
    None if the pages differ, or if their pixels are not simply those that are stored: these are decoded page by page.

    Raises
    ------
    FormatError : the file is truncated.
    DecodeError : the pages are larger than ``options.max_pixels``.
    """
    try:
        with open_binary(path) as stored:
            size = size_of_open(stored)
            chain = _chain(path, Slices(stored, size))
            stored.seek(0)
            with tifffile.TiffFile(stored if is_url(path) else path, _multifile=False) as file:
                numbers = [directory.number for directory in pages(chain)]
                found = _pages(file, numbers) if len(file.pages) == len(chain) else None
    except (FormatError, OSError):
        raise
    except Exception:  # tifffile raises many kinds; the decoder of single pages has the better errors
        return None
    if found is None:
        return None
    page, offset, nbytes = found
    try:
        check_pixels(page.width, page.height, options.max_pixels)
    except DecodeError as error:
        raise error.at(path, None) from None
    info = page.info(options)
    field = info.field("image", False)
    layout = _layout(StackPages(page, narrow(offset), narrow(nbytes), options), info.dtype)
    if layout.end() > size:
        raise truncated(path, size, layout.end())
    return field, layout


def _chain(path: str, data: Slices) -> list[ImageFileDirectory]:
    """Return the directories of all images.

    Raises
    ------
    FormatError : the chain of pages leaves the file; tifffile leaves out what is behind a damaged link.
    ValueError : it is no TIFF file.
    """
    if image_kind(data[:HEAD_BYTES]) != "tiff":
        raise ValueError("no TIFF file")
    try:
        return list(directories(data))
    except FormatError as error:
        raise FormatError(
            "the file is truncated",
            file=path,
            byte=error.byte,
            expected=error.expected,
            found="the position of a page beyond it",
            remedy="copy it again from its source, or read its first page alone (pages='first')",
        ) from error


def _pages(file: tifffile.TiffFile, numbers: Sequence[int]) -> tuple[StoredPage, Integers, Integers] | None:
    """Return the form of pages, and int64[pages, segments], offset and size of each strip or tile.

    None if they differ or cannot be laid out.

    Parameters
    ----------
    numbers : of the pages among all images of the file.
    """
    first = file.pages[numbers[0]]
    if not _is_plain(first):
        return None
    page, ranges, contiguous = StoredPage.of(first, file.byteorder), [], True
    for other in map(file.pages.__getitem__, numbers):
        if not isinstance(other, tifffile.TiffPage) or other.hash != first.hash or not _is_plain(other):
            return None
        contiguous = contiguous and other.is_contiguous
        ranges.append(np.array([other.dataoffsets, other.databytecounts], np.int64))
    offset, nbytes = np.moveaxis(np.array(ranges), 1, 0)
    if not offset.all() or not nbytes.all():  # segments that were never written
        return None
    if contiguous and not page.planar:
        offset = offset[:, :1]
        if len(offset) == 1:
            offset = offset + page.nbytes * np.arange(images_behind(file))[:, None]
        nbytes = np.full_like(offset, page.nbytes)
    return page, offset, nbytes


def _is_plain(page: tifffile.TiffPage) -> bool:
    """Return whether the pixels are those that the page stores, without a change of their numbers."""
    samples, extra = page.samplesperpixel, tuple(page.extrasamples)
    colours = (samples == 3 and not extra) or (samples == 4 and extra == (UNASSOCIATED_ALPHA,))
    return (
        page.dtype is not None
        and page.dtype.kind in "uif"
        and page.bitspersample == page.dtype.itemsize * 8
        and page.compression in LOSSLESS
        and (page.predictor == 1 or page.compression != RAW)
        and ((samples == 1 and page.photometric in GRAYS) or (colours and page.photometric == RGB))
        and page.imagedepth == page.tiledepth == 1
        and page.tags.valueof(274, 1) == 1  # orientation
        and page.fillorder == 1
        and not page.is_reduced
        and len(page.dataoffsets) == len(page.databytecounts) == int(np.prod(page.chunked))
    )


def _layout(pages: StackPages, dtype: np.dtype[Any]) -> Layout:
    """Return the layout of the pages: rows at even distances where that is possible."""
    first, page = pages.offset[:, 0].astype(np.int64), pages.page
    distances = np.unique(np.diff(first))
    stride = int(distances[0]) if len(distances) else page.nbytes
    if not (pages.is_whole and pages.is_plain and len(distances) <= 1 and stride >= page.nbytes):
        return pages
    convert = None if page.dtype == dtype else Decoding(dtype)
    return Strided(len(first), int(first[0]), stride, page.dtype, page.shape, convert=convert)
