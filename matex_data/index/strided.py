"""Rows at even distances, and rows that only a library knows; ``chunked`` has those in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.index.cache import ChunkCache
from matex_data.index.model import Layout, ReadRequest, RowSelection
from matex_data.index.scatter import Convert, are_consecutive, scatter

DIRECT_BYTES = 16 * 1024  # rows of this size are read to their places one by one; smaller ones are scattered after
SCATTER_BYTES = 1 << 20  # read and scattered in one go


@dataclass(frozen=True)
class Strided(Layout):
    """Rows of fixed size at even distances: contiguous HDF5, classic netCDF, npy, IDX, CIFAR.

    Parameters
    ----------
    rows : number of rows.
    offset : byte position of row 0 in the file.
    stride : bytes from one row to the next.
    dtype : as stored, of either byte order.
    shape : of one row.
    convert : makes the field's rows of the stored ones; None: they are the same numbers.
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
        """Bytes of one row in the file."""
        return prod(self.shape) * self.dtype.itemsize

    def stored_bytes(self) -> int:
        return self.rows * self.row_bytes

    def end(self) -> int:
        return self.offset + (self.rows - 1) * self.stride + self.row_bytes if self.rows else 0

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        ready = self.convert is None and self.dtype == out.dtype and out.flags.c_contiguous
        if self.row_bytes == 0 or not len(rows.destination):
            return
        if ready and (self.row_bytes >= DIRECT_BYTES or are_consecutive(rows.destination)):
            yield self._direct(rows, out)
            return
        for tile in rows.tiles(max(1, SCATTER_BYTES // self.row_bytes)):
            offset, nbytes = self._ranges(tile)
            yield ReadRequest(offset, nbytes, on_complete=partial(self._finish, tile.destination, out))

    def _ranges(self, rows: RowSelection) -> tuple[Integers, Integers]:
        """Offsets and lengths of the bytes of the rows, neighbours as one."""
        if self.stride == self.row_bytes:
            return self.offset + rows.start * self.stride, (rows.stop - rows.start) * self.row_bytes
        offset = self.offset + rows.numbers * self.stride
        return offset, np.full(len(offset), self.row_bytes)

    def _direct(self, rows: RowSelection, out: Array) -> ReadRequest:
        """Each run of neighbouring rows that stay neighbours goes to its destination in one piece."""
        numbers, destination = rows.numbers, rows.destination
        unbroken = (np.diff(numbers) == 1) & (np.diff(destination) == 1) & (self.stride == self.row_bytes)
        first, count = runs_of(unbroken)
        return ReadRequest(
            offset=self.offset + numbers[first] * self.stride,
            nbytes=count * self.row_bytes,
            target=as_bytes(out),
            at=destination[first] * self.row_bytes,
        )

    def _finish(self, destination: Integers, out: Array, data: Bytes) -> None:
        scatter(out, destination, data.view(self.dtype).reshape(-1, *self.shape), self.convert)


def runs_of(unbroken: np.ndarray[Any, Any]) -> tuple[Integers, Integers]:
    """First element and length of each run, given whether each element continues the one before."""
    first = np.concatenate([[0], np.flatnonzero(~unbroken) + 1]).astype(np.int64)
    return first, np.diff(np.append(first, len(unbroken) + 1))


def as_bytes(array: Array) -> Bytes:
    return array.reshape(-1).view(np.uint8)
