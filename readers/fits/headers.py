"""Headers of a FITS file: which of its extensions hold a table or an array, and where their data lie.

Format: FITS standard 4.0, https://fits.gsfc.nasa.gov/fits_standard.html, sections 3 and 4.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import IO, Any

from matex_data.errors import RESTORE, FormatError, truncated

BLOCK = 2880  # bytes, of which headers and data are multiples
CARD = 80  # bytes
MAX_HEADER = 1 << 24  # bytes
_VALUE = re.compile(r"\s*(?:'((?:[^']|'')*)'|([^/]*))")


@dataclass(frozen=True)
class Unit:
    """Header and data unit (HDU) of a file.

    Parameters
    ----------
    number : of the unit; 0 is the primary one.
    cards : values of the header by keyword.
    begin : first byte of the data in the file.
    """

    number: int
    cards: Mapping[str, Any]
    begin: int

    @property
    def kind(self) -> str:
        """Return the name of the extension, such as "BINTABLE"; of the primary unit "IMAGE", or "random groups"."""
        primary = "random groups" if self.cards.get("GROUPS") is True else "IMAGE"
        return str(self.cards.get("XTENSION", primary)).strip()

    @property
    def name(self) -> str:
        """Return the name of the unit, in capitals; "" if it has none."""
        return str(self.cards.get("EXTNAME", "")).strip().upper()

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the lengths of the axes, the slowest first, as NumPy has them."""
        return tuple(self.integer(f"NAXIS{axis}") for axis in range(self.integer("NAXIS"), 0, -1))

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Return the lengths of the axes of an image, also of a compressed one; () of a table."""
        if self.cards.get("ZIMAGE"):
            return tuple(self.integer(f"ZNAXIS{axis}") for axis in range(self.integer("ZNAXIS"), 0, -1))
        return self.shape if self.kind == "IMAGE" else ()

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of the data, without padding."""
        if not self.shape:
            return 0
        items = prod(self.shape) if not self.cards.get("GROUPS") else prod(self.shape[:-1])
        return abs(self.integer("BITPIX")) // 8 * self.integer("GCOUNT", 1) * (self.integer("PCOUNT", 0) + items)

    @property
    def is_table(self) -> bool:
        """Return whether the unit is a table, and no compressed image or table."""
        return self.kind in ("BINTABLE", "TABLE") and not self.cards.get("ZIMAGE") and not self.cards.get("ZTABLE")

    @property
    def has_data(self) -> bool:
        """Return whether the unit has data, or is a table without rows."""
        return self.nbytes > 0 or self.is_table

    def integer(self, keyword: str, default: int | None = None) -> int:
        """Return a whole number that is not negative, but for BITPIX.

        Parameters
        ----------
        default : where there is no such card; None: the standard demands one.

        Raises
        ------
        ValueError : the value is of another kind, or missing.
        """
        value = self.cards.get(keyword, default)
        if type(value) is not int or (value < 0 and keyword != "BITPIX"):
            raise ValueError(f"{keyword} = {value!r}")
        return value


def units(path: str, file: IO[bytes], size: int) -> Iterator[Unit]:
    """Yield the units of a file. Their data are not read. Raise ``FormatError`` if the file is damaged or truncated."""
    position = number = 0
    while position < size:
        file.seek(position)
        try:
            cards, length = _read_cards(file)
            unit = Unit(number, cards, position + length)
            end = unit.begin + unit.nbytes
        except ValueError as error:
            file.seek(position)
            if number and not file.read(CARD).startswith(b"XTENSION"):
                return  # bytes behind the last unit, which the standard allows
            raise FormatError(
                "a header is damaged",
                file=path,
                byte=position,
                expected="cards of 80 bytes",
                found=error,
                remedy=RESTORE,
            ) from error
        if end > size:
            raise truncated(path, size, end)
        yield unit
        position = unit.begin - (-unit.nbytes // BLOCK) * BLOCK
        number += 1


def _read_cards(file: IO[bytes]) -> tuple[dict[str, Any], int]:
    """Return the cards of a header, and its length in bytes."""
    cards: dict[str, Any] = {}
    length, latest = 0, ""
    while length < MAX_HEADER:
        block = file.read(BLOCK)
        length += BLOCK
        if len(block) < BLOCK or not block[:8].strip(b" ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") == b"":
            raise ValueError(f"{block[:CARD]!r}")
        for at in range(0, BLOCK, CARD):
            text = block[at : at + CARD].decode("latin-1")
            keyword = text[:8].rstrip()
            if keyword == "END":
                return cards, length
            begun = cards.get(latest)
            if text[8:10] == "= ":
                latest = "" if keyword in cards else keyword  # of two, the first one counts
                cards.setdefault(keyword, _value(text[10:]))
            elif keyword == "CONTINUE" and isinstance(begun, str) and begun.endswith("&"):  # section 4.2.1.2
                cards[latest] = begun[:-1] + str(_value(text[8:]))
            else:
                latest = ""
    raise ValueError("no END")


def _value(text: str) -> Any:
    found = _VALUE.match(text)
    if found is None or found[1] is not None:
        return found[1].replace("''", "'").rstrip() if found else ""
    word = found[2].strip()
    if word in ("T", "F"):
        return word == "T"
    for kind in (int, float):
        try:
            return kind(word.replace("D", "E"))
        except ValueError:
            continue
    return word
