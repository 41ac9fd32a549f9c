"""Columns of whole records: parsed by Arrow, off Python's lock; by Python's csv where Arrow refuses the text."""

from __future__ import annotations

import csv
import io
import re
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from matex_data._types import Bytes
from matex_data.declared import declared
from matex_data.errors import DecodeError, shortened
from matex_data.readers.csv.dialect import SHOWN, Dialect
from matex_data.readers.csv.options import BOOLEANS, MISSING, numbers
from matex_data.readers.csv.records import line_ends
from matex_data.warning import warn

_ARROW_ONLY = r"(?i)0x|nan|inf.*\s|\s.*inf"
"""Numbers in Arrow that are texts in pandas: 0x1F, NAN, nan(1), and infinity between blanks."""
_INTEGER = r"^[ \t]*[-+]?[0-9]+[ \t]*$"
_PLUS = re.compile(rb"\+(?<![\w.+-]\+)\d")  # not that of an exponent; Arrow has no integers with that sign
_EXACT = 2**53  # floats hold every integer up to it
_BAD_VALUE = re.compile(r"In CSV column #(\d+): Row #(\d+): CSV conversion error to ([^:]+): (.*)", re.DOTALL)
_warned: set[str] = set()
CALL_BYTES = 1 << 20  # parsed by one call, about
COLUMN_BYTES = 4 << 10
"""Bytes of a column that one call parses at least, about: it takes 10 to 60 us for a column, however few its values."""


class Block(NamedTuple):
    """Whole records that follow each other: their bytes and their number, and the lines before them."""

    nbytes: int
    records: int
    line: int


@declared
@dataclass(frozen=True)
class Parser:
    """Parser of the records of one file.

    Parameters
    ----------
    names : of all its columns.
    na_values : texts that stand for a missing value.
    date_format : of times, as in ``strptime``; None: ISO 8601.
    header : number of the record with the names.
    """

    path: str
    dialect: Dialect
    names: tuple[str, ...]
    na_values: tuple[str, ...] = MISSING
    date_format: str | None = None
    header: int | None = None

    def parse(self, data: Bytes, types: Mapping[str, Any], count: int, line: int) -> pa.Table:
        """Parse columns; name the line of an error, and fill short records.

        Parameters
        ----------
        data : whole records, as stored.
        types : Arrow's type of each column to parse; None: infer it; ``bool``: booleans, also written as 1 and 0.
        line : number of lines before them.

        Raises
        ------
        DecodeError : a record has too many fields, a value is not of its type, the number of records differs, or the
            text is in another encoding.
        """
        try:
            return self._parse_with_arrow(data, types, count)
        except UnicodeDecodeError as error:
            raise DecodeError(
                f"the text in line {line + len(line_ends(data[: error.start])) + 1} is not in its encoding",
                file=self.path,
                expected=self.dialect.encoding,
                found=f"{error.object[error.start : error.end]!r}: {error.reason}",
                remedy="give the encoding= in which the file was written, or correct the line",
            ) from error
        except pa.ArrowInvalid as error:
            return self._parse_with_python(data, types, count, line, error)

    def parse_blocks(self, data: Bytes, types: Mapping[str, Any], blocks: Sequence[Block]) -> list[pa.Table]:
        """Parse columns of blocks of records as one table; one by one if anything is wrong, since errors name lines.

        Parameters
        ----------
        data : the blocks one after the other, as stored.
        types : as of ``parse``.
        blocks : at least one.

        Raises
        ------
        DecodeError : as of ``parse``.
        """
        if len(blocks) > 1:
            try:
                return [self._parse_with_arrow(data, types, sum(block.records for block in blocks))]
            except (UnicodeDecodeError, pa.ArrowInvalid):
                pass
        texts = np.split(data, np.cumsum([block.nbytes for block in blocks[:-1]], dtype=np.int64))
        return [self.parse(text, types, block.records, block.line) for text, block in zip(texts, blocks, strict=True)]

    def _parse_with_arrow(self, data: Bytes, types: Mapping[str, Any], count: int) -> pa.Table:
        """Parse columns like ``parse``, but raise an error of Python or of Arrow where anything is wrong."""
        table = self._convert(self._simplified(data), types, self.dialect)
        if table.num_rows != count:
            raise pa.ArrowInvalid(f"{table.num_rows} records instead of {count}")
        return table

    def _simplified(self, data: Bytes) -> Bytes:
        """Return the same records in UTF-8, without comments, and with one byte between fields."""
        text = data
        if self.dialect.encoding != "utf-8" and data.max(initial=0) >= 128:
            text = np.frombuffer(data.tobytes().decode(self.dialect.encoding).encode(), np.uint8)
        if self.dialect.comment is not None:
            text = np.frombuffer(self.dialect.without_comments(text.tobytes()), np.uint8)
        return text if len(self.dialect.sep) == 1 else np.frombuffer(self.dialect.single(text.tobytes()), np.uint8)

    def _convert(self, text: Bytes, types: Mapping[str, Any], dialect: Dialect) -> pa.Table:
        """Convert a text in UTF-8, and correct the columns that Arrow and pandas read differently."""
        flags = {name: pa.bool_() for name, kind in types.items() if kind is bool}
        values = {name: kind for name, kind in types.items() if name not in flags}
        marked = self._without_marks(text, values, dialect)
        if flags:
            table = self._read(text, flags, dialect, digits=True)
            marked |= zip(table.column_names, table.columns, strict=True)
        others = {name: kind for name, kind in types.items() if name not in marked}
        if not marked:
            return self._as_written(text, types, dialect)
        found = self._as_written(text, others, dialect) if others else {}
        return pa.table({name: marked[name] if name in marked else found[name] for name in types})

    def _as_written(self, text: Bytes, types: Mapping[str, Any], dialect: Dialect) -> pa.Table:
        """Convert columns whose numbers have no marks."""
        table = self._read(text, types, dialect)
        doubtful = _doubtful_columns(table, text, types)
        written = self._read(text, dict.fromkeys(doubtful, pa.binary()), dialect) if doubtful else table
        for name in doubtful:
            column = self._as_pandas(name, table[name], written[name], types[name])
            table = table.set_column(table.column_names.index(name), name, column)
        for number in numbers(self.na_values):
            for i, column in enumerate(table.columns):
                if pa.types.is_floating(column.type):
                    missing = pc.equal(column, pa.scalar(number, column.type))
                    column = pc.if_else(missing, pa.scalar(None, column.type), column)
                    table = table.set_column(i, table.column_names[i], column)
        return table

    def _without_marks(self, text: Bytes, types: Mapping[str, Any], dialect: Dialect) -> dict[str, pa.ChunkedArray]:
        """Return the columns of numbers, by name, of which one has what Arrow does not read: thousands, a plus sign."""
        may_have_marks = pa.types.is_integer if dialect.thousands is None else _is_number
        numeric = [name for name, kind in types.items() if kind is None or may_have_marks(kind)]
        if not numeric or (dialect.thousands is None and not _PLUS.search(text.data)):
            return {}
        written = self._read(text, dict.fromkeys(numeric, pa.string()), dialect)
        mark, point = re.escape(dialect.thousands or ""), re.escape(dialect.decimal)
        digits = rf"(\d[\d{mark}]*({point}\d*)?|{point}\d+)([eE][-+]?\d+)?"
        pattern = rf"(?i)^[-+]?({digits}|inf|infinity)$"
        marks = rf"^\+|{mark}" if mark else r"^\+"
        found: dict[str, pa.ChunkedArray] = {}
        for name in numeric:
            column = pc.utf8_trim_whitespace(written[name])
            has_mark = pc.any(pc.match_substring_regex(column, marks)).as_py()
            if has_mark and pc.all(pc.match_substring_regex(column, pattern)).as_py():
                plain = pc.replace_substring_regex(column, marks, "")
                number = _as_number(pc.replace_substring(plain, dialect.decimal, "."), types[name])
                found |= {name: number} if _is_number(number.type) else {}
        return found

    def _as_pandas(self, name: str, column: Any, written: Any, requested: Any) -> Any:
        """Return a column as pandas reads it: of numbers, or of texts where one is no number.

        Parameters
        ----------
        column, written : the column as Arrow reads it, and as it is written.
        requested : its type; None: any.
        """
        strange = pc.match_substring_regex(written, _ARROW_ONLY)
        if pc.any(strange).as_py():
            if requested is None:
                return written
            row = pc.index(strange, True).as_py()
            value = written[row].as_py().decode(errors="replace")
            where = f"In CSV column #{self.names.index(name)}: Row #{row + 1}"  # as Arrow words it
            raise pa.ArrowInvalid(f"{where}: CSV conversion error to {requested}: invalid value '{value}'")
        if requested is None and pc.all(pc.match_substring_regex(written, _INTEGER)).as_py():
            return _integers(written)
        return column

    def _read(self, text: Bytes, types: Mapping[str, Any], dialect: Dialect, digits: bool = False) -> pa.Table:
        """Read columns as Arrow does; ``digits``: 1 and 0 are booleans."""
        booleans = BOOLEANS | ({"1": True, "0": False} if digits else {})
        times = [self.date_format, pa.csv.ISO8601] if self.date_format else []
        if (self.date_format or "").startswith("%Y-%d"):
            times.pop()  # ISO 8601 would take days for months
        if text[:3].tobytes() == BOM_UTF8:  # Arrow drops one at the beginning, which is not that of the file here
            text = np.frombuffer(BOM_UTF8 + text.tobytes(), np.uint8)
        reader = pa.csv.open_csv(  # of one block; read_csv would wait for a thread of Arrow for each text
            pa.BufferReader(pa.py_buffer(text)),
            read_options=pa.csv.ReadOptions(
                use_threads=False, column_names=list(self.names), block_size=min(len(text) + 16, 2**31 - 1)
            ),
            parse_options=pa.csv.ParseOptions(
                delimiter=dialect.delimiter,
                quote_char=dialect.quotechar or False,
                escape_char=dialect.escapechar or False,
                newlines_in_values=dialect.quotechar is not None,
            ),
            convert_options=pa.csv.ConvertOptions(
                check_utf8=False,
                column_types={name: kind for name, kind in types.items() if kind is not None},
                include_columns=list(types),
                null_values=list(self.na_values),
                true_values=[text for text, value in booleans.items() if value],
                false_values=[text for text, value in booleans.items() if not value],
                strings_can_be_null=True,
                decimal_point=dialect.decimal,
                timestamp_parsers=times,
            ),
        )
        return reader.read_all()

    def _parse_with_python(
        self, data: Bytes, types: Mapping[str, Any], count: int, line: int, error: Exception
    ) -> pa.Table:
        """Like ``parse``, but with Python's csv, after Arrow has refused the text with ``error``."""
        records, lines = self._records(data, line)
        if len(records) != count:
            raise DecodeError(
                f"the text from line {line + 1} on has changed since it was opened",
                file=self.path,
                expected=f"{count} records",
                found=f"{len(records)} records ({error})",
                remedy="let nobody write to the data while it is read, and open it again",
            )
        clean = io.StringIO(newline="")
        csv.writer(clean, lineterminator="\n").writerows(records)
        text = np.frombuffer(clean.getvalue().encode(), np.uint8)
        try:
            plain = Dialect(decimal=self.dialect.decimal, thousands=self.dialect.thousands)
            return self._convert(text, types, plain)
        except pa.ArrowInvalid as second_error:
            raise self._conversion_error(str(second_error), lines) from second_error

    def _records(self, data: Bytes, line: int) -> tuple[list[list[str]], list[int]]:
        """Return all records, as wide as there are columns, and the line in which each begins, counted from 1."""
        width = len(self.names)
        records, lines = [], []
        for begin, fields in self.dialect.parsed(data.tobytes(), self.dialect.encoding):
            first_line = line + begin
            if len(fields) > width:
                raise DecodeError(
                    f"the record in line {first_line} has too many fields, column {width + 1}",
                    file=self.path,
                    expected=f"{width} fields: {', '.join(shortened(self.names, SHOWN))}",
                    found=f"{len(fields)} fields: {self.dialect.sep.join(fields)[:200]!r}",
                    remedy="correct the line, or give sep=, quotechar=, skiprows= or comment=, or header=0 with names= "
                    "of all columns",
                )
            if len(fields) < width:
                self._warn_of_short_records(first_line, len(fields))
                fields = [*fields, *[""] * (width - len(fields))]
            records.append(fields)
            lines.append(first_line)
        return records, lines

    def _conversion_error(self, message: str, lines: Sequence[int]) -> DecodeError:
        found = _BAD_VALUE.search(message)
        if found is None:
            return DecodeError("the text does not parse", file=self.path, found=message)
        column, row = int(found[1]), int(found[2]) - 1
        name, line = self.names[column], lines[row] if row < len(lines) else 0
        return DecodeError(
            f"a value in line {line}, column {column + 1}, is not of the type of its column",
            file=self.path,
            field=name,
            expected=f"{found[3]}, as in the other lines",
            found=found[4],
            remedy=f"give dtype={{{name!r}: 'str'}}, or 'float64' with the text in na_values=, or no dtype= for this "
            "column, and infer='full'",
        )

    def _warn_of_short_records(self, line: int, width: int) -> None:
        if self.path not in _warned:
            _warned.add(self.path)
            warn(
                f"{self.path!r} has records with fewer fields than columns (line {line}: {width} of "
                f"{len(self.names)}); the fields that they lack are missing"
            )


def _doubtful_columns(table: pa.Table, text: Bytes, types: Mapping[str, Any]) -> list[str]:
    """Return the columns of numbers in which a value may be a text in pandas, or may have lost digits."""
    integers = [name for name in types if pa.types.is_integer(table[name].type)]
    floats = [name for name in types if pa.types.is_floating(table[name].type)]
    stored = text.tobytes() if integers else b""
    hexadecimal = any(x in stored and b"0" + x in stored for x in (b"x", b"X"))  # a single byte is found faster
    doubtful = integers if hexadecimal else []
    for name in floats:
        if not np.isfinite(pc.sum(table[name]).as_py() or 0) or (
            types[name] is None and _may_have_lost_digits(table[name])
        ):
            doubtful.append(name)
    return doubtful


def _may_have_lost_digits(column: pa.ChunkedArray) -> bool:
    """Return whether floats may have been written as integers that no float holds."""
    largest = pc.max(pc.abs(column)).as_py()
    return largest is not None and largest >= _EXACT and bool(pc.all(pc.equal(column, pc.round(column))).as_py())


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _as_number(column: pa.ChunkedArray, kind: Any) -> pa.ChunkedArray:
    """Return texts of numbers as numbers of a type; None: integers if all of them are, else floats.

    Integers that no type holds stay texts.
    """
    if kind is not None:
        return column.cast(kind)
    whole = pc.all(pc.match_substring_regex(column, _INTEGER)).as_py()
    return _integers(column) if whole else column.cast(pa.float64())


def _integers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return texts of integers as the first of int64 and uint64 that holds them all, otherwise as they are."""
    for kind in (pa.int64(), pa.uint64()):
        try:
            return pa.chunked_array([[None if text is None else int(text) for text in column.to_pylist()]], kind)
        except (OverflowError, ValueError):
            continue
    return column
