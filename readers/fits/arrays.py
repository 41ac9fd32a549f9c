"""Samples along an axis of a FITS image, or one in each of several image extensions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from matex_data._types import Array
from matex_data.codecs.pipeline import Pipeline
from matex_data.declared import declared
from matex_data.errors import RESTORE, DecodeError, FormatError
from matex_data.fields import Field
from matex_data.index.chunked import Chunked
from matex_data.index.library import LibraryRows, OpenFiles
from matex_data.index.model import Layout
from matex_data.index.scatter import Convert
from matex_data.index.strided import along_axis
from matex_data.locks import Lock
from matex_data.readers.fits.columns import decoded
from matex_data.readers.fits.headers import Unit
from matex_data.readers.text.unpacked import content
from matex_data.storage.files import open_binary, undecodable
from matex_data.storage.objects import is_url

DTYPES = {8: "u1", 16: ">i2", 32: ">i4", 64: ">i8", -32: ">f4", -64: ">f8"}
_ASTROPY_LOCK = Lock()  # threads may index several files


def array(path: str, unit: Unit, field: str, axis: int) -> tuple[Field, Layout]:
    """Return field and layout of the samples along an axis of an image.

    Parameters
    ----------
    field : name of the field.
    axis : of the samples, as NumPy counts axes: the slowest is 0.

    Raises
    ------
    FormatError : the image has no such axis, or its header is damaged.
    """
    if unit.cards.get("ZIMAGE"):
        return _compressed(path, unit, field, axis)
    stored, dtype, convert = _values(path, unit)
    shape = unit.shape
    axis = _checked_axis(path, shape, axis)
    step = prod(shape[1:]) * stored.itemsize
    layout = along_axis(shape, axis, unit.begin, step, stored, convert=convert)
    return Field(field, (*shape[:axis], *shape[axis + 1 :]), dtype), layout


def extensions(path: str, units: Sequence[Unit], field: str) -> tuple[Field, Layout]:
    """Return field and layout of image extensions of one shape and type, each of which is a sample.

    Raises
    ------
    FormatError : they differ, or are compressed.
    """
    first = units[0]
    stored, dtype, convert = _values(path, first)
    keywords = ("BITPIX", "BSCALE", "BZERO", "BLANK")
    for unit in units:
        same = unit.shape == first.shape and all(unit.cards.get(k) == first.cards.get(k) for k in keywords)
        if not same or unit.kind != "IMAGE":
            raise FormatError(
                "the extensions differ",
                file=path,
                expected=f"images of {dtype} of shape {first.shape}, without compression",
                found=f"{unit.kind} of shape {unit.shape} in extension {unit.number}",
                remedy="choose equal ones with hdu=",
            )
    count, nbytes = len(units), first.nbytes
    layout = Chunked(
        (count, *first.shape),
        (1, *first.shape),
        stored,
        Pipeline((), stored.itemsize, nbytes),
        np.arange(count),
        np.array([unit.begin for unit in units], np.int64),
        np.full(count, nbytes, np.int64),
        np.zeros(count, np.int64),
        np.zeros((), dtype),
        convert,
    )
    return Field(field, first.shape, dtype), layout


def _values(path: str, unit: Unit) -> tuple[np.dtype[Any], np.dtype[Any], Convert | None]:
    """Return the dtype of the stored pixels, that of the decoded ones, and the conversion, as astropy has them."""
    bits, scale, zero = unit.cards.get("BITPIX"), unit.cards.get("BSCALE", 1), unit.cards.get("BZERO", 0)
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (scale, zero))
    if bits not in DTYPES or not numbers:
        found = f"BITPIX = {bits!r}, BSCALE = {scale!r}, BZERO = {zero!r}"
        raise FormatError("the header of the image is damaged", file=path, found=found, remedy=RESTORE)
    stored = np.dtype(DTYPES[bits])
    blank = unit.cards.get("BLANK")
    missing = (blank,) if type(blank) is int and bits > 0 else ()
    return stored, *decoded(stored, scale, zero, missing, np.dtype("f4" if bits in (8, 16, -32) else "f8"))


def _checked_axis(path: str, shape: tuple[int, ...], axis: int) -> int:
    if not -len(shape) <= axis < len(shape):
        raise FormatError(
            "the image has no such axis",
            file=path,
            expected=f"one of {len(shape)} axes",
            found=f"sample_axis={axis}",
            remedy="count the axes as NumPy does: axis 0 is the last one of FITS",
        )
    return axis % len(shape)


def _compressed(path: str, unit: Unit, field: str, axis: int) -> tuple[Field, Layout]:
    from astropy.io import fits

    try:
        with _ASTROPY_LOCK, open_binary(path) as stored, fits.open(content(path, stored)[0], memmap=False) as file:
            section = file[unit.number].section
            shape = tuple(section.shape)
            dtype = section[tuple(slice(0, 1) for _ in shape)].dtype.newbyteorder("=")
    except Exception as error:  # astropy raises errors of many kinds
        raise undecodable(FormatError, "the compressed image cannot be read", path, error) from error
    axis = _checked_axis(path, shape, axis)
    sample = (*shape[:axis], *shape[axis + 1 :])
    rows, tile = shape[axis], unit.cards.get(f"ZTILE{len(shape) - axis}", 1)
    block_rows = max(1, min(tile, rows)) if type(tile) is int else 1
    return Field(field, sample, dtype), CompressedImageRows(path, unit.number, rows, block_rows, axis, dtype)


@declared
@dataclass(frozen=True, eq=False)
class CompressedImageRows(LibraryRows):
    """Rows of a compressed image, which astropy reads. The file stays open, and the tiles read last are kept.

    Parameters
    ----------
    rows, axis : length and position of the sample axis.
    block_rows : rows of a tile.
    """

    path: str
    number: int
    rows: int
    block_rows: int
    axis: int
    dtype: np.dtype[Any]

    def sources(self) -> Sequence[str]:
        return (self.path,)

    def read(self, start: int, stop: int) -> Array:
        """Read rows, decompressed and scaled."""
        parts: list[Array] = []
        low = start
        while low < stop:
            number = low // self.block_rows
            begin, end = number * self.block_rows, min(self.rows, (number + 1) * self.block_rows)
            block = self._block(number, begin, end)
            parts.append(block[low - begin : stop - begin])
            low = end
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _block(self, number: int, begin: int, end: int) -> Array:
        """Return the rows of the tiles of a block, which are decoded once for all that are read one after the other."""
        try:
            image = OPEN.get(self, lambda: TiledImage(self.path, self.number))
            if image.block[0] != number:
                rows = image.section[(*(slice(None),) * self.axis, slice(begin, end))]
                image.block = number, np.moveaxis(rows, self.axis, 0).astype(self.dtype)
        except Exception as error:  # astropy raises errors of many kinds
            raise undecodable(
                DecodeError, "the compressed image cannot be read", self.path, error, row=begin
            ) from error
        found: Array = image.block[1]
        return found


MAX_OPEN = 8  # files of a process whose images are compressed by the tile


class TiledImage:
    """Compressed image of an open file."""

    def __init__(self, path: str, number: int) -> None:
        from astropy.io import fits

        self.block: tuple[int, Any] = -1, None
        with ExitStack() as stack:
            file, stored = content(path, stack.enter_context(open_binary(path)))
            memmap = False if stored or is_url(path) else None  # True refuses numbers that it has to scale
            whole = stack.enter_context(fits.open(file, memmap=memmap))
            self.section = whole[number].section
            self._opened = stack.pop_all()

    def close(self) -> None:
        """Close the file."""
        self._opened.close()


OPEN = OpenFiles[TiledImage](MAX_OPEN)
