"""Manifests: tables, JSON Lines or annotations of COCO that name image files, with labels or targets beside them."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from matex_data._types import Bytes
from matex_data.errors import DataError, FormatError, near_matches
from matex_data.paths import existing_files
from matex_data.readers.csv.dialect import Dialect, column_names, detect, is_binary
from matex_data.readers.csv.options import BOOLEANS, MISSING
from matex_data.readers.csv.records import ENCODINGS, encodings_of, first_lines, line_ends
from matex_data.readers.images.folders.coco import read_coco
from matex_data.readers.images.folders.contents import is_image
from matex_data.readers.images.folders.members import ManifestValues, columns_of, values_of
from matex_data.readers.images.texts import Texts
from matex_data.readers.text.compression import plain_head
from matex_data.readers.text.unpacked import content
from matex_data.storage.files import open_binary, unreadable
from matex_data.storage.objects import check_url, existing_objects, is_url
from matex_data.storage.trust import NONE, Trust, resolved

HEAD_BYTES = 64 << 10  # in which the first record lies


@dataclass(frozen=True)
class Manifest:
    """Contents of a manifest.

    Parameters
    ----------
    root : folder that its paths are relative to.
    files : of the images, relative to ``root`` or absolute.
    columns : the other columns, by name.
    masks : files of a second column of images, likewise; None: there is none.
    unread : reason for each column that cannot be read, by name.
    """

    root: str
    files: list[str]
    columns: Mapping[str, ManifestValues]
    masks: list[str] | None = None
    unread: Mapping[str, str] = field(default_factory=dict)


def names_images(path: str, head: bytes, root: str | None = None) -> bool:
    """Return whether a text table names an existing image file in its first record. URLs are data, as other texts.

    Parameters
    ----------
    root : folder that its paths are relative to; None: its own folder.
    """
    text = plain_head(head)[:HEAD_BYTES]
    if is_binary(text):
        return False
    cut = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
    try:
        fields = _first_texts(_in_utf_8(np.frombuffer(text[:cut] or text, np.uint8)))
    except (ValueError, AttributeError, RecursionError):  # what Python's parsers of tables and of JSON refuse
        return False
    folder = _root(path, root)
    files = [resolved(folder, field) for field in fields if is_image(field) and not is_url(field)]
    return bool(_existing(path, [file for file in files if not is_url(file) or Trust.of([folder]).allows(file)]))


def kind_of_lines(path: str, head: bytes, options: Mapping[str, Any]) -> str:
    """Return "images" for JSON Lines that are a manifest, as ``metadata.jsonl`` of Hugging Face; otherwise "jsonl".

    Parameters
    ----------
    head : first bytes of the file.
    options : of the reader: ``root``, and ``layout="manifest"``.
    """
    given = options.get("layout") == "manifest"
    return "images" if given or names_images(path, head, options.get("root")) else "jsonl"


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
    text, folder = _text(path), _root(path, root)
    trust |= Trust.of([folder])
    annotated = read_coco(path, text)
    if annotated is not None:
        names_of_files, values, unread = annotated
        return Manifest(folder, _files(path, folder, names_of_files, trust), values, unread=unread)
    lines = _is_lines(text)
    names, columns = _columns_of_lines(path, text) if lines else _columns_of_table(path, text)
    at = _image_columns(path, [_first_text(column) for column in columns])
    files = [_files(path, folder, columns[column], trust) for column in at]
    others = _others(names, at, len(columns))
    _check_names(path, others, len(at))
    read = values_of if lines else _values
    values = {name: read(columns[column]) for column, name in others.items()}
    return Manifest(folder, files[0], values, files[1] if len(at) > 1 else None)


def _text(path: str) -> bytes:
    try:
        with open_binary(path) as file:
            return _in_utf_8(np.frombuffer(content(path, file, None)[0].read(), np.uint8))
    except OSError as error:
        raise unreadable(path, error, "the manifest") from error


def _in_utf_8(text: Bytes) -> bytes:
    """Return whole lines in UTF-8, without a byte order mark."""
    possible = encodings_of(text)
    encoding = next(name for name in ENCODINGS if name in possible)
    data = text.tobytes()
    return (data if encoding == "utf-8" else data.decode(encoding).encode()).removeprefix(BOM_UTF8)


def _is_lines(text: bytes) -> bool:
    return text.lstrip()[:1] == b"{"


def _first_texts(text: bytes) -> list[str]:
    """Return the texts of the first two records, of which the first one may be a header; raise ``ValueError``."""
    if _is_lines(text):
        return [value for value in json.loads(text.lstrip().split(b"\n", 1)[0]).values() if isinstance(value, str)]
    records = _dialect(text).records(text)[:2]
    return [_decoded(field).strip() for record in records for field in record]


def _columns_of_table(path: str, text: bytes) -> tuple[list[str] | None, list[list[Any]]]:
    """Return the names of the columns, or None without a header, and the texts of each column."""
    try:
        records = _dialect(text).records(text)
    except DataError as error:
        error.at(path, None)
        raise
    if not records:
        raise _empty(path)
    header = not any(is_image(field.strip()) for field in records[0])
    names = list(column_names([_decoded(field).strip() for field in records[0]])) if header else None
    rows = records[1:] if header else records
    if not rows:
        _image_columns(path, [])  # raises
    _check_widths(path, rows, len(records[0]))
    return names, [[_decoded(row[i]) for row in rows] for i in range(len(rows[0]))]


def _columns_of_lines(path: str, text: bytes) -> tuple[list[str], list[list[Any]]]:
    """Return the names of the members of all objects, and the values of each; None where an object lacks it."""
    objects: list[dict[str, Any]] = []
    for line in filter(bytes.strip, text.split(b"\n")):
        try:
            objects.append(dict(json.loads(line).items()))
        except (ValueError, AttributeError, RecursionError) as error:
            raise FormatError(
                "a line of the manifest is no object of JSON",
                file=path,
                row=len(objects),
                expected='such as {"file_name": "1.png", "label": 3}',
                found=f"{line[:60]!r}: {error}",
            ) from error
    if not objects:
        raise _empty(path)
    columns = columns_of(objects)
    return list(columns), list(columns.values())


def _empty(path: str) -> FormatError:
    return FormatError("the manifest is empty", file=path, expected="a record for each image", found="no record")


def _files(path: str, folder: str, column: Sequence[Any], trust: Trust) -> list[str]:
    """Return the names of files; raise ``FormatError`` if an object has none, ``DataError`` if a file does not exist,
    or is not trusted.
    """
    for row, value in enumerate(column):
        if not isinstance(value, str) or not value.strip():
            raise FormatError(
                "a record of the manifest names no image", file=path, row=row, expected="a path", found=repr(value)
            )
    files = [value.strip() for value in column]
    _check_files(path, folder, files, trust)
    # a store does not know ".."
    return [resolved(folder, file) if ".." in file else file for file in files] if is_url(folder) else files


def _dialect(text: bytes) -> Dialect:
    data = np.frombuffer(text, np.uint8)
    return detect(first_lines(data, line_ends(data)).tobytes(), Dialect(), frozenset())


def _first_text(column: Sequence[Any]) -> str:
    """Return the first value of a column that is neither empty nor missing; "" if that is no text."""
    first = next((value for value in column if value not in (None, "")), "")
    return first.strip() if isinstance(first, str) else ""


def _decoded(field: str) -> str:
    return field.encode("latin-1").decode()


def _root(path: str, root: str | None) -> str:
    return root if root is not None else path.rpartition("/")[0] if is_url(path) else str(Path(path).parent)


def _image_columns(path: str, fields: Sequence[str]) -> list[int]:
    """Return the column of images, and that of masks if there is one, by the first text of each column; raise
    ``FormatError`` if there are none, or more than two.
    """
    found = [column for column, field in enumerate(fields) if is_image(field)]
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
        found=f"columns that begin with {list(fields)}",
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
    paths = [resolved(root, file) for file in files]
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
        raise unreadable(path, error, "the images of the manifest") from error


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


def _values(column: Sequence[str]) -> ManifestValues:
    """Return the values of a column as those of JSON, where a missing one is None; texts as they stand."""
    values = [_value(field.strip()) for field in column]
    found = None if any(isinstance(value, str) for value in values) else values_of(values)
    return Texts.of(column) if found is None or isinstance(found, Texts) else found


def _value(field: str) -> bool | int | float | str | None:
    """Return the boolean, integer or float that a text stands for, None if its value is missing; or else the text."""
    if field in MISSING:
        return None
    if field in BOOLEANS:
        return BOOLEANS[field]
    if "_" in field or not field.isascii():
        return field  # in which Python sees numbers, and pandas does not
    for kind in (int, float):
        try:
            return kind(field)
        except ValueError:
            continue
    return field
