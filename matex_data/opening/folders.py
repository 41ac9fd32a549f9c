"""Fields that the folders of a partitioned data set name: ``year=2020/month=7/part-0.parquet``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from matex_data.errors import FieldNotFound, FormatError
from matex_data.fields import ALL_MISSING, AS_TEXT, EMPTY_IS_MISSING, Field, is_pattern, matching
from matex_data.index.library import FolderValue
from matex_data.index.model import FileIndex, Index, Layout

MISSING = "__HIVE_DEFAULT_PARTITION__"  # value of a folder for rows without one
_WHOLE = re.compile(r"[-+]?\d{1,18}$")


def roots(paths: Iterable[str]) -> frozenset[str]:
    """Return the folders below which those of partitions lie, of what a user names: folders, and patterns of files.

    >>> sorted(roots(["/data/", "runs/year=*/a.parquet"]))
    ['/data', 'runs']
    """
    found = set()
    for path in paths:
        parts = path.rstrip("/").split("/")
        is_folder = not any(map(is_pattern, parts)) and "{" not in path
        fixed = takewhile(lambda part: not is_pattern(part) and "{" not in part, parts)
        found.add("/".join(parts if is_folder or Path(path).is_dir() else fixed))
    return frozenset(found)


def partitions(path: str, roots: Collection[str]) -> dict[str, str | None]:
    """Return the values of the folders between a root and a file, by name; None: the value is missing.

    >>> partitions("/run=3/data/year=2020/site=s%C3%A3o/part-0.parquet", ["/run=3/data"])
    {'year': '2020', 'site': 'são'}
    """
    found: dict[str, str | None] = {}
    if "=" not in path:
        return found
    folders = path.split("/")[:-1]
    depths = (depth for depth in range(len(folders), -1, -1) if "/".join(folders[:depth]) in roots)
    for folder in folders[next(depths, len(folders)) :]:
        name, equals, text = folder.partition("=")
        if name and equals:
            value = unquote(text)
            found[unquote(name)] = None if value == MISSING else value
    return found


def add_partitions(
    path: str,
    values: Mapping[str, str | None],
    names: Sequence[str] | None,
    dtype: Mapping[str, Any],
    read: Callable[[Sequence[str] | None], Index],
) -> Index:
    """Return the index of a file with the fields of its folders. A column of the same name comes first.

    Parameters
    ----------
    path : of the file.
    values : of its folders, by name.
    names : of columns and folders, and patterns of these; None: all.
    dtype : of numbers, by name or pattern.
    read : reads the index of columns; None: of all.
    """
    if not values:
        return read(names)
    index = read(None) if names is None else _columns(names, values, read)
    asked = values if names is None else [name for one in names for name in matching(one, values)]
    wanted = [name for name in dict.fromkeys(asked) if name not in index.fields]
    if not wanted:
        return index
    (file,) = index.files
    made = {name: _constant(path, name, values[name], file.rows, dtype) for name in wanted}
    layouts: dict[str, Layout] = {**file.layouts, **{name: layout for name, (_, layout) in made.items()}}
    fields = {**index.fields, **{name: field for name, (field, _) in made.items()}}
    requested = list(fields) if names is None else names
    chosen = list(dict.fromkeys(name for one in requested for name in matching(one, fields)))
    return Index(
        {name: fields[name] for name in chosen},
        [FileIndex(path, file.rows, {name: layouts[name] for name in chosen}, file.stamp)],
    )


def _columns(names: Sequence[str], values: Collection[str], read: Callable[[Sequence[str] | None], Index]) -> Index:
    """Return the index of the columns of these names; of names of folders alone, any column for its rows."""
    stored = [name for name in names if name not in values]
    while stored:
        try:
            return read(stored)
        except FieldNotFound as error:  # a pattern of folders needs no column
            others = [name for name in stored if name != error.field or not matching(name, values)]
            if len(others) == len(stored):
                raise
            stored = others
    try:
        return read(names)
    except FieldNotFound:
        return read(None)


def _constant(path: str, name: str, text: str | None, rows: int, dtype: Mapping[str, Any]) -> tuple[Field, FolderValue]:
    requested = next((kind for pattern, kind in dtype.items() if fnmatchcase(name, pattern)), None)
    is_whole = text is not None and _WHOLE.match(text) is not None
    if text is not None and not is_whole and requested is None:
        value = text.encode()
        return Field(name, (), np.dtype(object), attributes={EMPTY_IS_MISSING: True}), FolderValue(rows, value)
    kind = np.dtype(np.float64 if text is None else np.int64) if requested is None else np.dtype(requested)
    if kind.kind not in "iuf" or not (is_whole or (text is None and kind.kind == "f")):
        raise FormatError(
            "the folder's value is not of this type",
            file=path,
            field=name,
            expected=f"a value of {kind}",
            found=text or MISSING,
            remedy="give another dtype=, such as {name: 'float64'} where values are missing",
        )
    number = math.nan if text is None else int(text)
    attributes = {ALL_MISSING: True} if text is None and requested is None else {AS_TEXT: True}
    written = None if text in (None, str(number)) else text
    return Field(name, (), kind, attributes=attributes), FolderValue(rows, number, text=written)
