"""Members of tar shards: the field of each file-name extension, and the decoding of a member's bytes."""

from __future__ import annotations

import io
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from matex_data._types import Array, Bytes
from matex_data.declared import declared
from matex_data.errors import DecodeError, FormatError
from matex_data.fields import Field
from matex_data.readers.arrays import read_header
from matex_data.readers.images.decoding import ImageInfo, ImageOptions, decode_image, image_info
from matex_data.readers.images.decoding.kinds import HEAD_BYTES, image_kind
from matex_data.readers.images.decoding.pillow import SEQUENTIAL

IMAGES = frozenset(("bmp", "fit", "fits", "gif", "jfif", "jpe", "jpeg", "jpg", "png", "ppm", "tif", "tiff", "webp"))
INTEGERS = frozenset(("class", "cls", "cls2", "count", "id", "index", "inx"))
ARRAYS = frozenset(("npy",))
"""Last words of extensions, as WebDataset decodes them. Members with any other one are bytes."""
MOST_DIGITS = 20  # of an int64, with its sign


class MemberDecoder(ABC):
    """Decoder of the members of one field; immutable, and small enough to broadcast."""

    @abstractmethod
    def field(self, name: str) -> Field:
        """Return the field."""

    @abstractmethod
    def decode(self, data: Bytes, out: Array) -> Any:
        """Return the sample, to be assigned to an element of the output array; or ``out``, which then holds it.

        Parameters
        ----------
        data : uint8[n], the member.
        out : element of the output array; only for samples that are arrays of one shape.

        Raises
        ------
        DataError : the member is damaged, or differs in shape or dtype from the first one.
        """


def kind_of(name: str) -> str:
    """Return the last word of a field's name, which tells how to decode it.

    >>> kind_of("input.png")
    'png'
    """
    return name.rpartition(".")[2]


@declared
@dataclass(frozen=True)
class BytesMember(MemberDecoder):
    """Member that is delivered as it is stored: text, JSON, and anything unknown."""

    def field(self, name: str) -> Field:
        return Field(name, (), np.dtype(object))

    def decode(self, data: Bytes, out: Array) -> Any:
        return data.tobytes()


@declared
@dataclass(frozen=True)
class IntegerMember(MemberDecoder):
    """Decimal number: a class or an index, int64."""

    def field(self, name: str) -> Field:
        return Field(name, (), np.dtype(np.int64))

    def decode(self, data: Bytes, out: Array) -> Any:
        text = data[:80].tobytes().strip()
        if len(data) <= 80 and len(text) <= MOST_DIGITS and re.fullmatch(rb"[+-]?[0-9]+", text):
            number = int(text)
            if -(1 << 63) <= number < 1 << 63:
                return number
        raise DecodeError(
            "the member is no integer",
            expected="decimal digits, of a 64-bit integer",
            found=repr(text),
            remedy='deliver the field as bytes: raw=["cls"], with its own name',
        )


@declared
@dataclass(frozen=True)
class ArrayMember(MemberDecoder):
    """Array in NumPy's format .npy.

    Parameters
    ----------
    shape, dtype : of every member; the dtype in native byte order.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def like(cls, data: bytes, path: str, name: str) -> ArrayMember:
        """Return the decoder of arrays of the shape and dtype of this one.

        Raises
        ------
        FormatError : the member is no array, or an array of Python objects.
        """
        stored = read_header(io.BytesIO(data), path, name, len(data))
        return cls(stored.shape, stored.dtype.newbyteorder("="))

    def field(self, name: str) -> Field:
        return Field(name, self.shape, self.dtype)

    def decode(self, data: Bytes, out: Array) -> Any:
        content = data.tobytes()
        stored = read_header(io.BytesIO(content), "", None, len(content))
        if (stored.shape, stored.dtype.newbyteorder("=")) != (self.shape, self.dtype):
            raise _differs(self.shape, self.dtype, stored.shape, stored.dtype)
        count = int(np.prod(stored.shape, dtype=np.int64))
        values = np.frombuffer(content, stored.dtype, count, stored.offset)
        return values.reshape(stored.shape, order="F" if stored.fortran else "C")


@declared
@dataclass(frozen=True)
class ImageMember(MemberDecoder):
    """Image of any format.

    Parameters
    ----------
    info : of the first image, as it is delivered: of all, unless each has a height and width of its own.
    nbytes : size of all images of their own sizes in memory; None: all have one size.
    """

    options: ImageOptions
    info: ImageInfo
    nbytes: int | None = None

    def field(self, name: str) -> Field:
        return self.info.field(name, self.nbytes is not None)

    def decode(self, data: Bytes, out: Array) -> Any:
        self._check_single(data)
        ragged = self.nbytes is not None
        image = decode_image(data, self.options, out=None if ragged else out)
        same = image.shape[2:] == self.info.shape[2:] if ragged else image.shape == self.info.shape
        if not same or image.dtype != self.info.dtype:
            raise _differs(self.info.shape, self.info.dtype, image.shape, image.dtype)
        return image.copy() if ragged and not image.flags.writeable else image  # a batch holds ragged images themselves

    def _check_single(self, data: Bytes) -> None:
        """Raise if a member has several pages or frames: a sample has one image, and the others would be lost."""
        if image_kind(data[:HEAD_BYTES].tobytes()) in ("tiff", *SEQUENTIAL):
            pages = image_info(data, self.options).pages
            if pages > 1:
                raise FormatError(
                    "the member has several pages",
                    expected="one image",
                    found=f"{pages} pages",
                    remedy="write each page as a sample, or deliver the members as bytes by raw=",
                )


def _differs(shape: tuple[int, ...], dtype: np.dtype[Any], other: tuple[int, ...], found: np.dtype[Any]) -> DecodeError:
    return DecodeError(
        "the member differs from the first one of its field",
        expected=f"{dtype} of shape {shape}",
        found=f"{found} of shape {other}",
        remedy='give size=(height, width), mode="rgb" or "gray", and dtype= for images of different kinds',
    )
