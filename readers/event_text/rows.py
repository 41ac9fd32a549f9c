"""Events of a text file: read by blocks of whole events, and parsed once for all fields of a window."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import DataError, DecodeError
from matex_data.index.blocks import Blocks, uneven_blocks
from matex_data.index.cache import Chunk, ChunkCache
from matex_data.index.model import EMPTY, ReadRequest, RowSelection
from matex_data.index.scatter import scatter
from matex_data.index.table import Outputs, Table
from matex_data.readers.compression import plain_text

Columns = Mapping[str, Array]


class EventParser(Protocol):
    """Parser of the text of neighbouring events, by the library of their format."""

    def parse(self, text: bytes, names: Sequence[str]) -> Columns:
        """Return the fields of all events of a text.

        Raises
        ------
        DecodeError : an event is damaged; ``row`` and ``byte`` are counted from the begin of ``text``.
        """


@declared
@dataclass(frozen=True, eq=False)
class EventRows(Table):
    """Events of a text file in blocks.

    Parameters
    ----------
    path : of the file.
    parser : of its events.
    width : number of fields.
    offset : int64[n + 1], byte of the text where each block begins, and where the last one ends.
    first : int64[n + 1], first event of each block, and their number.
    stored : compression of the file, as ``stored_as`` returns; "" if blocks can be read alone.
    size : of the file, in bytes.
    """

    path: str
    parser: EventParser
    width: int
    offset: Integers
    first: Integers
    stored: str
    size: int

    @property
    def rows(self) -> int:  # type: ignore[override]
        return int(self.first[-1])

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return int(np.diff(self.first).max(initial=1))

    def borders(self) -> Integers | None:
        return self.first[:-1]

    def stored_bytes(self) -> int:
        return self.size if self.stored else int(self.offset[-1] - self.offset[0])

    def inner_bytes(self, name: str) -> int:
        """Return about the size of all elements of a field in memory: a number has some 8 characters or more."""
        return int(self.offset[-1] - self.offset[0]) // max(1, self.width)

    def end(self) -> int:
        return self.size if self.stored else int(self.offset[-1])

    def requests(self, rows: RowSelection, outs: Outputs, cache: ChunkCache) -> Iterator[ReadRequest]:
        if not len(rows.destination):
            return
        window = _Window(self, uneven_blocks(rows, self.first), outs)
        text: Chunk | None = None
        if self.stored:
            text = cache.get((self, "text"))
            if text is None:
                text = cache.reserve((self, "text"), int(self.offset[-1]))
                whole = np.array([0], np.int64), np.array([self.size], np.int64)
                yield ReadRequest(*whole, on_complete=partial(self._unpack, text))
        yield from window.requests(text, cache)

    def _unpack(self, text: Chunk, data: Bytes) -> None:
        """Decompress the file for all windows that need its text."""
        try:
            text.complete(plain_text(data, self.stored))
        except Exception as error:
            text.fail(error)
            raise

    def columns(self, block: int, names: Sequence[str], text: Bytes) -> Columns:
        """Parse the events of a block.

        Raises
        ------
        DecodeError : an event is damaged; the error names the event and its byte in the file.
        """
        begin, count = int(self.first[block]), int(self.first[block + 1] - self.first[block])
        try:
            columns = self.parser.parse(text.tobytes(), names)
        except DataError as error:
            raise self._located(error, begin, int(self.offset[block])) from error
        for name, column in columns.items():
            if len(column) != count:
                raise DecodeError(
                    "the file changes while it is read", file=self.path, field=name, expected=count, found=len(column)
                )
        return columns

    def _located(self, error: DataError, event: int, byte: int) -> DecodeError:
        row = None if error.row is None else event + error.row
        where = "" if row is None else f" in event {row + 1}"
        text = " of the decompressed text" if self.stored else ""
        return DecodeError(
            f"{error.problem}{where}{text and ', byte counted in the decompressed text'}",
            file=self.path,
            field=error.field,
            row=row,
            byte=byte + (error.byte or 0),
            expected=error.expected,
            found=error.found,
            remedy=error.remedy or "the file is damaged: restore it from its source, or leave it out",
        )


@dataclass(frozen=True)
class _Window:
    """Events to read for one window: the blocks that hold them, and the arrays that receive their fields."""

    table: EventRows
    blocks: Blocks
    outs: Outputs

    def requests(self, text: Chunk | None, cache: ChunkCache) -> Iterator[ReadRequest]:
        """Yield the read of each block. A block that other windows need as well stays parsed.

        Parameters
        ----------
        text : the whole text, of a file that is compressed; None: the blocks are read from the file.
        """
        table, names = self.table, tuple(name for name, _ in self.outs)
        sizes = table.first[self.blocks.number + 1] - table.first[self.blocks.number]
        for i, block in enumerate(self.blocks.number.tolist()):
            key, parsed = (table, block, names), None
            begin, nbytes = table.offset[block], table.offset[block + 1] - table.offset[block]
            if self.blocks.count[i] < sizes[i]:
                cached = cache.get(key)
                if cached is not None:
                    yield ReadRequest(EMPTY, EMPTY, on_complete=partial(self._copy, i, cached), after=cached)
                    continue
                parsed = cache.reserve(key, int(nbytes))
            if text is not None:
                yield ReadRequest(EMPTY, EMPTY, on_complete=partial(self._parse_part, i, parsed, text), after=text)
            else:
                ranges = np.array([begin], np.int64), np.array([nbytes], np.int64)
                yield ReadRequest(*ranges, on_complete=partial(self._parse, i, parsed))

    def _parse(self, i: int, parsed: Chunk | None, data: Bytes) -> None:
        """Parse a block, pass it on to other windows, and scatter its events."""
        block = int(self.blocks.number[i])
        try:
            columns = self.table.columns(block, [name for name, _ in self.outs], data)
        except Exception as error:  # another window may wait for the block
            if parsed is not None:
                parsed.fail(error)
            raise
        if parsed is not None:
            parsed.complete(columns)
        self._scatter(i, columns)

    def _parse_part(self, i: int, parsed: Chunk | None, text: Chunk, _: Bytes) -> None:
        """Parse a block of a decompressed text."""
        whole: Bytes = text.value
        block = int(self.blocks.number[i])
        self._parse(i, parsed, whole[self.table.offset[block] : self.table.offset[block + 1]])

    def _copy(self, i: int, cached: Chunk, _: Bytes) -> None:
        """Scatter events of a block that the cache holds or that another window parses."""
        self._scatter(i, cached.value)

    def _scatter(self, i: int, columns: Columns) -> None:
        rows = self.blocks.rows(i, int(self.table.first[self.blocks.number[i]]))
        for name, out in self.outs:
            scatter(out, self.blocks.destinations(i), columns[name][rows])


def split_rows(values: Array, counts: Sequence[int]) -> NDArray[Any]:
    """Return an object array whose element i has the next ``counts[i]`` values, as an array of its own memory."""
    rows = np.empty(len(counts), object)
    begin = 0
    for i, count in enumerate(counts):
        rows[i] = values[begin : begin + count].copy()  # a view would keep the values of all events alive
        begin += count
    return rows
