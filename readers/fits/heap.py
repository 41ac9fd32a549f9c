"""Rows of variable length of a binary table, which lie anywhere in its heap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import FormatError
from matex_data.index.cache import ChunkCache
from matex_data.index.columns import compact
from matex_data.index.model import Layout, ReadRequest, RowSelection
from matex_data.index.ragged import scatter_lists
from matex_data.index.scatter import Convert

TILE_BYTES = 4 << 20  # of elements that are read to one array, about


@declared
@dataclass(frozen=True, eq=False)
class HeapRows(Layout):
    """Rows of variable length, each a byte range of its own. Neighbouring ranges are read as one.

    Parameters
    ----------
    rows : number of rows.
    begin : position of the heap in the file, in bytes.
    offset : integers[rows], first byte of each row in the heap.
    length : integers[rows], number of elements of each row. Both are held in memory by each rank.
    stored, dtype : of an element in the file, and decoded.
    convert : writes decoded elements for stored ones; None: they are equal.
    is_text : a row is a text.
    """

    rows: int
    begin: int
    offset: Array
    length: Array
    stored: np.dtype[Any]
    dtype: np.dtype[Any]
    convert: Convert | None
    is_text: bool
    block_rows: int = 1

    def stored_bytes(self) -> int:
        return int(self.length.sum(dtype=np.int64)) * self.stored.itemsize

    def inner_bytes(self) -> int:
        return 0 if self.is_text else int(self.length.sum(dtype=np.int64)) * self.dtype.itemsize

    def end(self) -> int:
        ends = self.offset.astype(np.int64) + self.length.astype(np.int64) * self.stored.itemsize
        return self.begin + int(ends.max(initial=0))

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        mean = self.stored_bytes() // max(1, self.rows)
        for tile in rows.tiles(max(1, TILE_BYTES // max(1, mean))):
            numbers = tile.numbers
            length = self.length[numbers].astype(np.int64)
            offset = self.begin + self.offset[numbers].astype(np.int64)
            nbytes = length * self.stored.itemsize
            some = nbytes > 0
            on_complete = partial(self._scatter, tile.destination, length, out)
            yield ReadRequest(offset[some], nbytes[some], on_complete=on_complete)

    def _scatter(self, destination: Integers, length: Integers, out: Array, data: Bytes) -> None:
        edges = np.append(0, np.cumsum(length))
        if self.is_text:
            whole = data.tobytes()
            for row, low, high in zip(destination.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
                out[row] = whole[low:high].split(b"\0")[0].rstrip(b" ")
            return
        stored = data.view(self.stored)
        values = stored
        if self.convert is not None:
            values = np.empty(len(stored), self.dtype)
            self.convert(stored, values)
        scatter_lists(out, destination, edges, values)


def heap_rows(
    path: str,
    name: str,
    descriptors: Integers,
    begin: int,
    nbytes: int,
    stored: np.dtype[Any],
    dtype: np.dtype[Any],
    convert: Convert | None,
    is_text: bool,
) -> HeapRows:
    """Return the layout of rows of variable length.

    Parameters
    ----------
    path, name : of the file and the column, for errors.
    descriptors : int64[rows, 2], number of elements and first byte in the heap of each row.
    begin, nbytes : byte range of the heap in the file.
    stored, dtype, convert, is_text : see `HeapRows`.

    Raises
    ------
    FormatError : a row lies outside of the heap.
    """
    length, offset = descriptors.T
    offset = np.where(length == 0, 0, offset)
    outside = (length < 0) | (offset < 0) | (length > nbytes) | (offset > nbytes - length * stored.itemsize)
    if outside.any():
        row = int(outside.argmax())
        raise FormatError(
            "a row of variable length lies outside of the heap",
            file=path,
            field=name,
            row=row,
            expected=f"{nbytes} bytes",
            found=f"{length[row]} elements from byte {offset[row]}",
            remedy="the file is damaged: restore it from its source",
        )
    offset = compact(np.append(offset, offset.max(initial=0)))[:-1]
    length = compact(np.append(length, length.max(initial=0)))[:-1]
    return HeapRows(len(length), begin, offset, length, stored, dtype, convert, is_text)
