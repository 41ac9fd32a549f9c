"""Header: whether the first record of a text names the columns, decided by evidence alone."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from matex_data.errors import FormatError
from matex_data.locks import cached_property
from matex_data.readers.csv.dialect import DATE, NUMBER

SORTED_NAMES = 10  # so many sorted numbers are no chance: one in 1.8 million random records has them
FEW = 5  # of fewer numbers one random record in twelve, or more, is sorted
STEPS = 4  # numbers whose equal steps are no chance
PRECISE = 5  # decimals, that hardly a name has
_BOOLEAN = re.compile(r"\s*(true|false)\s*$", re.IGNORECASE)
_WHOLE = re.compile(r"\s*\d+\s*$")
_WRITTEN = re.compile(r"\s*[-+]?\d*\.?(\d*)(.*?)\s*$")


def has_header(path: str, records: Sequence[Sequence[str]], decimal: str, missing: Collection[str]) -> bool:
    """Return whether the first record names the columns.

    It does if it is text, or if it differs from the records below as names differ from values: text above numbers, an
    empty first cell above row labels, whole numbers in equal steps above fractions. It does not if it has what names
    have not: equal cells, missing ones, a text that the column repeats, fractions that are not sorted.

    Parameters
    ----------
    path : of the file, for the message.
    records : the first records, at least one; the more of them, the more evidence.
    decimal : the decimal point.
    missing : texts that stand for a missing value.

    Raises
    ------
    FormatError : there is no evidence, or evidence for both.

    Examples
    --------
    >>> has_header("a.csv", [["", "0", "1"], ["0", "0.5", "7"], ["1", "0.25", "9"]], ".", [""])
    True
    >>> has_header("a.csv", [["0.5", "7", "1"], ["0.25", "9", "1"]], ".", [""])
    False
    """
    first, below = list(records[0]), records[1:]
    if below and {len(record) for record in below} == {len(first) + 1} and any(record[-1].strip() for record in below):
        first = ["", *first]  # as R writes row labels
    columns = [
        _Column(cell, [record[i] for record in below if i < len(record)], decimal, frozenset(missing))
        for i, cell in enumerate(first)
    ]
    used = [column for column in columns if column.kind or column.values]  # others are separators at the ends of lines
    kinds = {column.kind for column in used} - {""}
    if any(column.differs for column in used) or kinds == {"text"}:
        return True
    if used and not used[0].kind and kinds and used[0].counts_from_zero:
        return True
    named, valued = _like_names(used), _like_values(used, first in map(list, below))
    if named == valued:
        raise FormatError(
            "the first record may hold the names of the columns or values, which its file does not tell",
            file=path,
            expected="names such as texts above numbers, or values such as those of the records below",
            found=f"{_shown(first)} above {_shown(below[0]) if below else 'no record'}",
            remedy="give header=0 if the record holds names, header=None if it holds values",
        )
    return named


def _shown(record: Sequence[str]) -> str:
    """Return the first fields of a record as text for a message."""
    return ", ".join(map(repr, record[:6])) + (", ..." if len(record) > 6 else "")


@dataclass(frozen=True)
class _Column:
    """Cell of the first record, and the column below it.

    Parameters
    ----------
    cell : of the first record.
    below : cells of the other records, missing ones included.
    decimal : the decimal point.
    missing : texts that stand for a missing value.
    """

    cell: str
    below: list[str]
    decimal: str
    missing: frozenset[str]

    def is_number(self, cell: str) -> bool:
        """Return whether a cell holds a number."""
        return self._kind(cell) == "number"

    def _kind(self, cell: str) -> str:
        """Return "number", "date", "bool" or "text"; "" for a missing value."""
        if not cell.strip() or cell in self.missing:
            return ""
        if NUMBER.match(cell.replace(self.decimal, ".")):
            return "number"
        return "date" if DATE.match(cell) else "bool" if _BOOLEAN.match(cell) else "text"

    @cached_property
    def kind(self) -> str:
        """Kind of the cell of the first record."""
        return self._kind(self.cell)

    @cached_property
    def values(self) -> list[str]:
        """Cells below that are not missing."""
        return [cell for cell in self.below if self._kind(cell)]

    @cached_property
    def kinds(self) -> set[str]:
        """Kinds of the values below."""
        return {self._kind(cell) for cell in self.values}

    @property
    def differs(self) -> bool:
        """True if the cell cannot be a value of its column: text or a date above numbers, a number above dates."""
        kinds = self.kinds - {"bool"} if self.kind == "text" else self.kinds
        return bool(self.kind and self.kinds) and self.kind != "bool" and not kinds & {self.kind, "text", "bool"}

    def number(self, cell: str) -> float:
        """Return the number that a cell holds."""
        return float(cell.strip().replace(self.decimal, ".").lower().replace("d", "e"))

    @cached_property
    def numbers(self) -> list[float]:
        """Numbers below."""
        return [self.number(cell) for cell in self.values if self.is_number(cell)]

    @property
    def counts_from_zero(self) -> bool:
        """True if the column is the index of a table: 0, 1, 2, ..."""
        return bool(self.numbers) and self.numbers == list(range(len(self.below)))

    @property
    def labels(self) -> bool:
        """True if all cells below are present and differ, as labels of rows do."""
        return len(set(self.values)) == len(self.below) > 1

    @property
    def whole(self) -> bool:
        """True if the cell is written as a whole number without a sign."""
        return _WHOLE.match(self.cell) is not None

    def form(self, cell: str) -> tuple[int, bool]:
        """Return the number of decimals of a number, and whether it has an exponent."""
        written = _WRITTEN.match(cell.replace(self.decimal, "."))
        return (len(written[1]), bool(written[2])) if written else (0, False)

    @cached_property
    def forms(self) -> set[tuple[int, bool]]:
        """Forms of the numbers below."""
        return {self.form(cell) for cell in self.values if self.is_number(cell)}

    @property
    def measured(self) -> bool:
        """True if all values below are numbers that are written with decimals or exponents."""
        return self.kinds == {"number"} and (0, False) not in self.forms

    @property
    def keeps_zeros(self) -> bool:
        """True if the writer of the column does not strip zeros behind the point: 3.0, 2.50."""
        return self.measured and any(self.decimal in cell and cell.strip().endswith("0") for cell in self.values)

    @property
    def fraction(self) -> bool:
        """True if the cell is a number that is written with decimals or an exponent."""
        return self.kind == "number" and self.form(self.cell) != (0, False)

    @property
    def has_form(self) -> bool:
        """True if the cell is written with as many decimals as the numbers below, or with an exponent as they are."""
        decimals, exponent = self.form(self.cell)
        counts = [count for count, _ in self.forms]
        return bool(counts) and min(counts) <= decimals <= max(counts) and exponent in {e for _, e in self.forms}

    @property
    def precise(self) -> bool:
        """True if the cell is written with more digits than names have."""
        decimals, exponent = self.form(self.cell)
        return exponent or decimals >= PRECISE

    @property
    def continues(self) -> bool:
        """True if the column goes on from the cell in about equal steps, as times and row numbers do."""
        if len(self.numbers) < STEPS or len(self.numbers) < len(self.values):
            return False
        first, *steps = [abs(b - a) for a, b in pairwise([self.number(self.cell), *self.numbers])]
        least, most = min(steps), max(steps)
        even = least > 0 and most <= 1.5 * least and least * (1 - 1e-6) <= first <= most * (1 + 1e-6)
        return even and _is_sorted([self.number(self.cell), *self.numbers])

    @property
    def fits(self) -> bool:
        """True if the number lies in the range of those below, or no farther from the next one than these lie apart."""
        value, others = self.number(self.cell), [number for number in self.numbers if abs(number) < float("inf")]
        if len(others) < 2:
            return False
        step = max(abs(b - a) for a, b in pairwise(others))
        return min(others) <= value <= max(others) or abs(value - others[0]) <= step


def _like_names(columns: Sequence[_Column]) -> bool:
    """Return whether the first record has what names have and values have not."""
    lead = _empty_in_front(columns)
    numbers = [column for column in columns if column.kind == "number"]
    if lead == 1 and columns[0].labels and all(column.kind for column in columns[1:]):
        return True
    if not numbers or any(column.kind not in ("number", "text") for column in columns[lead:]):
        return False
    values = [column.number(column.cell) for column in numbers]
    if all(column.whole for column in numbers) and _whole_like_names(numbers, values):
        return True
    if len(values) < SORTED_NAMES or not (_counts(values) or _sorted_like_names(numbers, values)):
        return False
    records = zip(*(column.below for column in columns if column.kinds == {"number"}), strict=False)
    others = [[numbers[0].number(cell) for cell in record if numbers[0].is_number(cell)] for record in records]
    return not any(_is_sorted(other) for other in others)


def _whole_like_names(numbers: Sequence[_Column], values: Sequence[float]) -> bool:
    """Return whether whole numbers count, or are as years, above other texts or above measurements."""
    counted, even = _counts(values), len(values) > 2 and _evenly(values)
    if counted and len(values) > 1 and any(column.kinds == {"text"} for column in numbers):
        return True
    if (counted or even) and any(column.keeps_zeros for column in numbers):
        return True
    above_measurements = 2 * sum(column.measured for column in numbers) >= len(numbers)
    return above_measurements and ((counted and len(values) >= 3) or (even and len(values) >= 4))


def _sorted_like_names(numbers: Sequence[_Column], values: Sequence[float]) -> bool:
    """Return whether numbers are sorted, written as Python writes them, and mostly beyond the values below."""
    written = all(
        column.cell.strip() in (repr(value), f"{value:.0f}") for column, value in zip(numbers, values, strict=True)
    )
    return written and _is_sorted(values) and 2 * sum(column.fits for column in numbers) < len(numbers)


def _like_values(columns: Sequence[_Column], repeated: bool) -> bool:
    """Return whether the first record has what values have and names have not.

    Parameters
    ----------
    columns : those that hold anything.
    repeated : another record is equal to the first one, as in joined files with a header each.
    """
    if not repeated and any(column.kind == "text" and column.cell in column.values for column in columns):
        return True
    if any(column.kind in ("date", "bool") and column.kind in column.kinds for column in columns):
        return True
    lead = _empty_in_front(columns)
    if any(not column.kind for column in columns[lead:]):
        return True
    numbers = [column for column in columns if column.kind == "number"]
    if lead == 1 and columns[0].labels and any(column.fraction for column in numbers):
        return all(column.fits for column in numbers)
    return bool(numbers) and _numbers_like_values(numbers, [column.number(column.cell) for column in numbers])


def _numbers_like_values(numbers: Sequence[_Column], values: Sequence[float]) -> bool:
    """Return whether numbers are no names: two are equal, or fractions are not sorted, or written like those below."""
    if all(column.whole for column in numbers) and _counts(values):
        return False
    if len(set(values)) < len(values) or any(column.continues for column in numbers):
        return True
    fractions = [column for column in numbers if column.fraction]
    if any(column.forms == {(0, False)} for column in fractions):
        return False
    if not _is_sorted(values):
        return bool(fractions) or min(values) < 0
    precise = bool(fractions) and all(column.precise for column in fractions)
    return len(values) < FEW and precise and all(column.has_form and column.fits for column in numbers)


def _empty_in_front(columns: Sequence[_Column]) -> int:
    """Return the number of empty cells in front of the first record: the names of row labels are often empty."""
    return next((i for i, column in enumerate(columns) if column.kind), 0)


def _counts(values: Sequence[float]) -> bool:
    """Return whether numbers count from 0 or 1, or are the names of joined tables, of which each counts from 0."""
    if list(values) in (list(range(len(values))), list(range(1, len(values) + 1))):
        return True
    starts = [i for i, value in enumerate(values) if value == 0]
    runs = [list(values[a:b]) for a, b in pairwise([*starts, len(values)])]
    joined = bool(starts) and starts[0] == 0 and all(run == list(range(len(run))) for run in runs)
    return joined and len(runs[0]) >= max(3, len(values) / 2)


def _evenly(values: Sequence[float]) -> bool:
    """Return whether numbers are sorted in equal steps."""
    steps = [b - a for a, b in pairwise(values)]
    return _is_sorted(values) and all(abs(step - steps[0]) <= 1e-6 * abs(steps[0]) for step in steps)


def _is_sorted(values: Sequence[float]) -> bool:
    """Return whether numbers strictly ascend or strictly descend."""
    pairs = list(pairwise(values))
    return all(a < b for a, b in pairs) or all(a > b for a, b in pairs)
