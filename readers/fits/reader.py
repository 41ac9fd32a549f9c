"""Index of FITS files: rows of a table, planes of a cube, or image extensions are the samples.

Format: FITS 4.0, https://fits.gsfc.nasa.gov/fits_standard.html. astropy reads what is compressed by the tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import IO, Any

from matex_data.errors import FormatError, near_matches
from matex_data.index.model import Index
from matex_data.index.whole import FILE, files_as_samples
from matex_data.readers.catalogue import Catalogue
from matex_data.readers.fits.arrays import array, extensions
from matex_data.readers.fits.headers import Unit, units
from matex_data.readers.fits.kinds import tell_others
from matex_data.readers.fits.tables import table_of
from matex_data.readers.text.unpacked import content, unpacked_index
from matex_data.storage.files import open_binary, reading

FIELD = "data"  # name of the field of arrays without a name


def index(
    path: str,
    *,
    hdu: int | str | list[int] | list[str] | None = None,
    sample_axis: int | None = None,
    sample: str | None = None,
) -> Catalogue:
    """Index a table, a cube, or image extensions of a FITS file.

    Columns of a table are its fields. An image has one field, by the name of its extension, else "data".

    Parameters
    ----------
    hdu : number or name of the extension, where 0 is the primary one. A list of images, in its order, or a name that
        several images have: each of them is a sample. None: the first one with data.
    sample_axis : axis of an image along which the samples lie, as NumPy counts axes: 0 is the last axis of FITS. None:
        0, but a spectrum, of one axis, is one sample, and so is an image of two axes that ``hdu`` does not choose.
    sample : "file": all rows of the table, or all of the image, are one sample. None: a sample is a row.

    Raises
    ------
    FormatError : the file is damaged, or has no such data, or they have no ``sample_axis``.
    """
    with open_binary(path) as raw:
        file, stored = content(path, raw)
        chosen = _chosen(path, file, hdu)
    first, by_default = chosen[0], hdu is None
    are_samples = len(chosen) > 1 or (isinstance(hdu, list) and not first.is_table)
    found = _catalogue(path, chosen, sample_axis, are_samples)
    is_one = not are_samples and _is_one(first, sample_axis, by_default)

    def make(names: Sequence[str]) -> Index:
        made = found.make(names)
        made = files_as_samples(made) if is_one or sample == FILE else made
        return unpacked_index(made, stored) if stored and not first.cards.get("ZIMAGE") else made

    return replace(found, make=make)


def _catalogue(path: str, chosen: list[Unit], axis: int | None, are_samples: bool) -> Catalogue:
    """Return the catalogue of a table, of an image, or of image extensions."""
    first = chosen[0]
    if axis is not None and (are_samples or first.is_table):
        raise FormatError(
            "sample_axis= is an axis of one image",
            file=path,
            expected="hdu= with the number of an image",
            found=f"sample_axis={axis}, and a table" if first.is_table else f"sample_axis={axis}, and a list",
            remedy="leave out sample_axis=: rows of a table, and images of a list, are the samples",
        )
    if first.kind not in ("IMAGE", "BINTABLE", "TABLE") or first.cards.get("ZTABLE"):
        raise FormatError(
            "the extension is neither a table nor an image",
            file=path,
            expected="BINTABLE, TABLE or IMAGE",
            found="a compressed table" if first.cards.get("ZTABLE") else first.kind,
            remedy="decompress it with funpack"
            if first.cards.get("ZTABLE")
            else "choose another one with hdu=, or read it with astropy.io.fits and save it with numpy.save",
        )
    if first.is_table and not are_samples:
        return table_of(path, first)
    name = first.name or FIELD
    field, layout = extensions(path, chosen, name) if are_samples else array(path, first, name, axis or 0)
    return Catalogue.of(path, {name: (field, lambda: layout)})


def _is_one(unit: Unit, axis: int | None, by_default: bool) -> bool:
    """Return whether an image is one sample: a spectrum, or an image that the user has not chosen by its number."""
    axes = len(unit.image_shape)
    return axis is None and (axes == 1 or (axes == 2 and by_default))


def _chosen(path: str, file: IO[bytes], hdu: int | str | list[int] | list[str] | None) -> list[Unit]:
    """Return the units that the user asks for."""
    with reading(path):
        if not file.read(9) == b"SIMPLE  =":
            raise FormatError("the file is no FITS file", file=path, expected="SIMPLE  = at its start")
        found = list(units(path, file, file.seek(0, 2)))
    known = [unit for unit in found if unit.has_data]
    if hdu is None:
        tell_others(known)
        return _checked(path, known, known[:1], hdu)
    wanted = hdu if isinstance(hdu, list) and hdu else [hdu]
    return [unit for one in wanted for unit in _checked(path, known, [unit for unit in known if _is(unit, one)], one)]


def _is(unit: Unit, wanted: Any) -> bool:
    """Return whether a unit has this number or name."""
    if isinstance(wanted, str):
        return unit.name == wanted.strip().upper() != ""
    return unit.number == wanted and not isinstance(wanted, bool)


def _checked(path: str, known: Sequence[Unit], chosen: list[Unit], hdu: object) -> list[Unit]:
    """Return the chosen units; raise ``FormatError`` if there are none."""
    if not chosen:
        raise FormatError(
            "the file has no such data" if hdu is not None else "the file has no data",
            file=path,
            expected=f"one of {near_matches(str(hdu), [unit.name or str(unit.number) for unit in known])}",
            found=f"hdu={hdu!r}",
            remedy="choose an extension with hdu=",
        )
    return chosen
