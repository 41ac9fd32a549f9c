"""How a text is cut into records and fields: told by its first records, or by the user."""

from __future__ import annotations

import _csv
import csv
import io
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a long field is no error

SPACES = r"\s+"
SEPARATORS = ("\t", ";", "|", ",", "^", SPACES)  # of equally good ones the first
TYPICAL = 0.5  # of the records have to be of one width, for a separator to be believed
NUMBER = re.compile(r"\s*[-+]?(\d+(\.\d*)?|\.\d+)([eEdD][-+]?\d+)?\s*$|\s*[-+]?(nan|inf|infinity)\s*$", re.IGNORECASE)
COMMA_NUMBER = re.compile(r"\s*[-+]?\d*,\d+([eE][-+]?\d+)?\s*$")
THOUSANDS = re.compile(r"\s*[-+]?[1-9]\d{0,2},\d{3}\s*$")  # what as well may be a whole number
ESCAPED = re.compile(r'"[^"\n]*[^"\\]\\"[^",;|\t\r\n]')  # within quotes; a doubled one it is not
DATE = re.compile(r"\s*\d{4}-\d\d-\d\d([ T]\d\d:\d\d.*)?\s*$")


@dataclass(frozen=True)
class Dialect:
    """How fields are separated, quoted and written; names and meaning as in ``pandas.read_csv``.

    Parameters
    ----------
    sep : one character, or ``"\\s+"`` for any number of blanks and tabs.
    quotechar : None if no character quotes.
    escapechar : makes the next character an ordinary one; None: a quote within quotes is doubled.
    comment : the rest of the line after it does not count.
    comment_lines : whether ``comment`` counts only at the beginning of a line.
    decimal : the decimal point.
    encoding : of the text.
    """

    sep: str = ","
    quotechar: str | None = '"'
    escapechar: str | None = None
    comment: str | None = None
    comment_lines: bool = False
    decimal: str = "."
    encoding: str = "utf-8"

    @property
    def separators(self) -> bytes:
        """The bytes of which each ends a field."""
        return b" \t" if self.sep == SPACES else self.sep.encode("latin-1")

    def records(self, text: str) -> list[list[str]]:
        """The fields of every record of a text; a blank line has none."""
        return [self.fields(record) for record in self.reader(text)]

    def reader(self, text: str) -> _csv.Reader:
        """Python's own parser over a text in this dialect."""
        spaced = self.sep == SPACES
        return csv.reader(
            io.StringIO(text.replace("\t", " ") if spaced else text, newline=""),
            delimiter=" " if spaced else self.sep,
            quotechar=self.quotechar,
            quoting=csv.QUOTE_MINIMAL if self.quotechar else csv.QUOTE_NONE,
            escapechar=self.escapechar,
            skipinitialspace=spaced,
        )

    def fields(self, fields: list[str]) -> list[str]:
        """Without what a comment or blanks at the end have left behind."""
        if self.comment is not None:
            at = next((i for i, field in enumerate(fields) if self.comment in field), None)
            if at is not None and self.comment_lines:
                fields = [] if fields[0].lstrip().startswith(self.comment) else fields
            elif at is not None:
                rest = fields[at].split(self.comment)[0]
                fields = [*fields[:at], *([rest] if rest.strip() or at else [])]
        if self.sep == SPACES and fields and not fields[-1]:
            fields = fields[:-1]
        return [] if len(fields) == 1 and not fields[0].strip() else fields


def detect(text: str, given: Dialect, fixed: frozenset[str]) -> Dialect:
    """The dialect of a text, from its first records.

    Parameters
    ----------
    text : whole records.
    given : what the user has said, where its name is in ``fixed``.
    """
    dialect = given
    if "comment" not in fixed:
        first = text.lstrip()[:1]
        dialect = replace(dialect, comment=first if first in ("#", "%") else None, comment_lines=True)
    if "escapechar" not in fixed and ESCAPED.search(text):
        dialect = _better(text, dialect, replace(dialect, escapechar="\\"), fixed)
    if "sep" not in fixed:
        dialect = replace(dialect, sep=max(SEPARATORS, key=lambda sep: _consistency(text, replace(dialect, sep=sep))))
        if _consistency(text, dialect) < TYPICAL:
            dialect = replace(dialect, sep=",")
    if "decimal" not in fixed and dialect.sep != ",":
        fields = [field for record in dialect.records(text)[1:] for field in record]
        commas = sum(COMMA_NUMBER.match(field) is not None and not THOUSANDS.match(field) for field in fields)
        points = sum("." in field and NUMBER.match(field) is not None for field in fields)
        dialect = replace(dialect, decimal="," if commas > points else ".")
    return dialect


def _better(text: str, plain: Dialect, other: Dialect, fixed: frozenset[str]) -> Dialect:
    separators = SEPARATORS if "sep" not in fixed else (plain.sep,)
    scores = [max(_consistency(text, replace(d, sep=sep)) for sep in separators) for d in (plain, other)]
    return other if scores[1] >= scores[0] else plain


def _consistency(text: str, dialect: Dialect) -> float:
    """Share of the records that are as wide as most; 0 if these have one field."""
    widths = [len(record) for record in dialect.records(text) if record]
    width, count = Counter(widths).most_common(1)[0] if widths else (0, 0)
    return count / len(widths) if width > 1 else 0.0


def has_header(records: Sequence[Sequence[str]], decimal: str = ".") -> bool:
    """Whether the first record names the columns: it is all text, or text where numbers or dates follow."""
    first, rest = records[0], records[1:]
    values = [_is_value(field, decimal) for field in first]
    for column, value in enumerate(values):
        below = [record[column] for record in rest if column < len(record) and record[column].strip()]
        if not value and first[column].strip() and below and all(_is_value(field, decimal) for field in below):
            return True
    return not any(values)


def _is_value(field: str, decimal: str) -> bool:
    return NUMBER.match(field.replace(decimal, ".")) is not None or DATE.match(field) is not None


def column_names(fields: Sequence[str]) -> list[str]:
    """Names as pandas makes them: ``"Unnamed: 2"`` where there is none, ``"x.1"`` for a second ``"x"``."""
    names: list[str] = []
    taken = set(fields)
    seen: Counter[str] = Counter()
    for i, field in enumerate(fields):
        name = field if field.strip() else f"Unnamed: {i}"
        base = name
        while seen[name]:
            seen[base] += 1
            name = f"{base}.{seen[base] - 1}"
            while name in taken and not seen[name]:
                seen[base] += 1
                name = f"{base}.{seen[base] - 1}"
        seen[name] += 1
        names.append(name)
    return names
