"""Row groups of a Parquet file: byte ranges of column chunks, decoded by pyarrow."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from matex_data._types import Bytes, Integers
from matex_data.declared import declared
from matex_data.fields import EXACT
from matex_data.index.model import Limits
from matex_data.readers.parquet.blocks import ArrowBlocks
from matex_data.readers.parquet.footer import Footer
from matex_data.readers.parquet.values import ColumnValues
from matex_data.storage.objects import Seekable

DICTIONARY = {"PLAIN_DICTIONARY", "RLE_DICTIONARY"}  # encodings of pages that refer to one
NUMBER_BYTES = 4  # of a value, fewer than a text of one character has with its length


@declared
@dataclass(frozen=True, eq=False)
class RowGroups(ArrowBlocks):
    """Columns of a Parquet file; a block is a row group with rows, a stored column a column chunk.

    Parameters
    ----------
    groups : int64[blocks], number of each row group.
    paths : of each field, the name of its leaf in the schema.
    """

    footer: Footer
    groups: Integers
    paths: Sequence[str]

    def end(self) -> int:
        return self.footer.begin + self.footer.nbytes

    def columns(self, names: Sequence[str]) -> list[int]:
        position = {name: i for i, name in enumerate(self.members)}
        return [position[name] for name in names]

    def limits(self, name: str) -> Limits | None:
        """Return the bounds of a column of numbers by the statistics of its column chunks."""
        member = self.members[name]
        exact = member.kind == "number" and (member.field.dtype.kind == "f" or not member.requested)
        if not exact or not all(isinstance(step, str) for step in member.steps):
            return None
        metadata = self.footer.metadata()
        path = self.paths[self.columns([name])[0]]
        leaf = next(i for i in range(metadata.num_columns) if metadata.schema.column(i).path == path)
        bounds = [_bounds(metadata.row_group(group).column(leaf).statistics) for group in self.groups.tolist()]
        low, high = np.array(bounds, np.float64).reshape(-1, 2).T
        if member.field.dtype.kind == "f":  # rounded as the values are
            low, high = (bound.astype(member.field.dtype).astype(np.float64) for bound in (low, high))
        return Limits(self.edges, low, high)

    def fetching(self, block: int) -> Callable[[], Any]:
        return self.footer.metadata

    def decode(self, block: int, names: Sequence[str], stored: Bytes) -> dict[str, ColumnValues]:
        offset, nbytes = self.block_ranges(block, names)
        source = _Ranges(offset, np.cumsum(nbytes) - nbytes, nbytes, stored, self.end())
        self.check_fits(block, names)
        paths = [self.paths[column] for column in self.columns(names)]
        metadata, group = self.footer.metadata(), int(self.groups[block])
        texts = {path for name, path in zip(names, paths, strict=True) if self.members[name].kind == "text"}
        try:
            file = pq.ParquetFile(
                pa.PythonFile(source, "r"),
                metadata=metadata,
                pre_buffer=False,
                page_checksum_verification=True,
                read_dictionary=_repeated(metadata.row_group(group), texts),
            )
            table = file.read_row_group(group, columns=paths, use_threads=False)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self.undecodable(block, names, int(offset[0]), error) from error
        return self.values(block, table, names)


def _repeated(group: Any, paths: Collection[str]) -> list[str]:
    """Return the columns of texts that a row group has as numbers of a dictionary: a text then is in memory once."""
    columns = map(group.column, range(group.num_columns)) if paths else ()
    return [column.path_in_schema for column in columns if column.path_in_schema in paths and _is_repeated(column)]


def _is_repeated(column: Any) -> bool:
    """Return whether pages of a column chunk refer to a dictionary, and few hold texts beside it."""
    encodings = column.encodings
    if DICTIONARY.isdisjoint(encodings) or any(name.startswith("DELTA_") for name in encodings):
        return False  # pyarrow makes no dictionary of texts in DELTA_BYTE_ARRAY or DELTA_LENGTH_BYTE_ARRAY
    return bool(column.total_uncompressed_size < NUMBER_BYTES * column.num_values)


def _bounds(statistics: Any) -> tuple[float, float]:
    """Return the least and the greatest number of a column chunk; infinite ones if they are not known exactly."""
    if statistics is not None and statistics.has_min_max:
        low, high = statistics.min, statistics.max
        if isinstance(low, int | float) and -EXACT < low <= high < EXACT:
            return float(low), float(high)
    return -math.inf, math.inf


class _Ranges(Seekable):
    """File of which only some byte ranges are known.

    Parameters
    ----------
    offset, at, nbytes : of each range: in the file, in ``data``, and its length.
    data : the bytes of the ranges.
    size : of the file.
    """

    def __init__(self, offset: Integers, at: Integers, nbytes: Integers, data: Bytes, size: int) -> None:
        super().__init__(size)
        self.offset = offset
        self._ends = offset + nbytes
        self._at = at
        self._data = data

    def read(self, size: int = -1) -> Any:
        """Return a buffer over the bytes, without a copy."""
        inside = np.flatnonzero((self.offset <= self._position) & (self._position + size <= self._ends))
        if size < 0 or not len(inside):
            raise OSError(f"bytes {self._position} to {self._position + size} are in no column chunk that is read")
        begin = int(self._at[inside[0]] + self._position - self.offset[inside[0]])
        self._position += size
        return pa.py_buffer(self._data[begin : begin + size])
