"""Rows of a text file: which blocks hold the rows that are wanted, and one parse for all columns."""

from __future__ import annotations

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
from matex_data.readers.csv_packing import unpacked
from matex_data.readers.csv_parse import Layout, parse, plain
from matex_data.readers.csv_types import ColumnType
from matex_data.readers.ranks import Bytes
from matex_data.runs import Runs, cut
from matex_data.scatter import scatter, side_by_side
from matex_data.tables import Table

PARSE_BYTES = 1 << 20  # parsed at once, about

Outs = Sequence[tuple[str, Array]]
Targets = Sequence["_Target"]
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
        runs = cut(Runs(rows.start, rows.stop - rows.start), self.first)
        block = np.searchsorted(self.first, runs.start, side="right") - 1
        entered = np.flatnonzero(np.diff(block, prepend=-1))
        blocks, begin = block[entered], runs.first[entered]
        stop = np.append(begin[1:], runs.total)
        whole = (stop - begin == (self.first[1:] - self.first[:-1])[blocks]).tolist()
        targets, names = _targets(outs), tuple(name for name, _ in outs)
        fresh: list[_Piece] = []
        for i, number in enumerate(blocks.tolist()):
            kept = None if whole[i] else cache.get((id(self), number, names))
            if kept is not None:
                some = slice(begin[i], stop[i])
                want = _Want(blocks[i : i + 1], numbers[some] - self.first[number], rows.place[some], targets)
                yield Request(NOTHING, NOTHING, finish=partial(self._copy, want, kept))
            else:
                nbytes = int(self.offset[number + 1] - self.offset[number])
                fresh.append((i, None if whole[i] else cache.promise((id(self), number, names), nbytes)))
        for group in self._together(fresh, blocks):
            pieces = [i for i, _ in group]
            want = self._joined(numbers, rows.place, blocks[pieces], begin[pieces], stop[pieces], targets)
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
        self, numbers: Integers, place: Integers, blocks: Integers, begin: Integers, stop: Integers, targets: Targets
    ) -> _Want:
        """What is wanted of several blocks, whose rows will lie one behind the other."""
        behind = np.cumsum(self.first[blocks + 1] - self.first[blocks])
        shift = behind - self.first[blocks + 1]
        some = ranges(begin, stop - begin)
        return _Want(blocks, numbers[some] + np.repeat(shift, stop - begin), place[some], targets)

    def _finish(self, want: _Want, promises: list[Chunk | None], data: Bytes) -> None:
        try:
            columns = self._decoded(want, self._parsed(want, data))
        except Exception as error:  # whoever waits for one of the blocks must hear of any failure
            for waited in promises:
                if waited is not None and not waited.done():
                    waited.set_exception(error)
            raise
        begin = 0
        for block, promise in zip(want.blocks.tolist(), promises, strict=True):
            end = begin + int(self.first[block + 1] - self.first[block])
            if promise is not None and not promise.done():
                promise.set_result([column[begin:end] for column in columns])
            begin = end
        want.take(columns)

    def _copy(self, want: _Want, kept: Chunk, _: Bytes) -> None:
        want.take(kept.result())

    def _parsed(self, want: _Want, data: Bytes) -> pa.Table:
        text = unpacked(data, self.packed)[self.skip :] if self.packed else data
        wanted = {name: self.types[name].arrow for target in want.targets for name in target.names}
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

    def _decoded(self, want: _Want, table: pa.Table) -> list[Array]:
        """All records of the blocks for each target: a matrix, or the values of one column."""
        return [
            self._matrix(target, want, table) if target.several else self._values(target.names[0], want, table)
            for target in want.targets
        ]

    def _matrix(self, target: _Target, want: _Want, table: pa.Table) -> Array:
        """The columns side by side, all at once where they are parsed as what they become."""
        names, dtype = target.names, target.out.dtype
        if dtype.kind == "f" and {self.types[name].arrow for name in names} == {pa.from_numpy_dtype(dtype)}:
            (batch,) = table.select(names).combine_chunks().to_batches()
            rows: Array = batch.to_tensor(null_to_nan=True).to_numpy()
            return rows
        rows = np.empty((table.num_rows, len(names)), dtype)
        for i, name in enumerate(names):
            rows[:, i] = self._values(name, want, table)
        return rows

    def _values(self, name: str, want: _Want, table: pa.Table) -> Array:
        try:
            return self.types[name].values(table[name])
        except DataError as error:
            raise self._located(error, name, want, table) from error

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
class _Target:
    """Columns that become one array: several side by side, or a single one."""

    names: list[str]
    out: Array
    several: bool


def _targets(outs: Outs) -> Targets:
    targets = []
    for _, group in groupby(outs, lambda named: (named[1].strides, named[1].dtype)):
        names, arrays = map(list, zip(*group, strict=True))
        matrix = side_by_side(arrays)
        if matrix is not None:
            targets.append(_Target(names, matrix, True))
        else:
            targets += [_Target([name], out, False) for name, out in zip(names, arrays, strict=True)]
    return targets


@dataclass(frozen=True)
class _Want:
    """Rows of some blocks that are wanted, counted from the first row of the first block, and where they go."""

    blocks: Integers
    local: Integers
    place: Integers
    targets: Targets

    def take(self, columns: Sequence[Array]) -> None:
        """From all rows of the blocks, one array for each target."""
        for target, rows in zip(self.targets, columns, strict=True):
            some = rows if len(rows) == len(self.local) else rows.take(self.local, axis=0)
            scatter(target.out, self.place, some)
