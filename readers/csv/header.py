"""Header: whether the first record of a text names the columns."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from matex_data.errors import FormatError
from matex_data.readers.csv.dialect import DATE, NUMBER, Dialect

_BOOLEAN = re.compile(r"\s*(true|false)\s*$", re.IGNORECASE)
_ROW = ("number", "date")  # kinds of a value that texts are not


@dataclass(frozen=True)
class FirstRecord:
    """First record of a text.

    Parameters
    ----------
    cells : of the record.
    named : it names the columns; otherwise it is a sample.
    """

    cells: tuple[str, ...]
    named: bool


def first_record(
    path: str,
    records: Sequence[Sequence[str]],
    dialect: Dialect,
    missing: Collection[str],
    before: FirstRecord | None = None,
) -> FirstRecord:
    """Return the first record of a text, and whether it names the columns.

    Text names columns, and so does text or a date above numbers. A record with numbers is a sample, unless its first
    cell is empty, or all of its cells are 0, 1, 2, ..., as pandas numbers columns.

    Parameters
    ----------
    path : of the file, for the error.
    records : the first records, at least one.
    dialect : of the text.
    missing : texts that stand for a missing value.
    before : first record of the first file of the data set; None: this is the first file.

    Raises
    ------
    FormatError : the numbers rise strictly, and those of the next record do not: wavelengths and years are such names.

    Examples
    --------
    >>> tables = ["x,y", "3,4"], ["0,1", "3,4"], [",7,5", "a,3,4"], ["1,2", "3,4"], ["5.1,3.5,setosa", "4.9,3.0,setosa"]
    >>> records = [[line.split(",") for line in table] for table in tables]
    >>> [first_record("a.csv", table, Dialect(), [""]).named for table in records]
    [True, True, True, False, False]
    """
    first, below = list(records[0]), records[1:]
    if below and {len(record) for record in below} == {len(first) + 1} and any(record[-1].strip() for record in below):
        first = ["", *first]  # as R writes row labels

    def kind(cell: str) -> str:
        if not cell.strip() or cell in missing:
            return ""
        if NUMBER.match(dialect.plain_number(cell)):
            return "number"
        return "date" if DATE.match(cell) else "bool" if _BOOLEAN.match(cell) else "text"

    def numbers(record: Sequence[str]) -> list[float]:
        plain = [dialect.plain_number(record[i]) for i in numeric if i < len(record) and kind(record[i]) == "number"]
        return [float(number.lower().replace("d", "e")) for number in plain]

    kinds = [kind(cell) for cell in first]
    numeric = [i for i, one in enumerate(kinds) if one == "number"]
    columns = [{kind(record[i]) for record in below if i < len(record)} - {""} for i in range(len(first))]
    if any(_differs(one, values) for one, values in zip(kinds, columns, strict=True)):
        named = True
    elif not numeric:
        named = "text" in kinds and set(kinds) <= {"text", ""}
    elif before is not None and not before.named:
        named = False
    else:
        cells = [cell.strip() for cell in first]
        named = (
            not kinds[0] or cells == [str(i) for i in range(len(cells))] or before == FirstRecord(tuple(first), True)
        )
        if not named and _rise(numbers(first)) and below and not _rise(numbers(below[0])):
            raise FormatError(
                "the first record may hold the names of the columns or values, which its file does not tell",
                file=path,
                expected="numbers that do not rise, or that rise in the next record as well",
                found=f"{_shown(first)} above {_shown(below[0])}",
                remedy="give header=0 if the record holds names, header=None if it holds values",
            )
    return FirstRecord(tuple(first), named)


def _differs(kind: str, below: Collection[str]) -> bool:
    """Return whether a cell cannot be a value of its column: text or a date above numbers, a number above dates."""
    values = set(below) - {"bool"} if kind == "text" else set(below)
    return kind not in ("", "bool") and bool(values) and values <= set(_ROW) - {kind}


def _rise(numbers: Sequence[float]) -> bool:
    return len(numbers) > 1 and all(low < high for low, high in pairwise(numbers))


def _shown(record: Sequence[str]) -> str:
    """Return the first cells of a record as text for a message."""
    return ", ".join(map(repr, record[:6])) + (", ..." if len(record) > 6 else "")
