"""Images from the bytes of their files, in the wanted mode, size and dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import numpy as np
from PIL import Image

from matex_data._types import Array
from matex_data.errors import DataError, DecodeError
from matex_data.readers.images.decoding.convert import convert_image, convert_pixels, converted_shape
from matex_data.readers.images.decoding.fits import decode_fits, fits_header
from matex_data.readers.images.decoding.framing import cut, drawn, flipped, height_and_width
from matex_data.readers.images.decoding.jpeg import decode_plain, jpeg_header
from matex_data.readers.images.decoding.kinds import HEAD_BYTES, Data, as_buffer, image_kind
from matex_data.readers.images.decoding.options import ImageInfo, ImageOptions
from matex_data.readers.images.decoding.picture import Header, Pixels, check_pixels, header_of_mode
from matex_data.readers.images.decoding.pillow import FrameFile, decode_by_pillow, image_header, no_image, too_large
from matex_data.readers.images.decoding.resample import resize_array, resize_image
from matex_data.readers.images.decoding.tiff import decode_tiff, tiff_header


def image_info(data: Data, options: ImageOptions, path: str | None = None, count_pages: bool = True) -> ImageInfo:
    """Return shape, dtype and pages of the first image of a file, from its header.

    Parameters
    ----------
    data : bytes of the whole file.
    count_pages : False: do not count the pages, ``pages`` is 1.

    Raises
    ------
    FormatError : it is no image, or cannot be read.
    DecodeError : the image is larger than ``options.max_pixels``, or its data leave the file.
    """
    with _errors(data, path, no_image) as (buffer, kind):
        info = delivered_info(_header(buffer, kind, options, count_pages), options)
        return info if count_pages or info.pages == 1 else replace(info, pages=1)


def decode_image(
    data: Data,
    options: ImageOptions,
    path: str | None = None,
    page: int = 0,
    out: Array | None = None,
    seed: int | None = None,
    frames: FrameFile | None = None,
) -> Array:
    """Return an image as an array, which may be read-only. Safe in several threads.

    JPEG decoding and the resizing of 8-bit gray and colours take no interpreter lock; what is left takes about 30 us.

    Parameters
    ----------
    data : bytes of the whole file.
    page : of a file with several.
    out : array that receives the image, if it has its shape and dtype. Otherwise the result is valid until this thread
        decodes the next image.
    seed : of what is random about it, in every epoch another one; None: it is random in no way.
    frames : keeps the file open for its next frame, between calls of one thread; None: it has no other.

    Raises
    ------
    DataError : the image is damaged, cut off, larger than ``options.max_pixels``, or no image.
    """
    with _errors(data, path, _damaged) as (buffer, kind):
        return deliver(_decode(buffer, kind, options, page, out, frames or FrameFile()), options, out, seed)


@contextmanager
def _errors(
    data: Data, path: str | None, refused: Callable[[str, Exception], DataError]
) -> Iterator[tuple[bytes | memoryview, str]]:
    """Context manager: yield the bytes of an image and their kind; name the file in errors of their decoding.
    ``refused``: returns the error for what a library raises.
    """
    kind = "other"
    try:
        buffer = as_buffer(data)
        kind = image_kind(bytes(buffer[:HEAD_BYTES]))
        yield buffer, kind
    except MemoryError:
        raise
    except DataError as error:
        raise _at(error, path) from error.__cause__
    except Exception as error:
        raise _at(refused(kind, error), path) from error


def _header(buffer: bytes | memoryview, kind: str, options: ImageOptions, count_pages: bool) -> Header:
    if kind == "tiff":
        return tiff_header(buffer, options.max_pixels, count_pages)
    if kind == "fits":
        return fits_header(buffer, options.max_pixels)
    if kind == "jpeg" and (header := jpeg_header(buffer, whole=False)) is not None:
        check_pixels(header.width, header.height, options.max_pixels)
        return header_of_mode(header.mode, *header.turned)
    return image_header(buffer, kind, options.max_pixels)


def _decode(
    buffer: bytes | memoryview, kind: str, options: ImageOptions, page: int, out: Array | None, frames: FrameFile
) -> Image.Image | Pixels:
    if kind == "tiff":
        return decode_tiff(buffer, options.max_pixels, page)
    if kind == "fits":
        if page:
            raise DecodeError("the file has no such page", expected="page 0", found=f"page {page}")
        return decode_fits(buffer, options.max_pixels)
    if kind == "jpeg" and page == 0:
        pixels = decode_plain(buffer, options, out)
        if pixels is not None:
            return pixels
    return decode_by_pillow(buffer, kind, options, page, frames)


@lru_cache(maxsize=64)  # the images of a data set are alike, and there may be millions
def delivered_info(header: Header, options: ImageOptions) -> ImageInfo:
    """Return shape and dtype of the array that `deliver` returns for an image with this header."""
    shape, dtype = converted_shape(header, options.mode)
    if options.size is not None:
        shape = (*options.size, *shape[2:])
    mode = header.mode if options.mode == "native" else options.mode
    attributes = {"mode": mode}
    if dtype.kind == "b":
        attributes["value_range"] = "0 to 1"
    elif dtype.kind in "iu":
        attributes["value_range"] = f"{np.iinfo(dtype).min} to {np.iinfo(dtype).max}"
    return ImageInfo(shape, options.dtype or dtype, header.pages, attributes)


def deliver(
    picture: Image.Image | Pixels, options: ImageOptions, out: Array | None = None, seed: int | None = None
) -> Array:
    """Return decoded pixels in the mode, size and dtype of the options; in ``out`` if it has this shape and dtype."""
    if not options.takes_section:
        return _resized(picture, options, out)
    section, axes = drawn(options, *height_and_width(picture), seed)
    picture = picture if section is None else cut(picture, section)
    if not axes:
        return _resized(picture, options, out)
    array = flipped(_resized(picture, options, None), axes)
    if out is None or (array.shape, array.dtype) != (out.shape, out.dtype):
        return array
    np.copyto(out, array)
    return out


def _resized(picture: Image.Image | Pixels, options: ImageOptions, out: Array | None) -> Array:
    wanted = (
        convert_image(picture, options.mode)
        if isinstance(picture, Image.Image)
        else convert_pixels(picture, options.mode)
    )
    if isinstance(wanted, Image.Image):
        size = options.size
        array = np.asarray(wanted) if size is None else resize_image(wanted, size, options.resample)
        if array.dtype == bool:
            array = array.view(np.uint8) != 0  # Pillow has 255 for True, of which TensorFlow makes other numbers
        if options.mode == "gray":
            array = array[..., None]
    else:
        pixels, size = wanted.array, options.size
        target = _bytes_for(out, size, pixels)
        array = pixels if size is None else resize_array(pixels, size, options.resample, target)
    if out is None or (array.shape, options.dtype or array.dtype) != (out.shape, out.dtype):
        return array if options.dtype is None else array.astype(options.dtype, copy=False)
    if not np.may_share_memory(array, out):
        np.copyto(out, array, casting="unsafe")
    return out


def _bytes_for(out: Array | None, size: tuple[int, int] | None, pixels: Array) -> Array | None:
    """Return ``out`` if it can hold the resized pixels, which are bytes."""
    fits = out is not None and size is not None and out.dtype == np.uint8 and out.flags.c_contiguous
    return out if fits and out is not None and out.shape == (*(size or ()), *pixels.shape[2:]) else None


def _at(error: DataError, path: str | None) -> DataError:
    return error if path is None else error.at(path, None)


def _damaged(kind: str, error: Exception) -> DataError:
    if kind == "other":
        return no_image(kind, error)
    if isinstance(error, Image.DecompressionBombError):
        return too_large(error)
    return DecodeError(
        "the image does not decode",
        expected=f"a whole, undamaged {kind.upper()} image",
        found=repr(error),
        remedy="write the file again, or leave it out (on_error='skip' passes over damaged samples)",
    )
