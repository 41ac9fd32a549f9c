"""Texts and classes as codes of a sorted vocabulary, and as one-hot vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from matex_data.errors import FormatError
from matex_data.fields import MISSING_INTEGER, Field, field_of
from matex_data.index.computed import Call, ComputedFields, compute_all
from matex_data.index.model import Index
from matex_data.index.runs import Runs
from matex_data.reading.source import Source
from matex_data.transforms.counts import as_value, counts_of

CATEGORY = "category"
CATEGORIES = "categories"
"""Attribute of a field of codes: list of str, the name of each code."""
CODES = "codes of {}"  # name of the classes of one-hot vectors
Opened = Callable[[Index], Source]
"""Callable that opens the files of an index. *Collective*."""


def without_categories(options: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the fields that ``dtype=`` of a reader asks for as categories, and its options without these."""
    dtype, others = options.get("dtype"), {key: value for key, value in options.items() if key != "dtype"}
    if not isinstance(dtype, Mapping):
        return [], dict(options)
    names = [name for name, wanted in dtype.items() if isinstance(wanted, str) and wanted == CATEGORY]
    rest = {name: wanted for name, wanted in dtype.items() if name not in names}
    return names, {**others, "dtype": rest} if rest else others


def encode_categories(index: Index, names: Sequence[str], opened: Opened, whole: Index | None = None) -> Index:
    """Return the index with codes in place of texts or integers. *Collective*: each rank reads its block once.

    Codes are positions in the sorted values of all samples, -1 for missing ones, and the attribute ``categories`` has
    the values as texts. Fields with categories stay as they are.

    Parameters
    ----------
    index : of the data set.
    names : of the fields.
    opened : opens the files of an index. *Collective*.
    whole : of all samples of the files, where the data set has the objects of selected ones; None: it has all.

    Raises
    ------
    FieldNotFound : there is no such field.
    FormatError : a field is neither of texts nor of integers, or has more than a million different values.
    DataError : the first error of any rank, on every rank.
    """
    fields = {name: _checked(index, name) for name in names}
    fields = {name: one for name, one in fields.items() if not isinstance(one.attributes.get(CATEGORIES), list)}
    if not fields:
        return index
    counted = (whole or index).select(list(fields))
    counts = counts_of(opened(counted), list(fields), Runs.between(0, len(counted)))
    steps: list[ComputedFields] = []
    for name, field in fields.items():
        values = sorted(counts[name])
        attributes = {**field.attributes, CATEGORIES: [str(value) for value in values]}
        attributes.pop(MISSING_INTEGER, None)  # the code of a missing value is -1
        coded = replace(field, dtype=np.dtype(np.int32), attributes=attributes)
        steps.append(ComputedFields(partial(_codes, name, tuple(values)), [name], {name: coded}))
    return compute_all(index, steps)


def one_hot(index: Index, names: Sequence[str]) -> Index:
    """Return the index with vectors of zeros and a one in place of codes of categories.

    The vectors are float32 and have an entry for each category; those of missing values have zeros alone.

    Parameters
    ----------
    index : see `encode_categories`, which has made the codes.
    names : of the fields.
    """
    steps: list[ComputedFields] = []
    for name in names:
        field = index.fields[name]
        count = len(field.attributes[CATEGORIES])
        vectors = replace(field, shape=(*field.shape, count), dtype=np.dtype(np.float32))
        step = ComputedFields(partial(_vectors, name, count), [name], {name: vectors}, raw_of={name: name})
        steps.append(step)
    return compute_all(index, steps)


def count_as_classes(index: Index, names: Iterable[str]) -> Index:
    """Return the index with one-hot vectors of these names that count as classes, after a function has made them."""
    steps: list[ComputedFields] = []
    for name in names:
        field, codes = index.fields[name], CODES.format(name)
        categories = field.attributes.get(CATEGORIES)
        if isinstance(categories, list) and field.dtype.kind == "f" and field.shape[-1:] == (len(categories),):
            classes = replace(field, name=codes, shape=field.shape[:-1], dtype=np.dtype(np.int32))
            fields = {name: field, codes: classes}
            steps.append(ComputedFields(partial(_classes, name), [name], fields, dict, raw_of={name: codes}))
    return compute_all(index, steps).select(list(index.fields)) if steps else index


def _classes(name: str, call: Call) -> None:
    """Fill one-hot vectors, as they are, and the codes of their classes."""
    vectors = call.inputs[name]
    if name not in call.placed:
        call.fill(name, vectors)
    call.fill(CODES.format(name), np.where(vectors.any(axis=-1), vectors.argmax(axis=-1), -1))


def _checked(index: Index, name: str) -> Field:
    field = field_of(index.fields, name)
    if field.ragged or field.dtype.kind not in "biuSUO":
        raise FormatError(
            "the field has no classes",
            field=name,
            expected="texts, integers or truth values in each sample",
            found=field.description,
            remedy='leave it out of one_hot= and of dtype={...: "category"}',
        )
    return field


def _codes(name: str, values: tuple[Any, ...], call: Call) -> None:
    """Convert values to the codes of these categories."""
    rows = call.inputs[name]
    code_of = {value: code for code, value in enumerate(values)}
    unique, inverse = np.unique(rows, return_inverse=True) if rows.dtype != object else (rows, None)
    codes = np.fromiter((code_of.get(as_value(value), -1) for value in unique.reshape(-1).tolist()), np.int32)
    call.fill(name, codes.reshape(rows.shape) if inverse is None else codes[inverse.reshape(rows.shape)])


def _vectors(name: str, count: int, call: Call) -> None:
    """Convert codes to one-hot vectors of ``count`` categories."""
    call.fill(name, call.inputs[name][..., None] == np.arange(count))
