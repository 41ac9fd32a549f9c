"""Fields with one value for all samples of a file: by its name, or of an array that belongs to no sample."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import translate
from functools import partial
from typing import Any

import numpy as np

from matex_data._types import Array
from matex_data.errors import FieldNotFound, FormatError, PartitionError, near_matches
from matex_data.fields import Field, Schema, is_pattern, name_taken
from matex_data.index.columns import compact
from matex_data.index.files import DerivedFiles, FileIndex, LayoutFacts
from matex_data.index.library import Constant
from matex_data.index.model import Index

FileFields = Mapping[str, Mapping[str, bool | int | float | str]]
"""By name of a field, its value for the files that fit a pattern: ``{"label": {"sig_*.root": 1, "bkg_*.root": 0}}``."""

_Values = Sequence[bool | int | float | bytes]


def add_file_fields(index: Index, file_fields: FileFields) -> Index:
    """Return the index with a field for each entry of ``file_fields``.

    A pattern is compared with the name of a file, and with as many of its folders as it names itself.

    Raises
    ------
    PartitionError : a file fits no pattern of a field, or several; a pattern fits no folder, which has one value.
    FormatError : the files have a field of this name, or the values of a field are of different kinds.
    """
    if not file_fields:
        return index
    fields = dict(index.fields)
    columns: dict[str, tuple[_Values, Array]] = {}
    for name, values in file_fields.items():
        if name in fields:
            raise name_taken(name, "file_fields=", index.files.paths[0])
        dtype, stored = _typed(name, list(values.values()))
        fields[name] = Field(name, (), dtype)
        columns[name] = stored, _pattern_of_files(name, list(values), index.files.paths)
    return _with_values(index, fields, partial(_of_patterns, columns))


def _of_patterns(columns: Mapping[str, tuple[_Values, Array]], number: int) -> dict[str, Any]:
    """Return the value of each field for the file of a number."""
    return {name: values[int(of[number])] for name, (values, of) in columns.items()}


def _typed(name: str, values: Sequence[Any]) -> tuple[np.dtype[Any], _Values]:
    """Return the dtype of the values, and these as they are stored."""
    if values and all(isinstance(value, str | bytes) for value in values):
        return np.dtype(object), [value.encode() if isinstance(value, str) else value for value in values]
    kinds = {np.asarray(value).dtype.kind for value in values}
    if kinds and (kinds == {"b"} or kinds <= set("iuf")):
        array = np.array(values)
        return array.dtype, array.tolist()
    raise FormatError(
        "file_fields= needs numbers alone or texts alone for a field",
        field=name,
        expected='a dict such as {"sig_*": 1, "bkg_*": 0}',
        found=repr(values),
    )


def _pattern_of_files(name: str, patterns: Sequence[str], paths: Sequence[str]) -> Array:
    """Return the number of the pattern that each file fits, integers[files]."""
    compiled = [(pattern.count("/") + 1, re.compile(translate(pattern))) for pattern in patterns]
    numbers = np.zeros(len(paths), np.int64)
    for number, path in enumerate(paths):
        parts = path.rstrip("/").split("/")
        fitting = [i for i, (names, pattern) in enumerate(compiled) if pattern.match("/".join(parts[-names:]))]
        if len(fitting) != 1:
            raise PartitionError(
                f"file_fields= has {len(fitting) or 'no'} pattern{'s' * (len(fitting) > 1)} for a file",
                file=path,
                field=name,
                expected=f"exactly one of {', '.join(map(repr, patterns))}",
                found=", ".join(repr(patterns[i]) for i in fitting) or "none",
                remedy="give each file one value; a pattern may name folders, such as 'signal/*.root'",
            )
        numbers[number] = fitting[0]
    folder = next((path for path in paths if path.endswith("/")), None)
    without = [patterns[i] for i in set(range(len(patterns))) - set(numbers.tolist())]
    if folder is not None and without:
        raise PartitionError(
            "file_fields= has a pattern that fits no folder: files of a folder are one data set, with one value",
            file=folder,
            field=name,
            expected="patterns of the names of folders",
            found=", ".join(map(repr, without)),
            remedy="give the values of single files in a table of the folder, such as metadata.csv",
        )
    return compact(numbers)


def add_static_fields(index: Index, names: Sequence[str] | None) -> Index:
    """Return the index with static arrays as fields, of which each sample has the whole array.

    Parameters
    ----------
    index : of the files; its arrays are those of the first file.
    names : of the fields that are wanted; None: the static arrays with two or more axes.

    Raises
    ------
    FormatError : an array has neither numbers nor texts.
    FieldNotFound : a name is neither that of a field nor of an array of the first file.
    """
    arrays = {
        name: array
        for name, array in index.static.items()
        if name not in index.fields and (array.ndim > 1 if names is None else name in names)
    }
    lacking = next((n for n in names or () if n not in index.fields and n not in arrays and not is_pattern(n)), None)
    if lacking is not None:
        raise FieldNotFound(
            "static_as_inputs= takes the arrays of the first file, which has none of this name",
            file=next(iter(index.files.paths), None),
            field=lacking,
            expected=f"one of {near_matches(lacking, [*index.fields, *index.static])}",
            remedy="correct the name, or open a file first that has it",
        )
    if not arrays:
        return index
    odd = next((name for name, array in arrays.items() if array.dtype.kind not in "biufSO"), None)
    if odd is not None:
        raise FormatError("the array is no field", field=odd, expected="numbers or texts", found=arrays[odd].dtype)
    fields = {name: Field(name, array.shape, array.dtype) for name, array in arrays.items()}
    return _with_values(index, {**index.fields, **fields}, partial(_the_same, arrays))


def _the_same(arrays: Mapping[str, Array], _: int) -> Mapping[str, Array]:
    return arrays


def _with_values(index: Index, fields: Schema, values_of: Callable[[int], Mapping[str, Any]]) -> Index:
    """Return the index with further fields, each with one value for all samples of a file.

    Parameters
    ----------
    fields : of the index, and the new ones.
    values_of : returns the value of each new field for the file of a number.
    """
    files, facts = index.files, None
    if files.has_facts and len(files):
        no = np.zeros(len(files), bool)
        of_constants = LayoutFacts(np.ones(len(files), np.uint8), np.zeros(len(files), np.uint8), no, no)
        facts = {**dict.fromkeys(fields, of_constants), **files.facts}
    derived = DerivedFiles(files, partial(_with_constants, values_of), facts=facts)
    return Index(fields, derived, index.static, index.facts)


def _with_constants(values_of: Callable[[int], Mapping[str, Any]], number: int, file: FileIndex) -> FileIndex:
    constants = {name: Constant(file.rows, value) for name, value in values_of(number).items()}
    return replace(file, layouts={**file.layouts, **constants})
