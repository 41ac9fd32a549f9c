"""Index of FITS files: rows of a table, planes of a cube, or image extensions are the samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import BinaryIO

from matex_data.errors import DataError, FieldNotFound, FormatError, near_matches
from matex_data.index.model import Index
from matex_data.index.whole import FILE, files_as_samples
from matex_data.readers.fits.arrays import array_index, extensions_index
from matex_data.readers.fits.headers import Unit, units
from matex_data.readers.fits.opening import opened
from matex_data.readers.fits.tables import table_index
from matex_data.readers.unpacked import unpacked_index

FIELD = "data"  # name of the field of arrays without a name


def index(
    path: str,
    names: Sequence[str] | None = None,
    *,
    hdu: int | str | list[int] | list[str] | None = None,
    sample_axis: int | None = None,
    sample: str | None = None,
) -> Index:
    """Index a table, a cube, or image extensions of a FITS file.

    Parameters
    ----------
    names : columns of the table; None: all. An image has one field, by the name of its extension, else "data".
    hdu : number or name of the extension, where 0 is the primary one. A list, or a name that several images have: each
        of them is a sample. None: the first one with data.
    sample_axis : axis of an image along which the samples lie, as NumPy counts axes: 0 is the last axis of FITS. None:
        0, but a spectrum, of one axis, is one sample, and so is an image of two axes that ``hdu`` does not choose.
    sample : "file": all rows of the table, or all of the image, are one sample. None: a sample is a row.

    Raises
    ------
    FieldNotFound : there is no column or extension of that name.
    FormatError : the file is damaged, or has no such data.
    """
    with opened(path) as (file, stored):
        chosen = _chosen(path, file, hdu)
        found = _index(path, file, chosen, names, sample_axis, hdu is None)
    if sample == FILE and not (len(found) == 1 and _is_one(chosen[0], sample_axis, hdu is None)):
        found = files_as_samples(found)
    return unpacked_index(found, stored) if stored and not _is_compressed(chosen[0]) else found


def _index(
    path: str, file: BinaryIO, chosen: list[Unit], names: Sequence[str] | None, axis: int | None, by_default: bool
) -> Index:
    first = chosen[0]
    if first.kind not in ("IMAGE", "BINTABLE", "TABLE") or first.cards.get("ZTABLE"):
        raise FormatError(
            "the extension is neither a table nor an image",
            file=path,
            expected="BINTABLE, TABLE or IMAGE",
            found="a compressed table" if first.cards.get("ZTABLE") else first.kind,
            remedy="decompress it with funpack" if first.cards.get("ZTABLE") else "choose another one with hdu=",
        )
    if first.is_table and len(chosen) == 1:
        return table_index(path, file, first, names)
    field = first.name or FIELD
    if names is not None and list(names) != [field]:
        other = next((name for name in names if name != field), field)
        raise FieldNotFound("the image has no such field", file=path, field=other, expected=f"{field!r}, its only one")
    if len(chosen) > 1:
        return extensions_index(path, chosen, field)
    found = array_index(path, first, field, axis or 0)
    return files_as_samples(found) if _is_one(first, axis, by_default) else found


def _is_one(unit: Unit, axis: int | None, by_default: bool) -> bool:
    """Return whether an image is one sample: a spectrum, or an image that the user has not chosen by its number."""
    axes = len(unit.image_shape)
    return axis is None and (axes == 1 or (axes == 2 and by_default))


def _is_compressed(unit: Unit) -> bool:
    return bool(unit.cards.get("ZIMAGE"))


def _chosen(path: str, file: BinaryIO, hdu: int | str | list[int] | list[str] | None) -> list[Unit]:
    """Return the units that the user asks for."""
    try:
        if not file.read(9) == b"SIMPLE  =":
            raise FormatError("the file is no FITS file", file=path, expected="SIMPLE  = at its start")
        found = list(units(path, file, file.seek(0, 2)))
    except OSError as error:
        raise DataError("the file cannot be read", file=path, found=error) from error
    if hdu is None:
        chosen = [unit for unit in found if unit.nbytes][:1]
    else:
        wanted = hdu if isinstance(hdu, list) else [hdu]
        names = {name.strip().upper() for name in wanted if isinstance(name, str)}
        chosen = [unit for unit in found if unit.number in wanted or (unit.name and unit.name in names)]
        chosen = [unit for unit in chosen if unit.nbytes]
    if not chosen:
        named = [unit.name or str(unit.number) for unit in found if unit.nbytes]
        raise FormatError(
            "the file has no such data" if hdu is not None else "the file has no data",
            file=path,
            expected=f"one of {near_matches(str(hdu), named)}",
            found=f"hdu={hdu!r}",
            remedy="choose an extension with hdu=",
        )
    return chosen
