"""Events of text files: each small or compressed file indexed by one rank, a large one by all ranks.

They are read by blocks of whole events, which are parsed once for all fields of a window.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Array, Bytes
from matex_data.declared import declared
from matex_data.errors import RESTORE, DataError, DecodeError, FormatError
from matex_data.fields import Field
from matex_data.index.decoded import ByteRangeBlocks
from matex_data.index.model import FileIndex, Index
from matex_data.index.stamps import Stamp
from matex_data.index.table import Column
from matex_data.index.united import adapted, counted, unite
from matex_data.readers.catalogue import Catalogue
from matex_data.readers.collective import IndexingRanks, agreed
from matex_data.readers.formats import located
from matex_data.readers.text.scan import Events, EventSyntax, scan_file, scan_text
from matex_data.readers.text.unpacked import content, of_content
from matex_data.sampling.schedule import rank_range
from matex_data.storage.files import open_binary, reading, size_of_open

EventColumns = Mapping[str, Array]
REAL = rb"[-+]?(?:(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d++)?|(?i:nan|inf(?:inity)?))"
SHOWN_BYTES = 160  # of a line in a message


class EventParser(Protocol):
    """Parser of the text of neighbouring events, by the library of their format."""

    def parse(self, text: bytes, names: Sequence[str]) -> EventColumns:
        """Return the fields of all events of a text.

        Raises
        ------
        DecodeError : an event is damaged; ``row`` and ``byte`` are counted from the begin of ``text``.
        """


@declared
@dataclass(frozen=True, eq=False)
class EventBlocks(ByteRangeBlocks):
    """Events of a text; a block is a range of whole events."""

    parser: EventParser

    def decode(self, block: int, names: Sequence[str], stored: Bytes) -> EventColumns:
        """Parse the events of a block.

        Raises
        ------
        DecodeError : an event is damaged; the error names the event and its byte in the file.
        """
        begin, count = int(self.edges[block]), int(self.edges[block + 1] - self.edges[block])
        try:
            columns = self.parser.parse(stored.tobytes(), names)
        except DataError as error:
            raise damaged_event(error, self.path, begin, int(self.offset[block])) from error
        for name, column in columns.items():
            if len(column) != count:
                raise DecodeError(
                    "the file changes while it is read", file=self.path, field=name, expected=count, found=len(column)
                )
        return columns


def damaged_event(error: DataError, path: str, row: int, byte: int) -> DecodeError:
    """Return the error of a parser, which counts from event ``row`` and from ``byte`` of the text, for the file."""
    row = row + (error.row or 0)
    problem = error.problem if error.row is None else f"{error.problem} in event {row + 1}"
    where = {"file": path, "field": error.field, "row": None if error.row is None else row}
    return located(error, DecodeError, RESTORE, problem, byte=byte + (error.byte or 0), **where)


def split_rows(values: Array, counts: Sequence[int]) -> NDArray[Any]:
    """Return an object array whose element i has the next ``counts[i]`` values, as an array of its own memory."""
    rows = np.empty(len(counts), object)
    begin = 0
    for i, count in enumerate(counts):
        rows[i] = values[begin : begin + count].copy()  # a view would keep the values of all events alive
        begin += count
    return rows


SMALL_BYTES = 4 << 20  # a smaller file is indexed by one rank
HEADER_BYTES = 64 << 20  # largest header
READ_BYTES = 64 << 10  # of a header, per read


class EventHeader(Protocol):
    """Facts that stand before the first event of a file; immutable, and small enough to broadcast."""

    @property
    def begin(self) -> int:
        """Byte of the text before which there are no events."""

    def schema(self, path: str, events: Events) -> tuple[Mapping[str, Field], Mapping[str, str]]:
        """Return the fields of an event, and the facts that all files must share.

        Raises
        ------
        FormatError : the file is truncated.
        """

    def parser(self, names: Sequence[str]) -> EventParser:
        """Return the parser of these fields."""


ReadHeader = Callable[[str, IO[bytes]], EventHeader]
"""Reads the begin of a binary file or stream, ``(path, text)``."""


@dataclass
class _File:
    path: str
    stamp: Stamp
    size: int
    stored: str
    header: EventHeader
    events: Events | None


def index_files(
    syntax: EventSyntax,
    read_header: ReadHeader,
    paths: Sequence[str],
    names: Sequence[str] | None,
    ranks: IndexingRanks,
) -> Index:
    """Index the events of text files with the same fields. *Collective*.

    Rank 0 gets the index of all files, the others that of their block of them.

    Parameters
    ----------
    syntax : by which texts of the format are cut into events.
    names : fields; None: all.

    Raises
    ------
    FieldNotFound : there is no field of that name.
    FormatError : a file is truncated or of another format, or the files have different fields.
    DataError : a file cannot be read.
    """
    own = range(*rank_range(len(paths), ranks.rank, ranks.size))
    files: list[_File] = agreed(ranks, lambda: [_inspect(syntax, read_header, paths[number]) for number in own])
    large = ranks.allgather([number for number, file in zip(own, files, strict=True) if file.events is None])
    for number in (number for of_rank in large for number in of_rank):
        mine = files[number - own.start] if number in own else None
        file = next(filter(None, ranks.allgather(mine)))
        events = scan_file(file.path, file.header.begin, file.size, syntax, ranks)
        if not events.count:
            raise header_error(file.path, "the file has no events", expected="an event", found=f"{file.size} bytes")
        if mine is not None:
            mine.events = events
    indexes: list[Index] = agreed(ranks, lambda: [_index(file, names) for file in files])
    if len(paths) == 1:
        return ranks.allgather(indexes[0] if ranks.rank == 0 else None)[0]  # type: ignore[no-any-return]
    union = unite(ranks, counted((index.files.paths[0], index.fields, index.facts) for index in indexes))
    entries = agreed(ranks, lambda: [adapted(index.files[0], index.fields, union) for index in indexes])
    return Index(union.fields, ranks.gather_files(entries), facts=union.texts)


def _inspect(syntax: EventSyntax, read_header: ReadHeader, path: str) -> _File:
    """Read the header of a file; find the events of a small or compressed one."""
    with reading(path), open_binary(path) as file:
        stamp, size = Stamp.of(path), size_of_open(file)
        plain, stored = content(path, file)
        if not stored and size > SMALL_BYTES:
            return _File(path, stamp, size, stored, read_header(path, plain), None)
        text = np.frombuffer(plain.read(), np.uint8)
    header = read_header(path, io.BytesIO(text.tobytes()))
    events = scan_text(text, header.begin, syntax)
    if not events.count:
        _check_without_events(path, text[header.begin : events.offset[-1]], header)
    return _File(path, stamp, size, stored, header, events)


def _check_without_events(path: str, text: Bytes, header: EventHeader) -> None:
    """Raise ``FormatError`` if the text of a file without events, of which no rank reads a block, is damaged."""
    try:
        header.parser([]).parse(text.tobytes(), [])
    except DataError as error:
        byte = header.begin + (error.byte or 0)
        raise header_error(path, error.problem, byte=byte, expected=error.expected, found=error.found) from error


def _index(file: _File, names: Sequence[str] | None) -> Index:
    """Return the index of a file whose events are known."""
    events = file.events
    assert events is not None
    fields, facts = file.header.schema(file.path, events)

    def make(selected: Sequence[str]) -> Index:
        chosen, offset = {name: fields[name] for name in selected}, events.offset
        rows = EventBlocks(file.path, events.first, offset[:-1], np.diff(offset), chosen, file.header.parser(selected))
        table = of_content(file.path, file.stored, rows)
        entry = FileIndex(file.path, rows.rows, {name: Column(table, name) for name in chosen}, file.stamp)
        return Index(chosen, [entry], facts={name: fact for name, fact in facts.items() if name in selected})

    return Catalogue(file.path, fields, make).index(names)


def header_error(path: str, problem: str, **facts: Any) -> FormatError:
    """Return the error for a file whose header is damaged."""
    return FormatError(problem, file=path, **{"remedy": RESTORE, **facts})
