"""Options of the reader of text tables, by the names of ``pandas.read_csv``, checked once."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, get_type_hints

from matex_data.errors import FormatError
from matex_data.readers.csv.dialect import NUMBER, SPACES, Dialect
from matex_data.readers.options import check_names, check_types

INFER = ("sample", "full")
MISSING = (
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A"),
    *("NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
)
"""Texts that stand for a missing value in pandas."""
BOOLEANS = {"True": True, "TRUE": True, "true": True, "False": False, "FALSE": False, "false": False}
_ASCII = bytes(range(128)) + b"\x1b$B"  # by which a text is cut; what begins Japanese characters in ISO 2022


@dataclass(frozen=True)
class CsvOptions:
    """Options of the reader, with the meaning that they have in ``pandas.read_csv`` unless noted.

    Parameters
    ----------
    sep, quotechar, escapechar, comment, decimal, thousands, encoding : of the dialect. Separator, comments and encoding
        are detected where they are None.
    header : "infer": see `header.first_record`; None: no names; a number: the record with the names.
    names : of all columns; without ``header`` there is no record with names.
    usecols : columns by name or number; None: all.
    dtype : one type, or a dict of types by column.
    na_values, keep_default_na : texts that stand for a missing value.
    skiprows : lines to skip at the beginning.
    parse_dates : deliver times in ISO 8601, or in ``date_format``, as seconds; otherwise as texts.
    infer : "sample": infer types from blocks spread over a large file; "full": from every value.
    """

    sep: str | None = None
    quotechar: str | None = '"'
    escapechar: str | None = None
    comment: str | None = None
    decimal: str | None = None
    thousands: str | None = None
    encoding: str | None = None
    header: int | str | None = "infer"
    names: Sequence[str] | None = None
    usecols: Sequence[str | int] | None = None
    dtype: Any = None
    na_values: str | float | Sequence[Any] | None = None
    keep_default_na: bool = True
    skiprows: int = 0
    parse_dates: bool = True
    date_format: str | None = None
    infer: str = "sample"

    @property
    def fixed(self) -> frozenset[str]:
        """Return the properties of the dialect that the user has given."""
        names = ("sep", "escapechar", "comment", "decimal", "thousands", "encoding")
        return frozenset(name for name in names if getattr(self, name))

    @property
    def dialect(self) -> Dialect:
        """Return the dialect as far as it is known without a file."""
        given = {name: getattr(self, name) for name in self.fixed}
        quotechar = None if self.sep != SPACES and len(self.sep or "") > 1 else self.quotechar or None
        return Dialect(**{**given, "quotechar": quotechar, "encoding": self.encoding or "utf-8"})

    @property
    def missing_texts(self) -> tuple[str, ...]:
        """Return all texts that stand for a missing value; a whole number also as ``"5"`` and ``"5.0"``."""
        given: Any = () if self.na_values is None else self.na_values
        added = [given] if isinstance(given, str | Real) else list(given)
        texts = [*(MISSING if self.keep_default_na else ()), *map(str, added)]
        whole = [int(number) for number in numbers(texts) if number.is_integer()]
        return tuple(dict.fromkeys([*texts, *map(str, whole), *(f"{number}.0" for number in whole)]))

    def requested_dtype(self, name: str) -> Any:
        """Return the type that the user requests for a column; None if there is none."""
        return self.dtype.get(name) if isinstance(self.dtype, Mapping) else self.dtype


def numbers(texts: Iterable[str]) -> list[float]:
    """Return the numbers among texts; a column of floats lacks them however they are written there."""
    written = [text for text in texts if NUMBER.match(text) and not set(text) & set("dD")]
    return [float(text) for text in written if not math.isnan(float(text))]


def check_options(given: Mapping[str, Any]) -> CsvOptions:
    """Check the options that a user has given.

    Raises
    ------
    FormatError : there is no such option, or it has no such value.
    """
    hints = {**get_type_hints(CsvOptions), "delimiter": str | None, "delim_whitespace": bool}
    check_names("csv", given, list(hints))
    check_types(given, hints)
    given = dict(given)
    if "delimiter" in given:
        given["sep"] = given.pop("delimiter")
    if given.pop("delim_whitespace", False):
        given["sep"] = SPACES
    options = CsvOptions(**given)
    if options.infer not in INFER:
        raise _bad_value("infer", INFER, options.infer)
    for name in ("quotechar", "escapechar", "comment", "decimal", "thousands"):
        value = getattr(options, name)
        if value and (len(value) != 1 or not value.isascii()):
            raise _bad_value(name, "one ASCII character", value)
    sep = options.sep or ""
    if not sep.isascii() or set(sep) & set("\r\n\0") or (len(sep) > 1 and "\\" in sep and sep != SPACES):
        raise _bad_value("sep", rf"ASCII characters as they stand in the text, or {SPACES!r}", sep)
    if options.thousands and options.thousands == (options.decimal or "."):
        raise _bad_value("thousands", "another character than the decimal point", options.thousands)
    if options.skiprows < 0:
        raise _bad_value("skiprows", "a number of lines", options.skiprows)
    if "%f" in (options.date_format or ""):
        raise _bad_value("date_format", "no %f: fractions of seconds are read in ISO 8601 alone", options.date_format)
    if options.header not in ("infer", None) and (isinstance(options.header, str) or options.header < 0):
        raise _bad_value("header", "'infer', None or the number of a record", options.header)
    if options.names is not None and len({str(name) for name in options.names}) < len(options.names):
        raise _bad_value("names", "different names", options.names)
    return replace(options, encoding=_checked_encoding(options.encoding))


def _checked_encoding(name: str | None) -> str | None:
    """Return an encoding by Python's name, without the variant that has a byte order mark."""
    if name is None:
        return None
    try:
        found = codecs.lookup(name).name
        usable = found.startswith(("utf-16", "utf-32")) or _ASCII.decode(found, "replace") == _ASCII.decode()
    except LookupError as error:
        raise _bad_value("encoding", "the name of an encoding of Python", name) from error
    if not usable:
        raise _bad_value("encoding", "one that contains ASCII, or UTF-16 or UTF-32", name)
    return "utf-8" if found in ("utf-8-sig", "ascii") else found


def _bad_value(name: str, expected: object, found: object) -> FormatError:
    return FormatError(f"the option {name}= has no such value", expected=expected, found=repr(found))
