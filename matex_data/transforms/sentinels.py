"""Numbers that stand for missing ones, such as -9999: they become NaN before anything else is made of a field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any

import numpy as np

from matex_data._types import Array
from matex_data.errors import FieldNotFound, FormatError, near_matches
from matex_data.fields import Field, is_pattern, matching
from matex_data.index.computed import Call, compute
from matex_data.index.converted import exact
from matex_data.index.model import Index

Sentinels = float | Sequence[float] | Mapping[str, float | Sequence[float]]
"""Numbers that are missing ones: of all fields of floats, or by name or pattern of the fields."""


def check_sentinels(sentinels: Sentinels | None) -> None:
    """Raise ``FormatError`` if this is no valid value of ``missing_values=``."""
    values = list(sentinels.values()) if isinstance(sentinels, Mapping) else [] if sentinels is None else [sentinels]
    if not all(isinstance(number, Real) and not isinstance(number, bool) for one in values for number in _listed(one)):
        raise FormatError(
            "missing_values= has something else than numbers",
            expected="a number, a list of numbers, or a dict of these by field",
            found=repr(sentinels),
        )


def mark_missing(index: Index, sentinels: Sentinels | None) -> Index:
    """Return the index with NaN in place of numbers that stand for missing ones.

    Integers, which have no NaN, are float64 then; only fields that ``sentinels`` names are converted.

    Raises
    ------
    FieldNotFound : a name is no field.
    FormatError : a named field has no numbers.
    """
    rules = sentinels if isinstance(sentinels, Mapping) else {} if sentinels is None else {"*": sentinels}
    named = isinstance(sentinels, Mapping)
    found = dict[str, str]()
    for rule in sorted(rules, key=is_pattern):
        fields = matching(rule, index.fields)
        if not fields and not is_pattern(rule):
            expected = f"one of {near_matches(rule, index.fields)}"
            raise FieldNotFound("missing_values= names no field", field=rule, expected=expected)
        found = {**dict.fromkeys(fields, rule), **found}
    for name, rule in found.items():
        field = index.fields[name]
        if _applies(field, named, rule):
            marked = field if field.dtype.kind == "f" else replace(field, dtype=np.dtype(np.float64))
            values = np.array(_listed(rules[rule]), np.float64)
            index = compute(index, partial(_mark, marked, values), [name], {name: marked})
    return index


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple | np.ndarray) else [value]


def _applies(field: Field, named: bool, rule: str) -> bool:
    """Return whether a rule applies to a field; raise ``FormatError`` if it names one that it cannot apply to."""
    if field.dtype.kind == "f" and not field.nested:
        return True
    if named and field.dtype.kind in "iu" and not field.nested:
        return True
    if named and not is_pattern(rule):
        raise FormatError(
            "a field has no numbers, of which one could stand for missing ones",
            field=field.name,
            expected="a field of floats or integers in missing_values=",
            found=field.description,
        )
    return False


def _mark(field: Field, numbers: Array, call: Call) -> None:
    """Replace numbers of a field by NaN."""
    if field.ragged:
        lists = call.lists(field.name)
        call.fill(field.name, _marked(field, lists.values, numbers), lists.offsets)
    else:
        call.fill(field.name, _marked(field, call.inputs[field.name], numbers))


def _marked(field: Field, values: Array, numbers: Array) -> Array:
    """Return values in the dtype of a field, with NaN in place of these numbers, as the values have them."""
    missing = np.isin(values, numbers.astype(values.dtype) if values.dtype.kind == "f" else numbers)
    found = exact(np.where(missing, values.dtype.type(0), values), field, "integers up to 2**53, beside missing values")
    found[missing] = np.nan
    return found
