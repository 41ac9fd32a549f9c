"""Rows of a text file: read by blocks of whole records, and parsed once for all columns of a window."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
import pyarrow as pa

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import DataError, DecodeError
from matex_data.index.decoded import DecodedBlocks, SelectedBlocks
from matex_data.index.model import ReadRequest, ranges
from matex_data.index.runs import neighbours
from matex_data.index.scatter import matrix_view, scatter
from matex_data.index.table import Outputs
from matex_data.readers.csv.parse import CALL_BYTES, COLUMN_BYTES, Block, Parser
from matex_data.readers.csv.types import ColumnType


@declared
@dataclass(frozen=True, eq=False)
class CsvRows(DecodedBlocks):
    """Records of a text file in blocks.

    Parameters
    ----------
    types : of each column that can be read.
    offset : int64[blocks + 1], byte where each block begins, and where the last one ends.
    line : int64[blocks], lines before each block.
    """

    parser: Parser
    types: Mapping[str, ColumnType]
    offset: Integers
    line: Integers

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.types)

    def stored_bytes(self) -> int:
        return int(self.offset[-1] - self.offset[0])

    def end(self) -> int:
        return int(self.offset[-1])

    def decoded_bytes(self, block: int, outs: Outputs) -> int:
        return int(self.offset[block + 1] - self.offset[block])

    def block_requests(self, selection: SelectedBlocks, positions: Integers) -> Iterator[ReadRequest]:
        number = selection.blocks.number[positions]
        nbytes, targets = self.offset[number + 1] - self.offset[number], _targets(selection.outs)
        total = max(1, nbytes.sum())
        calls = max(1, round(total / max(CALL_BYTES, COLUMN_BYTES * len(selection.outs))))
        for indices in neighbours(nbytes, total / calls):
            complete = partial(self._parse, selection, positions[indices], targets)
            yield ReadRequest(self.offset[number[indices]], nbytes[indices], on_complete=complete)

    def block_sizes(self, blocks: Integers) -> Integers:
        """Return the number of records of each block, int64[blocks]."""
        return self.edges[blocks + 1] - self.edges[blocks]

    def _parse(self, selection: SelectedBlocks, positions: Integers, targets: Sequence[_Target], data: Bytes) -> None:
        """Parse blocks, pass them on to other windows, and scatter their rows."""
        blocks = selection.blocks.select(positions)
        columns, sizes = self.columns(blocks.number, targets, data), self.block_sizes(blocks.number)
        before = np.cumsum(sizes) - sizes
        for i, begin, size in zip(positions.tolist(), before.tolist(), sizes.tolist(), strict=True):
            if i in selection.reserved:
                own = zip(targets, (column[begin : begin + size] for column in columns), strict=True)
                selection.reserved.complete(i, {name: of for target, block in own for name, of in target.split(block)})
        shift = np.repeat(before - self.edges[blocks.number], np.diff(blocks.first_run))
        rows = ranges(blocks.runs.start + shift, blocks.runs.count)
        for target, column in zip(targets, columns, strict=True):
            scatter(target.out, blocks.destination, column if len(column) == len(rows) else column.take(rows, axis=0))

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
        types = {name: self.types[name].arrow for name in names}
        nbytes, lines = (self.offset[blocks + 1] - self.offset[blocks]).tolist(), self.line[blocks].tolist()
        parts = map(Block, nbytes, self.block_sizes(blocks).tolist(), lines)
        tables = self.parser.parse_blocks(data, types, list(parts))
        return tables[0] if len(tables) == 1 else pa.concat_tables(tables).unify_dictionaries()

    def _values(self, name: str, blocks: Integers, table: pa.Table) -> Array:
        try:
            return self.types[name].values(table[name])
        except DataError as error:
            row = int(np.argmax(table[name].is_null().to_numpy()))
            ends = np.cumsum(self.block_sizes(blocks))
            at = int(np.searchsorted(ends, row, side="right"))
            record = int(self.edges[blocks[at] + 1] - (ends[at] - row))
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

    def split(self, values: Array) -> Iterable[tuple[str, Array]]:
        """Return the columns of values, by name."""
        return zip(self.names, values.T if self.is_matrix else [values], strict=True)


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
