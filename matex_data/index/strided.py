"""Layout of fixed-size rows at a constant stride."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.index.cache import ChunkCache
from matex_data.index.model import Layout, ReadRequest, RowSelection
from matex_data.index.runs import runs_where
from matex_data.index.scatter import Convert, are_consecutive, as_bytes, scatter

DIRECT_BYTES = 16 * 1024  # rows of this size are read one by one to their destinations; smaller ones are scattered
SCATTER_BYTES = 1 << 20  # of rows that are read to scratch memory and scattered in one go


@declared
@dataclass(frozen=True)
class Strided(Layout):
    """Fixed-size rows at a constant stride: contiguous HDF5, classic netCDF, npy, IDX, CIFAR.

    Row i occupies the bytes from ``offset + i * stride``. The rows are decoded by viewing their bytes as ``dtype``.

    Parameters
    ----------
    rows : number of rows.
    offset : byte position of row 0 in the file.
    stride : bytes from one row to the next; more than ``row_bytes`` where rows of other fields lie between.
    dtype : as stored, of either byte order.
    shape : of one row.
    block_rows : rows of a block, see `Layout`.
    convert : writes the field's values for the stored rows; None: they are equal.

    Examples
    --------
    A file of a 16-byte header and five rows of three big-endian 2-byte integers each, 6 bytes a row:

    >>> from matex_data.index.model import RowSelection
    >>> layout = Strided(rows=5, offset=16, stride=6, dtype=np.dtype(">i2"), shape=(3,))
    >>> layout.row_bytes, layout.end()
    (6, 46)

    The reads of rows 1 and 2 are one byte range. Its bytes become rows 0 and 1 of the output:

    >>> out = np.zeros((2, 3), "i2")
    >>> selection = RowSelection(np.array([1]), np.array([3]), np.array([0, 1]))
    >>> (request,) = layout.requests(selection, out, ChunkCache(0))
    >>> request.offset.tolist(), request.nbytes.tolist()
    ([22], [12])
    >>> request.on_complete(np.arange(6, dtype=">i2").view("u1"))
    >>> out.tolist()
    [[0, 1, 2], [3, 4, 5]]
    """

    rows: int
    offset: int
    stride: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    block_rows: int = 1
    convert: Convert | None = None

    @property
    def row_bytes(self) -> int:
        """Size of one row in the file, in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def stored_bytes(self) -> int:
        return self.rows * self.row_bytes

    def end(self) -> int:
        return self.offset + (self.rows - 1) * self.stride + self.row_bytes if self.rows else 0

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        same_bytes = self.convert is None and self.dtype == out.dtype and out.flags.c_contiguous
        if self.row_bytes == 0 or not len(rows.destination):
            return
        if same_bytes and (self.row_bytes >= DIRECT_BYTES or are_consecutive(rows.destination)):
            yield self._read_in_place(rows, out)
            return
        for tile in rows.tiles(max(1, SCATTER_BYTES // self.row_bytes)):
            offset, nbytes = self._byte_ranges(tile)
            yield ReadRequest(offset, nbytes, on_complete=partial(self._scatter, tile.destination, out))

    def _byte_ranges(self, rows: RowSelection) -> tuple[Integers, Integers]:
        """Return offsets and lengths of the rows' bytes; contiguous rows share one range."""
        if self.stride == self.row_bytes:
            return self.offset + rows.start * self.stride, (rows.stop - rows.start) * self.row_bytes
        offset = self.offset + rows.numbers * self.stride
        return offset, np.full(len(offset), self.row_bytes)

    def _read_in_place(self, rows: RowSelection, out: Array) -> ReadRequest:
        """Return a request that reads straight into ``out``, one range per run that is contiguous on both sides."""
        if self.stride == self.row_bytes and are_consecutive(rows.destination):
            count = rows.stop - rows.start
            at = int(rows.destination[0]) + np.cumsum(count) - count
            return ReadRequest(*self._byte_ranges(rows), target=as_bytes(out), at=at * self.row_bytes)
        numbers, destination = rows.numbers, rows.destination
        contiguous = (np.diff(numbers) == 1) & (np.diff(destination) == 1) & (self.stride == self.row_bytes)
        first, count = runs_where(contiguous)
        return ReadRequest(
            offset=self.offset + numbers[first] * self.stride,
            nbytes=count * self.row_bytes,
            target=as_bytes(out),
            at=destination[first] * self.row_bytes,
        )

    def _scatter(self, destination: Integers, out: Array, data: Bytes) -> None:
        scatter(out, destination, data.view(self.dtype).reshape(-1, *self.shape), self.convert)
