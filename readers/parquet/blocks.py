"""Blocks of a columnar file of which pyarrow makes a table, and a field each of its members."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from matex_data._types import Integers
from matex_data.errors import DataError, DecodeError
from matex_data.index.decoded import SingleBlocks
from matex_data.index.table import Outputs
from matex_data.machine import check_fits
from matex_data.readers.parquet.members import ColumnField
from matex_data.readers.parquet.values import ColumnValues, decode
from matex_data.storage.files import undecodable

SMALLER = "write the file with fewer rows in a block (row_group_size=100_000 of pyarrow), or select fewer columns"


@dataclass(frozen=True, eq=False)
class ArrowBlocks(SingleBlocks):
    """Columns of a file that pyarrow decodes.

    Parameters
    ----------
    members : the fields, by name.
    offset, nbytes : int64[blocks * columns], byte ranges of the stored columns, block by block. Columns of integers of
        one axis take the least memory in an index of many files.
    ratio : bytes of the columns in memory for each byte in the file.
    """

    members: Mapping[str, ColumnField]
    offset: Integers
    nbytes: Integers
    ratio: float

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.members)

    @abstractmethod
    def columns(self, names: Sequence[str]) -> list[int]:
        """Return the positions of the stored columns that hold fields, each once."""

    def ranges(self, block: int, columns: Sequence[int]) -> tuple[Integers, Integers]:
        """Return offsets and lengths in bytes of stored columns in a block."""
        at = block * (len(self.nbytes) // (len(self.edges) - 1)) + np.array(columns, np.int64)
        return self.offset[at], self.nbytes[at]

    def block_ranges(self, block: int, names: Sequence[str]) -> tuple[Integers, Integers]:
        return self.ranges(block, self.columns(names))

    def column_bytes(self, columns: Sequence[int]) -> int:
        """Return the sum of the lengths of stored columns in all blocks, in bytes."""
        if len(self.edges) < 2:
            return 0
        return int(self.nbytes.reshape(len(self.edges) - 1, -1)[:, list(columns)].sum())

    def stored_bytes(self) -> int:
        return int(self.nbytes.sum())

    def inner_bytes(self, name: str) -> int:
        if not self.members[name].field.ragged:
            return 0
        return int(self.column_bytes(self.columns([name])) * self.ratio)

    def decoded_bytes(self, block: int, outs: Outputs) -> int:
        return self.declared_bytes(block, [name for name, _ in outs])

    def declared_bytes(self, block: int, names: Sequence[str]) -> int:
        """Return the size of fields in a block, in bytes: what the file declares, but no less than its rows take."""
        rows = int(self.edges[block + 1] - self.edges[block])
        stored = int(self.ranges(block, self.columns(names))[1].sum() * self.ratio)
        return max(stored, rows * sum(self.members[name].field.row_bytes for name in names))

    def check_fits(self, block: int, names: Sequence[str]) -> None:
        """Raise ``PartitionError`` for a block that does not fit into memory once it is decoded."""
        check_fits(self.declared_bytes(block, names), "a block of rows", file=self.path, remedy=SMALLER)

    def values(self, block: int, table: pa.Table, names: Sequence[str]) -> dict[str, ColumnValues]:
        """Return the rows of fields in a block that pyarrow has decoded.

        Raises
        ------
        DecodeError : the block has another number of rows, or a value that its field cannot hold.
        """
        first, count = int(self.edges[block]), int(self.edges[block + 1] - self.edges[block])
        if table.num_rows != count:
            raise DecodeError(
                "a block of rows is damaged", file=self.path, row=first, expected=f"{count} rows", found=table.num_rows
            )
        found = {}
        for name in names:
            member = self.members[name]
            try:
                found[name] = decode(table.column(member.column), member)
            except DecodeError as error:
                error.at(self.path, name).at_row(first + (error.row or 0))
                raise
        return found

    def undecodable(self, block: int, names: Sequence[str], byte: int, error: Exception) -> DataError:
        """Return the error for a block that pyarrow does not decode."""
        field, row = names[0] if len(names) == 1 else None, int(self.edges[block])
        problem = "a block of rows does not decode"
        return undecodable(DecodeError, problem, self.path, error, field=field, row=row, byte=byte, found=error)
