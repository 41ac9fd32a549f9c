"""Counts of the values of a field over all ranks, for vocabularies, classes and class weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import FormatError
from matex_data.fields import Field, Schema, field_of
from matex_data.index.runs import Samples
from matex_data.mpi.communicator import Communicator
from matex_data.reading.plan import Arrays
from matex_data.reading.source import Source
from matex_data.transforms.missing import is_missing

MOST_VALUES = 1_000_000  # that all ranks keep: some 100 MB of Python objects
ValueCounts = Mapping[Any, int]


def counts_of(source: Source, names: Sequence[str], samples: Samples) -> dict[str, Counter[Any]]:
    """Return how often each value of fields occurs, by field. *Collective*: each rank reads its block.

    Parameters
    ----------
    source : the opened files.
    names : of the fields. Of arrays and lists, all elements count.
    samples : samples of all ranks, ascending.

    Raises
    ------
    FieldNotFound, FormatError, DataError : see ``Dataset.value_counts``.
    """
    fields = {name: _checked(source.index.raw.fields, name) for name in names}
    own: dict[str, Counter[Any]] = {name: Counter() for name in names}

    def count(_: Integers, arrays: Arrays) -> None:
        for name, field in fields.items():
            values = field.join(arrays[name].reshape(-1)) if field.ragged else arrays[name]
            own[name].update(count_present(values, field))
            check_number(name, len(own[name]))

    source.use_block(samples, names, count)
    return {name: merged_counts(source.comm, name, own[name]) for name in names}


def value_counts(source: Source, name: str, samples: Samples) -> dict[Any, int]:
    """Return how often each value of a field occurs, the most frequent first; see `counts_of`. *Collective*."""
    counts = counts_of(source, [name], samples)[name]
    return dict(sorted(sorted(counts.items()), key=lambda item: -item[1]))


def class_weights(counts: ValueCounts) -> dict[Any, float]:
    """Return the weight of each class that gives all classes the same sum: samples / (classes * count).

    Source: King and Zeng, Logistic Regression in Rare Events Data (2001), as "balanced" in scikit-learn.
    """
    total = sum(counts.values())
    return {value: total / (len(counts) * count) for value, count in sorted(counts.items())}


def _checked(schema: Schema, name: str) -> Field:
    field = field_of(schema, name)
    if field.dtype.kind not in "biufSUO" or field.nested:
        raise FormatError(
            "values of this type are not counted",
            field=name,
            expected="integers, booleans, floats or texts",
            found=field.description,
        )
    return field


def check_number(name: str, distinct: int) -> None:
    """Raise ``FormatError`` if a field has more different values than ranks count."""
    if distinct > MOST_VALUES:
        raise FormatError(
            "the field has too many different values to count",
            field=name,
            expected=f"at most {MOST_VALUES:,}",
            found=f"{distinct:,} or more",
            remedy="count a field of classes; for numbers see statistics()",
        )


def count_present(values: Array, field: Field) -> Counter[Any]:
    """Return how often each value of a field occurs that is not missing, as Python's object."""
    values = values[~is_missing(values, field)]
    if values.dtype.kind == "O":
        counted = Counter(values.tolist())
    else:
        unique, counts = np.unique(values, return_counts=True)
        counted = Counter(dict(zip(unique.tolist(), counts.tolist(), strict=True)))
    return Counter({as_value(value): count for value, count in counted.items()})


def as_value(value: Any) -> Any:
    """Return a value as Python's object: bytes as text."""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


def merged_counts(comm: Communicator, name: str, own: ValueCounts) -> Counter[Any]:
    """Return the sum of the counts of all ranks. *Collective*.

    Raises
    ------
    FormatError : there are too many different values; on every rank.
    """
    counts = comm.combine(Counter(own), _sum)
    check_number(name, len(counts))
    return counts


def _sum(first: Counter[Any], second: Counter[Any]) -> Counter[Any]:
    """Return the sum of two counts; one of them as it is if it has too many values already."""
    return first if len(first) > MOST_VALUES else second if len(second) > MOST_VALUES else first + second
