"""Text tables: CSV, TSV and their relatives, indexed by all ranks exactly as a serial parser reads them.

Format: RFC 4180, https://www.rfc-editor.org/rfc/rfc4180, and the dialects that pandas reads; see `dialect`.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np

from matex_data._types import Bytes
from matex_data.errors import DataError, FormatError, NoSamples, shortened
from matex_data.fields import EMPTY_IS_MISSING, Field
from matex_data.index.model import FileIndex, Index
from matex_data.index.stamps import Stamp
from matex_data.index.table import Column
from matex_data.index.united import adapted, check_common, counted, unite
from matex_data.readers.catalogue import check_known
from matex_data.readers.collective import IndexingRanks, KeepingRanks, SingleRank, agreed, on_root, read_own_ranges
from matex_data.readers.csv.dialect import NUMBER, SHOWN, Dialect, FirstRecord, column_names, detect, first_record
from matex_data.readers.csv.options import CsvOptions, check_options
from matex_data.readers.csv.parse import COLUMN_BYTES, Block, Parser
from matex_data.readers.csv.records import (
    ENCODINGS,
    Records,
    encodings_of,
    first_lines,
    last_line_end,
    line_ends,
    record_starts,
    scan_file,
    scan_text,
)
from matex_data.readers.csv.rows import CsvRows
from matex_data.readers.csv.types import (
    TEXT,
    ColumnSummary,
    ColumnType,
    inferred_type,
    is_inferred,
    merge_summaries,
    requested_type,
)
from matex_data.readers.text.scan import block_bytes
from matex_data.readers.text.unpacked import content, of_content
from matex_data.sampling.schedule import rank_range
from matex_data.storage.files import open_binary, read_into, reading, size_of_open
from matex_data.warning import warn

SMALL_BYTES = 4 << 20  # a smaller file is indexed by one rank
HEAD_BYTES = 1 << 20  # of a large file, and as often twice as many as the first records need
MOST_HEAD_BYTES = 64 << 20
HEAD_RECORDS = 200  # from which header and width are detected
SAMPLE_BLOCKS = 64  # of a large file, from which types are inferred
_SEPARATOR_LINE = re.compile(rb"sep=([\t -~])[\r\n]")  # the first line of texts for Excel

ReadText = Callable[[int, int], Bytes]
"""Returns the bytes of a text from one position to another."""


def index(path: str, names: Sequence[str] | None = None, /, **options: Any) -> Index:
    """Index the records of a text file; see ``index_collectively``."""
    return index_collectively([path], names, SingleRank(), **options)


def index_collectively(
    paths: Sequence[str],
    names: Sequence[str] | None,
    ranks: IndexingRanks,
    /,
    *,
    absent: Mapping[str, Any] | None = None,
    **options: Any,
) -> Index:
    """Index the records of text files with the same columns. *Collective*.

    Each small file is indexed by one rank; of a large one each rank scans a segment. Rank 0 gets the index of all
    files, the others that of their block of them.

    Parameters
    ----------
    names : columns; None: all.
    absent : values of columns in the files that lack them, by name; None: they are missing there.
    options : those of ``CsvOptions``.

    Raises
    ------
    FieldNotFound : there is no column of that name.
    FormatError : a file is empty, a quote is not closed, the files have different columns, an option is wrong.
    DecodeError : a record has too many fields, or a value is not of the requested type.
    DataError : a file cannot be read.
    """
    checked = check_options(options)
    ranks = KeepingRanks(ranks)  # types are inferred from bytes that the search for records has read
    own = range(*rank_range(len(paths), ranks.rank, ranks.size))
    of_root = agreed(ranks, lambda: [_inspect(paths[0], names, checked)] if ranks.rank == 0 else [])
    before = ranks.allgather(of_root[0].first if of_root else None)[0]
    rest = own[len(of_root) :]
    files = of_root + agreed(ranks, lambda: [_inspect(paths[i], names, checked, before) for i in rest])
    available = _all_names(files, ranks)
    fills = dict(absent or {})
    absent_names = fills.keys() - set(available)
    of_files = None if names is None else [name for name in names if name not in absent_names]
    columns = agreed(ranks, lambda: _select_columns(paths[0], available, of_files, checked))
    large = ranks.allgather([number for number, file in zip(own, files, strict=True) if file.records is None])
    for number in (number for of_rank in large for number in of_rank):
        file = next(filter(None, ranks.allgather(files[number - own.start] if number in own else None)))
        _scan_large(file, checked, ranks)
        file.summaries = _summarize_large(file, file.own(columns), checked, ranks)
        if number in own:
            files[number - own.start] = file
    _warn_of_samples(files, ranks)
    lacking = [
        dict.fromkeys({*columns}.difference(file.parser.names, fills), ColumnSummary(missing=True)) for file in files
    ]
    found = [file.summaries or {} for file in files]
    summaries = merge_summaries(ranks.allgather(merge_summaries([*found, *lacking])))
    first = ranks.allgather(files[0] if ranks.rank == 0 else None)[0]
    fields, types = _fields(first, columns, checked, summaries)
    if len(paths) == 1 and not fills:
        return Index(fields, [_indexed(first, columns, types)])
    schemas = [{name: fields[name] for name in file.own(columns)} for file in files]
    own_files = list(zip(files, schemas, strict=True))
    own_unions = counted(((file.parser.path, schema, {}) for file, schema in own_files), fills)
    union = unite(ranks, own_unions).with_absent(fills if names is None else names)

    def adapt() -> list[FileIndex]:
        for file, schema in own_files if names is None else ():
            check_common(file.parser.path, schema, union)
        return [adapted(_indexed(file, schema, types), schema, union) for file, schema in own_files]

    return Index(union.fields, ranks.gather_files(agreed(ranks, adapt)))


def _all_names(files: Iterable[_TextFile], ranks: IndexingRanks) -> list[str]:
    """Return the columns of all files, those of the first one in front. *Collective*."""
    by_file = dict.fromkeys(file.parser.names for file in files)
    by_rank = ranks.allgather(list(by_file))
    return list(dict.fromkeys(name for of_rank in by_rank for names in of_rank for name in names))


@dataclass
class _TextFile:
    """Facts about one file.

    Parameters
    ----------
    size : of the text, in bytes.
    start, line : byte of the text where the first record begins, and lines before it.
    first : the first record, if the options leave open whether it names the columns.
    stored : compression or wide encoding of the file, as ``stored_as`` returns.
    stamp : of the file before it was read.
    records : None: not scanned yet.
    summaries : of the columns, by name; None: not inferred yet.
    """

    parser: Parser
    size: int
    start: int
    line: int
    first: FirstRecord | None = None
    stored: str = ""
    stamp: Stamp | None = None
    records: Records | None = None
    summaries: dict[str, ColumnSummary] | None = None

    def own(self, columns: Iterable[str]) -> list[str]:
        """Return those of some columns that the file has."""
        known = frozenset(self.parser.names)
        return [name for name in columns if name in known]


def _inspect(
    path: str, names: Sequence[str] | None, options: CsvOptions, before: FirstRecord | None = None
) -> _TextFile:
    """Detect dialect and header of a file; index a small or compressed one. ``before``: first record of the first file;
    None: it is this one, or tells nothing.
    """
    with reading(path), open_binary(path) as file:
        stamp, size = Stamp.of(path), size_of_open(file)
        plain, stored = content(path, file, options.encoding)
        if not stored and size > SMALL_BYTES:
            return replace(_inspect_large(path, file, size, options, before), stamp=stamp)
        text = np.frombuffer(plain.read(), np.uint8)
    if not stored and len(text) != size:
        raise DataError("the file changes while it is read", file=path, expected=f"{size} bytes", found=len(text))
    if stored and stored == options.encoding:
        options = replace(options, encoding="utf-8")
    parsed = _parse_head(path, text, len(text), options, before)
    assert parsed is not None  # the text is whole
    parsed.stored, parsed.stamp = stored, stamp
    return _index_small(parsed, text, names, options)


def _inspect_large(path: str, file: IO[bytes], size: int, options: CsvOptions, before: FirstRecord | None) -> _TextFile:
    """Detect dialect and header of a large file, open at its begin, from as much as holds the first records."""
    head = file.read(HEAD_BYTES)
    while (parsed := _parse_head(path, np.frombuffer(head, np.uint8), size, options, before)) is None:
        more = file.read(len(head)) if len(head) < MOST_HEAD_BYTES else b""
        if not more:
            raise FormatError(
                "the first records are too long",
                file=path,
                expected=f"a header and two records in the first {MOST_HEAD_BYTES >> 20} MiB",
                found=f"fewer in {len(head)} bytes",
                remedy="write fewer columns into a file; if quotes have no meaning in it, give quotechar=None",
            )
        head += more
    return parsed


def _index_small(file: _TextFile, text: Bytes, names: Sequence[str] | None, options: CsvOptions) -> _TextFile:
    file.records = scan_text(text, file.start, file.line, block_bytes(len(text)), file.parser.dialect)
    _check_records(file, options, lambda start, stop: text[start:stop])
    available = file.parser.names
    columns = list(available) if names is None else file.own(names)
    if options.usecols is not None:
        columns = [name for name in columns if name in _used(available, options)]
    file.summaries = _summarize(
        text[file.start :], file, columns, options, [Block(len(text) - file.start, file.records.count, file.line)]
    )
    return file


def _parse_head(path: str, head: Bytes, size: int, options: CsvOptions, before: FirstRecord | None) -> _TextFile | None:
    """Detect dialect, header, and the start of the records from the first bytes of a text.

    Return None if these are not the whole text, and hold no header with two records behind it.
    """
    start = len(BOM_UTF8) if head[: len(BOM_UTF8)].tobytes() == BOM_UTF8 else 0
    separator = _SEPARATOR_LINE.match(head[start : start + 16].tobytes())
    if separator and not options.skiprows:
        options = replace(options, skiprows=1, sep=options.sep or separator[1].decode())
    if options.skiprows:
        ends = line_ends(head)
        start = int(ends[options.skiprows - 1]) if options.skiprows <= len(ends) else len(head)
    text, is_whole = head[start:], len(head) >= size
    if not is_whole:
        text = text[: last_line_end(text)]
    ends = line_ends(text)
    dialect = detect(first_lines(text, ends).tobytes(), options.dialect, options.fixed)
    starts, is_inside, _ = record_starts(text, ends, False, dialect)
    given = None if options.header in ("infer", None) else int(options.header or 0)
    if not is_whole and len(starts) - is_inside < (given or 0) + 3:
        return None
    if not len(starts):
        raise NoSamples(
            "the file is empty",
            file=path,
            expected="records",
            found=f"{size} bytes, line 1, column 1: no record",
            remedy="leave the file out, or write it again",
        )
    last = min(HEAD_RECORDS, len(starts) - (is_inside and not is_whole))
    stop = int(starts[last]) if last < len(starts) else len(text)
    records = dialect.records(text[int(starts[0]) : stop].tobytes())
    comment = _names_in_comment(text[: int(starts[0])].tobytes(), dialect)
    comment = comment if len(comment) == len(records[0]) else []  # other comments are prose
    in_comment = len(comment) > 1
    leading = _first_record(path, records, in_comment, dialect, options, before)
    header = given if given is not None else 0 if leading and leading.named else None
    if header is not None and header >= len(records):
        raise FormatError(
            "there is no record with the names",
            file=path,
            expected=f"record {header}",
            found=f"{len(records)} records",
            remedy="give header= the number of the record with the names, from 0 on, or None if there is none",
        )
    first = 0 if header is None else header + 1
    fields = comment if header is None else records[header]
    names = _column_names(path, records[first:] or records, fields, options)
    at = int(starts[first]) if first < len(starts) else len(text)
    parser = Parser(
        path,
        dialect,
        tuple(_decode_name(name, options.encoding) for name in names),
        options.missing_texts,
        options.date_format,
        header,
    )
    lines = options.skiprows + int(np.searchsorted(ends, at, side="right"))
    return _TextFile(parser, size, start + at, lines, leading)


def _first_record(
    path: str,
    records: Sequence[Sequence[str]],
    in_comment: bool,
    dialect: Dialect,
    options: CsvOptions,
    before: FirstRecord | None,
) -> FirstRecord | None:
    """Return the first record, unless options or a comment above the records (``in_comment``) have the names."""
    if options.header != "infer" or options.names is not None:
        return None
    if in_comment and all(map(NUMBER.match, records[0])):
        return None
    return first_record(path, records, dialect, options.missing_texts, before)


def _names_in_comment(text: bytes, dialect: Dialect) -> list[str]:
    """Return the fields of the last comment before the first record, where ``numpy.savetxt`` writes the names."""
    lines = text.strip().splitlines()
    mark = (dialect.comment or "").encode()
    if not lines or not mark or not lines[-1].lstrip().startswith(mark):
        return []
    return next(iter(dialect.records(lines[-1].lstrip(mark + b" "))), [])


def _column_names(
    path: str, records: Sequence[Sequence[str]], header: Sequence[str], options: CsvOptions
) -> Iterable[str]:
    width = Counter(len(record) for record in records).most_common(1)[0][0]
    if options.names is not None:
        if len(options.names) < width:
            raise FormatError(
                "there are more columns than names",
                file=path,
                expected=f"{width} names",
                found=f"{len(options.names)}",
                remedy="give names= one name for each column",
            )
        return map(str, options.names)
    if not header or (options.header is None and len(header) != width):
        return map(str, range(width))
    if len(header) == width - 1:  # no name for the column of row names in front, or for an empty one at the end
        if all(len(record) < width or not record[-1].strip() for record in records):
            header = [*header, ""]
        elif all(len(record) == width for record in records):  # others are too long
            header = ["", *header]
    return column_names(header)


def _decode_name(name: str, encoding: str | None) -> str:
    """Return the text of a name that has been decoded as Latin-1."""
    stored = name.encode("latin-1")
    for candidate in (encoding or "utf-8", "cp1252"):
        try:
            return stored.decode(candidate).removeprefix("\ufeff")
        except UnicodeDecodeError:
            continue
    return name


def _check_records(file: _TextFile, options: CsvOptions, read: ReadText) -> None:
    """Raise if the records of a file have a fault, and choose the encoding of its text."""
    records, path = file.records, file.parser.path
    assert records is not None
    if records.nul >= 0:
        line, column = _line_and_column(file, records, records.nul, read)
        remedy = "the file is damaged, or it is no text; UTF-16 without a byte order mark needs encoding='utf-16-le'"
        raise FormatError(
            f"there is a NUL byte in line {line}, column {column}", file=path, byte=records.nul, remedy=remedy
        )
    if records.open_quote >= 0:
        line, column = _line_and_column(file, records, records.open_quote, read)
        raise FormatError(
            f"the quote in line {line}, column {column}, is not closed",
            file=path,
            byte=records.open_quote,
            expected=f"another {file.parser.dialect.quotechar} before the end of the file",
            remedy="the file may be truncated; if quotes have no meaning in it, give quotechar=None",
        )
    if not records.count:
        raise NoSamples(
            f"the file has a header and no records behind it, line {file.line + 1}, column 1",
            file=path,
            expected="at least one record",
            found=f"the columns {', '.join(file.parser.names[:8])}",
            remedy="leave the file out; if its only line is a record, give header=None",
        )
    possible = records.encodings & encodings_of(read(0, file.start))
    encoding = options.encoding or next(name for name in ENCODINGS if name in possible)
    if encoding == "utf-8" and encoding not in possible:
        raise FormatError("the text is not UTF-8", file=path, remedy="leave out encoding=, or give another one")
    file.parser = replace(file.parser, dialect=replace(file.parser.dialect, encoding=encoding))


def _line_and_column(file: _TextFile, records: Records, byte: int, read: ReadText) -> tuple[int, int]:
    """Return line and column, counted from 1, of a byte of the text."""
    block = int(np.searchsorted(records.offset[:-1], byte, side="right")) - 1
    start, line = (int(records.offset[block]), int(records.line[block])) if block >= 0 else (file.start, file.line)
    before = read(start, byte)
    ends = line_ends(before)
    fields = before[int(ends[-1]) if len(ends) else 0 :].tobytes()
    return line + len(ends) + 1, 1 + sum(fields.count(sep) for sep in file.parser.dialect.separators)


def _summarize(
    data: Bytes, file: _TextFile, columns: Sequence[str], options: CsvOptions, blocks: Sequence[Block]
) -> dict[str, ColumnSummary]:
    """Summarize blocks of records, in those columns whose type depends on their values."""
    distinct = {name for name in columns if options.requested_dtype(name) == "category"}
    types = {name: None for name in columns if is_inferred(options.requested_dtype(name))}
    types |= dict.fromkeys(distinct, TEXT.arrow)
    if not types:
        return {}
    tables = file.parser.parse_blocks(data, types, blocks)
    return merge_summaries(
        {name: ColumnSummary.of(table[name], name in distinct) for name in types} for table in tables
    )


def _scan_large(file: _TextFile, options: CsvOptions, ranks: IndexingRanks) -> None:
    """Find the records of a large file. *Collective*."""
    path = file.parser.path
    file.records = scan_file(path, file.start, file.line, file.size, file.parser.dialect, ranks)

    def read(start: int, stop: int) -> Bytes:
        memory = np.empty(stop - start, np.uint8)
        return memory[: read_into(path, start, memory)]

    agreed(ranks, lambda: _check_records(file, options, read))


def _summarize_large(
    file: _TextFile, columns: Sequence[str], options: CsvOptions, ranks: IndexingRanks
) -> dict[str, ColumnSummary]:
    """Summarize blocks spread over a large file, or all; the choice does not depend on the ranks. *Collective*."""
    assert file.records is not None
    offset, first, line = file.records.offset, file.records.first, file.records.line
    full = options.infer == "full" or any(options.requested_dtype(name) == "category" for name in columns)
    count = len(line) if full else min(SAMPLE_BLOCKS, len(line))
    selected = np.unique(np.linspace(0, len(line) - 1, count).astype(np.int64))
    at_once = max(1, COLUMN_BYTES * len(file.parser.names) // block_bytes(file.size))
    low, high = rank_range(-(-len(selected) // at_once), ranks.rank, ranks.size)
    own = selected[low * at_once : high * at_once]
    found: list[dict[str, ColumnSummary]] = []
    texts: list[Bytes] = []

    def take(i: int, data: Bytes) -> None:
        texts.append(data.copy())
        if len(texts) == at_once or i == len(own) - 1:
            parsed = own[i + 1 - len(texts) : i + 1]
            records, lines = (first[parsed + 1] - first[parsed]).tolist(), line[parsed].tolist()
            blocks = list(map(Block, map(len, texts), records, lines))
            found.append(_summarize(np.concatenate(texts), file, columns, options, blocks))
            texts.clear()

    ranges = list(zip(offset[own].tolist(), (offset[own + 1] - offset[own]).tolist(), strict=True))
    read_own_ranges(ranks, file.parser.path, ranges, take)
    return merge_summaries(ranks.allgather(merge_summaries(found)))


def _select_columns(path: str, columns: Sequence[str], names: Sequence[str] | None, options: CsvOptions) -> list[str]:
    """Return the selected ones of the columns of all files: ``names``, or those of ``usecols=``, in order."""
    selected = list(columns)
    if options.usecols is not None:
        requested = _used(columns, options)
        check_known(path, requested, columns, "column")
        selected = [name for name in columns if name in requested]
    if names is not None:
        check_known(path, names, selected, "column")
        selected = list(names)
    if isinstance(options.dtype, dict):
        check_known(path, options.dtype, columns, "column")
    return selected


def _used(columns: Sequence[str], options: CsvOptions) -> list[str]:
    """Return the names of ``usecols=``."""
    numbered = dict(enumerate(columns))
    return [one if isinstance(one, str) else numbered.get(one, str(one)) for one in options.usecols or ()]


def _warn_of_samples(files: Sequence[_TextFile], ranks: IndexingRanks) -> None:
    """Warn, on rank 0, if first records of numbers are samples. *Collective*."""
    samples = [file for file in files if file.first is not None and not file.first.named]
    by_rank = ranks.allgather((len(samples), [(file.parser.path, file.first) for file in samples[:1]]))
    shown = [one for _, own in by_rank for one in own]
    if shown:
        path, first = shown[0]
        cells = ", ".join(shortened(first.cells, SHOWN))
        count = sum(number for number, _ in by_rank)
        text = (
            f"the first record of {path!r} ({cells}) is a sample{f', as in {count} files' if count > 1 else ''}: "
            "numbers are no names. header=0 takes it for names, and header=None for a sample without this message"
        )
        on_root(ranks, lambda: warn(text))


def _fields(
    first: _TextFile, columns: Sequence[str], options: CsvOptions, summaries: Mapping[str, ColumnSummary]
) -> tuple[dict[str, Field], dict[str, ColumnType]]:
    """Return the fields, and the types of their columns, from the first file and the summaries of all."""
    types = {}
    for name in columns:
        dtype, summary = options.requested_dtype(name), summaries.get(name, ColumnSummary())
        if dtype is None:
            types[name] = inferred_type(summary, options.parse_dates)
        else:
            types[name] = requested_type(name, dtype, summary)
    parser, dialect = first.parser, first.parser.dialect
    shown = {
        name: getattr(dialect, name) for name in ("sep", "quotechar", "escapechar", "comment", "decimal", "thousands")
    }
    shown["encoding"] = first.stored if first.stored.startswith("utf") else dialect.encoding
    shown["header"] = parser.header
    shown[EMPTY_IS_MISSING] = bool(options.missing_texts)
    fields, position = {}, {name: number for number, name in enumerate(parser.names)}
    for name in columns:
        attributes = {"column": position.get(name), **shown, **types[name].attributes}
        fields[name] = Field(name, (), types[name].dtype, attributes=attributes)
    return fields, types


def _indexed(file: _TextFile, columns: Iterable[str], types: Mapping[str, ColumnType]) -> FileIndex:
    path, records, columns = file.parser.path, file.records, list(columns)
    assert records is not None
    types = {name: types[name] for name in columns}
    rows = CsvRows(path, records.first, file.parser, types, records.offset, records.line)
    table = of_content(path, file.stored, rows)
    return FileIndex(path, rows.rows, {name: Column(table, name) for name in columns}, file.stamp)
