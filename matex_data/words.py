"""Numbers and values as text for people."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, whose plural has an s if it is not given.

    >>> counted(1, "file"), counted(2000, "file"), counted(3, "entry", "entries")
    ('1 file', '2,000 files', '3 entries')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def nbytes_text(nbytes: float) -> str:
    """Return a number of bytes in decimal units.

    >>> nbytes_text(999), nbytes_text(1_234_567), nbytes_text(5e12)
    ('999 B', '1.23 MB', '5 TB')
    """
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    power = 0
    while nbytes >= 999.5 and power < len(units) - 1:
        nbytes, power = nbytes / 1000, power + 1
    return f"{nbytes:.3g} {units[power]}"


def shortened(value: object, most: int = 40) -> str:
    """Return a value as text of at most ``most`` characters.

    >>> shortened("a long description of a field", 12)
    'a long desc…'
    """
    text = " ".join(str(value).split())
    return text if len(text) <= most else text[: most - 1] + "…"


def exact_text(value: Any) -> str:
    """Return a value as text, with all numbers of its arrays.

    >>> len(exact_text({"times": np.arange(2000)})) > 8000
    True
    """
    with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
        return repr(value)
