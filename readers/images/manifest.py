"""Manifests: tables with a column of image files, and labels or targets beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from matex_data._types import Array
from matex_data.errors import DataError, FormatError, near_matches
from matex_data.paths import existing_files
from matex_data.readers.compression import plain_head, plain_text, stored_as
from matex_data.readers.csv.dialect import Dialect, column_names, detect, is_binary
from matex_data.readers.csv.options import MISSING
from matex_data.readers.images.folders import is_image
from matex_data.readers.images.texts import Texts

HEAD_BYTES = 64 << 10  # from which the dialect is detected
BOM = b"\xef\xbb\xbf"
INTEGER = re.compile(r"[-+]?\d{1,18}$")
BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


@dataclass(frozen=True)
class Manifest:
    """Contents of a manifest.

    Parameters
    ----------
    root : folder that its paths are relative to.
    files : of the images, relative to ``root`` or absolute.
    columns : the other columns, by name.
    """

    root: str
    files: list[str]
    columns: Mapping[str, Array | Texts]


def names_images(path: str, head: bytes, root: str | None = None) -> bool:
    """Return whether a text table names an existing image file in its first record.

    Parameters
    ----------
    path : of the table.
    head : its first bytes.
    root : folder that its paths are relative to; None: its own folder.
    """
    text = plain_head(head)[:HEAD_BYTES]
    if is_binary(text):
        return False
    cut = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
    try:
        records = _dialect(text[:cut] or text).records(text[:cut] or text)[:2]
    except ValueError:  # what Python's parser of tables refuses
        return False
    folder = _root(path, root)
    return any(
        is_image(field.strip()) and Path(folder, _decoded(field).strip()).is_file() for r in records for field in r
    )


def read_manifest(path: str, root: str | None = None) -> Manifest:
    """Return the images that a table lists, and its other columns.

    Raises
    ------
    FormatError : no column holds names of images, or a record has another number of fields.
    DataError : the table cannot be read, or an image does not exist.
    """
    records = _records(path)
    if not records:
        raise FormatError("the manifest is empty", file=path, expected="a record for each image", found="no record")
    header = not any(is_image(field.strip()) for field in records[0])
    names = column_names([_decoded(field.strip()) for field in records[0]]) if header else None
    rows = records[1:] if header else records
    at = _image_column(path, rows[:1])
    _check_widths(path, rows, len(records[0]))
    columns = [[row[i] for row in rows] for i in range(len(rows[0]))]
    files = [_decoded(field.strip()) for field in columns.pop(at)]
    folder = _root(path, root)
    _check_files(path, folder, files)
    others = _others(names, at, len(columns))
    _check_names(path, others)
    return Manifest(folder, files, {name: _values(column) for name, column in zip(others, columns, strict=True)})


def _records(path: str) -> list[list[str]]:
    try:
        data = np.fromfile(path, np.uint8)
        stored = stored_as(data[:16].tobytes(), "utf-8")
        text = (plain_text(data, stored) if stored else data).tobytes().removeprefix(BOM)
        return _dialect(text[:HEAD_BYTES]).records(text)
    except OSError as error:
        raise DataError("the manifest cannot be read", file=path, found=error) from error
    except DataError as error:
        raise error.at(path, None) from error


def _dialect(text: bytes) -> Dialect:
    cut = text.rfind(b"\n") + 1
    return detect((text[:cut] or text).removeprefix(BOM), Dialect(), frozenset())


def _decoded(field: str) -> str:
    return field.encode("latin-1").decode("utf-8", "surrogateescape")


def _root(path: str, root: str | None) -> str:
    return str(Path(path).parent) if root is None else root


def _image_column(path: str, rows: Sequence[Sequence[str]]) -> int:
    fields = rows[0] if rows else []
    for column, field in enumerate(fields):
        if is_image(field.strip()):
            return column
    raise FormatError(
        "no column of the manifest holds image files",
        file=path,
        row=0,
        expected="a column of paths, for example 'cats/1.jpg'",
        found=f"the first record {list(fields)}",
        remedy="open the table with format='csv' if it lists no images",
    )


def _check_widths(path: str, records: Sequence[Sequence[str]], width: int) -> None:
    for row, record in enumerate(records):
        if len(record) != width:
            raise FormatError(
                "the records of the manifest differ in their number of fields",
                file=path,
                row=row,
                expected=f"{width} fields, as in the first record",
                found=f"{len(record)} fields",
                remedy="quote fields that contain the separator",
            )


def _check_files(path: str, root: str, files: Sequence[str]) -> None:
    """Raise unless all files exist. Folders with many of them are listed once."""
    paths = [str(Path(root, file)) if ".." in file else f"{root}/{file}" for file in files]
    paths = [file if file.startswith("/") else full for file, full in zip(files, paths, strict=True)]
    found = existing_files(paths)
    for row, (file, full) in enumerate(zip(files, paths, strict=True)):
        if full not in found:
            folder = Path(full).parent
            siblings = [other.name for other in folder.iterdir()] if folder.is_dir() else []
            raise DataError(
                "an image of the manifest does not exist",
                file=path,
                row=row,
                expected=f"the file {full!r}",
                found=f"in its folder: {near_matches(Path(file).name, siblings)}"
                if siblings
                else f"no {str(folder)!r}",
                remedy="paths are relative to the folder of the manifest; name another one with root=",
            )


def _others(names: Sequence[str] | None, at: int, count: int) -> list[str]:
    """Return the names of the columns beside that of the images."""
    if names is not None:
        return [name for column, name in enumerate(names) if column != at]
    return ["label"] if count == 1 else [f"column_{column}" for column in range(count + 1) if column != at]


def _check_names(path: str, names: Sequence[str]) -> None:
    for name in names:
        if name in ("image", "path"):
            raise FormatError(
                "a column has the name of a field of its own",
                file=path,
                field=name,
                expected="names other than 'image' and 'path', which are the pixels and the file of a sample",
                found=f"the column {name!r}",
                remedy="rename the column",
            )


def _values(column: Sequence[str]) -> Array | Texts:
    """Return a column as int64, bool or float64, where NaN stands for a missing number; or else as texts."""
    stripped = [field.strip() for field in column]
    if all(map(INTEGER.match, stripped)):
        return np.array(stripped, np.int64)
    present = [field for field in stripped if field not in MISSING]
    if present and len(present) == len(stripped) and all(field in BOOLS for field in present):
        return np.array([BOOLS[field] for field in present])
    try:
        numbers = np.array([np.nan if field in MISSING else float(field) for field in stripped])
    except ValueError:
        numbers = None
    if numbers is not None and present and not any("_" in field for field in present):
        return numbers
    return Texts.of([_decoded(field) for field in column])
