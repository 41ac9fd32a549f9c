"""Missing values. Readers deliver numbers as NaN and texts as empty; here they are replaced, masked or dropped.

Replacement and masks are made once all rows of a window are in memory. Dropping takes one read of the data when it is
opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Array, Integers
from matex_data.errors import FormatError
from matex_data.fields import EMPTY_IS_MISSING, MASK, Field
from matex_data.index.cache import ChunkCache
from matex_data.index.chosen import Samples
from matex_data.index.converted import Converted
from matex_data.index.files import DerivedFiles
from matex_data.index.model import FileIndex, Index, ReadRequest, RowSelection
from matex_data.index.runs import Runs
from matex_data.reading.source import Source
from matex_data.transforms.select import select_samples

MODES = ("nan", "mask", "drop")
TILE = 1 << 18  # numbers tested at once: temporary arrays stay in the processor's cache
Missing = str | float | Mapping[str, str | float]


def check_missing(missing: Missing) -> None:
    """Raise ``FormatError`` if ``missing`` is no valid value of ``missing=``; see `check_rules` for dicts."""
    if isinstance(missing, Mapping):
        return
    number = isinstance(missing, Real) and not isinstance(missing, bool)
    if not number and missing not in MODES:
        raise FormatError(
            "unknown treatment of missing values",
            expected=f"missing= one of {MODES}, a number that replaces them, or a dict by field",
            found=repr(missing),
        )


def fill_missing(index: Index, missing: Missing, names: Sequence[str] | None) -> Index:
    """Return an index whose missing numbers are replaced by ``missing``, or by 0 for "mask", with masks of all others.

    Parameters
    ----------
    index : index with missing numbers as NaN.
    missing : value of ``missing=``; for "nan" and "drop" the index is returned as it is. Of a dict, only the masks that
        are requested are made.
    names : requested fields, masks among them; None: all.

    Raises
    ------
    FormatError : the data already has a field with the name of a mask.
    """
    if isinstance(missing, str) and missing != "mask":
        return index
    by_field = isinstance(missing, Mapping)
    floats = [field for field in index.fields.values() if field.dtype.kind == "f" and not field.ragged]
    whole = names is None and not by_field
    masked = [f for f in floats if whole or MASK.format(f.name) in (names or ())]
    masked = masked if by_field or missing == "mask" else []
    masks = {MASK.format(field.name): field for field in masked}
    for name in masks:
        if name in index.fields:
            raise FormatError(
                "the data already has a field with the name of a mask",
                field=name,
                remedy='select fields with inputs= and targets=; with pad=, give missing= a number or "nan"',
            )
    fields = {**index.fields, **{name: Field(name, field.shape, np.dtype(bool)) for name, field in masks.items()}}
    files = index.files
    if masks:
        files = DerivedFiles(files, partial(_masked, {name: field.name for name, field in masks.items()}))
    if isinstance(missing, Mapping):
        return Index(fields, files, index.static, index.facts)
    number = 0.0 if isinstance(missing, str) else float(missing)
    mask_of = {field.name: MASK.format(field.name) if field in masked else None for field in floats}
    post_process = partial(_replace, mask_of, number)
    return Index(fields, files, index.static, post_process=post_process)


def _masked(field_of: Mapping[str, str], _: int, file: FileIndex) -> FileIndex:
    """Return the index of a file with masks, given the field of each."""
    masks = {mask: _Mask(file.layouts[name]) for mask, name in field_of.items()}
    return replace(file, layouts={**file.layouts, **masks})


@dataclass(frozen=True)
class _Mask(Converted):
    """Layout of a mask, for which no bytes are read."""

    def stored_bytes(self) -> int:
        return 0

    def end(self) -> int:
        return 0

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        return iter(())


def _replace(
    mask_of: Mapping[str, str | None], number: float, arrays: Mapping[str, Array], destination: Integers
) -> None:
    """Replace the missing numbers in the rows ``destination`` of the named arrays, and fill their masks."""
    for name, mask in mask_of.items():
        if name in arrays:
            _replace_in(arrays[name], None if mask is None else arrays[mask], number, destination)


def _replace_in(array: Array, mask: Array | None, number: float, destination: Integers) -> None:
    step = max(1, TILE // max(1, prod(array.shape[1:])))
    low, high = (int(destination.min()), int(destination.max()) + 1) if len(destination) else (0, 0)
    contiguous = high - low == len(destination)
    for i in range(0, len(destination), step):
        selected: Any = slice(low + i, min(low + i + step, high)) if contiguous else destination[i : i + step]
        rows = array[selected]
        absent = np.isnan(rows)
        if mask is not None:
            mask[selected] = ~absent
        if absent.any():
            rows[absent] = number
            array[selected] = rows


def replace_missing(array: Array, field: Field, value: Any, destination: Integers) -> None:
    """Replace the missing values in rows of an array.

    Parameters
    ----------
    array : [n, ...], which may be a view of one column.
    field : of which the values are.
    value : that replaces missing ones; a text for texts.
    destination : the rows.
    """
    if array.dtype.kind == "f":
        _replace_in(array, None, float(value), destination)
        return
    rows = array[destination]
    absent = is_missing(rows, field)
    if absent.any():
        text = isinstance(value, str) and array.dtype.kind != "U"
        rows[absent] = value.encode("utf-8", "surrogateescape") if text else value
        array[destination] = rows


def find_complete(source: Source, samples: Samples | None) -> Samples:
    """Return the samples without any missing value, equal on all ranks. *Collective*: each rank reads its block.

    Parameters
    ----------
    source : opened files.
    samples : samples to choose from, ascending; None: all.

    Raises
    ------
    DataError : the first error of any rank, on every rank.
    """
    fields = {name: field for name, field in source.index.fields.items() if _may_be_missing(field)}
    samples = samples or Runs(np.array([0]), np.array([len(source.index)]))
    return select_samples(source, samples, list(fields), partial(_complete, fields)) if fields else samples


def _may_be_missing(field: Field) -> bool:
    return not field.ragged and (field.dtype.kind == "f" or _is_category(field) or _has_empty_texts(field))


def _is_category(field: Field) -> bool:
    return field.dtype.kind == "i" and isinstance(field.attributes.get("categories"), list)


def _has_empty_texts(field: Field) -> bool:
    """Return whether an empty text of the field is a missing one."""
    return field.dtype.kind in "SUO" and bool(field.attributes.get(EMPTY_IS_MISSING, True))


def _complete(fields: Mapping[str, Field], arrays: Mapping[str, Array]) -> Array:
    """Return bool[samples], True for samples without missing values."""
    complete: Array = np.logical_and.reduce(
        [~is_missing(array, fields[name]).any(axis=tuple(range(1, array.ndim))) for name, array in arrays.items()]
    )
    return complete


def is_missing(array: Array, field: Field) -> NDArray[np.bool_]:
    """Return which values of a field are missing, of the shape of ``array``: NaN, empty texts, codes of no category."""
    if array.dtype.kind == "f":
        return np.isnan(array)
    if _has_empty_texts(field):
        return np.asarray((array == b"") | (array == "") if array.dtype.kind == "O" else array == array.dtype.type())
    return array < 0 if _is_category(field) else np.zeros(array.shape, bool)
