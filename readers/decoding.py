"""Conversion of stored numbers to those of a field: byte order, sign, missing values, scale and offset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from matex_data._types import Array
from matex_data.declared import declared
from matex_data.errors import DecodeError
from matex_data.fields import EXACT
from matex_data.index.chunked import Chunked
from matex_data.index.combined import Concatenated, Converted
from matex_data.index.library import LibraryRows, MemoryRows
from matex_data.index.model import Layout
from matex_data.index.scatter import CONVERT_ITEMS, Convert
from matex_data.index.strided import Strided, Transposed


@declared
@dataclass(frozen=True)
class Decoding:
    """Conversion of stored numbers: ``stored * scale + offset``, and NaN where they are missing.

    With ``dtype`` alone it only converts the type and the byte order. An integer without a scale that float64 does not
    hold is a ``DecodeError``.

    Parameters
    ----------
    dtype : of the decoded numbers.
    stored_kind : "i" or "u": the stored integers are signed or unsigned, in contrast to their dtype; "": as the dtype.
    missing : stored values that stand for missing numbers, as ``dtype``.
    low, high : smallest and largest valid stored value, or None. Values outside are missing.
    scale, offset : numbers, or None.
    """

    dtype: np.dtype[Any]
    stored_kind: str = ""
    missing: tuple[Any, ...] = ()
    low: Any = None
    high: Any = None
    scale: Any = None
    offset: Any = None

    def __call__(self, rows: Array, out: Array) -> None:
        with np.errstate(over="ignore"):  # numbers beyond the range of ``dtype`` become infinite, as in xarray
            for stored, decoded in _cache_blocks(rows, out):
                self._decode(stored, decoded)

    def _decode(self, stored: Array, out: Array) -> None:
        if self.stored_kind:
            stored = stored.view(f"{stored.dtype.byteorder}{self.stored_kind}{stored.itemsize}")
        np.copyto(out, stored, casting="unsafe")
        missing = self._is_missing(out)
        if self.scale is None and out.dtype == np.float64 and stored.dtype.kind in "iu" and stored.itemsize == 8:
            check_exact(stored, out, missing)
        if self.scale is not None:
            np.multiply(out, self.scale, out=out, casting="same_kind")
        if self.offset is not None:
            np.add(out, self.offset, out=out, casting="same_kind")
        if missing is not None and missing.any():
            np.copyto(out, np.nan, where=missing)

    def _is_missing(self, numbers: Array) -> Array | None:
        missing: Array | None = None
        for value in self.missing:
            missing = _or(missing, numbers == value)
        if self.low is not None:
            missing = _or(missing, numbers < self.low)
        if self.high is not None:
            missing = _or(missing, numbers > self.high)
        return missing

    def decode(self, stored: Array) -> Array:
        """Return a whole array, decoded."""
        out = np.empty(stored.shape, self.dtype)
        self(stored.reshape(-1), out.reshape(-1))
        return out


@declared
@dataclass(frozen=True)
class Narrowed:
    """Conversion to floats of 32 bits, after that to another dtype: numbers are rounded once.

    Parameters
    ----------
    wide : conversion to the other dtype.
    """

    wide: Decoding

    def __call__(self, rows: Array, out: Array) -> None:
        for stored, narrow in _cache_blocks(rows, out):
            np.copyto(narrow, self._wide(stored), casting="same_kind")

    def _wide(self, stored: Array) -> Array:
        wide = np.empty(stored.shape, self.wide.dtype)
        self.wide(stored, wide)
        return wide

    def decode(self, stored: Array) -> Array:
        """Return a whole array, decoded."""
        return self._wide(stored).astype(np.float32)


def check_exact(stored: Array, numbers: Array, missing: Array | None = None) -> None:
    """Raise ``DecodeError`` if an integer may be rounded as float64.

    Parameters
    ----------
    stored : integers, or their texts.
    numbers : float64, the same.
    missing : True where a number stands for a missing one.
    """
    rounded = np.abs(numbers) >= EXACT
    if missing is not None:
        rounded &= ~missing
    if rounded.any():
        raise DecodeError(
            "an integer is not exact as float64, which has NaN for missing ones",
            expected="less than 2**53",
            found=stored[rounded][0],
            remedy="leave the field out, or write it without a number that stands for missing ones",
        )


def _or(a: Array | None, b: Array) -> Array:
    return b if a is None else np.logical_or(a, b, out=a)


def _cache_blocks(rows: Array, out: Array) -> Iterator[tuple[Array, Array]]:
    """Yield blocks of both arrays that fit into the processor's cache."""
    if rows.size <= CONVERT_ITEMS:
        yield rows, out
    elif rows.flags.c_contiguous and out.flags.c_contiguous:
        stored, decoded = rows.reshape(-1), out.reshape(-1)
        for i in range(0, len(stored), CONVERT_ITEMS):
            yield stored[i : i + CONVERT_ITEMS], decoded[i : i + CONVERT_ITEMS]
    elif len(rows) == 1:
        yield from _cache_blocks(rows[0], out[0])
    else:
        step = max(1, CONVERT_ITEMS * len(rows) // rows.size)
        for i in range(0, len(rows), step):
            yield from _cache_blocks(rows[i : i + step], out[i : i + step])


def narrow(numbers: Array) -> Array:
    """Return integers of 0 or more in the smallest unsigned type, contiguous, since each rank keeps all of them.

    >>> narrow(np.array([3, 300])).dtype
    dtype('uint16')
    """
    return np.ascontiguousarray(numbers, np.min_scalar_type(int(numbers.max(initial=0))))


class Decoder(Protocol):
    """Decoder of whole arrays; can be pickled."""

    def decode(self, stored: Array) -> Array:
        """Return an array, decoded."""


def decode_layout(layout: Layout, convert: Convert | None, decoder: Decoder) -> Layout:
    """Return the layout with decoded rows.

    Parameters
    ----------
    convert : decodes rows that are read as bytes, see `matex_data.index.scatter.Convert`.
    decoder : decodes rows that the library of the format reads, or that the index carries.
    """
    if isinstance(layout, Strided | Chunked | Transposed):
        return replace(layout, convert=convert)
    if isinstance(layout, MemoryRows):
        return MemoryRows(decoder.decode(layout.values))
    if isinstance(layout, Concatenated):
        return replace(layout, parts=tuple(decode_layout(part, convert, decoder) for part in layout.parts))
    if isinstance(layout, Converted):  # some rows, or those of another file
        return replace(layout, layout=decode_layout(layout.layout, convert, decoder))
    assert isinstance(layout, LibraryRows), layout
    return DecodedLibraryRows(layout, decoder)


@declared
@dataclass(frozen=True, eq=False)
class DecodedLibraryRows(LibraryRows):
    """Rows of another layout, decoded after the library has read them."""

    source: LibraryRows
    decoder: Decoder

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.source.rows

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return self.source.block_rows

    def read(self, start: int, stop: int) -> Array:
        return self.decoder.decode(self.source.read(start, stop))
