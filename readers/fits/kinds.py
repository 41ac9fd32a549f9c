"""Kinds of FITS files: by their first data these hold pictures, or rows, planes and spectra."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any

from matex_data.errors import FormatError, shortened
from matex_data.readers.fits.headers import Unit, units
from matex_data.storage.files import open_binary
from matex_data.warning import warn

MOST_NAMED = 5  # data in a warning


def kind_of(path: str, head: bytes, options: Mapping[str, Any]) -> str:
    """Return "images" for a picture, with a warning of what a FITS file has behind it, else "fits".

    Parameters
    ----------
    head : first bytes of the file.
    options : of the reader: those of FITS files tell what is meant.
    """
    if holds_rows(path, head) or {"hdu", "sample_axis"} & set(options):
        return "fits"
    with suppress(FormatError, ValueError, OSError):  # who reads the image says what is wrong
        tell_others([unit for unit in _units_with_data(path, head) if unit is not None])
    return "images"


def tell_others(found: Sequence[Unit]) -> None:
    """Warn of the data of a FITS file behind the first ones, which alone are read by default.

    The text names no file: of a thousand files with the same units it is shown once.
    """
    names = [unit.name or unit.number for unit in found]
    if len(names) > 1:
        shown = ", ".join(shortened(map(repr, names), MOST_NAMED))
        text = f"of the {len(names)} data of a FITS file ({shown}) the first alone are read"
        warn(f"{text}: hdu={names[1]!r} reads all of that name or number, and a list of images each as a sample")


def holds_rows(path: str, head: bytes) -> bool:
    """Return whether the first data of a FITS file are no image: a table, a spectrum, an array of more than two axes.

    A header behind the first one that is damaged counts as that of a table, whose reader says what is wrong with it.

    Parameters
    ----------
    head : first bytes of the file, which tell the kind of most files.
    """
    headers = 0
    try:
        for unit in _units_with_data(path, head):
            headers += 1
            if unit is not None:
                return len(unit.image_shape) < 2 or prod(unit.image_shape[:-2]) > 1
    except (FormatError, ValueError):
        return headers > 0
    except OSError:
        return False
    return False


def _units_with_data(path: str, head: bytes) -> Iterator[Unit | None]:
    """Yield the units of a FITS file; None for one without data or of another kind."""
    if head.startswith(b"SIMPLE  ="):
        with open_binary(path) as file:
            for unit in units(path, file, file.seek(0, 2)):
                is_data = unit.number == 0 or unit.kind in ("IMAGE", "BINTABLE", "TABLE")
                yield unit if unit.has_data and is_data else None
