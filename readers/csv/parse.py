"""Bytes of whole records become columns: by Arrow, off Python's lock; what Arrow refuses goes through Python's csv."""

from __future__ import annotations

import csv
import io
import math
import re
import warnings
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from matex_data._types import Bytes
from matex_data.errors import DecodeError
from matex_data.readers.csv.dialect import NUMBER, SPACES, Dialect
from matex_data.readers.csv.records import CR, LF, SPACE, TAB, uncommented

MISSING = (
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A"),
    *("NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
)
"""Texts that stand for a missing value in pandas."""
_NANS = {"nan", "NaN", "-nan", "-NaN"}
_UNSOUGHT = (frozenset(MISSING), frozenset(MISSING) - {""}, frozenset(MISSING) - _NANS - {""}, frozenset[str]())
"""Which of them are not looked for: all at first, then all but the empty text, then all but that and NaN, then none.
Arrow takes none of them for a number, a truth value or a time, but for NaN."""
_ARROW_ONLY = r"(?i)0x|nan|inf.*\s|\s.*inf"
"""In what Arrow takes for a number and pandas for a text: 0x1F, NAN, nan(1), and infinity between blanks."""
_INTEGER = r"^[ \t]*[-+]?[0-9]+[ \t]*$"
_EXACT = 2**53  # floats hold every integer up to it
_FAILED = re.compile(r"In CSV column #(\d+): Row #(\d+): CSV conversion error to ([^:]+): (.*)", re.DOTALL)
_warned: set[str] = set()
_needed: dict[str, int] = {}  # by file, the first of these with which all that was parsed could be


@dataclass(frozen=True)
class TextLayout:
    """What it takes to parse a piece of a text.

    Parameters
    ----------
    path : of the file, for messages.
    dialect : of the text.
    names : of all its columns.
    na_values : texts that stand for a missing value.
    date_format : of times, as in ``strptime``; None: ISO 8601.
    short_rows : "missing": the fields that a record lacks are missing; "error": each record has to have all.
    header : number of the record with the names.
    """

    path: str
    dialect: Dialect
    names: tuple[str, ...]
    na_values: tuple[str, ...] = MISSING
    date_format: str | None = None
    short_rows: str = "missing"
    header: int | None = None


def parse(data: Bytes, layout: TextLayout, wanted: Mapping[str, Any], rows: int, line: int) -> pa.Table:
    """Columns of a piece of a text.

    Parameters
    ----------
    data : whole records, as they lie in the file.
    wanted : the type of each column that is wanted; None: as it looks.
    rows : how many records there are.
    line : how many lines are before them.

    Raises
    ------
    DecodeError : a record has too many fields, a value is not of its type, or there are not so many records.
    """
    try:
        table = _parsed(standard(data, layout.dialect), layout, wanted, layout.dialect)
        if table.num_rows == rows:
            return table
    except pa.ArrowInvalid as error:
        return _mended(data, layout, wanted, rows, line, error)
    return _mended(data, layout, wanted, rows, line, None)


def plain(data: Bytes, layout: TextLayout, wanted: Mapping[str, Any], rows: int) -> pa.Table | None:
    """The same, but None where something is wrong with any record."""
    try:
        table = _parsed(standard(data, layout.dialect), layout, wanted, layout.dialect)
    except pa.ArrowInvalid:
        return None
    return table if table.num_rows == rows else None


def _parsed(text: Any, layout: TextLayout, wanted: Mapping[str, Any], dialect: Dialect) -> pa.Table:
    """Columns of a standard text.

    To compare each number with all texts that stand for a missing value takes a fifth of the time. So they are only
    looked for once one of them has been found in the file, or where it could be taken for a value.

    Raises
    ------
    pyarrow.ArrowInvalid : a record or a value is not what it should be.
    """
    most = len(_UNSOUGHT) - 1
    level = begin = _needed.get(layout.path, 0) if all(map(_refuses_marks, wanted.values())) else most
    while True:
        try:
            marks = [m for m in layout.na_values if m not in _UNSOUGHT[level]]
            table = _read(text, layout, wanted, dialect, marks)
            doubtful = _doubtful(table, text, wanted)
            if doubtful:
                texts = _read(text, layout, dict.fromkeys(doubtful, pa.binary()), dialect, marks)
                table = _as_pandas(table, texts, layout, wanted)
            table = _without(table, numbers(layout.na_values))
        except pa.ArrowInvalid:
            if level == most:
                raise
            level += 1
            continue
        if level > begin:
            _needed[layout.path] = level
        return table


def _refuses_marks(kind: Any) -> bool:
    """Whether no value of an Arrow type looks like one of the marks."""
    return kind is not None and bool(pa.types.is_primitive(kind))


def numbers(texts: Iterable[str]) -> list[float]:
    """The numbers among some texts, for which they stand in a column of floats however they are written there."""
    plain = [text for text in texts if NUMBER.match(text) and not set(text) & set("dD")]
    return [float(text) for text in plain if not math.isnan(float(text))]


def _without(table: pa.Table, missing: Sequence[float]) -> pa.Table:
    """The table with nothing where floats have one of these values."""
    for i, column in enumerate(table.columns if missing else ()):
        if pa.types.is_floating(column.type):
            for number in missing:
                nothing = pc.equal(column, pa.scalar(number, column.type))
                column = pc.if_else(nothing, pa.scalar(None, column.type), column)
            table = table.set_column(i, table.column_names[i], column)
    return table


def _doubtful(table: pa.Table, text: Any, wanted: Mapping[str, Any]) -> list[str]:
    """Columns of numbers of which some may be none in pandas, or have lost digits."""
    whole = [name for name in wanted if pa.types.is_integer(table[name].type)]
    broken = [name for name in wanted if pa.types.is_floating(table[name].type)]
    stored = bytes(memoryview(text)) if whole or broken else b""
    names = [name for name in broken if wanted[name] is None and _long(table[name])]
    if whole and any(x in stored and b"0" + x in stored for x in (b"x", b"X")):
        names += whole
    if broken and (b"n" in stored or b"N" in stored):  # as NaN and infinity
        names += [name for name in broken if name not in names and not np.isfinite(pc.sum(table[name]).as_py() or 0)]
    return names


def _long(column: pa.ChunkedArray) -> bool:
    """Whether floats may be integers that have lost digits."""
    largest = pc.max(pc.abs(column)).as_py()
    return largest is not None and largest >= _EXACT and bool(pc.all(pc.equal(column, pc.round(column))).as_py())


def _as_pandas(table: pa.Table, texts: pa.Table, layout: TextLayout, wanted: Mapping[str, Any]) -> pa.Table:
    """The table with columns as pandas has them: of numbers, or of texts where one is no number.

    Parameters
    ----------
    texts : the columns in doubt, as they are written.

    Raises
    ------
    pyarrow.ArrowInvalid : a text is none of the type that is asked for.
    """
    for name in texts.column_names:
        strange = pc.match_substring_regex(texts[name], _ARROW_ONLY)
        column = texts[name]
        if not pc.any(strange).as_py():
            column = _integers(column) if wanted[name] is None and _written_whole(column) else table[name]
        elif wanted[name] is not None:
            row = pc.index(strange, True).as_py()
            destination = f"In CSV column #{layout.names.index(name)}: Row #{row + 1}"
            value = column[row].as_py().decode(errors="replace")
            raise pa.ArrowInvalid(f"{destination}: CSV conversion error to {wanted[name]}: invalid value '{value}'")
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def _written_whole(column: pa.ChunkedArray) -> bool:
    return bool(pc.all(pc.match_substring_regex(column, _INTEGER)).as_py())


def _integers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Texts of integers as the first of int64 and uint64 that holds them all, else as they are."""
    if pc.any(pc.match_substring(column, "+")).as_py():
        return column  # Arrow has no integers with that sign
    for kind in (pa.int64(), pa.uint64()):
        try:
            return pa.chunked_array([[None if text is None else int(text) for text in column.to_pylist()]], kind)
        except (OverflowError, ValueError):
            continue
    return column


def _read(
    text: Any, layout: TextLayout, wanted: Mapping[str, Any], dialect: Dialect, na_values: Sequence[str]
) -> pa.Table:
    convert = pa.csv.ConvertOptions(
        check_utf8=False,
        column_types={name: kind for name, kind in wanted.items() if kind is not None},
        include_columns=list(wanted),
        null_values=list(na_values),
        true_values=["True", "TRUE", "true"],
        false_values=["False", "FALSE", "false"],
        strings_can_be_null=True,
        decimal_point=dialect.decimal,
        timestamp_parsers=[layout.date_format] if layout.date_format else None,
    )
    options = pa.csv.ParseOptions(
        delimiter=" " if dialect.sep == SPACES else dialect.sep,
        quote_char=dialect.quotechar or False,
        escape_char=dialect.escapechar or False,
        newlines_in_values=dialect.quotechar is not None,
    )
    read = pa.csv.ReadOptions(
        use_threads=False, column_names=list(layout.names), block_size=min(len(text) + 16, 2**31 - 1)
    )
    if bytes(memoryview(text)[:3]) == BOM_UTF8:  # Arrow drops one at the beginning, which is not that of the file here
        text = BOM_UTF8 + bytes(text)
    return pa.csv.read_csv(
        pa.BufferReader(pa.py_buffer(text)),
        read_options=read,
        parse_options=options,
        convert_options=convert,
    )


def standard(data: Bytes, dialect: Dialect) -> Any:
    """The same records in UTF-8, without comments, and with one blank for many."""
    text: Any = data
    if dialect.encoding != "utf-8" and data.max(initial=0) >= 128:
        text = np.frombuffer(data.tobytes().decode(dialect.encoding).encode(), np.uint8)
    if dialect.comment is not None:
        text = np.frombuffer(uncommented(text.tobytes(), dialect), np.uint8)
    if dialect.sep == SPACES:
        text = _single_blanks(text)
    return text


def _single_blanks(data: Bytes) -> Bytes:
    """One blank for a run of blanks and tabs, none at the start and at the end of a line."""
    blank, edge = (data == SPACE) | (data == TAB), (data == LF) | (data == CR)
    ends = np.append((blank | edge)[1:], True)
    kept = data[~(blank & ends)]
    blank, edge = (kept == SPACE) | (kept == TAB), (kept == LF) | (kept == CR)
    kept = kept[~(blank & np.concatenate([[True], edge[:-1]]))]
    return np.where(kept == TAB, np.uint8(SPACE), kept)


def _mended(
    data: Bytes, layout: TextLayout, wanted: Mapping[str, Any], rows: int, line: int, failure: Exception | None
) -> pa.Table:
    """The same by way of Python's parser, which knows its line; short records are filled."""
    records, lines = _records(data, layout, line)
    if len(records) != rows:
        raise DecodeError(
            f"the text from line {line + 1} on is not what it was when it was opened",
            file=layout.path,
            expected=f"{rows} records",
            found=f"{len(records)} records" + (f" ({failure})" if failure else ""),
            remedy="let nobody write to the data while it is read, and open it again",
        )
    clean = io.StringIO(newline="")
    csv.writer(clean, lineterminator="\n").writerows(records)
    text = np.frombuffer(clean.getvalue().encode(), np.uint8)
    try:
        return _parsed(text, layout, wanted, Dialect(decimal=layout.dialect.decimal))
    except pa.ArrowInvalid as error:
        raise _conversion_error(str(error), layout, lines) from error


def _records(data: Bytes, layout: TextLayout, line: int) -> tuple[list[list[str]], list[int]]:
    """All records, as wide as there are columns, and the line in which each begins, counted from 1."""
    width = len(layout.names)
    text = uncommented(data.tobytes(), layout.dialect).decode(layout.dialect.encoding, "surrogateescape")
    dialect = replace(layout.dialect, comment=None)
    reader = dialect.reader(text)
    records, lines, before = [], [], line
    for raw in reader:
        fields = dialect.fields(raw)
        begun, before = before + 1, line + reader.line_num
        if not fields:
            continue
        if len(fields) > width or (len(fields) < width and layout.short_rows == "error"):
            raise _ragged(fields, layout, begun)
        if len(fields) < width:
            _warn(layout.path, begun, len(fields), width)
            fields = [*fields, *[""] * (width - len(fields))]
        records.append(fields)
        lines.append(begun)
    return records, lines


def _ragged(fields: Sequence[str], layout: TextLayout, line: int) -> DecodeError:
    width = len(layout.names)
    column = min(len(fields), width) + 1
    lacking = f", from column {column} ({layout.names[column - 1]!r}) on there is nothing" if column <= width else ""
    return DecodeError(
        f"the record in line {line} has too {'few' if lacking else 'many'} fields, column {column}",
        file=layout.path,
        expected=f"{width} fields: {', '.join(layout.names[:8])}{', ...' if width > 8 else ''}",
        found=f"{len(fields)} fields: {layout.dialect.sep.join(fields)[:200]!r}{lacking}",
        remedy="mend the line; or, if the text is cut in a wrong way, give sep=, quotechar=, skiprows= or comment=",
    )


def _conversion_error(message: str, layout: TextLayout, lines: Sequence[int]) -> DecodeError:
    found = _FAILED.search(message)
    if found is None:
        return DecodeError("the text does not parse", file=layout.path, found=message)
    column, row = int(found[1]), int(found[2]) - 1
    name, line = layout.names[column], lines[row] if row < len(lines) else 0
    return DecodeError(
        f"a value in line {line}, column {column + 1}, is not of the type of its column",
        file=layout.path,
        field=name,
        expected=f"{found[3]}, as in the other lines",
        found=found[4],
        remedy=f"give dtype={{{name!r}: 'str'}} or another type, add the text to na_values=, or open with infer='full'",
    )


def _warn(path: str, line: int, width: int, expected: int) -> None:
    if path not in _warned:
        _warned.add(path)
        warnings.warn(
            f"{path!r} has records with fewer fields than columns (line {line}: {width} of {expected}); "
            "what they lack counts as missing (short_rows='error' refuses them)",
            stacklevel=2,
        )
