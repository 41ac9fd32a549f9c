"""Text tables: CSV, TSV and their relatives, read in parallel exactly as a serial parser reads them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from matex_data._types import Bytes
from matex_data.errors import FieldNotFound, FormatError, near_matches
from matex_data.fields import Field
from matex_data.index.model import FileIndex, Index
from matex_data.index.table import Column
from matex_data.readers.collective import IndexingRanks, SingleRank
from matex_data.readers.csv.blocks import scan_together
from matex_data.readers.csv.files import TextFile, check, look, look_at
from matex_data.readers.csv.options import Options, checked
from matex_data.readers.csv.rows import TextRows
from matex_data.readers.csv.types import ColumnType, Seen, chosen, inferred
from matex_data.sampling.schedule import rank_range

SAMPLE_BLOCKS = 64  # of a large file, from which types are inferred


def index(path: str, names: Sequence[str] | None = None, /, **options: Any) -> Index:
    """The records of a text file; see ``index_collectively``."""
    return index_collectively([path], names, SingleRank(), **options)


def index_collectively(
    paths: Sequence[str], names: Sequence[str] | None, ranks: IndexingRanks, /, **options: Any
) -> Index:
    """The records of text files with the same columns. *Collective*.

    Small files are dealt out; of a large one every rank scans a part.

    Parameters
    ----------
    names : columns; None: all.
    options : those of ``Options``.

    Raises
    ------
    FieldNotFound : there is no column of that name.
    FormatError : a file is empty, a quote is not closed, the files have different columns, an option is wrong.
    DecodeError : a record has too many fields, or a value is not of the type asked for.
    DataError : a file cannot be read.
    """
    chosen_options = checked(options)

    def wanted(path: str, columns: Sequence[str]) -> list[str]:
        return _wanted(path, columns, names, chosen_options)

    files = _dealt(paths, lambda path: look(path, chosen_options, lambda columns: wanted(path, columns)), ranks)
    for file in files:
        if file.tally is None:
            _count(file, chosen_options, ranks)
    _check_names(files)
    columns = wanted(files[0].path, files[0].layout.names)
    for file in files:
        if file.seen is None:
            file.seen = _look_together(file, columns, chosen_options, ranks)
    if ranks.rank == 0:
        _warn_of_packed(files)
    return _index(files, columns, chosen_options)


def _dealt(paths: Sequence[str], task: Callable[[str], TextFile], ranks: IndexingRanks) -> list[TextFile]:
    """Every file looked at by one rank. *Collective*."""
    own: list[TextFile] = []
    error: Exception | None = None
    try:
        own = [task(path) for path in paths[ranks.rank :: ranks.size]]
    except Exception as failure:  # whatever it is, every rank has to raise it
        error = failure
    ranks.agree(error)
    by_rank = ranks.allgather(own)
    return [by_rank[number % ranks.size][number // ranks.size] for number in range(len(paths))]


def _count(file: TextFile, options: Options, ranks: IndexingRanks) -> None:
    """The records of a large file. *Collective*."""
    layout = file.layout
    file.tally = scan_together(layout.path, file.start, file.line, file.size, layout.dialect, ranks)
    error: Exception | None = None
    try:
        check(file, options, lambda start, stop: _stretch(layout.path, start, stop))
    except Exception as failure:  # as above
        error = failure
    ranks.agree(error)


def _stretch(path: str, start: int, stop: int) -> Bytes:
    return np.fromfile(path, np.uint8, stop - start, offset=start)


def _look_together(file: TextFile, names: Sequence[str], options: Options, ranks: IndexingRanks) -> dict[str, Seen]:
    """What the values of some blocks look like, or of all; which ones does not depend on the ranks. *Collective*."""
    offset, first, line = file.blocks()
    full = options.infer == "full" or any(options.wish(name) == "category" for name in names)
    count = len(line)
    some = np.arange(count) if full else np.unique(np.linspace(0, count - 1, SAMPLE_BLOCKS).astype(np.int64))
    low, high = rank_range(len(some), ranks.rank, ranks.size)
    own = some[low:high]
    found: dict[str, Seen] = {}
    error: Exception | None = None
    memory = np.empty(int(np.diff(offset)[own].max(initial=0)), np.uint8)
    for i in range(rank_range(len(some), 0, ranks.size)[1]):
        block = int(own[i]) if i < len(own) and error is None else -1
        size = int(offset[block + 1] - offset[block]) if block >= 0 else 0
        try:
            ranks.read(file.path, int(offset[block]), memory[:size])
            if block >= 0:
                rows = int(first[block + 1] - first[block])
                values = look_at(memory[:size], file.layout, names, options, rows, int(line[block]))
                found = _merged([found, values])
        except Exception as failure:  # as above
            error = error or failure
    ranks.agree(error)
    return _merged(ranks.allgather(found))


def _merged(parts: Sequence[dict[str, Seen]]) -> dict[str, Seen]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: reduce(Seen.with_, (part[name] for part in parts if name in part)) for name in names}


def _wanted(path: str, columns: Sequence[str], names: Sequence[str] | None, options: Options) -> list[str]:
    """The columns that matter, in the order of the file or as they are asked for."""
    usable = list(columns)
    if options.usecols is not None:
        numbers = dict(enumerate(columns))
        asked = [c if isinstance(c, str) else numbers.get(c, str(c)) for c in options.usecols]
        _check_found(path, asked, columns)
        usable = [name for name in columns if name in asked]
    if names is not None:
        _check_found(path, names, usable)
        usable = list(names)
    if isinstance(options.dtype, dict):
        _check_found(path, options.dtype, columns)
    return usable


def _check_found(path: str, names: Sequence[str] | dict[str, Any], columns: Sequence[str]) -> None:
    for name in names:
        if name not in columns:
            raise FieldNotFound(
                "there is no such column", file=path, field=name, expected=f"one of {near_matches(name, columns)}"
            )


def _check_names(files: Sequence[TextFile]) -> None:
    first = files[0].layout
    for file in files[1:]:
        if file.layout.names != first.names:
            raise FormatError(
                "the files do not have the same columns",
                file=file.path,
                expected=f"{', '.join(first.names)}, as in {first.path!r}",
                found=", ".join(file.layout.names),
                remedy="open files of one kind together, or give names= and header=",
            )


def _warn_of_packed(files: Sequence[TextFile]) -> None:
    packed = [file for file in files if file.packed]
    if packed:
        warnings.warn(
            f"{packed[0].path!r} is stored as {packed[0].packed}, of which no part can be read alone: every rank that "
            f"needs rows of it unpacks all of it ({len(packed)} of {len(files)} files)",
            stacklevel=2,
        )


def _index(files: Sequence[TextFile], columns: Sequence[str], options: Options) -> Index:
    seen = _merged([dict(file.seen or {}) for file in files])
    types = {name: _type(name, seen.get(name, Seen()), options) for name in columns}
    layout = files[0].layout
    fields = {}
    for name in columns:
        attributes = {"column": layout.names.index(name), **_dialect_of(files[0]), **types[name].attributes}
        fields[name] = Field(name, (), types[name].dtype, attributes=attributes)
    indexed = []
    for file in files:
        offset, first, line = file.blocks()
        rows = TextRows(file.layout, types, int(first[-1]), offset, first, line, file.packed, file.start)
        indexed.append(FileIndex(file.path, rows.rows, {name: Column(rows, name) for name in columns}))
    return Index(fields, indexed)


def _type(name: str, what: Seen, options: Options) -> ColumnType:
    if not options.has_type(name):
        return inferred(what, options.parse_dates)
    return chosen(name, options.wish(name), sorted(what.values))


def _dialect_of(file: TextFile) -> dict[str, Any]:
    """What has been found out about the text, by the names of the options."""
    dialect = file.layout.dialect
    found = {name: getattr(dialect, name) for name in ("sep", "quotechar", "escapechar", "comment", "decimal")}
    encoding = file.packed if file.packed.startswith("utf") else dialect.encoding
    return {**found, "encoding": encoding, "header": file.layout.header}
