"""References to the tiles and strips of a TIFF file, as tifffile writes them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import tifffile

from matex_data.errors import DataError, FormatError
from matex_data.readers.zarr.writing import Entry, References

IMAGE = "image"
"""Name of the array: that of the field of the reader of images."""


def references(path: str) -> References:
    """Return references to the first series of images in a TIFF file, at full resolution.

    Parameters
    ----------
    path : of the file.

    Raises
    ------
    DataError : the file cannot be read, or zarr is not installed.
    FormatError : it is damaged, or its strips are no chunks of equal shape.
    """
    try:
        with tifffile.TiffFile(path, _multifile=False) as file:
            left_out = {f"series {n}: {s.name}": "another series" for n, s in enumerate(file.series) if n}
            found = _of_series(file.series[0], str(Path(path).absolute()))
    except OSError as error:
        raise DataError("the file cannot be read", file=path, found=error) from error
    except ImportError as error:
        remedy = "python -m pip install zarr"
        raise DataError("references to TIFF files need zarr", file=path, found=error, remedy=remedy) from error
    except (ValueError, IndexError, NotImplementedError, tifffile.TiffFileError) as error:
        remedy = "open the file itself: its images are read in parallel, too"
        raise FormatError(
            "the images have no references", file=path, expected="chunks of equal shape", found=error, remedy=remedy
        ) from error
    return References(found, left_out)


def _of_series(series: Any, path: str) -> dict[str, Entry]:
    text = io.StringIO()
    with series.aszarr(level=0) as store:
        store.write_fsspec(text, url="", groupname=IMAGE)
    entries: dict[str, Entry] = {}
    for key, entry in json.loads(text.getvalue()).items():
        entries[key] = [path, *entry[1:]] if isinstance(entry, list) else entry
    array = json.loads(str(entries[f"{IMAGE}/.zarray"]))
    entries[f"{IMAGE}/.zarray"] = json.dumps(
        {**array, "fill_value": None}
    )  # xarray takes a fill value for a missing one
    return entries
