"""What a user may say about text files, by the names of ``pandas.read_csv``; checked once."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, get_type_hints

from matex_data.errors import FormatError
from matex_data.readers.csv.dialect import SPACES, Dialect
from matex_data.readers.csv.parse import MISSING, numbers
from matex_data.readers.options import check_names, check_types

SHORT_ROWS = ("missing", "error")
INFER = ("sample", "full")
ASCII = "\t\n\r '+,-./0123456789:;ABCXYZ^_abcxyz|" + '"'  # what a text is cut by


@dataclass(frozen=True)
class Options:
    """Options of the reader; their meaning, where nothing else is said, is that of ``pandas.read_csv``.

    Parameters
    ----------
    sep, quotechar, escapechar, comment, decimal, encoding : of the dialect; what is not given is detected.
    header : "infer": the first record if it looks like names; None: no names; a number: of the record with the names.
    names : of the columns; then there is no header unless ``header`` says so.
    usecols : columns by name or number; None: all.
    dtype : one type, or a dict of types by column.
    na_values, keep_default_na : texts that stand for a missing value.
    skiprows : lines at the beginning that do not count.
    parse_dates : whether times in ISO 8601, or in ``date_format``, become seconds; else they stay texts.
    infer : "sample": types follow from parts of large files; "full": from every value.
    short_rows : "missing": the fields that a record lacks are missing; "error": each record has to have all.
    """

    sep: str | None = None
    quotechar: str | None = '"'
    escapechar: str | None = None
    comment: str | None = None
    decimal: str | None = None
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
    short_rows: str = "missing"

    @property
    def fixed(self) -> frozenset[str]:
        """Properties of the dialect that the user has given."""
        return frozenset(n for n in ("sep", "escapechar", "comment", "decimal", "encoding") if getattr(self, n))

    @property
    def dialect(self) -> Dialect:
        """What is known of the dialect before looking at a file."""
        given = {name: getattr(self, name) for name in self.fixed}
        return Dialect(**{**given, "quotechar": self.quotechar or None, "encoding": self.encoding or "utf-8"})

    @property
    def missing_texts(self) -> tuple[str, ...]:
        """All texts that stand for a missing value."""
        given: Any = () if self.na_values is None else self.na_values
        more = [given] if isinstance(given, str | Real) else list(given)
        texts = [*(MISSING if self.keep_default_na else ()), *map(str, more)]
        whole = [int(number) for number in numbers(texts) if number.is_integer()]
        return tuple(dict.fromkeys([*texts, *map(str, whole), *(f"{number}.0" for number in whole)]))

    def wish(self, name: str) -> Any:
        """The type that the user wants for a column; None: none in particular."""
        return self.dtype.get(name) if isinstance(self.dtype, Mapping) else self.dtype

    def has_type(self, name: str) -> bool:
        """Whether the user has said which type the column has."""
        return self.wish(name) is not None


def checked(given: Mapping[str, Any]) -> Options:
    """The options.

    Raises
    ------
    FormatError : there is no such option, or it has no such value.
    """
    hints = {**get_type_hints(Options), "delimiter": str | None, "delim_whitespace": bool}
    check_names("csv", given, list(hints))
    check_types(given, hints)
    given = dict(given)
    if "delimiter" in given:
        given["sep"] = given.pop("delimiter")
    if given.pop("delim_whitespace", False):
        given["sep"] = SPACES
    options = Options(**given)
    for name, allowed in (("infer", INFER), ("short_rows", SHORT_ROWS)):
        if getattr(options, name) not in allowed:
            raise _bad(name, allowed, getattr(options, name))
    for name in ("sep", "quotechar", "escapechar", "comment", "decimal"):
        value = getattr(options, name)
        if value and value != SPACES and (len(value) != 1 or not value.isascii()):
            raise _bad(name, "one ASCII character" + (rf", or {SPACES!r}" if name == "sep" else ""), value)
    if options.skiprows < 0:
        raise _bad("skiprows", "a number of lines", options.skiprows)
    if options.header not in ("infer", None) and (isinstance(options.header, str) or options.header < 0):
        raise _bad("header", "'infer', None or the number of a record", options.header)
    if options.names is not None and len({str(name) for name in options.names}) < len(options.names):
        raise _bad("names", "different names", options.names)
    return replace(options, encoding=_encoding(options.encoding))


def _encoding(name: str | None) -> str | None:
    """The encoding by Python's name; a byte order mark is no matter of the encoding here."""
    if name is None:
        return None
    try:
        found = codecs.lookup(name).name
        told = found.startswith(("utf-16", "utf-32")) or ASCII.encode().decode(found) == ASCII
    except (LookupError, UnicodeError) as error:
        raise _bad("encoding", "a name that Python knows", name) from error
    if not told:
        raise _bad("encoding", "one that has ASCII, or UTF-16 or UTF-32", name)
    return "utf-8" if found in ("utf-8-sig", "ascii") else found


def _bad(name: str, expected: object, found: object) -> FormatError:
    return FormatError(f"the option {name}= has no such value", expected=expected, found=repr(found))
