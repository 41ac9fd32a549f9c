"""Rows of a text file: which blocks hold the rows that are wanted, and one parse for all columns."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from matex_data.cache import Chunk, ChunkCache
from matex_data.errors import DataError, DecodeError
from matex_data.index import Array, Integers, Request, Rows
from matex_data.layouts import NOTHING
from matex_data.readers.csv_parse import Layout, parse
from matex_data.readers.csv_types import ColumnType
from matex_data.readers.ranks import Bytes
from matex_data.scatter import consecutive
from matex_data.tables import Table

PARSE_BYTES = 512 << 10  # parsed at once, about: neighbouring blocks that are wanted as a whole

Outs = Sequence[tuple[str, Array]]


@dataclass(frozen=True, eq=False)
class TextRows(Table):
    """Records of a text file in blocks.

    Parameters
    ----------
    layout : how they are parsed.
    types : of each column that can be asked for.
    rows : number of records.
    offset : int64[n + 1], byte where each block begins, and where the last one ends; of a file that is packed,
        0 and the size of the file.
    first : int64[n + 1], first record of each block, and ``rows``.
    line : int64[n], lines before each block.
    packed : "gzip", "bz2", "xz" or "zstd" if the file has to be unpacked as a whole; "utf-16" and the like if it has
        to be transcoded as a whole; "" if blocks can be read alone.
    skip : bytes before the first record of an unpacked text.
    """

    layout: Layout
    types: Mapping[str, ColumnType]
    rows: int
    offset: Integers
    first: Integers
    line: Integers
    packed: str = ""
    skip: int = 0

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.types)

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return int(np.diff(self.first).max(initial=1))

    def borders(self) -> Integers | None:
        return self.first[:-1]

    def stored_bytes(self) -> int:
        return int(self.offset[-1] - self.offset[0])

    def end(self) -> int:
        return int(self.offset[-1])

    def requests(self, rows: Rows, outs: Outs, cache: ChunkCache) -> Iterator[Request]:
        numbers = rows.numbers
        if not len(numbers):
            return
        block = np.searchsorted(self.first, numbers, side="right") - 1
        begin = np.flatnonzero(np.diff(block, prepend=-1))
        stop = np.append(begin[1:], len(numbers))
        blocks = block[begin]
        whole = stop - begin == (self.first[1:] - self.first[:-1])[blocks]
        i = 0
        while i < len(blocks):
            j = i + 1
            while whole[i] and j < len(blocks) and self._joins(int(blocks[i]), int(blocks[j]), j - i, bool(whole[j])):
                j += 1
            some = slice(int(begin[i]), int(stop[j - 1]))
            want = _Want(numbers[some] - self.first[blocks[i]], rows.place[some], outs)
            yield self._request(int(blocks[i]), int(blocks[j - 1]) + 1, want, bool(whole[i]), cache)
            i = j

    def _joins(self, first: int, other: int, count: int, whole: bool) -> bool:
        return whole and other == first + count and int(self.offset[other + 1] - self.offset[first]) <= PARSE_BYTES

    def _request(self, low: int, high: int, want: _Want, whole: bool, cache: ChunkCache) -> Request:
        promise = None
        if not whole:
            key = (id(self), low, *(name for name, _ in want.outs))
            kept = cache.get(key)
            if kept is not None:
                return Request(NOTHING, NOTHING, finish=partial(self._copy, want, low, kept))
            promise = cache.promise(key, int(self.offset[high] - self.offset[low]))
        return Request(
            offset=self.offset[low : low + 1],
            nbytes=self.offset[high : high + 1] - self.offset[low],
            finish=partial(self._finish, want, low, high, promise),
        )

    def _finish(self, want: _Want, low: int, high: int, promise: Chunk | None, data: Bytes) -> None:
        try:
            table = self._parsed(want, low, high, data)
        except Exception as error:  # whoever waits for the block must hear of any failure
            if promise is not None:
                promise.set_exception(error)
            raise
        if promise is not None:
            promise.set_result(table)
        self._take(want, low, table)

    def _parsed(self, want: _Want, low: int, high: int, data: Bytes) -> pa.Table:
        text = unpacked(data, self.packed)[self.skip :] if self.packed else data
        wanted = {name: self.types[name].arrow for name, _ in want.outs}
        return parse(text, self.layout, wanted, int(self.first[high] - self.first[low]), int(self.line[low]))

    def _copy(self, want: _Want, low: int, kept: Chunk, _: Bytes) -> None:
        self._take(want, low, kept.result())

    def _take(self, want: _Want, low: int, table: pa.Table) -> None:
        first = int(want.place[0]) if len(want.place) else 0
        place = slice(first, first + len(want.place)) if consecutive(want.place) else want.place
        for name, out in want.outs:
            try:
                values = self.types[name].values(table[name])
            except DataError as error:
                raise self._located(error, name, low, table) from error
            out[place] = values if len(values) == len(want.local) else values[want.local]

    def _located(self, error: DataError, name: str, low: int, table: pa.Table) -> DecodeError:
        """The error with the record that has no value."""
        row = int(np.argmax(table[name].is_null().to_numpy()))
        record, column = int(self.first[low]) + row, self.layout.names.index(name) + 1
        return DecodeError(
            f"{error.problem}: record {record + 1}, column {column}, behind line {int(self.line[low])}",
            field=name,
            row=record,
            expected=error.expected,
            found="nothing",
            remedy=error.remedy,
        )


@dataclass(frozen=True)
class _Want:
    """Rows of neighbouring blocks that are wanted, counted from the first block, and where they go."""

    local: Integers
    place: Integers
    outs: Outs


_MAGIC = {"gzip": b"\x1f\x8b", "bz2": b"BZh", "xz": b"\xfd7zXZ\x00", "zstd": b"\x28\xb5\x2f\xfd"}
_MARKS = {"utf-32": (b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff"), "utf-16": (b"\xff\xfe", b"\xfe\xff")}


def packing(head: bytes, encoding: str | None) -> str:
    """What has to be undone before a file is text of one byte for each ASCII character; "" if nothing."""
    for name, mark in _MAGIC.items():
        if head.startswith(mark):
            return name
    if encoding is not None:
        wide = encoding.lower().replace("_", "-").startswith(("utf-16", "utf-32", "utf16", "utf32"))
        return encoding if wide else ""
    return next((name for name, marks in _MARKS.items() if head.startswith(marks)), "")


def unpacked(data: Bytes, packed: str) -> Bytes:
    """The text of a whole file.

    Raises
    ------
    DecodeError : it is not what it says it is.
    """
    stored: Any = data.tobytes()
    try:
        if packed == "gzip":
            stored = gzip.decompress(stored)
        elif packed == "bz2":
            stored = bz2.decompress(stored)
        elif packed == "xz":
            stored = lzma.decompress(stored)
        elif packed == "zstd":
            stored = pa.input_stream(pa.BufferReader(stored), compression="zstd").read()
        else:
            stored = stored.decode(packed).encode()
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise DecodeError("the file does not unpack", expected=packed, found=error, remedy="copy it again") from error
    return np.frombuffer(stored, np.uint8)
