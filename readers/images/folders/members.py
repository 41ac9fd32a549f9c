"""Columns of the members of JSON objects, such as the lines of ``metadata.jsonl`` and the annotations of COCO."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from matex_data._types import Array
from matex_data.readers.images.texts import NumberLists, Texts

ManifestValues = Array | Texts | NumberLists
MOST_NESTED = 8  # objects within each other whose members are columns; deeper ones are texts of JSON


def columns_of(objects: Sequence[Mapping[str, Any]], depth: int = 0) -> dict[str, list[Any]]:
    """Return the values of each member of all objects, those of inner ones as ``outer.inner``; None where it lacks.

    Examples
    --------
    >>> columns_of([{"label": 1}, {"box": {"x": 2}}])
    {'label': [1, None], 'box.x': [None, 2]}
    """
    names = dict.fromkeys(name for members in objects for name in members)
    columns: dict[str, list[Any]] = {}
    for name in names:
        column = [members.get(name) for members in objects]
        inner: dict[str, list[Any]] = {}
        if depth < MOST_NESTED and all(value is None or isinstance(value, dict) for value in column):
            below = columns_of([value or {} for value in column], depth + 1)
            inner = {f"{name}.{key}": values for key, values in below.items()}
        columns |= inner if inner and not inner.keys() & names.keys() else {name: column}
    return columns


def values_of(column: Sequence[Any]) -> ManifestValues:
    """Return values of JSON as int64, uint64, bool or float64, where NaN stands for None; lists of them; or else texts.

    Integers that none of these types holds are texts.

    Examples
    --------
    >>> values_of([1, None]).tolist(), values_of([[1, 2], None]).take(np.arange(2)).lengths.tolist()
    ([1.0, nan], [2, 0])
    """
    present = [value for value in column if value is not None]
    kinds = {type(value) for value in present}
    whole = len(present) == len(column)
    if kinds == {bool} and whole:
        return np.array(column)
    try:
        if kinds == {int} and whole:
            return np.array(column, np.uint64 if max(present) >= 1 << 63 else np.int64)
        if kinds in ({float}, {int, float}) or (kinds == {int} and all(float(value) == value for value in present)):
            return np.array([np.nan if value is None else float(value) for value in column])
        if kinds == {list}:
            return _lists([value or [] for value in column])
    except (ValueError, OverflowError):  # lists that differ in shape, or a number beyond its type
        pass
    texts = ("" if value is None else value if isinstance(value, str) else json.dumps(value) for value in column)
    return Texts.of(list(texts))


def _lists(column: Sequence[list[Any]]) -> NumberLists:
    """Return lists of numbers, or of lists of as many numbers each; raise ``ValueError`` for others."""
    numbers = list(chain.from_iterable(column))
    values = np.array(numbers)
    are_rounded = values.dtype.kind == "f" and not any(isinstance(n, float) for n in np.array(numbers, object).flat)
    if values.dtype.kind not in "bif" or are_rounded:
        raise ValueError(f"lists of {values.dtype}")
    return NumberLists(values, np.cumsum([len(part) for part in column], dtype=np.int64))
