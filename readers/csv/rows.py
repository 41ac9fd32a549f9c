"""Rows of a text file: read by blocks of whole records, and parsed once for all columns of a window."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
import pyarrow as pa

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import DataError, DecodeError
from matex_data.index.blocks import Blocks, uneven_blocks
from matex_data.index.cache import Chunk, ChunkCache, Reserved
from matex_data.index.model import EMPTY, ReadRequest, RowSelection, ranges
from matex_data.index.scatter import matrix_view, scatter
from matex_data.index.table import Outputs, Table
from matex_data.readers.csv.parse import Parser
from matex_data.readers.csv.types import ColumnType
from matex_data.readers.text.compression import plain_text
from matex_data.readers.text.unpacked import notice_of

PARSE_BYTES = 1 << 20  # parsed by one call, about


@declared
@dataclass(frozen=True, eq=False)
class CsvRows(Table):
    """Records of a text file in blocks.

    Parameters
    ----------
    parser : of the file.
    types : of each column that can be read.
    rows : number of records.
    offset : int64[n + 1], byte where each block begins, and where the last one ends; of a compressed or transcoded
        file, 0 and the size of the file.
    first : int64[n + 1], first record of each block, and ``rows``.
    line : int64[n], lines before each block.
    stored : compression or wide encoding of the file, as ``stored_as`` returns; "" if blocks can be read alone.
    skip : bytes before the first record of a decompressed or transcoded text.
    """

    parser: Parser
    types: Mapping[str, ColumnType]
    rows: int
    offset: Integers
    first: Integers
    line: Integers
    stored: str = ""
    skip: int = 0

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.types)

    @property
    def notice(self) -> str:  # type: ignore[override]
        return notice_of(self.parser.path, self.stored) if self.stored else ""

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return int(np.diff(self.first).max(initial=1))

    def borders(self) -> Integers | None:
        return self.first[:-1]

    def stored_bytes(self) -> int:
        return int(self.offset[-1] - self.offset[0])

    def end(self) -> int:
        return int(self.offset[-1])

    def requests(self, rows: RowSelection, outs: Outputs, cache: ChunkCache) -> Iterator[ReadRequest]:
        if not len(rows.destination):
            return
        blocks = uneven_blocks(rows, self.first)
        nbytes = self.offset[blocks.number + 1] - self.offset[blocks.number]
        window = _Window(self, blocks, _targets(outs), Reserved())
        names = tuple(name for name, _ in outs)
        uncached = np.ones(len(blocks.number), bool)
        for i in np.flatnonzero(blocks.count < self.block_sizes(blocks.number)).tolist():
            key = (self, int(blocks.number[i]), names)
            cached = cache.get(key)
            if cached is None:
                window.reserved[i] = cache.reserve(key, int(nbytes[i]))
            else:
                uncached[i] = False
                yield ReadRequest(EMPTY, EMPTY, on_complete=partial(window.copy, i, cached), after=cached)
        selected = np.flatnonzero(uncached)
        total = nbytes[selected].sum()
        groups = max(1, round(total / PARSE_BYTES))
        group = (np.cumsum(nbytes[selected]) - nbytes[selected]) * groups // max(1, total)
        for neighbours in np.split(selected, np.flatnonzero(np.diff(group)) + 1):
            if len(neighbours):
                offset = self.offset[blocks.number[neighbours]]
                yield ReadRequest(offset, nbytes[neighbours], on_complete=partial(window.parse, neighbours))

    def block_sizes(self, blocks: Integers) -> Integers:
        """Return the number of records of each block, int64[blocks]."""
        return self.first[blocks + 1] - self.first[blocks]

    def columns(self, blocks: Integers, targets: Sequence[_Target], data: Bytes) -> list[Array]:
        """Parse all records of blocks: for each target a matrix, or the values of one column."""
        table = self._table(blocks, [name for target in targets for name in target.names], data)
        found = []
        for target in targets:
            names, dtype = target.names, target.out.dtype
            if not target.is_matrix:
                found.append(self._values(names[0], blocks, table))
            elif dtype.kind == "f" and {self.types[name].arrow for name in names} == {pa.from_numpy_dtype(dtype)}:
                (batch,) = table.select(names).combine_chunks().to_batches()
                found.append(batch.to_tensor(null_to_nan=True).to_numpy())
            else:
                matrix = np.empty((table.num_rows, len(names)), dtype)
                for i, name in enumerate(names):
                    matrix[:, i] = self._values(name, blocks, table)
                found.append(matrix)
        return found

    def _table(self, blocks: Integers, names: Sequence[str], data: Bytes) -> pa.Table:
        text = plain_text(data, self.stored)[self.skip :] if self.stored else data
        types = {name: self.types[name].arrow for name in names}
        sizes = self.block_sizes(blocks)
        if len(blocks) > 1:
            try:
                return self.parser.parse_with_arrow(text, types, int(sizes.sum()))
            except pa.ArrowInvalid:
                pass  # block by block, since an error has to name its line
        ends = np.cumsum(self.offset[blocks + 1] - self.offset[blocks])[:-1]
        lines, texts = self.line[blocks].tolist(), np.split(text, ends)
        parts = zip(texts, sizes.tolist(), lines, strict=True)
        tables = [self.parser.parse(part, types, count, line) for part, count, line in parts]
        return tables[0] if len(tables) == 1 else pa.concat_tables(tables).unify_dictionaries()

    def _values(self, name: str, blocks: Integers, table: pa.Table) -> Array:
        try:
            return self.types[name].values(table[name])
        except DataError as error:
            row = int(np.argmax(table[name].is_null().to_numpy()))
            ends = np.cumsum(self.block_sizes(blocks))
            at = int(np.searchsorted(ends, row, side="right"))
            record = int(self.first[blocks[at] + 1] - (ends[at] - row))
            column = self.parser.names.index(name) + 1
            raise DecodeError(
                f"{error.problem}: record {record + 1}, column {column}, behind line {int(self.line[blocks[at]])}",
                field=name,
                row=record,
                expected=error.expected,
                found="nothing",
                remedy=error.remedy,
            ) from error


@dataclass(frozen=True)
class _Target:
    """Array that receives one column, or neighbouring columns as a matrix."""

    names: list[str]
    out: Array
    is_matrix: bool


def _targets(outs: Outputs) -> list[_Target]:
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
class _Window:
    """Rows to read for one window.

    Parameters
    ----------
    blocks : that hold the rows.
    targets : arrays that receive them.
    reserved : by position in ``blocks``, those that the cache keeps for other windows.
    """

    table: CsvRows
    blocks: Blocks
    targets: Sequence[_Target]
    reserved: Reserved

    def parse(self, selected: Integers, data: Bytes) -> None:
        """Parse blocks, pass them on to other windows, and scatter their rows."""
        blocks = self.blocks.select(selected)
        columns = self.table.columns(blocks.number, self.targets, data)
        sizes = self.table.block_sizes(blocks.number)
        before = np.cumsum(sizes) - sizes
        for i, begin, size in zip(selected.tolist(), before.tolist(), sizes.tolist(), strict=True):
            self.reserved.complete(i, [column[begin : begin + size] for column in columns])
        self._scatter(blocks, columns, before)

    def copy(self, i: int, cached: Chunk, _: Bytes) -> None:
        """Scatter rows of a block that the cache holds or that another window parses."""
        self._scatter(self.blocks.select(np.array([i])), cached.value, np.zeros(1, np.int64))

    def _scatter(self, blocks: Blocks, columns: Sequence[Array], position: Integers) -> None:
        """Scatter rows of blocks that begin at ``position`` in the columns, of which each target has one."""
        shift = np.repeat(position - self.table.first[blocks.number], np.diff(blocks.first_run))
        rows = ranges(blocks.runs.start + shift, blocks.runs.count)
        for target, column in zip(self.targets, columns, strict=True):
            values = column if len(column) == len(rows) else column.take(rows, axis=0)
            scatter(target.out, blocks.destination, values)
