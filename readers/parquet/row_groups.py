"""Row groups of a Parquet file: byte ranges of column chunks, decoded by pyarrow."""

from __future__ import annotations

import io
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from matex_data._types import Array, Bytes, Integers
from matex_data.errors import DecodeError
from matex_data.index.decoded import DecodedBlocks, Selection
from matex_data.index.model import ReadRequest
from matex_data.index.scatter import RowIndices
from matex_data.index.table import Outputs
from matex_data.readers.parquet.footer import Footer
from matex_data.readers.parquet.members import Member
from matex_data.readers.parquet.values import Values, copy_rows, decode


@dataclass(frozen=True, eq=False)
class RowGroups(DecodedBlocks):
    """Columns of a Parquet file; a block is a row group with rows.

    Parameters
    ----------
    footer : of the file.
    groups : int64[blocks], number of each row group.
    members : the fields, by name.
    paths : of each field, the name of its leaf in the schema.
    offset, nbytes : int64[blocks, fields], byte ranges of the column chunks.
    ratio : bytes of the column chunks in memory for each byte in the file.
    """

    footer: Footer
    groups: Integers
    members: Mapping[str, Member]
    paths: Sequence[str]
    offset: Integers
    nbytes: Integers
    ratio: float

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.members)

    def stored_bytes(self) -> int:
        return int(self.nbytes.sum())

    def end(self) -> int:
        return self.footer.begin + self.footer.nbytes

    def inner_bytes(self, name: str) -> int:
        if not self.members[name].field.ragged:
            return 0
        return int(self.nbytes[:, self._columns([name])].sum() * self.ratio)

    def key(self, block: int, outs: Outputs) -> Hashable:
        return self, block, tuple(name for name, _ in outs)

    def decoded_bytes(self, block: int, outs: Outputs) -> int:
        return int(self.nbytes[block, self._columns([name for name, _ in outs])].sum() * self.ratio)

    def block_requests(self, selection: Selection, positions: Integers) -> Iterator[ReadRequest]:
        columns = self._columns([name for name, _ in selection.outs])
        for i in positions.tolist():
            block = int(selection.blocks.number[i])
            offset, nbytes = self.offset[block, columns], self.nbytes[block, columns]
            on_complete = partial(self._decode, selection, i, offset, nbytes)
            yield ReadRequest(offset, nbytes, fetch=self._fetch, on_complete=on_complete)

    def _fetch(self) -> None:
        """Read the footer, in a thread that waits for the storage."""
        self.footer.metadata()

    def _columns(self, names: Sequence[str]) -> list[int]:
        """Return the positions of fields in ``paths``."""
        position = {name: i for i, name in enumerate(self.members)}
        return [position[name] for name in names]

    def _decode(self, selection: Selection, i: int, offset: Integers, nbytes: Integers, stored: Bytes) -> None:
        try:
            source = _Ranges(offset, np.cumsum(nbytes) - nbytes, nbytes, stored, self.end())
            decoded = self._values(int(selection.blocks.number[i]), source, [name for name, _ in selection.outs])
        except Exception as error:
            selection.fail([i], error)
            raise
        self.complete(selection, i, decoded)

    def _values(self, block: int, source: _Ranges, names: Sequence[str]) -> dict[str, Values]:
        """Decode the rows of the fields in a row group."""
        first, count = int(self.edges[block]), int(self.edges[block + 1] - self.edges[block])
        paths = [self.paths[column] for column in self._columns(names)]
        metadata = self.footer.metadata()
        try:
            file = pq.ParquetFile(
                pa.PythonFile(source, "r"), metadata=metadata, pre_buffer=False, page_checksum_verification=True
            )
            table = file.read_row_group(int(self.groups[block]), columns=paths, use_threads=False)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DecodeError(
                "a row group does not decode",
                file=self.path,
                field=names[0] if len(names) == 1 else None,
                row=first,
                byte=int(source.offset[0]),
                found=error,
                remedy="the file is damaged there: restore it from its source",
            ) from error
        if table.num_rows != count:
            raise DecodeError(
                "a row group is damaged", file=self.path, row=first, expected=f"{count} rows", found=table.num_rows
            )
        found = {}
        for name in names:
            member = self.members[name]
            try:
                found[name] = decode(table.column(member.column), member)
            except DecodeError as error:
                raise error.at(self.path, name).at_row(first + (error.row or 0)) from error
        return found

    def copy_rows(self, name: str, block: Any, rows: RowIndices, out: Array, destination: RowIndices) -> None:
        copy_rows(block[name], rows, out, destination)


class _Ranges(io.RawIOBase):
    """File of which only some byte ranges are known.

    Parameters
    ----------
    offset, at, nbytes : of each range: in the file, in ``data``, and its length.
    data : the bytes of the ranges.
    size : of the file.
    """

    def __init__(self, offset: Integers, at: Integers, nbytes: Integers, data: Bytes, size: int) -> None:
        self.offset = offset
        self._ends = offset + nbytes
        self._at = at
        self._data = data
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def read(self, size: int = -1) -> Any:
        """Return a buffer over the bytes, without a copy."""
        inside = np.flatnonzero((self.offset <= self._position) & (self._position + size <= self._ends))
        if size < 0 or not len(inside):
            raise OSError(f"bytes {self._position} to {self._position + size} are in no column chunk that is read")
        begin = int(self._at[inside[0]] + self._position - self.offset[inside[0]])
        self._position += size
        return pa.py_buffer(self._data[begin : begin + size])
