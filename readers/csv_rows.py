"""Rows of a text file: which blocks hold the rows that are wanted, and one parse for all columns."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from matex_data.cache import Chunk, ChunkCache
from matex_data.errors import DataError, DecodeError
from matex_data.index import Array, Integers, Request, Rows, ranges
from matex_data.layouts import NOTHING
from matex_data.readers.csv_parse import Layout, parse, plain
from matex_data.readers.csv_types import ColumnType
from matex_data.readers.ranks import Bytes
from matex_data.scatter import scatter, side_by_side
from matex_data.tables import Table

PARSE_BYTES = 1 << 20  # parsed at once, about

Outs = Sequence[tuple[str, Array]]
_Piece = tuple[int, Chunk | None]


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
        fresh: list[tuple[int, Chunk | None]] = []
        for i, number in enumerate(blocks.tolist()):
            key = (id(self), number, *(name for name, _ in outs))
            kept = None if whole[i] else cache.get(key)
            if kept is not None:
                some = slice(begin[i], stop[i])
                want = _Want(blocks[i : i + 1], numbers[some] - self.first[number], rows.place[some], outs)
                yield Request(NOTHING, NOTHING, finish=partial(self._copy, want, kept))
            else:
                nbytes = int(self.offset[number + 1] - self.offset[number])
                fresh.append((i, None if whole[i] else cache.promise(key, nbytes)))
        for group in self._together(fresh, blocks):
            pieces = [i for i, _ in group]
            want = self._joined(numbers, rows.place, blocks[pieces], begin[pieces], stop[pieces], outs)
            offset = self.offset[want.blocks]
            done = partial(self._finish, want, [promise for _, promise in group])
            yield Request(offset, self.offset[want.blocks + 1] - offset, finish=done)

    def _together(self, pieces: list[_Piece], blocks: Integers) -> Iterator[list[_Piece]]:
        """Pieces that are parsed at once."""
        group: list[_Piece] = []
        nbytes = 0
        for i, promise in pieces:
            group.append((i, promise))
            nbytes += int(self.offset[blocks[i] + 1] - self.offset[blocks[i]])
            if nbytes >= PARSE_BYTES:
                yield group
                group, nbytes = [], 0
        if group:
            yield group

    def _joined(
        self, numbers: Integers, place: Integers, blocks: Integers, begin: Integers, stop: Integers, outs: Outs
    ) -> _Want:
        """What is wanted of several blocks, whose rows will lie one behind the other."""
        behind = np.cumsum(self.first[blocks + 1] - self.first[blocks])
        shift = behind - self.first[blocks + 1]
        some = ranges(begin, stop - begin)
        return _Want(blocks, numbers[some] + np.repeat(shift, stop - begin), place[some], outs)

    def _finish(self, want: _Want, promises: list[Chunk | None], data: Bytes) -> None:
        try:
            table = self._parsed(want, data)
        except Exception as error:  # whoever waits for one of the blocks must hear of any failure
            for waited in promises:
                if waited is not None and not waited.done():
                    waited.set_exception(error)
            raise
        begin = 0
        for block, promise in zip(want.blocks.tolist(), promises, strict=True):
            count = int(self.first[block + 1] - self.first[block])
            if promise is not None and not promise.done():
                promise.set_result(table.slice(begin, count))
            begin += count
        self._take(want, table)

    def _parsed(self, want: _Want, data: Bytes) -> pa.Table:
        text = unpacked(data, self.packed)[self.skip :] if self.packed else data
        wanted = {name: self.types[name].arrow for name, _ in want.outs}
        rows = (self.first[want.blocks + 1] - self.first[want.blocks]).tolist()
        if len(rows) == 1:
            return parse(text, self.layout, wanted, rows[0], int(self.line[want.blocks[0]]))
        table = plain(text, self.layout, wanted, sum(rows))
        return self._one_by_one(want, wanted, text) if table is None else table

    def _one_by_one(self, want: _Want, wanted: Mapping[str, Any], text: Bytes) -> pa.Table:
        """Something is wrong in one of the blocks: its lines have to be known."""
        tables, begin = [], 0
        for block in want.blocks.tolist():
            end = begin + int(self.offset[block + 1] - self.offset[block])
            rows = int(self.first[block + 1] - self.first[block])
            tables.append(parse(text[begin:end], self.layout, wanted, rows, int(self.line[block])))
            begin = end
        return pa.concat_tables(tables).unify_dictionaries()

    def _copy(self, want: _Want, kept: Chunk, _: Bytes) -> None:
        self._take(want, kept.result())

    def _take(self, want: _Want, table: pa.Table) -> None:
        for _, group in groupby(want.outs, lambda named: (named[1].strides, named[1].dtype)):
            names, outs = zip(*group, strict=True)
            matrix = side_by_side(outs)
            if matrix is None:
                for name, out in zip(names, outs, strict=True):
                    scatter(out, want.place, self._values(want, name, table))
                continue
            scatter(matrix, want.place, self._matrix(want, names, table, matrix.dtype))

    def _matrix(self, want: _Want, names: Sequence[str], table: pa.Table, dtype: np.dtype[Any]) -> Array:
        """The columns side by side, all at once where they are parsed as what they become."""
        if dtype.kind == "f" and {table.schema.field(name).type for name in names} == {pa.from_numpy_dtype(dtype)}:
            (batch,) = table.select(names).combine_chunks().to_batches()
            rows: Array = batch.to_tensor(null_to_nan=True).to_numpy()
            return rows if len(rows) == len(want.local) else rows[want.local]
        rows = np.empty((len(want.place), len(names)), dtype)
        for i, name in enumerate(names):
            rows[:, i] = self._values(want, name, table)
        return rows

    def _values(self, want: _Want, name: str, table: pa.Table) -> Array:
        try:
            values = self.types[name].values(table[name])
        except DataError as error:
            raise self._located(error, name, want, table) from error
        return values if len(values) == len(want.local) else values[want.local]

    def _located(self, error: DataError, name: str, want: _Want, table: pa.Table) -> DecodeError:
        """The error with the record that has no value."""
        row = int(np.argmax(table[name].is_null().to_numpy()))
        ends = np.cumsum(self.first[want.blocks + 1] - self.first[want.blocks])
        at = int(np.searchsorted(ends, row, side="right"))
        record = int(self.first[want.blocks[at] + 1] - (ends[at] - row))
        column = self.layout.names.index(name) + 1
        return DecodeError(
            f"{error.problem}: record {record + 1}, column {column}, behind line {int(self.line[want.blocks[at]])}",
            field=name,
            row=record,
            expected=error.expected,
            found="nothing",
            remedy=error.remedy,
        )


@dataclass(frozen=True)
class _Want:
    """Rows of some blocks that are wanted, counted from the first row of the first block, and where they go."""

    blocks: Integers
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
