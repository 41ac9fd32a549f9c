"""Rows of a text file: which blocks hold the rows that are wanted, and one parse for all columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from matex_data._types import Array, Bytes, Integers
from matex_data.errors import DataError, DecodeError
from matex_data.index.blocks import Blocks, uneven_blocks
from matex_data.index.cache import ChunkCache, ChunkFuture
from matex_data.index.model import EMPTY, ReadRequest, RowSelection, ranges
from matex_data.index.scatter import matrix_view, scatter
from matex_data.index.table import Table
from matex_data.readers.csv.compression import unpacked
from matex_data.readers.csv.parse import TextLayout, parse, plain
from matex_data.readers.csv.types import ColumnType

PARSE_BYTES = 1 << 20  # parsed at once, about

Outs = Sequence[tuple[str, Array]]
Targets = Sequence["_Target"]


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

    layout: TextLayout
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

    def requests(self, rows: RowSelection, outs: Outs, cache: ChunkCache) -> Iterator[ReadRequest]:
        if not len(rows.destination):
            return
        blocks = uneven_blocks(rows, self.first)
        offset, end = self.offset[blocks.number], self.offset[blocks.number + 1]
        wanted = _Wanted(blocks, _targets(outs), {})
        names = tuple(name for name, _ in outs)
        fresh = np.ones(len(blocks.number), bool)
        for i in np.flatnonzero(blocks.count < self._sizes(blocks.number)).tolist():
            key = (id(self), int(blocks.number[i]), names)
            kept = cache.get(key)
            if kept is None:
                wanted.promises[i] = cache.reserve(key, int(end[i] - offset[i]))
                continue
            fresh[i] = False
            yield ReadRequest(EMPTY, EMPTY, on_complete=partial(self._copy, wanted, i, kept))
        several = np.flatnonzero(fresh)
        nbytes = (end - offset)[several]
        groups = max(1, round(nbytes.sum() / PARSE_BYTES))
        turn = (np.cumsum(nbytes) - nbytes) * groups // max(1, nbytes.sum())
        for some in np.split(several, np.flatnonzero(np.diff(turn)) + 1):
            if len(some):
                yield ReadRequest(offset[some], (end - offset)[some], on_complete=partial(self._finish, wanted, some))

    def _sizes(self, blocks: Integers) -> Integers:
        """int64[blocks], how many records each block has."""
        return self.first[blocks + 1] - self.first[blocks]

    def _finish(self, wanted: _Wanted, some: Integers, data: Bytes) -> None:
        blocks = wanted.blocks.select(some)
        promises = [wanted.promises.get(i) for i in some.tolist()]
        try:
            columns = self._decoded(blocks.number, wanted.targets, data)
        except Exception as error:  # whoever waits for one of the blocks must hear of any failure
            for waited in promises:
                if waited is not None and not waited.done():
                    waited.set_exception(error)
            raise
        sizes = self._sizes(blocks.number)
        before = np.cumsum(sizes) - sizes
        for begin, size, promise in zip(before.tolist(), sizes.tolist(), promises, strict=True):
            if promise is not None and not promise.done():
                promise.set_result([column[begin : begin + size] for column in columns])
        shift = np.repeat(before - self.first[blocks.number], np.diff(blocks.entered))
        _take(wanted.targets, columns, ranges(blocks.runs.start + shift, blocks.runs.count), blocks.destination)

    def _copy(self, wanted: _Wanted, i: int, kept: ChunkFuture, _: Bytes) -> None:
        block = wanted.blocks.select(np.array([i]))
        begin = int(self.first[block.number[0]])
        _take(wanted.targets, kept.result(), ranges(block.runs.start - begin, block.runs.count), block.destination)

    def _decoded(self, blocks: Integers, targets: Targets, data: Bytes) -> list[Array]:
        """All records of the blocks for each target: a matrix, or the values of one column."""
        table = self._parsed(blocks, [name for target in targets for name in target.names], data)
        return [
            self._matrix(target, blocks, table) if target.several else self._values(target.names[0], blocks, table)
            for target in targets
        ]

    def _parsed(self, blocks: Integers, names: Sequence[str], data: Bytes) -> pa.Table:
        text = unpacked(data, self.packed)[self.skip :] if self.packed else data
        wanted = {name: self.types[name].arrow for name in names}
        if len(blocks) == 1:
            return parse(text, self.layout, wanted, int(self._sizes(blocks)[0]), int(self.line[blocks[0]]))
        table = plain(text, self.layout, wanted, int(self._sizes(blocks).sum()))
        return self._one_by_one(blocks, wanted, text) if table is None else table

    def _one_by_one(self, blocks: Integers, wanted: Mapping[str, Any], text: Bytes) -> pa.Table:
        """Something is wrong in one of the blocks: its lines have to be known."""
        tables, begin = [], 0
        for block, rows in zip(blocks.tolist(), self._sizes(blocks).tolist(), strict=True):
            end = begin + int(self.offset[block + 1] - self.offset[block])
            tables.append(parse(text[begin:end], self.layout, wanted, rows, int(self.line[block])))
            begin = end
        return pa.concat_tables(tables).unify_dictionaries()

    def _matrix(self, target: _Target, blocks: Integers, table: pa.Table) -> Array:
        """The columns side by side, all at once where they are parsed as what they become."""
        names, dtype = target.names, target.out.dtype
        if dtype.kind == "f" and {self.types[name].arrow for name in names} == {pa.from_numpy_dtype(dtype)}:
            (batch,) = table.select(names).combine_chunks().to_batches()
            rows: Array = batch.to_tensor(null_to_nan=True).to_numpy()
            return rows
        rows = np.empty((table.num_rows, len(names)), dtype)
        for i, name in enumerate(names):
            rows[:, i] = self._values(name, blocks, table)
        return rows

    def _values(self, name: str, blocks: Integers, table: pa.Table) -> Array:
        try:
            return self.types[name].values(table[name])
        except DataError as error:
            raise self._located(error, name, blocks, table) from error

    def _located(self, error: DataError, name: str, blocks: Integers, table: pa.Table) -> DecodeError:
        """The error with the record that has no value."""
        row = int(np.argmax(table[name].is_null().to_numpy()))
        ends = np.cumsum(self._sizes(blocks))
        at = int(np.searchsorted(ends, row, side="right"))
        record = int(self.first[blocks[at] + 1] - (ends[at] - row))
        column = self.layout.names.index(name) + 1
        return DecodeError(
            f"{error.problem}: record {record + 1}, column {column}, behind line {int(self.line[blocks[at]])}",
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
        matrix = matrix_view(arrays)
        if matrix is not None:
            targets.append(_Target(names, matrix, True))
        else:
            targets += [_Target([name], out, False) for name, out in zip(names, arrays, strict=True)]
    return targets


@dataclass(frozen=True)
class _Wanted:
    """Blocks of which some rows are wanted, the arrays that receive them, and the blocks that others wait for, too."""

    blocks: Blocks
    targets: Targets
    promises: dict[int, ChunkFuture]


def _take(targets: Targets, columns: Sequence[Array], rows: Integers, destination: Integers) -> None:
    """Some rows of the columns, one of which there is for each target, to their places."""
    for target, column in zip(targets, columns, strict=True):
        scatter(target.out, destination, column if len(column) == len(rows) else column.take(rows, axis=0))
