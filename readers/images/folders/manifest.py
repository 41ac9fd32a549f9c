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
from matex_data.readers.csv.dialect import Dialect, column_names, detect, is_binary
from matex_data.readers.csv.options import MISSING
from matex_data.readers.images.folders.contents import is_image
from matex_data.readers.images.texts import Texts
from matex_data.readers.text.compression import plain_head, plain_text, stored_as
from matex_data.storage.files import read_bytes
from matex_data.storage.objects import check_url, existing_objects, is_url
from matex_data.storage.trust import NONE, Trust, joined

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
    masks : files of a second column of images, likewise; None: there is none.
    """

    root: str
    files: list[str]
    columns: Mapping[str, Array | Texts]
    masks: list[str] | None = None


def names_images(path: str, head: bytes, root: str | None = None) -> bool:
    """Return whether a text table names an existing image file in its first record. URLs are data, as other texts.

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
    fields = [_decoded(field).strip() for record in records for field in record if is_image(field.strip())]
    folder = _root(path, root)
    files = [joined(folder, field) for field in fields if not is_url(field)]
    return bool(_existing(path, [file for file in files if not is_url(file) or Trust.of([folder]).allows(file)]))


def read_manifest(path: str, root: str | None = None, trust: Trust = NONE) -> Manifest:
    """Return the images that a table lists, the masks of a second column of images, and the other columns.

    Parameters
    ----------
    root : folder that its paths are relative to; None: its own folder.
    trust : where images of stores may lie, beside that folder; local ones are read wherever they lie.

    Raises
    ------
    FormatError : no column holds names of images, or a record has another number of fields.
    DataError : the table cannot be read, or an image does not exist, or is not trusted.
    """
    records = _records(path)
    if not records:
        raise FormatError("the manifest is empty", file=path, expected="a record for each image", found="no record")
    header = not any(is_image(field.strip()) for field in records[0])
    names = column_names([_decoded(field.strip()) for field in records[0]]) if header else None
    rows = records[1:] if header else records
    at = _image_columns(path, rows[:1])
    _check_widths(path, rows, len(records[0]))
    columns = [[row[i] for row in rows] for i in range(len(rows[0]))]
    folder = _root(path, root)
    files = [[_decoded(field.strip()) for field in columns[column]] for column in at]
    for of_column in files:
        _check_files(path, folder, of_column, trust | Trust.of([folder]))
    if is_url(folder):  # whose store does not know ".."
        files = [[joined(folder, file) if ".." in file else file for file in of_column] for of_column in files]
    others = _others(names, at, len(columns))
    _check_names(path, others, len(at))
    values = {name: _values(columns[column]) for column, name in others.items()}
    return Manifest(folder, files[0], values, files[1] if len(at) > 1 else None)


def _records(path: str) -> list[list[str]]:
    try:
        data = np.frombuffer(read_bytes(path), np.uint8)
        stored = stored_as(data[:16].tobytes(), "utf-8")
        text = (plain_text(data, stored) if stored else data).tobytes().removeprefix(BOM)
        return _dialect(text[:HEAD_BYTES]).records(text)
    except OSError as error:
        raise DataError("the manifest cannot be read", file=path, found=error) from error
    except DataError as error:
        error.at(path, None)
        raise


def _dialect(text: bytes) -> Dialect:
    cut = text.rfind(b"\n") + 1
    return detect((text[:cut] or text).removeprefix(BOM), Dialect(), frozenset())


def _decoded(field: str) -> str:
    return field.encode("latin-1").decode("utf-8", "surrogateescape")


def _root(path: str, root: str | None) -> str:
    return root if root is not None else path.rpartition("/")[0] if is_url(path) else str(Path(path).parent)


def _image_columns(path: str, rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the column of images, and that of masks if there is one.

    Raises
    ------
    FormatError : there are none, or more than two.
    """
    fields = rows[0] if rows else []
    found = [column for column, field in enumerate(fields) if is_image(field.strip())]
    if len(found) > 2:
        raise FormatError(
            "several columns of the manifest hold image files",
            file=path,
            row=0,
            expected="one of images, or one of images and one of masks behind it",
            found=f"{len(found)} columns: {[fields[column] for column in found]}",
            remedy="write a table with two of them; md.merge puts the fields of two data sets side by side",
        )
    if found:
        return found
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


def _check_files(path: str, root: str, files: Sequence[str], trust: Trust) -> None:
    """Raise unless all files are trusted and exist. Folders with many of them are listed once."""
    paths = [joined(root, file) for file in files]
    for full in filter(is_url, paths):
        trust.check(full, path)
    found = _existing(path, paths)
    for row, (file, full) in enumerate(zip(files, paths, strict=True)):
        if full not in found:
            folder = Path(full).parent
            siblings = [other.name for other in folder.iterdir()] if not is_url(full) and folder.is_dir() else []
            raise DataError(
                "an image of the manifest does not exist",
                file=path,
                row=row,
                expected=f"the file {full!r}",
                found=f"in its folder: {near_matches(Path(file).name, siblings)}"
                if siblings
                else f"no {full.rpartition('/')[0]!r}",
                remedy="paths are relative to the folder of the manifest; name another one with root=",
            )


def _existing(path: str, files: Sequence[str]) -> set[str]:
    """Return those of the files that a manifest names that exist; of a web server, which lists none, all."""
    local, urls = [file for file in files if not is_url(file)], [file for file in files if is_url(file)]
    for url in urls:
        check_url(url)
    try:
        return existing_files(local) | existing_objects(urls)
    except OSError as error:
        raise DataError("the images of the manifest cannot be read", file=path, found=error) from error


def _others(names: Sequence[str] | None, at: Sequence[int], count: int) -> dict[int, str]:
    """Return the columns beside those of files, with their names."""
    others = [column for column in range(count) if column not in at]
    if names is not None:
        return {column: names[column] for column in others}
    return {others[0]: "label"} if len(others) == 1 else {column: f"column_{column}" for column in others}


def _check_names(path: str, names: Mapping[int, str], files: int) -> None:
    own = ("image", "path", "mask")[: files + 1]
    for name in names.values():
        if name in own:
            raise FormatError(
                "a column has the name of a field of its own",
                file=path,
                field=name,
                expected=f"names other than {', '.join(map(repr, own))}, which are the pixels and the file of a sample",
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
