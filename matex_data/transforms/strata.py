"""Sets of samples by the values of a field: equal fractions of each class, whole groups, sections of time.

Each rank reads the values of its block, and keeps a number for each of its samples. What all ranks know is a count for
each value, and a bit for each sample of the files.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Array, Integers
from matex_data.errors import FormatError, PartitionError
from matex_data.fields import Field
from matex_data.index.runs import Samples
from matex_data.readers.dimensions.cf import calendar_of, time_origin
from matex_data.reading.source import Source
from matex_data.sampling.permutation import Permutation, check_seed, permutation
from matex_data.transforms.counts import as_value, check_number, merged_counts
from matex_data.transforms.missing import use_values
from matex_data.transforms.names import field_of_values
from matex_data.transforms.select import AT_ONCE, samples_of_mask

MOST_CLASSES = 10_000  # of which every rank knows the counts of every other one
ROWS_OF_CLASS = 1000  # of each, about, to which sets are assigned at once: a call costs Python time
UNREAD = -1  # set of a sample that cannot be read, with on_error="skip"
NO_VALUE = "a split by values needs one value for each sample"
VALUELESS = "a split by values needs a value of each sample"
REMEDY = 'leave out samples without a value: missing="drop" with the field among inputs= or targets=, or where='


class Assignment:
    """Number of a set for each sample of this rank's block.

    Parameters
    ----------
    source : opened files.
    samples : samples of all ranks, ascending.
    sets : number of sets.
    own : integers[samples of this rank's block], the set of each; below 0: none.
    """

    def __init__(self, source: Source, samples: Samples, sets: int, own: Array) -> None:
        self._source, self._samples, self._sets, self._own = source, samples, sets, own

    def sets(self) -> tuple[Samples, ...]:
        """Return the samples of each set, equal on all ranks. *Collective*."""
        return tuple(self._where(self._own == number) for number in range(self._sets))

    def pairs(self) -> Iterator[tuple[Samples, Samples]]:
        """Yield each set behind the union of all others. *Collective*."""
        for number in range(self._sets):
            yield self._where((self._own >= 0) & (self._own != number)), self._where(self._own == number)

    def _where(self, mask: Array) -> Samples:
        return samples_of_mask(self._source, self._samples, mask)


def stratify(source: Source, samples: Samples, name: str, fractions: Sequence[float], seed: int | None) -> Assignment:
    """Assign the same fractions of the samples of each class to the sets, to one sample. *Collective*.

    Parameters
    ----------
    source : opened files.
    samples : samples of all ranks, ascending.
    name : of the field of classes.
    fractions : of each set; they sum to 1.
    seed : of a random choice from each class; None: consecutive samples of a class.

    Raises
    ------
    FieldNotFound, FormatError, DataError : see ``Dataset.split``.
    """
    codes, counts = _encode(source, samples, name)
    comm = source.comm
    comm.agree(_too_many_classes(name, len(counts)))
    step = max(AT_ONCE, ROWS_OF_CLASS * len(counts))  # an order of all samples would take 16 bytes for each
    parts = [codes[begin : begin + step] for begin in range(0, len(codes), step)]
    own = sum((np.bincount(part + 1, minlength=len(counts) + 1)[1:] for part in parts), np.zeros_like(counts))
    before = comm.sum_of_lower(own)
    ends = np.cumsum(sizes_by_class(counts, fractions), axis=1)
    for part in parts:
        order = np.argsort(part.astype(np.int16), kind="stable")  # a radix sort
        first = np.searchsorted(part, np.arange(len(counts) + 1, dtype=part.dtype), sorter=order)
        for number in np.flatnonzero(np.diff(first)).tolist():
            rows = order[first[number] : first[number + 1]]
            at = before[number] + np.arange(len(rows))  # the number of each sample within its class
            drawn = at if seed is None else Permutation(int(counts[number]), check_seed(seed), number)(at)
            part[rows] = np.searchsorted(ends[number], drawn, side="right")  # in place of the class
            before[number] += len(rows)
    return Assignment(source, samples, len(fractions), codes)


def sizes_by_class(counts: Integers, fractions: Sequence[float]) -> Integers:
    """Return the samples of each class in each set, int64[classes, sets]: fractions of the class, rounded up or down.

    What is rounded up is chosen so that the sets as a whole have their fractions, too.

    >>> sizes_by_class(np.array([3, 3, 4]), (0.5, 0.5)).tolist()
    [[2, 1], [1, 2], [2, 2]]
    """
    exact = counts[:, None] * np.asarray(fractions, np.float64)
    sizes: Integers = np.floor(exact + 1e-9).astype(np.int64)
    deficit = np.zeros(len(fractions))
    for number, rest in enumerate((counts - sizes.sum(axis=1)).tolist()):
        missing = exact[number] - sizes[number]
        deficit += missing
        chosen = np.argsort(np.where(missing > 1e-9, -deficit, np.inf), kind="stable")[:rest]
        sizes[number, chosen] += 1
        deficit[chosen] -= 1
    return sizes


def group(source: Source, samples: Samples, name: str, fractions: Sequence[float], seed: int | None) -> Assignment:
    """Assign whole groups to the sets, so that these have about their fractions of the samples. *Collective*.

    Parameters
    ----------
    source, samples, fractions : see `stratify`.
    name : of the field whose equal values make a group.
    seed : of a random order of the groups; None: the largest first, which gives the most even sets.

    Raises
    ------
    PartitionError : a set would have no group.
    FieldNotFound, FormatError, DataError : see ``Dataset.split``.
    """
    codes, counts = _encode(source, samples, name)
    order = np.argsort(-counts, kind="stable") if seed is None else permutation(len(counts), check_seed(seed))
    set_of = np.full(len(counts) + 1, UNREAD, np.int32)  # the last one for samples that cannot be read
    deficits = [fraction * int(counts.sum()) for fraction in fractions]
    for number, count in zip(order.tolist(), counts[order].tolist(), strict=True):
        chosen = max(range(len(deficits)), key=deficits.__getitem__)
        set_of[number] = chosen
        deficits[chosen] -= count
    empty = [i for i, fraction in enumerate(fractions) if fraction and i not in set_of]
    if empty:
        raise PartitionError(
            f"set {empty[0] + 1} of {len(fractions)} would have no group",
            field=name,
            expected="at least a group for each set",
            found=f"{len(counts)} groups, the largest of {counts.max(initial=0)} samples",
            remedy="split into fewer or more equal fractions",
        )
    return Assignment(source, samples, len(fractions), _renumbered(codes, set_of))


def divide_at(source: Source, samples: Samples, name: str, borders: Sequence[Any], slid: bool = False) -> Assignment:
    """Assign the samples to sets by a field: below the first border, from it to below the second one, and so on.

    *Collective*.

    Parameters
    ----------
    source, samples : see `stratify`.
    name : of a field of numbers, of times whose units tell from when they count, or of dates as text (ISO 8601).
    borders : ascending, at least one: numbers, or dates as text.
    slid : samples are sequence windows, of whose values that of the first row counts.

    Raises
    ------
    PartitionError : the borders do not ascend, or are of another type than the field.
    FieldNotFound, FormatError, DataError : see ``Dataset.split``.
    """
    field = field_of_values(source.index.raw.fields, name, NO_VALUE, axes=(0, 1) if slid else (0,))
    edges, convert = _edges(field, borders)
    own = np.full(source.block(samples).total, UNREAD, np.int32)

    def assign(positions: Integers, values: Array) -> None:
        own[positions] = np.searchsorted(edges, convert(values), side="right")

    use_values(source, samples, field, assign, VALUELESS, REMEDY)
    return Assignment(source, samples, len(borders) + 1, own)


def _edges(field: Field, borders: Sequence[Any]) -> tuple[Array, Callable[[Array], Array]]:
    """Return the borders as an ascending array, and the function that turns values of the field into such values."""
    borders = [_as_text(border) for border in borders]
    origin = time_origin(field.attributes.get("units"), calendar_of(field.attributes))
    dates = all(isinstance(border, str) for border in borders)
    convert: Callable[[Array], Array] = np.asarray
    if dates and origin is not None:
        found = [time_origin(f"seconds since {border}", origin.calendar) for border in borders]
        seconds = np.array([np.nan if of_border is None else of_border.start for of_border in found])
        edges = (seconds - origin.start) / origin.unit
    elif dates and field.dtype.kind in "SUO":
        edges, convert = _as_dates(np.array(borders, object)), _as_dates
    elif all(isinstance(border, Real) for border in borders) and field.dtype.kind in "iuf":
        edges = np.array(borders, field.dtype if field.dtype.kind == "f" else object)  # rounded as the field
    else:
        edges = np.array([np.nan])
    if not len(edges) or (edges != edges).any() or (edges[1:] <= edges[:-1]).any():
        raise PartitionError(
            "at= has no borders that fit the field",
            field=field.name,
            expected="ascending numbers, or for a field of times ascending dates as text, such as 2015-01-31",
            found=f"at={list(borders)!r}, and the field is {field.description}",
        )
    if field.dtype.kind in "iu":  # float64 does not have all of them, and none reaches a border above the largest
        limits = np.iinfo(field.dtype)
        within = [math.ceil(max(edge, limits.min)) for edge in edges.tolist() if edge <= limits.max]
        edges = np.array(within, field.dtype)
    return edges, convert


def _as_text(border: Any) -> Any:
    """Return a date of NumPy, pandas or Python as text of ISO 8601, in UTC; whatever else it is as it is."""
    if isinstance(border, np.datetime64):
        return str(border.astype("datetime64[us]"))
    if isinstance(border, datetime) and border.tzinfo is not None:
        border = border.astimezone(UTC).replace(tzinfo=None)
    return border.isoformat() if isinstance(border, date) else border


def _as_dates(texts: Array) -> Array:
    plain = [text.decode() if isinstance(text, bytes) else str(text) for text in texts.tolist()]
    try:
        return np.array(plain, "datetime64[us]")
    except ValueError as error:
        raise FormatError("a text is no date", expected="dates of ISO 8601, such as 2015-01-31", found=error) from error


def _encode(source: Source, samples: Samples, name: str) -> tuple[NDArray[np.int32], Integers]:
    """Return the number of the value of each sample of this rank, and the count of each value. *Collective*.

    Returns
    -------
    codes : int32[samples of this rank's block], numbers of the values in ascending order; -1: cannot be read.
    counts : int64[values], samples of all ranks.
    """
    field = field_of_values(source.index.raw.fields, name, NO_VALUE)
    codes = np.full(source.block(samples).total, UNREAD, np.int32)
    known: dict[Any, int] = {}
    own: Counter[Any] = Counter()

    def count(positions: Integers, array: Array) -> None:
        values, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
        plain = [as_value(value) for value in values.tolist()]
        codes[positions] = np.array([known.setdefault(value, len(known)) for value in plain], np.int32)[inverse]
        own.update(dict(zip(plain, counts.tolist(), strict=True)))
        check_number(name, len(own))

    use_values(source, samples, field, count, VALUELESS, REMEDY)
    merged = merged_counts(source.comm, name, own)
    ordered = sorted(merged)
    number = {value: i for i, value in enumerate(ordered)}
    numbers = np.array([*(number[value] for value in known), UNREAD], np.int32)
    return _renumbered(codes, numbers), np.array([merged[value] for value in ordered], np.int64)


def _renumbered(codes: NDArray[np.int32], numbers: NDArray[np.int32]) -> NDArray[np.int32]:
    """Replace each code by the number at its position, and return them; NumPy widens positions to 64 bits."""
    for low in range(0, len(codes), AT_ONCE):
        codes[low : low + AT_ONCE] = numbers[codes[low : low + AT_ONCE]]
    return codes


def _too_many_classes(name: str, classes: int) -> FormatError | None:
    if classes <= MOST_CLASSES:
        return None
    return FormatError(
        "the field has too many different values to stratify by",
        field=name,
        expected=f"at most {MOST_CLASSES:,} classes",
        found=f"{classes:,}",
        remedy="stratify by a field of classes, or keep samples of equal values together with groups=",
    )
