"""Columns of a FITS table: type, shape and scaling of each.

Format: FITS standard 4.0, sections 7.2 (ASCII tables) and 7.3 (binary tables).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from matex_data._types import Array
from matex_data.declared import declared
from matex_data.errors import RESTORE, DecodeError
from matex_data.index.scatter import Convert
from matex_data.readers.catalogue import Unreadable
from matex_data.readers.decoding import Decoding, check_exact
from matex_data.readers.fits.headers import Unit
from matex_data.warning import warn

_FORM = re.compile(r"(\d*)([LXBIJKAEDCMPQ])(.*)$")
_warned: set[str] = set()  # of these columns
_TEXT_FORM = re.compile(r"([AIFED])(\d+)(?:\.(\d+))?$")
_DIM = re.compile(r"\(\s*\d+(?:\s*,\s*\d+)*\s*\)$")
DTYPES = {"B": "u1", "I": ">i2", "J": ">i4", "K": ">i8", "E": ">f4", "D": ">f8", "C": ">c8", "M": ">c16", "L": "u1"}
_BIASED = {("|u1", -128): "i1", (">i2", 2**15): "u2", (">i4", 2**31): "u4", (">i8", 2**63): "u8"}
"""Integers of the other sign, by the stored dtype and its zero (FITS 4.0, sections 4.4.2.5 and 7.3.2)."""


@dataclass(frozen=True)
class FitsColumn:
    """Column of a table.

    Parameters
    ----------
    offset : first byte in a row.
    stored : dtype of an element in the file.
    shape : of a row; of an element, if the rows are of variable length.
    dtype : of the decoded values.
    convert : writes decoded values for stored ones; None: they are equal.
    pointer_bytes : of each of two integers, length and position of a row of variable length; 0: rows of one length.
    is_text : the elements are texts.
    """

    name: str
    unit: str
    offset: int
    stored: np.dtype[Any]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    convert: Convert | None
    pointer_bytes: int = 0
    is_text: bool = False


def binary_columns(unit: Unit) -> list[FitsColumn | tuple[str, str]]:
    """Return the columns of a binary table; for one that cannot be read, its name and the reason.

    Raises
    ------
    ValueError : the header is damaged.
    """
    found: list[FitsColumn | tuple[str, str]] = []
    offset = 0
    for number in range(1, unit.integer("TFIELDS") + 1):
        form = _FORM.match(_text(unit, f"TFORM{number}").upper())
        name = _text(unit, f"TTYPE{number}") or f"col{number}"
        if form is None:
            raise ValueError(f"TFORM{number} = {unit.cards.get(f'TFORM{number}')!r}")
        repeat, code = int(form[1] or 1), form[2]
        if code == "A" and not form[1] and form[3].isdigit():
            repeat = int(form[3])  # as in ASCII tables: a frequent mistake, which astropy reads like this, too
        width = _width(code, repeat)
        try:
            found.append(_binary_column(unit, number, name, repeat, code, form[3], offset))
        except Unreadable as reason:
            found.append((name, str(reason)))
        offset += width
    if offset != unit.shape[-1]:
        raise ValueError(f"columns of {offset} bytes in rows of {unit.shape[-1]} bytes")
    return found


def _width(code: str, repeat: int) -> int:
    """Return the bytes of a column in a row."""
    if code == "X":
        return -(-repeat // 8)
    return repeat * {"A": 1, "P": 8, "Q": 16}.get(code, 0) or repeat * np.dtype(DTYPES.get(code, "V0")).itemsize


def _binary_column(unit: Unit, number: int, name: str, repeat: int, code: str, further: str, offset: int) -> FitsColumn:
    pointer_bytes = {"P": 4, "Q": 8}.get(code, 0)
    if pointer_bytes:
        if repeat != 1 or not further or further[0] not in {*DTYPES, "A"}:
            raise Unreadable(f"rows of variable length of the type {further!r}")
        code = further[0]
    shape = _shape(unit, number, repeat) if not pointer_bytes else ()
    label = name, _text(unit, f"TUNIT{number}"), offset
    if code == "A":
        length = 1 if pointer_bytes else (shape[-1] if len(shape) > 1 else repeat)
        stored = np.dtype(f"S{max(1, length)}")
        if not pointer_bytes and not repeat:
            raise Unreadable("it has no bytes")
        return FitsColumn(*label, stored, shape[:-1], stored, strip, pointer_bytes, is_text=True)
    if code == "X":
        if not repeat:
            raise Unreadable("it has no bits")
        stored = np.dtype((np.void, max(1, -(-repeat // 8))))
        return FitsColumn(*label, stored, (), np.dtype(bool), Bits(repeat))
    if code == "L":
        convert = logical_of_lists if pointer_bytes else Logical(name)
        return FitsColumn(*label, np.dtype("u1"), shape, np.dtype(bool), convert, pointer_bytes)
    return FitsColumn(*label, np.dtype(DTYPES[code]), shape, *scaling(unit, number, code), pointer_bytes)


def _shape(unit: Unit, number: int, repeat: int) -> tuple[int, ...]:
    dim = _text(unit, f"TDIM{number}")
    if _DIM.match(dim):
        shape = tuple(int(length) for length in reversed(dim[1:-1].split(",")))
        if prod(shape) <= repeat:  # further bytes are undefined
            return shape
    elif dim:
        raise Unreadable(f"the shape {dim!r} of TDIM{number}, which is no list of lengths")
    return () if repeat == 1 else (repeat,)


def scaling(unit: Unit, number: int, code: str) -> tuple[np.dtype[Any], Convert | None]:
    """Return the dtype of decoded numbers, and the conversion to them."""
    stored = np.dtype(DTYPES[code])
    scale, zero = _number(unit, f"TSCAL{number}", 1), _number(unit, f"TZERO{number}", 0)
    null = unit.cards.get(f"TNULL{number}")
    missing = (null,) if isinstance(null, int) and code in "BIJK" else ()
    if code in "CM" and (scale, zero) != (1, 0):
        raise Unreadable("complex numbers with a scale")
    return decoded(stored, scale, zero, missing, np.dtype("f8"))


def decoded(
    stored: np.dtype[Any], scale: float, zero: float, missing: tuple[int, ...], wide: np.dtype[Any]
) -> tuple[np.dtype[Any], Convert | None]:
    """Return the dtype of decoded numbers, and the conversion to them; None: they are the stored ones.

    Parameters
    ----------
    stored : as the file has them; the numbers are ``stored * scale + zero``.
    missing : stored integers that stand for missing numbers.
    wide : of numbers that are neither the stored ones, nor these with the other sign.
    """
    if scale == 1 and (stored.str, zero) in _BIASED:
        dtype = np.dtype(_BIASED[stored.str, int(zero)])
        if not missing:
            return dtype, Biased(dtype)
        return wide, Biased(dtype, Decoding(wide, missing=tuple(wide.type(value + int(zero)) for value in missing)))
    if scale == 1 and zero == 0 and not missing:
        native = stored.newbyteorder("=")
        return native, None if stored == native else Decoding(native)
    numbers = (None if scale == 1 else float(scale)), (None if zero == 0 else float(zero))
    return wide, Decoding(wide, missing=tuple(map(wide.type, missing)), scale=numbers[0], offset=numbers[1])


def _text(unit: Unit, keyword: str) -> str:
    return str(unit.cards.get(keyword, "")).strip()


def _number(unit: Unit, keyword: str, default: int) -> int | float:
    value = unit.cards.get(keyword, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{keyword} = {value!r}")
    return value


def text_columns(unit: Unit) -> list[FitsColumn | tuple[str, str]]:
    """Return the columns of an ASCII table; raise ``ValueError`` if the header is damaged."""
    found: list[FitsColumn | tuple[str, str]] = []
    for number in range(1, unit.integer("TFIELDS") + 1):
        form = _TEXT_FORM.match(_text(unit, f"TFORM{number}"))
        name = _text(unit, f"TTYPE{number}") or f"col{number}"
        begin = unit.integer(f"TBCOL{number}") - 1
        if form is None or begin < 0 or not int(form[2]) or begin + int(form[2]) > unit.shape[-1]:
            raise ValueError(f"TFORM{number} = {unit.cards.get(f'TFORM{number}')!r}, TBCOL{number} = {begin + 1}")
        stored = np.dtype(f"S{form[2]}")
        label = name, _text(unit, f"TUNIT{number}"), begin, stored, ()
        if form[1] == "A":
            found.append(FitsColumn(*label, stored, strip, is_text=True))
            continue
        scale, zero = _number(unit, f"TSCAL{number}", 1), _number(unit, f"TZERO{number}", 0)
        null = unit.cards.get(f"TNULL{number}")
        is_whole = form[1] == "I" and scale == 1 and zero == 0 and null is None
        dtype = np.dtype(("i2" if int(form[2]) <= 4 else "i4" if int(form[2]) <= 9 else "i8") if is_whole else "f8")
        text = None if null is None else str(null).strip().encode()
        found.append(
            FitsColumn(
                *label, dtype, TextNumbers(dtype, text, b"0" if form[1] == "I" else b"nan", float(scale), float(zero))
            )
        )
    return found


@declared
def strip(rows: Array, out: Array) -> None:
    """Write texts without the blanks at their ends; a text ends with its first NUL."""
    texts = np.ascontiguousarray(rows)
    letters = texts.view(np.uint8).reshape(*texts.shape, texts.itemsize)
    ended = np.cumsum(letters == 0, axis=-1, dtype=bool)
    cleaned = np.where(ended, 0, letters).astype(np.uint8).view(texts.dtype)[..., 0]
    out[...] = np.strings.rstrip(cleaned)


@declared
@dataclass(frozen=True)
class Logical:
    """Conversion of logical values, of which those that are undefined (NUL) are False, with a warning.

    Whether there are any shows only when rows are read, long after the dtype of the field is known.

    Parameters
    ----------
    name : of the column, for the warning.
    """

    name: str

    def __call__(self, rows: Array, out: Array) -> None:
        np.equal(rows, ord("T"), out=out)
        if not rows.all() and self.name not in _warned:
            _warned.add(self.name)
            warn(f"the logical column {self.name!r} has undefined values (NUL), which are read as False")


@declared
def logical_of_lists(rows: Array, out: Array) -> None:
    """Write logical values of lists, for which astropy up to 7.2.0 stored 1 and 0 in place of T and F.

    A NUL is such a 0, or undefined.
    """
    np.logical_or(rows == ord("T"), rows == 1, out=out)


@declared
@dataclass(frozen=True)
class Biased:
    """Conversion of integers that are stored with the other sign, of which the first bit differs.

    Parameters
    ----------
    dtype : of the decoded integers, in native byte order.
    wide : conversion of these to floats; None: they stay integers.
    """

    dtype: np.dtype[Any]
    wide: Decoding | None = None

    def __call__(self, rows: Array, out: Array) -> None:
        unsigned = np.dtype(f"u{self.dtype.itemsize}")
        bits = rows.astype(rows.dtype.newbyteorder("=")).view(unsigned)
        whole = (bits ^ unsigned.type(1 << (8 * self.dtype.itemsize - 1))).view(self.dtype)
        if self.wide is None:
            out[...] = whole
        else:
            self.wide(whole, out)


@declared
@dataclass(frozen=True)
class Bits:
    """Conversion of bits to truth values, the highest bit of a byte first.

    Parameters
    ----------
    count : bits of a row.
    """

    count: int

    def __call__(self, rows: Array, out: Array) -> None:
        octets = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)
        out[...] = np.unpackbits(octets, axis=1, count=self.count).astype(bool)


@declared
@dataclass(frozen=True)
class TextNumbers:
    """Conversion of the texts of an ASCII table to numbers.

    Parameters
    ----------
    dtype : of the numbers.
    null : text of a missing number, without blanks; None: there is none.
    blank : text that a blank field stands for: zero among integers (FITS 4.0, section 7.2.5), a missing real number.
    scale, zero : the number is ``text * scale + zero``.
    """

    dtype: np.dtype[Any]
    null: bytes | None
    blank: bytes
    scale: float
    zero: float

    def __call__(self, rows: Array, out: Array) -> None:
        stored = np.strings.strip(np.ascontiguousarray(rows))
        texts = np.where(stored == b"", self.blank, np.strings.replace(stored, b"D", b"E"))
        if self.null is not None:
            texts = np.where(stored == self.null, b"nan", texts)
        try:
            numbers = texts.astype(self.dtype)
        except (ValueError, OverflowError) as error:
            raise DecodeError("a text is no number", expected=self.dtype, found=error, remedy=RESTORE) from error
        if self.dtype.kind == "f":
            if self.blank == b"0" and self.scale == 1:
                check_exact(stored, numbers)
            numbers = numbers * self.scale + self.zero
        out[...] = numbers
