"""Index of FITS files: rows of a table, planes of a cube, or image extensions are the samples."""

from __future__ import annotations

from collections.abc import Sequence

from matex_data.errors import DataError, FieldNotFound, FormatError, near_matches
from matex_data.index.model import Index
from matex_data.readers.fits.arrays import array_index, extensions_index
from matex_data.readers.fits.headers import Unit, units
from matex_data.readers.fits.tables import table_index
from matex_data.storage.files import open_binary

FIELD = "data"  # name of the field of arrays without a name


def index(
    path: str,
    names: Sequence[str] | None = None,
    *,
    hdu: int | str | list[int] | list[str] | None = None,
    sample_axis: int = 0,
) -> Index:
    """Index a table, a cube, or image extensions of a FITS file.

    Parameters
    ----------
    names : columns of the table; None: all. An image has one field, by the name of its extension, else "data".
    hdu : number or name of the extension, where 0 is the primary one. A list, or a name that several images have: each
        of them is a sample. None: the first one with data.
    sample_axis : axis of an image along which the samples lie, as NumPy counts axes: 0 is the last axis of FITS.

    Raises
    ------
    FieldNotFound : there is no column or extension of that name.
    FormatError : the file is damaged, or has no such data.
    """
    chosen = _chosen(path, hdu)
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
        return table_index(path, first, names)
    field = first.name or FIELD
    if names is not None and list(names) != [field]:
        other = next((name for name in names if name != field), field)
        raise FieldNotFound("the image has no such field", file=path, field=other, expected=f"{field!r}, its only one")
    return array_index(path, first, field, sample_axis) if len(chosen) == 1 else extensions_index(path, chosen, field)


def _chosen(path: str, hdu: int | str | list[int] | list[str] | None) -> list[Unit]:
    """Return the units that the user asks for."""
    try:
        with open_binary(path) as file:
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
