"""Missing values by field: numbers, texts, means, medians and most frequent values of the samples of a training set.

The statistics are those of the first set of a split, which validation and test sets share: nothing of these leaks into
what the training set is filled with. Before a split they are those of all samples.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from numbers import Real
from typing import Any

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import FieldNotFound, FormatError, near_matches
from matex_data.fields import MISSING_INTEGER, Field, Schema, by_pattern, is_pattern
from matex_data.index.computed import Call, ComputedFields, compute_all
from matex_data.index.model import Index
from matex_data.index.runs import Samples
from matex_data.mpi.communicator import Communicator
from matex_data.reading.plan import Arrays
from matex_data.reading.source import Source
from matex_data.transforms.counts import merged_counts
from matex_data.transforms.missing import KEEP, MEAN, MEDIAN, MODE, RULES, is_missing, replace_missing
from matex_data.transforms.stack import column_axis

FillRule = str | float
Rules = Mapping[str, FillRule]
"""Treatment of missing values by field name or pattern: one of `RULES`, a number, or a text."""
MOST_KEPT = 1 << 27  # numbers of a rank of which it finds the median: a gigabyte


@dataclass(frozen=True)
class FilledColumn:
    """Field, or column of a stack, whose missing values are replaced.

    Parameters
    ----------
    name : of the field.
    number : of the column; None: the whole field.
    axis : of an array of rows, along which the columns lie.
    rule : the treatment.
    """

    name: str
    number: int | None
    axis: int
    rule: FillRule

    def of(self, array: Array) -> Array:
        """Return the view of an array of rows that has the column."""
        if self.number is None:
            return array
        return array[:, self.number] if self.axis == 1 else array[..., self.number]


def find_columns(fields: Schema, rules: Rules) -> list[FilledColumn]:
    """Return the columns that the rules apply to; names come before patterns, patterns in their order.

    Raises
    ------
    FieldNotFound : a name is no field.
    FormatError : a named field cannot have missing values, or has no mean.
    """
    known = [column for field in fields.values() for column, _, _ in _columns(field)]
    fitting = by_pattern(rules, known)
    columns: list[FilledColumn] = []
    for field in fields.values():
        for column, number, axis in _columns(field):
            pattern = fitting.get(column)
            rule = KEEP if pattern is None else rules[pattern]
            if rule != KEEP and _applies(field, column, rule, named=pattern == column):
                columns.append(FilledColumn(field.name, number, axis, rule))
    unused = next((name for name in rules if name not in fitting.values() and not is_pattern(name)), None)
    if unused is not None:
        raise FieldNotFound("missing= names no field", field=unused, expected=f"one of {near_matches(unused, known)}")
    return columns


def _columns(field: Field) -> Iterator[tuple[str, int | None, int]]:
    """Yield name, number and axis of each column of a field."""
    names = field.attributes.get("columns")
    axis = column_axis(field)
    if axis is None or not isinstance(names, list):
        yield field.name, None, 0
        return
    for number, name in enumerate(names):
        yield name.partition("[")[0], number, axis


def _applies(field: Field, name: str, rule: FillRule, named: bool) -> bool:
    """Return whether a rule applies to a field; raise ``FormatError`` if it is one for this field that cannot."""
    whole = MISSING_INTEGER in field.attributes and isinstance(rule, Real)
    numbers = (field.dtype.kind == "f" or whole) and not field.ragged
    classes = not field.ragged and (field.dtype.kind in "SUO" or isinstance(field.attributes.get("categories"), list))
    if isinstance(rule, str) and rule not in RULES:
        return _takes_text(field, name, rule)
    if numbers or (classes and rule == MODE):
        return True
    if named and not (field.dtype.kind in "biu" and not classes):  # integers have no missing values
        raise FormatError(
            f"missing= has no such treatment of {name!r}",
            field=name,
            expected='"mode", the most frequent value, or a text for texts' if classes else "a field of numbers",
            found=f"{rule!r} for {field.description}",
        )
    return False


def _takes_text(field: Field, name: str, text: str) -> bool:
    """Return True if a text replaces the missing texts of a field; raise ``FormatError`` if it cannot."""
    kind, room = field.dtype.kind, field.dtype.itemsize
    expected = None if kind in "SUO" and not field.ragged else f"a field of texts, or one of {RULES} for numbers"
    if expected is None and kind != "O" and np.array(text if kind == "U" else text.encode()).itemsize > room:
        expected = f"a text that fits into {field.dtype}"
    if expected is not None:
        found = f"{text!r} for {field.description}"
        raise FormatError("missing= has a text that cannot replace values", field=name, expected=expected, found=found)
    return True


@dataclass(frozen=True)
class Imputation:
    """Treatment of missing values whose statistics follow from samples.

    Parameters
    ----------
    columns : that are treated.
    index : of the samples with their missing values.
    transforms : text that identifies the samples without it, see `Source`.
    mapped : functions of ``map`` have got what it has filled in.
    """

    columns: Sequence[FilledColumn]
    index: Index
    transforms: str
    mapped: bool = False

    @classmethod
    def of(cls, rules: Rules, index: Index, transforms: str) -> Imputation:
        """Return the treatment of the fields of a data set by the rules of ``missing=``."""
        return cls(find_columns(index.fields, rules), index, transforms)

    @property
    def learns(self) -> bool:
        """Return whether any value depends on samples."""
        return any(column.rule in _TALLIES for column in self.columns)

    def fitted(self, source: Source, samples: Samples) -> Source:
        """Return the opened files with the statistics of some samples. *Collective*.

        Each rank reads its block of the samples once. The result is equal on any number of ranks, to the last bit.

        Raises
        ------
        FormatError : a column has no value at all, or infinite ones.
        DataError : the first error of any rank, on every rank.
        """
        names = list(dict.fromkeys(c.name for c in self.columns if c.rule in _TALLIES))
        fields = self.index.fields
        tallies = [_TALLIES[c.rule](c, fields[c.name]) if c.rule in _TALLIES else None for c in self.columns]

        def add(_: Integers, arrays: Arrays) -> None:
            for column, tally in zip(self.columns, tallies, strict=True):
                if tally is not None:
                    tally.add(column.of(arrays[column.name]))

        if names:
            source.use_block(samples, names, add)
        merged = [c.rule if t is None else t.merged(source.comm) for c, t in zip(self.columns, tallies, strict=True)]
        digest = hashlib.blake2b(repr(merged).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
        by_field: dict[str, list[tuple[FilledColumn, Any]]] = {}
        for column, value in zip(self.columns, merged, strict=True):
            by_field.setdefault(column.name, []).append((column, value))
        steps = (
            ComputedFields(partial(_fill, name, tuple(values)), [name], {name: fields[name]}, dict, f"missing {digest}")
            for name, values in by_field.items()
        )
        return source.with_index(compute_all(self.index, steps), f"{self.transforms}missing {digest}")


def _fill(name: str, values: Sequence[tuple[FilledColumn, Any]], call: Call) -> None:
    """Replace the missing values of the columns of a field."""
    if name not in call.placed:
        call.fill(name, call.inputs[name])
    for column, value in values:
        replace_missing(column.of(call.outs[name]), call.fields[name], value)


class _Mean:
    """Mean of numbers, exact before it is rounded, so that it depends on no order.

    A float is an integer of 53 bits times a power of two. The integers are added by power, in halves that do not
    overflow.
    """

    def __init__(self, column: FilledColumn, field: Field) -> None:
        self._column, self._dtype = column, field.dtype
        self._sums: dict[int, int] = {}
        self._count = 0

    def add(self, array: Array) -> None:
        """Add numbers; NaN do not count."""
        values = array[~np.isnan(array)].astype(np.float64)
        if not np.isfinite(values).all():
            raise FormatError(
                "a field with infinite numbers has no mean", field=self._column.name, expected="finite numbers"
            )
        fraction, exponent = np.frexp(values)
        mantissa = np.ldexp(fraction, 53).astype(np.int64)
        powers, group = np.unique(exponent, return_inverse=True)
        high, low = np.zeros(len(powers), np.int64), np.zeros(len(powers), np.int64)
        np.add.at(high, group, mantissa >> 26)
        np.add.at(low, group, mantissa & (1 << 26) - 1)
        for power, upper, lower in zip(powers.tolist(), high.tolist(), low.tolist(), strict=True):
            self._sums[power] = self._sums.get(power, 0) + (upper << 26) + lower
        self._count += len(values)

    def merged(self, comm: Communicator) -> float:
        """Return the mean of the numbers of all ranks. *Collective*."""
        total, count = Fraction(0), 0
        for sums, of_rank in comm.allgather((self._sums, self._count)):
            total += sum(
                (Fraction(number) * Fraction(2) ** (power - 53) for power, number in sums.items()), Fraction(0)
            )
            count += of_rank
        if not count:
            raise _no_value(self._column)
        return float(self._dtype.type(float(total / count)))


class _Median:
    """Median of numbers: the middle one, or the mean of both in the middle. A rank keeps the numbers of its block."""

    def __init__(self, column: FilledColumn, field: Field) -> None:
        self._column, self._dtype = column, field.dtype
        self._kept: list[Array] = []

    def add(self, array: Array) -> None:
        """Keep numbers; NaN do not count."""
        self._kept.append(array[~np.isnan(array)])
        count = sum(map(len, self._kept))
        if count > MOST_KEPT:
            raise FormatError(
                "a rank keeps the numbers of which it finds the median",
                field=self._column.name,
                expected=f"at most {MOST_KEPT:,} numbers for each rank",
                found=f"{count:,}",
                remedy='take "mean", or more ranks',
            )

    def merged(self, comm: Communicator) -> float:
        """Return the median of the numbers of all ranks. *Collective*: 64 times one number is added up."""
        own = np.sort(np.concatenate(self._kept)).astype(np.float64) if self._kept else np.empty(0)

        def not_above(number: float) -> int:
            return sum(comm.allgather(int(np.searchsorted(own, number, side="right"))))

        count = not_above(np.inf)
        if not count:
            raise _no_value(self._column)
        low, high = -(1 << 63), (1 << 63) - 1  # floats in their order, as integers
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if not_above(_float(middle)) > (count - 1) // 2 else (middle + 1, high)
        lower = upper = _float(low)
        if not_above(lower) <= count // 2:
            upper = min(comm.allgather(min(own[own > lower], default=np.inf)))
        if not np.isfinite([lower, upper]).all():
            raise FormatError("the median of a field is infinite", field=self._column.name, expected="finite numbers")
        return float(self._dtype.type(float((Fraction(lower) + Fraction(upper)) / 2)))


def _float(number: int) -> float:
    """Return the float with a number in the order of all floats, of which -1 and 0 are the zeros."""
    bits = np.int64(number if number >= 0 else number ^ (1 << 63) - 1)
    value = float(bits.view(np.float64))
    return math.copysign(math.inf, number) if math.isnan(value) else value


class _Mode:
    """Most frequent value; of several the smallest."""

    def __init__(self, column: FilledColumn, field: Field) -> None:
        self._column, self._field = column, field
        self._counts: dict[Any, int] = {}

    def add(self, array: Array) -> None:
        """Count values; missing ones do not count."""
        values = array[~is_missing(array, self._field)]
        unique, counts = np.unique(values, return_counts=True)
        for value, count in zip(unique.tolist(), counts.tolist(), strict=True):
            self._counts[value] = self._counts.get(value, 0) + count

    def merged(self, comm: Communicator) -> Any:
        """Return the most frequent value of all ranks. *Collective*."""
        counts = merged_counts(comm, self._column.name, self._counts)
        if not counts:
            raise _no_value(self._column)
        return min(counts, key=lambda value: (-counts[value], value))


_TALLIES: dict[Any, Callable[[FilledColumn, Field], _Mean | _Median | _Mode]] = {
    MEAN: _Mean,
    MEDIAN: _Median,
    MODE: _Mode,
}


def _no_value(column: FilledColumn) -> FormatError:
    return FormatError(
        f"missing= needs the {column.rule} of a field without values",
        field=column.name,
        expected="one value at least in the samples that count",
        remedy="give a number in its place",
    )
