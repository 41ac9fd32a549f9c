"""Fields that the folders of a partitioned data set name: ``year=2020/month=7/part-0.parquet``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any
from urllib.parse import unquote

import numpy as np

from matex_data.errors import FieldNotFound, FormatError
from matex_data.fields import EMPTY_IS_MISSING, Field
from matex_data.index.constant import Constant
from matex_data.index.model import FileIndex, Index, Layout

MISSING = "__HIVE_DEFAULT_PARTITION__"  # value of a folder for rows without one
_WHOLE = re.compile(r"[-+]?\d{1,18}$")


def partitions(path: str) -> dict[str, str | int | None]:
    """Return the values of the folders that hold a file, by name; None: the value is missing.

    >>> partitions("/data/year=2020/site=s%C3%A3o/part-0.parquet")
    {'year': 2020, 'site': 'são'}
    """
    found: dict[str, str | int | None] = {}
    for folder in PurePath(path).parts[:-1]:
        name, equals, text = folder.partition("=")
        if name and equals:
            value = unquote(text)
            found[unquote(name)] = int(value) if _WHOLE.match(value) else None if value == MISSING else value
    return found


def add_partitions(
    path: str,
    names: Sequence[str] | None,
    dtype: Mapping[str, Any],
    read: Callable[[Sequence[str] | None], Index],
) -> Index:
    """Return the index of a file with the fields of its folders. A column of the same name comes first.

    Parameters
    ----------
    names : of columns and folders; None: all.
    dtype : of numbers, by name or pattern.
    read : reads the index of columns; None: of all.
    """
    values = partitions(path)
    if not values:
        return read(names)
    if names is None:
        index = read(None)
    else:
        stored = [name for name in names if name not in values]
        index = read(stored) if stored else _with_any(path, names, read)
    wanted = [name for name in (values if names is None else names) if name in values and name not in index.fields]
    if not wanted:
        return index
    (file,) = index.files
    made = {name: _constant(path, name, values[name], file.rows, dtype) for name in wanted}
    layouts: dict[str, Layout] = {**file.layouts, **{name: layout for name, (_, layout) in made.items()}}
    fields = {**index.fields, **{name: field for name, (field, _) in made.items()}}
    chosen = list(fields) if names is None else list(names)
    return Index(
        {name: fields[name] for name in chosen},
        [FileIndex(path, file.rows, {name: layouts[name] for name in chosen})],
    )


def _with_any(path: str, names: Sequence[str], read: Callable[[Sequence[str] | None], Index]) -> Index:
    """Return an index for names of folders alone: with those of them that are columns, else any column for its rows."""
    try:
        return read(names)
    except FieldNotFound:
        return read(None)


def _constant(
    path: str, name: str, value: str | int | None, rows: int, dtype: Mapping[str, Any]
) -> tuple[Field, Constant]:
    requested = next((kind for pattern, kind in dtype.items() if fnmatchcase(name, pattern)), None)
    if isinstance(value, str) and requested is None:
        return Field(name, (), np.dtype(object), attributes={EMPTY_IS_MISSING: True}), Constant(rows, value.encode())
    kind = np.dtype(np.int64 if value is not None else np.float64) if requested is None else np.dtype(requested)
    if kind.kind not in "iuf" or isinstance(value, str) or (value is None and kind.kind != "f"):
        raise FormatError(
            "the folder's value is not of this type",
            file=path,
            field=name,
            expected=f"a value of {kind}",
            found=value or MISSING,
            remedy="give another dtype=, such as {name: 'float64'} where values are missing",
        )
    return Field(name, (), kind), Constant(rows, float("nan") if value is None else value)
