"""Text tables, which nothing but their text tells, and those among them that list images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matex_data.readers.detection import HEAD_BYTES
from matex_data.readers.formats import TABLE_SUFFIXES, format_named, missing_package
from matex_data.readers.images.folders.manifest import names_images
from matex_data.readers.text import compression


def kind_of(path: str, head: bytes, options: Mapping[str, Any]) -> str | None:
    """Return "images" for a manifest, whose first record names an image file and no URL; "csv" for another table.

    Parameters
    ----------
    head : first bytes of the file.
    options : of the reader: ``root`` is the folder of the images, and ``layout="manifest"`` says that the file is one.
    """
    if options.get("layout") == "manifest" or names_images(path, head, options.get("root")):
        return "images"
    return "csv" if _is_text_table(path, head, named=format_named("csv").matches_name(path)) else None


def _is_text_table(path: str, head: bytes, named: bool) -> bool:
    """Return whether the file is a text table; ``named``: it has the name of one. Raise ``FormatError`` if the CSV
    reader is not installed.
    """
    try:
        import pyarrow  # noqa: F401 (by the reader, which would fail later)

        from matex_data.readers.csv import dialect
    except ModuleNotFoundError as error:
        if named:
            raise missing_package("csv", error, path) from error
        return False
    text = compression.plain_head(head)
    if not named:
        return dialect.is_table(text, whole=text is head and len(head) < HEAD_BYTES)
    certain = path.lower().endswith(TABLE_SUFFIXES)
    return not dialect.is_markup_or_script(text) and (certain or not dialect.is_binary(text))
