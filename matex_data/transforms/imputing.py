"""Missing values by field: numbers, texts, means, medians and most frequent values of the samples of a training set.

The statistics are those of the first set of a split, which validation and test sets share: nothing of these leaks into
what the training set is filled with. Before a split they are those of all samples.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import Any

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import FormatError
from matex_data.fields import MISSING_INTEGER, Field, Schema, is_category
from matex_data.index.computed import compute_all
from matex_data.index.model import Index
from matex_data.index.runs import Samples
from matex_data.mpi.communicator import Communicator
from matex_data.reading.plan import Arrays
from matex_data.reading.source import Source
from matex_data.transforms.counts import count_present, merged_counts
from matex_data.transforms.missing import (
    KEEP,
    MEAN,
    MEDIAN,
    MODE,
    RULES,
    check_no_integers,
    filling,
)
from matex_data.transforms.names import named_by_rules

FillRule = str | float
Rules = Mapping[str, FillRule]
"""Treatment of missing values by field name or pattern: one of `RULES`, a number, or a text."""
MOST_KEPT = 1 << 27  # numbers of a rank of which it finds the median: a gigabyte


def find_rules(fields: Schema, rules: Rules) -> dict[str, FillRule]:
    """Return the rule of each field that one applies to; names come before patterns, patterns in their order.

    Raises
    ------
    FieldNotFound : a name is no field.
    FormatError : a named field cannot have missing values, or has no mean; nothing replaces those of integers, which
        have no NaN.
    """
    found: dict[str, FillRule] = {}
    for name, pattern in named_by_rules(rules, fields, "missing=").items():
        rule = rules[pattern]
        if rule != KEEP and _applies(fields[name], rule, named=pattern == name):
            found[name] = rule
    check_no_integers({name: field for name, field in fields.items() if name not in found})
    return found


def texts_to_fill(fields: Schema, rules: Rules, names: Sequence[str]) -> dict[str, str]:
    """Return the texts that replace missing ones of these fields before classes are made of them; see `find_rules`."""
    by_name = {name: pattern for name, pattern in named_by_rules(rules, fields, "missing=").items() if name in names}
    texts = ((name, pattern, rules[pattern]) for name, pattern in by_name.items() if rules[pattern] not in RULES)
    return {n: rule for n, key, rule in texts if isinstance(rule, str) and _applies(fields[n], rule, named=key == n)}


def _applies(field: Field, rule: FillRule, named: bool) -> bool:
    """Return whether a rule applies to a field; raise ``FormatError`` if it is one for this field that cannot."""
    whole = MISSING_INTEGER in field.attributes and isinstance(rule, Real)
    numbers = (field.dtype.kind == "f" or whole) and not field.ragged
    classes = not field.ragged and (field.dtype.kind in "SUO" or isinstance(field.attributes.get("categories"), list))
    if isinstance(rule, str) and rule not in RULES:
        return _takes_text(field, rule, named)
    if numbers or (classes and rule == MODE):
        return True
    if named and not (field.dtype.kind in "biu" and not classes):  # integers have no missing values
        raise FormatError(
            f"missing= has no such treatment of {field.name!r}",
            field=field.name,
            expected='"mode", the most frequent value, or a text for texts' if classes else "a field of numbers",
            found=f"{rule!r} for {field.description}",
        )
    return False


def _takes_text(field: Field, text: str, named: bool) -> bool:
    """Return whether a text replaces the missing texts of a field; raise ``FormatError`` if it is one that cannot."""
    kind, room = field.dtype.kind, field.dtype.itemsize
    texts = kind in "SUO" and not field.ragged
    wrong = not texts and (named or (kind == "f" and not field.ragged))  # a pattern passes over what misses nothing
    expected = f"a field of texts, or one of {RULES} for numbers" if wrong else None
    classes = "leave the field out of dtype=; one_hot= makes classes of the texts that are filled in"
    if texts and kind != "O" and np.array(text if kind == "U" else text.encode()).itemsize > room:
        expected = f"a text that fits into {field.dtype}"
    if expected is not None:
        found = f"{text!r} for {field.description}"
        raise FormatError(
            "missing= has a text that cannot replace values",
            field=field.name,
            expected=expected,
            found=found,
            remedy=classes if is_category(field) else None,
        )
    return texts


@dataclass(frozen=True)
class Imputation:
    """Treatment of missing values whose statistics follow from samples.

    Parameters
    ----------
    rules : of the fields that are treated, by name.
    index : of rows with their missing values.
    finish : makes the index of the samples of that of the rows.
    transforms : text that identifies the samples without it, see `Source`.
    rows_of : returns the rows of samples, where these are sequence windows; None: each sample is a row.
    mapped : operations on the data set, such as ``map``, have got what it has filled in.
    """

    rules: Mapping[str, FillRule]
    index: Index
    finish: Callable[[Index], Index]
    transforms: str
    rows_of: Callable[[Samples], Samples] | None = None
    mapped: bool = False

    @property
    def learns(self) -> bool:
        """Return whether any value depends on samples."""
        return any(rule in _TALLIES for rule in self.rules.values())

    def fitted(self, source: Source, samples: Samples) -> Source:
        """Return the opened files with the statistics of some samples. *Collective*.

        Each rank reads its block of the samples once. The result is equal on any number of ranks, to the last bit.

        Raises
        ------
        FormatError : a field has no value at all, or infinite ones.
        DataError : the first error of any rank, on every rank.
        """
        fields = self.index.raw.fields
        tallies = {name: _TALLIES[rule](fields[name]) for name, rule in self.rules.items() if rule in _TALLIES}

        def add(_: Integers, arrays: Arrays) -> None:
            for name, tally in tallies.items():
                tally.add(fields[name].join(arrays[name].reshape(-1)) if fields[name].ragged else arrays[name])

        if tallies and self.rows_of is None:
            source.with_index(self.index, "").use_block(samples, list(tallies), add)
        elif tallies and self.rows_of is not None:
            source.of_index(self.index, "").use_block(self.rows_of(samples), list(tallies), add)
        values = {n: tallies[n].merged(source.comm) if n in tallies else rule for n, rule in self.rules.items()}
        digest = hashlib.blake2b(repr(values).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
        steps = [filling(self.index.fields[name], value, f"missing {digest}") for name, value in values.items()]
        return source.with_index(self.finish(compute_all(self.index, steps)), f"{self.transforms}missing {digest}")


class _Mean:
    """Mean of numbers, exact before it is rounded, so that it depends on no order.

    A float is an integer of 53 bits times a power of two. The integers are added by power, in halves that do not
    overflow.
    """

    def __init__(self, field: Field) -> None:
        self._field = field
        self._sums: dict[int, int] = {}
        self._count = 0

    def add(self, array: Array) -> None:
        """Add numbers; NaN do not count."""
        values = array[~np.isnan(array)].astype(np.float64)
        if not np.isfinite(values).all():
            raise FormatError(
                "a field with infinite numbers has no mean",
                field=self._field.name,
                expected="finite numbers",
                remedy='give a number in place of "mean", or mark infinite numbers as missing with missing_values=',
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
            raise _no_value(self._field, MEAN)
        return float(self._field.dtype.type(float(total / count)))


class _Median:
    """Median of numbers: the middle one, or the mean of both in the middle. A rank keeps the numbers of its block."""

    def __init__(self, field: Field) -> None:
        self._field = field
        self._kept: list[Array] = []

    def add(self, array: Array) -> None:
        """Keep numbers; NaN do not count."""
        self._kept.append(array[~np.isnan(array)])
        count = sum(map(len, self._kept))
        if count > MOST_KEPT:
            raise FormatError(
                "a rank keeps the numbers of which it finds the median",
                field=self._field.name,
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
            raise _no_value(self._field, MEDIAN)
        low, high = -(1 << 63), (1 << 63) - 1  # floats in their order, as integers
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if not_above(_float(middle)) > (count - 1) // 2 else (middle + 1, high)
        lower = upper = _float(low)
        if not_above(lower) <= count // 2:
            upper = min(comm.allgather(min(own[own > lower], default=np.inf)))
        if not np.isfinite([lower, upper]).all():
            raise FormatError(
                "the median of a field is infinite",
                field=self._field.name,
                expected="finite numbers",
                remedy='give a number in place of "median", or mark infinite numbers as missing with missing_values=',
            )
        return float(self._field.dtype.type(float((Fraction(lower) + Fraction(upper)) / 2)))


def _float(number: int) -> float:
    """Return the float with a number in the order of all floats, of which -1 and 0 are the zeros."""
    bits = np.int64(number if number >= 0 else number ^ (1 << 63) - 1)
    value = float(bits.view(np.float64))
    return math.copysign(math.inf, number) if math.isnan(value) else value


class _Mode:
    """Most frequent value; of several the smallest."""

    def __init__(self, field: Field) -> None:
        self._field = field
        self._counts: Counter[Any] = Counter()

    def add(self, array: Array) -> None:
        """Count values; missing ones do not count."""
        self._counts.update(count_present(array, self._field))

    def merged(self, comm: Communicator) -> Any:
        """Return the most frequent value of all ranks. *Collective*."""
        counts = merged_counts(comm, self._field.name, self._counts)
        if not counts:
            raise _no_value(self._field, MODE)
        return min(counts, key=lambda value: (-counts[value], value))


_TALLIES: dict[Any, Callable[[Field], _Mean | _Median | _Mode]] = {
    MEAN: _Mean,
    MEDIAN: _Median,
    MODE: _Mode,
}


def _no_value(field: Field, rule: str) -> FormatError:
    return FormatError(
        f"missing= needs the {rule} of a field without values",
        field=field.name,
        expected="one value at least in the samples that count",
        remedy="give a number in its place",
    )
