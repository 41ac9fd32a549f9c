"""Texts and classes as codes of a sorted vocabulary, and as one-hot vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import FieldNotFound, FormatError, near_matches
from matex_data.fields import Field
from matex_data.index.cache import ChunkCache
from matex_data.index.converted import Converted
from matex_data.index.files import DerivedFiles
from matex_data.index.model import EMPTY, FileIndex, Index, Layout, ReadRequest, RowSelection, call_after_last
from matex_data.index.runs import Runs
from matex_data.index.scatter import scatter
from matex_data.index.table import plan_reads
from matex_data.reading.source import Source
from matex_data.transforms.counts import as_value, value_counts

CATEGORY = "category"
CATEGORIES = "categories"
"""Attribute of a field of codes: list of str, the name of each code."""
Opened = Callable[[Index], Source]
"""Callable that opens the files of an index. *Collective*."""


def requested_categories(options: Mapping[str, Any]) -> list[str]:
    """Return the fields that the option ``dtype=`` of a reader asks for as categories."""
    dtype = options.get("dtype")
    return [name for name, wanted in dtype.items() if _is_category(wanted)] if isinstance(dtype, Mapping) else []


def without_categories(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a reader without the dtypes that ask for categories."""
    if not isinstance(options.get("dtype"), Mapping):
        return dict(options)
    rest = {name: wanted for name, wanted in options["dtype"].items() if not _is_category(wanted)}
    return {**{key: value for key, value in options.items() if key != "dtype"}, **({"dtype": rest} if rest else {})}


def _is_category(wanted: Any) -> bool:
    return isinstance(wanted, str) and wanted == CATEGORY


def encode_categories(index: Index, names: Sequence[str], opened: Opened) -> Index:
    """Return the index with codes in place of texts or integers. *Collective*: each rank reads its block of a field.

    Codes are positions in the sorted values of all samples, -1 for missing ones, and the attribute ``categories`` has
    the values as texts. Fields with categories stay as they are.

    Parameters
    ----------
    index : of the data set.
    names : of the fields.
    opened : opens the files of an index. *Collective*.

    Raises
    ------
    FieldNotFound : there is no such field.
    FormatError : a field is neither of texts nor of integers, or has more than a million different values.
    DataError : the first error of any rank, on every rank.
    """
    for name in names:
        field = _checked(index, name)
        if isinstance(field.attributes.get(CATEGORIES), list):
            continue
        everything = Runs(np.array([0]), np.array([len(index)]))
        values = sorted(value_counts(opened(index.select([name])), name, everything))
        attributes = {**field.attributes, CATEGORIES: [str(value) for value in values]}
        coded = replace(field, dtype=np.dtype(np.int32), attributes=attributes)
        index = _replaced(index, coded, partial(_coded, name, field, tuple(values)))
    return index


def one_hot(index: Index, names: Sequence[str], opened: Opened) -> Index:
    """Return the index with vectors of zeros and a one in place of classes. *Collective* like `encode_categories`.

    The vectors are float32 and have an entry for each category; those of missing values have zeros alone.

    Parameters
    ----------
    index, names, opened : see `encode_categories`.
    """
    index = encode_categories(index, names, opened)
    for name in names:
        field = index.fields[name]
        count = len(field.attributes[CATEGORIES])
        vectors = replace(field, shape=(*field.shape, count), dtype=np.dtype(np.float32))
        index = _replaced(index, vectors, partial(_hot, name, field))
    return index


def _checked(index: Index, name: str) -> Field:
    field = index.fields.get(name)
    if field is None:
        raise FieldNotFound("no such field", field=name, expected=f"one of {near_matches(name, index.fields)}")
    if field.ragged or field.dtype.kind not in "biuSUO":
        raise FormatError(
            "the field has no classes",
            field=name,
            expected="texts, integers or truth values in each sample",
            found=field.description,
        )
    return field


def _replaced(index: Index, field: Field, layout: Callable[[Layout], Layout]) -> Index:
    files = DerivedFiles(index.files, partial(_replace_layout, field.name, layout))
    return Index({**index.fields, field.name: field}, files, index.static, index.facts, index.post_process)


def _replace_layout(name: str, layout: Callable[[Layout], Layout], _: int, file: FileIndex) -> FileIndex:
    return replace(file, layouts={**file.layouts, name: layout(file.layouts[name])})


def _coded(name: str, field: Field, values: tuple[Any, ...], layout: Layout) -> Layout:
    return Made(layout, name, field, Codes(values))


def _hot(name: str, field: Field, layout: Layout) -> Layout:
    return Made(layout, name, field, Vectors(len(field.attributes[CATEGORIES])))


@dataclass(frozen=True)
class Codes:
    """Conversion of values to codes.

    Parameters
    ----------
    values : of the categories.
    """

    values: tuple[Any, ...]

    def __call__(self, rows: Array) -> Array:
        code_of = {value: code for code, value in enumerate(self.values)}
        unique, inverse = np.unique(rows, return_inverse=True) if rows.dtype != object else (rows, None)
        codes = np.fromiter((code_of.get(as_value(value), -1) for value in unique.reshape(-1).tolist()), np.int32)
        return codes.reshape(rows.shape) if inverse is None else codes[inverse.reshape(rows.shape)]


@dataclass(frozen=True)
class Vectors:
    """Conversion of codes to one-hot vectors.

    Parameters
    ----------
    count : number of categories.
    """

    count: int

    def __call__(self, rows: Array) -> Array:
        vectors: Array = (rows[..., None] == np.arange(self.count)).astype(np.float32)
        return vectors


@dataclass(frozen=True, eq=False)
class Made(Converted):
    """Rows that are made of those of another layout once they are read.

    Parameters
    ----------
    layout : of the rows that are read.
    name, field : of these.
    make : called with rows, returns as many other ones.
    """

    name: str
    field: Field
    make: Codes | Vectors

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        read = self.field.empty(len(rows.destination))
        selection = RowSelection(rows.start, rows.stop, np.arange(len(read)))
        requests = [one for _, one in plan_reads({self.name: self.layout}, selection, {self.name: read}, cache)]
        finish = partial(self._finish, read, out, rows.destination)
        yield from call_after_last(requests or [ReadRequest(EMPTY, EMPTY)], finish)

    def _finish(self, read: Array, out: Array, destination: Integers) -> None:
        scatter(out, destination, self.make(read))
