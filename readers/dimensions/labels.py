"""Entries of a coordinate by value: numbers, texts, and dates in the calendar of the coordinate."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from numbers import Integral, Real
from typing import Any

import cftime
import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import FormatError
from matex_data.index.strided import Indices
from matex_data.index.subset import Axis
from matex_data.readers.dimensions.cf import ORIGIN

MOST_SHOWN = 12  # values of a coordinate in an error
DATE_PARTS = re.compile(
    r"(\d{4})(?:-(\d{1,2}))?(?:-(\d{1,2}))?(?:[T ](\d{1,2})(?::(\d{2}))?(?::(\d{2}(?:\.\d+)?))?)?Z?"
)


def is_list(value: Any) -> bool:
    """Return whether a value of ``sel=`` is a list of values."""
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)


def plain(value: Any) -> Any:
    """Return a value of ``sel=`` or ``isel=`` with arrays, also those of xarray and pandas, as lists or single values.

    >>> plain(np.array(850)), plain(slice(np.array([20, 30]), None))
    (850, slice([20, 30], None, None))
    """
    if isinstance(value, slice):
        return slice(*map(plain, (value.start, value.stop, value.step)))
    if not hasattr(value, "__array__"):
        return [plain(one) for one in value] if is_list(value) else value
    array = np.asarray(value)
    if array.dtype.kind in "Mm":
        return list(array) if array.ndim else array[()]
    return array.tolist()


def no_entry(path: str, name: str, found: Any, expected: str) -> FormatError:
    """Return the error of a selection that has nothing, or that is none."""
    return FormatError(
        f"nothing is selected along {name!r}", file=path, field=name, expected=expected, found=repr(found)
    )


@dataclass(frozen=True)
class Labels:
    """Values of a coordinate.

    Parameters
    ----------
    values : decoded, one for each entry.
    attributes : of the decoded values.
    nearest : a value that is not there stands for the nearest one, of two as near ones the larger, as in pandas.
    """

    path: str
    name: str
    values: Array
    attributes: Mapping[str, Any]
    nearest: bool = False

    @property
    def _calendar(self) -> str | None:
        """Calendar of times; None: the values are no times."""
        return str(self.attributes["calendar"]) if self.attributes.get("origin") == ORIGIN else None

    def entries(self, wanted: Any) -> Axis:
        """Return the entries of a value, a list, or a slice."""
        if isinstance(wanted, slice):
            return self._between(wanted)
        values = self._listed(wanted)
        found = tuple(map(self._entry, values, self._equal(values)))
        return found if is_list(wanted) else found[0]

    def samples(self, wanted: Any) -> tuple[Indices, str | None]:
        """Return the entries of the samples, and the fact `LISTED`; other files may have the rest of a list."""
        if isinstance(wanted, slice):
            if wanted.step not in (None, 1):
                raise no_entry(self.path, self.name, wanted, "a slice of samples without a step; windows have stride=")
            return self._between(wanted, empty=True), None
        if self._calendar is not None and isinstance(wanted, str):
            return self._between(slice(wanted, wanted), empty=True), None  # "2015": all samples of the year
        values = self._listed(wanted)
        equal = [entries.tolist() for entries in self._equal(values)]
        found = [n for entries in equal for n in entries]
        if not is_list(wanted):
            return tuple(found), None
        if sorted(set(found)) != found or max(map(len, equal)) > 1:
            raise FormatError(
                f"sel= lists samples of {self.name!r} in another order than theirs, or twice",
                file=self.path,
                field=self.name,
                expected="values in the order of the samples, each once",
                found=repr(wanted),
                remedy="list them in the order of the files; data[[2, 0, 1]] gives samples in any order",
            )
        here = [position for position, entries in enumerate(equal) if entries]
        return tuple(found), " ".join(map(str, [len(values), *here[:1], *here[-1:]]))

    def _listed(self, wanted: Any) -> Sequence[Any]:
        if is_list(wanted) and not len(wanted):
            raise no_entry(self.path, self.name, wanted, self._shown(None))
        values: Sequence[Any] = wanted if is_list(wanted) else [wanted]
        return values

    def _equal(self, wanted: Sequence[Any]) -> list[Integers]:
        """Return the entries that have each of these values."""
        numbers = np.empty(len(wanted), object)  # compared as Python does: exact also where the types differ
        numbers[:] = [self._number(value) for value in wanted]  # of which none is NaN, which a search finds anywhere
        order = np.flatnonzero(self.values == self.values)
        order = order[np.argsort(self.values[order], kind="stable")]
        ascending = self.values[order].astype(object)
        ends = (np.searchsorted(ascending, numbers, side).tolist() for side in ("left", "right"))
        return [order[begin:end] for begin, end in zip(*ends, strict=True)]

    def _entry(self, value: Any, found: Integers) -> int:
        """Return the only entry of those that have a value; the nearest one if there is none, and may be another."""
        if self.nearest and not len(found) and self.values.dtype.kind in "iuf" and len(self.values):
            values = self.values.astype(np.float64)
            distance = np.abs(values - np.float64(self._number(value)))
            near = np.flatnonzero(distance == np.nanmin(distance, initial=np.inf))
            found = near[values[near] == values[near].max(initial=-np.inf)]
        if len(found) != 1:
            raise FormatError(
                f"the coordinate {self.name!r} has {'no' if not len(found) else 'several'} such value",
                file=self.path,
                field=self.name,
                expected=self._shown(value),
                found=repr(value),
                remedy='name a value of the coordinate, or give method="nearest"; isel= takes positions',
            )
        return int(found[0])

    def _shown(self, value: Any) -> str:
        """Return values of the coordinate as text, those nearest to a value if there are many."""
        values = self.values
        if len(values) > MOST_SHOWN and values.dtype.kind in "iuf" and isinstance(value, Real):
            nearest = np.sort(np.argsort(np.abs(values - float(value)), kind="stable")[:MOST_SHOWN])
            return f"one of {len(values)} values, such as {values[nearest].tolist()}"
        shown = values[:MOST_SHOWN].tolist()
        if self._calendar is not None:
            dates = cftime.num2date(shown, f"seconds since {ORIGIN}", self._calendar)
            shown = [str(one) for one in dates]
        more = f" and {len(values) - MOST_SHOWN} more" if len(values) > MOST_SHOWN else ""
        return f"one of {shown}{more}"

    def _number(self, value: Any, end: bool = False) -> Any:
        """Return a value as the coordinate has it. ``end``: of a date, return the end of its period: of "2015" the last
        moment of the year.
        """
        if isinstance(value, Real | np.number | datetime | np.datetime64) and value != value:
            raise FormatError(
                f"sel= has a missing value for the coordinate {self.name!r}",
                file=self.path,
                field=self.name,
                expected="values that the coordinate may have",
                found=repr(value),
            )
        if self._calendar is not None:
            return self._seconds(value, end)
        kind = self.values.dtype.kind
        if kind in "SO":
            if isinstance(value, str | bytes):
                return value.encode() if isinstance(value, str) else value
        elif isinstance(value, Real | np.number):
            if kind == "f":
                return self.values.dtype.type(value)  # 20.1 is equal to the float32 20.1
            return value
        raise FormatError(
            f"sel= has a value of another kind than the coordinate {self.name!r}",
            file=self.path,
            field=self.name,
            expected="texts" if kind in "SO" else "numbers",
            found=repr(value),
        )

    def _seconds(self, value: Any, end: bool) -> float:
        """Return a date as seconds since ``ORIGIN``, in the calendar of the coordinate."""
        if isinstance(value, datetime | np.datetime64 | date):
            value = str(np.array(value, "datetime64[us]"))
        if isinstance(value, cftime.datetime):
            value = value.isoformat()
        match = DATE_PARTS.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise FormatError(
                f"sel= has no date for the coordinate {self.name!r}",
                file=self.path,
                field=self.name,
                expected='dates of ISO 8601, such as "2015", "2015-01-31" or "2015-01-31T12:00"',
                found=repr(value),
            )
        year, month, day, hour, minute, second = match.groups()
        parts = [int(part) if part else None for part in (year, month, day, hour, minute)]
        try:
            begin = cftime.datetime(
                parts[0], parts[1] or 1, parts[2] or 1, parts[3] or 0, parts[4] or 0, calendar=self._calendar
            )
            number = float(cftime.date2num(begin, f"seconds since {ORIGIN}", self._calendar)) + float(second or 0)
            return number + self._period(begin, match) if end else number
        except ValueError as error:
            raise FormatError(
                "sel= has no date of the calendar",
                file=self.path,
                field=self.name,
                expected=self._calendar,
                found=value,
            ) from error

    def _period(self, begin: cftime.datetime, match: re.Match[str]) -> float:
        """Return the seconds from the first to the last microsecond of what a date names: a year, a month, a day."""
        lengths = {6: 1.0, 5: 60.0, 4: 3600.0, 3: 86400.0}
        named = next(number for number in range(6, 0, -1) if match[number])
        if named in lengths:
            return 0.0 if named == 6 and "." in match[6] else lengths[named] - 1e-6
        year, month = begin.year + (named == 1 or begin.month == 12), 1 if named == 1 else begin.month % 12 + 1
        following = cftime.datetime(year, month, 1, calendar=self._calendar)
        return float((following - begin).total_seconds()) - 1e-6

    def _between(self, wanted: slice, empty: bool = False) -> range:
        """Return the entries between two values, both included.

        Along an ascending coordinate the lower value comes first; along a descending one either of them.
        """
        values = self.values
        if values.dtype.kind not in "iuf":
            raise no_entry(self.path, self.name, wanted, "a list of values, since the coordinate has no numbers")
        descending = len(values) > 1 and bool((values[1:] < values[:-1]).all())
        if not descending and not (values[1:] >= values[:-1]).all():
            raise no_entry(self.path, self.name, wanted, "a list of values, since the coordinate is not in order")
        first, last = wanted.start, wanted.stop
        low, high = first, last
        if descending:
            given = [self._number(value) for value in (first, last) if value is not None]
            low, high = (first, last) if len(given) == 2 and given[0] <= given[1] else (last, first)
        chosen = np.ones(len(values), bool)
        if low is not None:
            chosen &= values >= self._number(low)
        if high is not None:
            chosen &= values <= self._number(high, end=True)
        found = np.flatnonzero(chosen)
        if not len(found):
            if empty:
                return range(0)
            raise no_entry(self.path, self.name, wanted, self._shown(first if first is not None else last))
        step = wanted.step or 1
        if not isinstance(step, Integral) or step < 1:
            raise no_entry(self.path, self.name, wanted, "a step of 1 or more")
        return range(int(found[0]), int(found[-1]) + 1, int(step))
