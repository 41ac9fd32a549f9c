"""One text file: its dialect, the names of its columns, its blocks of records, and what its values look like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from matex_data._types import Bytes, Integers
from matex_data.errors import DataError, FormatError
from matex_data.readers.csv.blocks import RecordScanner, block_bytes, scan_alone
from matex_data.readers.csv.compression import packing, unpacked
from matex_data.readers.csv.dialect import Dialect, column_names, detect, has_header
from matex_data.readers.csv.options import Options
from matex_data.readers.csv.parse import TextLayout, parse
from matex_data.readers.csv.records import line_ends, scan
from matex_data.readers.csv.types import Seen, chosen, seen

HEAD_BYTES = 1 << 20  # in which the dialect and the header are looked for
TYPICAL_BYTES = 64 << 10  # of them, from which the dialect is told
MOST_RECORDS = 200  # of them, from which header and width are told
SMALL_BYTES = 4 << 20  # a smaller file is scanned by one rank
BOM = b"\xef\xbb\xbf"


@dataclass
class TextFile:
    """What is known of a file.

    Parameters
    ----------
    layout : how it is parsed.
    size : bytes of the file.
    packed : what has to be undone before it is text, as of ``TextRows``.
    start, line : byte of the text where the first record begins, and lines before it.
    tally : its records; None: not counted yet.
    seen : what the values of the columns look like, as far as they have been looked at.
    """

    layout: TextLayout
    size: int
    packed: str
    start: int
    line: int
    tally: RecordScanner | None = None
    seen: Mapping[str, Seen] | None = None

    @property
    def path(self) -> str:
        """The file."""
        return self.layout.path

    def blocks(self) -> tuple[Integers, Integers, Integers]:
        """Offset and first record of each block, with those behind the last; and lines before each."""
        assert self.tally is not None
        offset, first, line = self.tally.columns()
        if self.packed:
            return np.array([0, self.size]), np.array([0, self.tally.rows]), np.array([self.line])
        return np.append(offset, self.tally.offset), np.append(first, self.tally.rows), line


def look(path: str, options: Options, wanted: Callable[[Sequence[str]], Sequence[str]]) -> TextFile:
    """Dialect and header of a file; of a small or packed one, all there is to know.

    Parameters
    ----------
    wanted : which of the columns matter.

    Raises
    ------
    DataError : it cannot be read. FormatError : it is empty, or has no records. DecodeError : it does not parse.
    """
    size, head = _head(path)
    packed = packing(head.tobytes(), options.encoding)
    whole = bool(packed) or size <= SMALL_BYTES
    if packed:
        try:
            head = unpacked(_bytes(path, size), packed)
        except DataError as error:
            raise error.at(path, None) from error
    elif whole:
        head = _bytes(path, size)
    fixed = replace(options, encoding="utf-8") if packed and packed == options.encoding else options
    file = _told(path, head, size, packed, fixed)
    if whole:
        step = len(head) + 1 if packed else block_bytes(size)
        file.tally = scan_alone(head, file.start, file.line, step, file.layout.dialect)
        check(file, fixed, lambda start, stop: head[start:stop])
        names = wanted(file.layout.names)
        file.seen = look_at(head[file.start :], file.layout, names, fixed, file.tally.rows, file.line)
    return file


def _head(path: str) -> tuple[int, Bytes]:
    try:
        size = Path(path).stat().st_size
        with Path(path).open("rb") as file:
            return size, np.frombuffer(file.read(HEAD_BYTES), np.uint8)
    except OSError as error:
        raise DataError("the file cannot be read", file=path, found=error) from error


def _bytes(path: str, size: int) -> Bytes:
    data = np.fromfile(path, np.uint8)
    if len(data) != size:
        raise DataError("the file changes while it is read", file=path, expected=f"{size} bytes", found=len(data))
    return data


def _told(path: str, head: Bytes, size: int, packed: str, options: Options) -> TextFile:
    """Dialect, header, and where the records begin."""
    start, line = _beginning(head, options.skiprows)
    text = head[start:].tobytes().decode("latin-1")
    dialect = detect(_whole_lines(text[:TYPICAL_BYTES]), options.dialect, options.fixed)
    found = scan(head[start:], False, dialect)
    spans = zip(found.starts.tolist(), [*found.starts[1:].tolist(), len(text)], strict=False)
    records = [dialect.fields(next(dialect.reader(text[a:b]))) for a, b in islice(spans, MOST_RECORDS)]
    if not records:
        raise FormatError(
            "the file is empty", file=path, expected="records", found=f"{size} bytes, line 1, column 1: no record"
        )
    header = _header(records, dialect, options)
    if header is not None and header >= len(records):
        raise FormatError(
            "there is no record with the names", file=path, expected=f"record {header}", found=f"{len(records)} records"
        )
    first = 0 if header is None else header + 1
    commented = _comment_before(text[: int(found.starts[0])], dialect) if header is None else []
    names = _names(path, records[first:] or records, records[header] if header is not None else commented, options)
    at = int(found.starts[first]) if first < len(found.starts) else len(text)
    line += int(np.searchsorted(found.ends, at, side="right"))
    encoded = tuple(_decoded(name, options.encoding).removeprefix("\ufeff") for name in names)
    na_values, dates = options.missing_texts, options.date_format
    layout = TextLayout(path, dialect, encoded, na_values, dates, options.short_rows, header)
    return TextFile(layout, size, packed, start + at, line)


def _beginning(head: Bytes, skiprows: int) -> tuple[int, int]:
    """First byte, and lines before it, behind a byte order mark and the lines that do not count."""
    start = len(BOM) if head[: len(BOM)].tobytes() == BOM else 0
    if skiprows:
        ends = line_ends(head)
        start = int(ends[skiprows - 1]) if skiprows <= len(ends) else len(head)
    return start, skiprows


def _whole_lines(text: str) -> str:
    end = max(text.rfind("\n"), text.rfind("\r"))
    return text[: end + 1] if end >= 0 and len(text) >= TYPICAL_BYTES else text


def _header(records: Sequence[Sequence[str]], dialect: Dialect, options: Options) -> int | None:
    if options.header != "infer":
        return int(options.header) if options.header is not None else None
    return 0 if options.names is None and has_header(records, dialect.decimal) else None


def _comment_before(text: str, dialect: Dialect) -> list[str]:
    """The fields of the last comment before the first record: some programs write the names there."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or dialect.comment is None or not lines[-1].startswith(dialect.comment):
        return []
    return dialect.fields(next(dialect.reader(lines[-1].lstrip(dialect.comment + " ")), []))


def _names(path: str, records: Sequence[Sequence[str]], header: Sequence[str], options: Options) -> list[str]:
    width = Counter(len(record) for record in records).most_common(1)[0][0]
    if options.names is not None:
        if len(options.names) < width:
            raise FormatError(
                "there are more columns than names", file=path, expected=f"{width} names", found=f"{len(options.names)}"
            )
        return [str(name) for name in options.names]
    if not header or (options.header is None and len(header) != width):
        return [str(i) for i in range(width)]
    if len(header) == width - 1:  # names of all columns but the row names in front, or but nothing at the end
        trailing = all(len(record) < width or not record[-1].strip() for record in records)
        header = [*header, ""] if trailing else ["", *header]
    return column_names(header)


def _decoded(name: str, encoding: str | None) -> str:
    """A name that has been read byte by byte."""
    stored = name.encode("latin-1")
    for candidate in (encoding or "utf-8", "cp1252"):
        try:
            return stored.decode(candidate)
        except UnicodeDecodeError:
            continue
    return name


def check(file: TextFile, options: Options, stretch: Callable[[int, int], Bytes]) -> None:
    """The records are counted: raise what is wrong with them, and note how the text is encoded.

    Parameters
    ----------
    stretch : the bytes of the text from one position to another.
    """
    tally = file.tally
    assert tally is not None
    if tally.nul >= 0:
        line, column = _place(file, tally.nul, stretch)
        remedy = "the file is damaged, or it is no text; UTF-16 without a byte order mark needs encoding='utf-16-le'"
        raise FormatError(
            f"there is a NUL byte in line {line}, column {column}", file=file.path, byte=tally.nul, remedy=remedy
        )
    if tally.inside:
        line, column = _place(file, tally.opened, stretch)
        raise FormatError(
            f"the quote in line {line}, column {column}, is not closed",
            file=file.path,
            byte=tally.opened,
            expected=f"another {file.layout.dialect.quotechar} before the end of the file",
            remedy="the file may be truncated; if quotes have no meaning in it, give quotechar=None",
        )
    if not tally.rows:
        raise FormatError(
            f"the file has a header and no records behind it, line {file.line + 1}, column 1",
            file=file.path,
            expected="at least one record",
            found=f"the columns {', '.join(file.layout.names[:8])}",
            remedy="leave the file out; if its only line is a record, give header=None",
        )
    tally.look_at_bytes(stretch(0, file.start))
    encoding = options.encoding or ("utf-8" if tally.utf8 else "cp1252" if tally.defined else "iso8859-1")
    if encoding == "utf-8" and not tally.utf8:
        raise FormatError("the text is not UTF-8", file=file.path, remedy="leave out encoding=, or give another one")
    file.layout = replace(file.layout, dialect=replace(file.layout.dialect, encoding=encoding))


def _place(file: TextFile, byte: int, stretch: Callable[[int, int], Bytes]) -> tuple[int, int]:
    """Line and column, counted from 1, of a byte of the text."""
    assert file.tally is not None
    offset, _, lines = file.tally.columns()
    block = int(np.searchsorted(offset, byte, side="right")) - 1
    start, line = (int(offset[block]), int(lines[block])) if block >= 0 else (file.start, file.line)
    before = stretch(start, byte)
    ends = line_ends(before)
    begun = before[int(ends[-1]) if len(ends) else 0 :].tobytes()
    return line + len(ends) + 1, 1 + sum(begun.count(bytes([sep])) for sep in file.layout.dialect.separators)


def look_at(
    data: Bytes, layout: TextLayout, names: Sequence[str], options: Options, rows: int, line: int
) -> dict[str, Seen]:
    """What values of those columns look like whose type is not given.

    Parameters
    ----------
    data : ``rows`` whole records, behind ``line`` lines.
    """
    wanted: dict[str, Any] = {name: None for name in names if not options.has_type(name)}
    distinct = {name for name in names if options.wish(name) == "category"}
    wanted |= dict.fromkeys(distinct, chosen("", str).arrow)
    if not wanted:
        return {}
    table = parse(data, layout, wanted, rows, line)
    return {name: seen(table[name], name in distinct) for name in wanted}
