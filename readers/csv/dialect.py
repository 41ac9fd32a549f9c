"""Dialects: how a text is cut into records and fields, and how its first records tell that, and names of columns."""

from __future__ import annotations

import _csv
import csv
import importlib.util
import io
import re
from codecs import BOM_UTF8
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import DecodeError, FormatError, shortened

SPACES = r"\s+"
BLANK, TAB, LF, CR = b" \t\n\r"
UNIT = "\x1f"  # ASCII's own separator of fields, which no text has
SEPARATORS = ("\t", ";", "|", ",", SPACES)  # of equally good ones the first
_COMMON = "\t,"  # those that separate a single record; names contain the others
SHOWN = 8  # cells or names of columns in a message
TYPICAL = 0.5  # share of the records that must have one width for a separator to be accepted
NUMBER = re.compile(r"\s*[-+]?(\d+(\.\d*)?|\.\d+)([eEdD][-+]?\d+)?\s*$|\s*[-+]?(nan|inf|infinity)\s*$", re.IGNORECASE)
DATE = re.compile(r"\s*\d{4}-\d\d-\d\d([ T]\d\d:\d\d.*)?\s*$")

_MARKUP_OR_SCRIPT = re.compile(rb"\s*(<\?xml|<!doctype|<html|#!\s*/)", re.IGNORECASE)
_MARKUP_OR_SETTINGS = re.compile(r"\s*[<{\[]")  # XML without a declaration, JSON, INI
_LOG_TIME = re.compile(r".*\d\d:\d\d:\d\d,\d{3}[^\d,]")  # the comma belongs to the seconds
_CONTROL = bytes({*range(9), *range(14, 32), 127})  # all control characters except white space


@declared
@dataclass(frozen=True)
class Dialect:
    """Separators, quotes, comments and encoding of a text; names and meaning as in ``pandas.read_csv``.

    Parameters
    ----------
    sep : one character; ``"\\s+"`` for any number of blanks and tabs; or characters that separate as they stand, of a
        text without quotes.
    quotechar : None if no character quotes.
    escapechar : makes the next character an ordinary one; None: a quote inside quotes is doubled.
    comment : starts a comment that ends with its line.
    comment_lines : only whole lines are comments.
    decimal : the decimal point.
    thousands : separates the thousands of numbers.
    encoding : of the text, by Python's name.
    """

    sep: str = ","
    quotechar: str | None = '"'
    escapechar: str | None = None
    comment: str | None = None
    comment_lines: bool = False
    decimal: str = "."
    thousands: str | None = None
    encoding: str = "utf-8"

    @property
    def separators(self) -> bytes:
        """Return the bytes of which each ends a field."""
        return b" \t" if self.sep == SPACES else self.delimiter.encode("latin-1")

    @property
    def delimiter(self) -> str:
        """Return the character that separates fields once `single` has been called."""
        return " " if self.sep == SPACES else self.sep if len(self.sep) == 1 else UNIT

    def single(self, text: bytes) -> bytes:
        """Return a text of which one character separates the fields; it begins outside quotes, and has no comments.

        Raises
        ------
        DecodeError : the text has the character that stands for longer separators.
        """
        if len(self.sep) == 1:
            return text
        if self.sep == SPACES:
            return self._single_blanks(np.frombuffer(text, np.uint8)).tobytes()
        if UNIT.encode() in text:
            raise DecodeError(
                f"a text with sep={self.sep!r} contains a control character",
                expected="no byte 0x1f",
                found="one that stands for the separator while the text is cut",
            )
        return text.replace(self.sep.encode(), UNIT.encode())

    def plain_number(self, cell: str) -> str:
        """Return a number as Python writes it."""
        return cell.replace(self.thousands or "", "").replace(self.decimal, ".")

    @property
    def blanks(self) -> bytes:
        """Return the bytes that may stand before the first field of a line and before a comment."""
        return b" \t" if self.sep == SPACES else b" \t".replace(self.separators, b"")

    def parsed(self, text: bytes, encoding: str = "latin-1") -> Iterator[tuple[int, list[str]]]:
        """Yield the line in which each record begins, counted from 1, and its fields, as Python's parser reads them.

        Comments, and lines of blanks, are no records; a quoted field without a character is one, as in pandas.
        """
        decoded = self.single(self.without_comments(text)).decode(encoding, "surrogateescape")
        lines = deque[str](maxlen=1)  # the last one that the parser has taken
        rows: _csv.Reader = _parser().reader(
            (lines.append(line) or line for line in io.StringIO(decoded, newline="")),  # type: ignore[func-returns-value]
            delimiter=self.delimiter,
            quotechar=self.quotechar,
            quoting=csv.QUOTE_MINIMAL if self.quotechar else csv.QUOTE_NONE,
            escapechar=self.escapechar,
        )
        begin = 1
        for fields in rows:
            if lines[0].strip(" \t\r\n") or len(fields) > 1 or "".join(fields).strip(" \t"):
                yield begin, fields
            begin = rows.line_num + 1

    def records(self, text: bytes) -> list[list[str]]:
        """Return the fields of every record, decoded as Latin-1."""
        return [fields for _, fields in self.parsed(text)]

    def without_comments(self, text: bytes) -> bytes:
        """Return a text that begins outside quotes without its comments; its line ends stay."""
        if self.comment is None or self.comment.encode() not in text:
            return text
        kept, position = [], 0
        for begin, end in self.quotes_and_comments(text, False)[1]:
            kept.append(text[position:begin].rstrip(self.blanks))
            position = end
        return b"".join([*kept, text[position:]])

    def quotes_and_comments(self, text: bytes, inside: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Find the quotes that open and close fields, and the comments, one character after the other.

        Parameters
        ----------
        text : begins with a line.
        inside : it begins inside quotes.

        Returns
        -------
        positions of the quotes, which open and close alternately; begin and end of each comment.
        """
        quote, escape, comment = (c.encode() if c else None for c in (self.quotechar, self.escapechar, self.comment))
        before_quote = b"\r\n" + self.separators
        quotes, comments, skip = [], [], 0  # nothing before ``skip`` counts
        pattern = b"|".join(re.escape(c) for c in (quote, comment) if c)
        for match in re.finditer(pattern, text) if pattern else ():
            at = match.start()
            if at < skip:
                continue
            if match[0] == comment:
                if not inside and (not self.comment_lines or self._begins_line(text, at)):
                    ends = [end for end in (text.find(b"\n", at), text.find(b"\r", at)) if end >= 0]
                    skip = min(ends, default=len(text))
                    comments.append((at, skip))
            elif escape and _is_escaped(text, at, escape):
                continue
            elif inside and text[at + 1 : at + 2] == quote:
                skip = at + 2
            elif inside or at == 0 or text[at - 1] in before_quote:
                inside = not inside
                quotes.append(at)
        return quotes, comments

    def field_quotes(self, data: Bytes, inside: bool) -> Integers:
        """Return the positions of the quotes that alternately open and close fields, int64[n].

        Parameters
        ----------
        data, inside : as of ``quotes_and_comments``.
        """
        quotes = self.quotes(data)
        if not len(quotes) or self.all_fit(data, quotes, inside):
            return quotes
        return np.array(self.quotes_and_comments(data.tobytes(), inside)[0], np.int64)

    def quotes(self, data: Bytes) -> Integers:
        """Return the positions of all quotes, int64[n]."""
        return np.empty(0, np.int64) if self.quotechar is None else np.flatnonzero(data == ord(self.quotechar))

    def all_fit(self, data: Bytes, quotes: Integers, inside: bool) -> bool:
        """Return whether every quote that opens a field, if each opens or closes one, stands behind a separator."""
        if self.escapechar is not None or self.comment is not None:
            return False
        opening = quotes[int(inside) :: 2]
        neighbours = byte_set([*self.separators, LF, CR, *(self.quotechar or "").encode()])
        return bool(neighbours[data[opening[opening > 0] - 1]].all())

    def _single_blanks(self, data: Bytes) -> Bytes:
        """Return a text with one blank for a run of blanks and tabs outside quotes, and none at the ends of a line."""
        blank, edge = (data == BLANK) | (data == TAB), (data == LF) | (data == CR)
        quotes = self.field_quotes(data, False)
        if len(quotes):
            inside = np.zeros(len(data), bool)
            inside[quotes] = True
            blank &= ~np.logical_xor.accumulate(inside)
        kept = ~(blank & np.append((blank | edge)[1:], True))
        data, blank, edge = data[kept], blank[kept], edge[kept]
        kept = ~(blank & np.append(True, edge)[:-1])
        simplified: Bytes = np.where(blank, np.uint8(BLANK), data)[kept]
        return simplified

    def _begins_line(self, text: bytes, at: int) -> bool:
        begin = max(text.rfind(b"\n", 0, at), text.rfind(b"\r", 0, at)) + 1
        return not text[begin:at].strip(self.blanks)


def byte_set(codes: Iterable[int]) -> NDArray[np.bool_]:
    """Return for each byte whether it is one of these, bool[256]."""
    table = np.zeros(256, bool)
    table[list(codes)] = True
    return table


def _is_escaped(text: bytes, at: int, escape: bytes) -> bool:
    before = text[max(0, at - 1000) : at]
    return (len(before) - len(before.rstrip(escape))) % 2 == 1


def detect(text: bytes, given: Dialect, fixed: frozenset[str]) -> Dialect:
    """Detect separator and comments of a text from its first records.

    Parameters
    ----------
    text : whole records.
    given : the dialect to start from.
    fixed : names of the properties that the user has given, which stay.
    """
    dialect = given
    if "comment" not in fixed and text.lstrip()[:1] in (b"#", b"%"):
        dialect = replace(dialect, comment=text.lstrip()[:1].decode(), comment_lines=True)
    if "sep" not in fixed:
        possible = [sep for sep in SEPARATORS if sep not in (dialect.decimal, dialect.thousands)]
        best, score = ",", 0.0
        for sep in possible:
            found = _consistency(text, replace(dialect, sep=sep))
            if found >= TYPICAL and found > score:
                best, score = sep, found
            if score == 1:
                break
        dialect = replace(dialect, sep=best)
    return dialect


def _consistency(text: bytes, dialect: Dialect) -> float:
    """Return the share of the records that have the most common width; 0 if that is one field, or blanks part words."""
    if not any(separator in text for separator in dialect.separators):
        return 0.0
    records = dialect.records(text)
    widths = [len(record) for record in records]
    width, count = Counter(widths).most_common(1)[0] if widths else (0, 0)
    if width < 2:
        return 0.0
    if dialect.sep == SPACES:
        cells = (dialect.plain_number(cell) for record in records[1:] or records for cell in record)
        if widths[0] == width - 1 == 1 or not any(map(NUMBER.match, cells)):  # a name above words, such as units
            return 0.0
    return count / len(widths) if len(widths) > 1 or dialect.sep in _COMMON else TYPICAL


def column_names(fields: Sequence[str]) -> list[str]:
    """Return names as pandas makes them: ``"Unnamed: 2"`` for an empty one, ``"x.1"`` for a second ``"x"``."""
    names = [field if field.strip() else f"Unnamed: {i}" for i, field in enumerate(fields)]
    counts: Counter[str] = Counter()
    for i in sorted(range(len(names)), key=lambda i: not fields[i].strip()):  # the names of the file stay as they are
        original = name = names[i]
        count = counts[original]
        while count > 0:
            counts[original] = count + 1
            name = f"{original}.{count}"
            count = count + 1 if name in names else counts[name]
        names[i] = name
        counts[name] = count + 1
    return names


def is_markup_or_script(text: bytes) -> bool:
    """Return whether a text begins as XML, a web page or a script, whatever its name."""
    return _MARKUP_OR_SCRIPT.match(text.removeprefix(BOM_UTF8)) is not None


def is_binary(text: bytes) -> bool:
    """Return whether more than one byte in a hundred, and more than one, is a control character."""
    return _control_count(text) > 1 + len(text) // 100


def _control_count(text: bytes) -> int:
    return len(text) - len(text.translate(None, _CONTROL))


def is_table(text: bytes, whole: bool) -> bool:
    """Return whether one separator cuts all records of a text into the same number of fields, at least two.

    Blanks separate words as well as columns: more than half of such columns must hold numbers.

    Parameters
    ----------
    whole : this is all of the text; otherwise its last record may be cut off.
    """
    text = text.removeprefix(BOM_UTF8)
    decoded = text.decode("latin-1")
    if _control_count(text) or is_markup_or_script(text):
        return False
    if _MARKUP_OR_SETTINGS.match(decoded) or _LOG_TIME.match(decoded):
        return False
    dialect = detect(text, Dialect(), frozenset())
    records = dialect.records(text)[: None if whole else -1]
    if len(records) < 2 or len({len(record) for record in records}) > 1:
        return False
    columns = [column for column in zip(*records, strict=True) if any(field.strip() for field in column)]
    numeric = sum(all(map(NUMBER.match, column[1:])) for column in columns)
    return len(columns) > 1 and (dialect.sep != SPACES or 2 * numeric > len(columns))


@cache
def _parser() -> Any:
    """Return a module of Python's parser for this package alone, with its own limit: a long field is no error."""
    spec = importlib.util.find_spec("_csv")
    assert spec is not None and spec.loader is not None
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    own.field_size_limit(2**31 - 1)
    return own


_BOOLEAN = re.compile(r"\s*(true|false)\s*$", re.IGNORECASE)
_ROW = ("number", "date")  # kinds of a value that texts are not


@dataclass(frozen=True)
class FirstRecord:
    """First record of a text.

    Parameters
    ----------
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
    cell is empty, all of its cells are 0, 1, 2, ..., as pandas numbers columns, or they count years and others do not.

    Parameters
    ----------
    records : the first records, at least one.
    missing : texts that stand for a missing value.
    before : first record of the first file of the data set; None: this is the first file.

    Raises
    ------
    FormatError : the numbers rise strictly, and those of the next record do not: wavelengths are such names.

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
    if any(_differs(one, {kind(record[i]) for record in below if i < len(record)}) for i, one in enumerate(kinds)):
        named = True
    elif not numeric:
        named = "text" in kinds and set(kinds) <= {"text", ""}
    elif before is not None and not before.named:
        named = False
    else:
        cells = [cell.strip() for cell in first]
        named = (
            not kinds[0]
            or cells == [str(i) for i in range(len(cells))]
            or before == FirstRecord(tuple(first), True)
            or (_count_years(numbers(first)) and not all(map(_is_year, chain.from_iterable(map(numbers, below)))))
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
    values = set(below) - ({"", "bool"} if kind == "text" else {""})
    return kind not in ("", "bool") and bool(values) and values <= set(_ROW) - {kind}


def _count_years(numbers: Sequence[float]) -> bool:
    """Return whether numbers, three or more, are consecutive years: 1960, 1961, 1962."""
    return len(numbers) > 2 and _is_year(numbers[0]) and all(high - low == 1 for low, high in pairwise(numbers))


def _is_year(number: float) -> bool:
    return 1000 <= number < 3000 and number.is_integer()


def _rise(numbers: Sequence[float]) -> bool:
    return len(numbers) > 1 and all(low < high for low, high in pairwise(numbers))


def _shown(record: Sequence[str]) -> str:
    """Return the first cells of a record as text for a message."""
    return ", ".join(shortened(map(repr, record), SHOWN))
