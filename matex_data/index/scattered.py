"""Layout of arrays that lie anywhere in a file, a row each: of equal shape, or of their own ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.index.cache import ChunkCache
from matex_data.index.model import Layout, ReadRequest, RowSelection
from matex_data.index.ragged import scatter_lists

TILE_BYTES = 4 << 20  # that are read to one array, about


@declared
@dataclass(frozen=True, eq=False)
class Scattered(Layout):
    """Uncompressed arrays of one dtype, each of them a row.

    Parameters
    ----------
    offset : integers[rows], byte position of each array.
    lengths : integers[rows, axes], its shape. Both are held in memory by each machine, in the smallest type: `compact`.
    dtype : as stored, of either byte order.

    Examples
    --------
    >>> layout = Scattered(np.array([0, 24]), np.array([[3], [1]]), np.dtype("f8"))
    >>> layout.rows, layout.end(), layout.inner_bytes()
    (2, 32, 32)
    """

    offset: Array
    lengths: Array
    dtype: np.dtype[Any]
    block_rows: int = 1

    @property
    def rows(self) -> int:  # type: ignore[override]
        return len(self.offset)

    def stored_bytes(self) -> int:
        return int(self._nbytes(slice(None)).sum())

    def inner_bytes(self) -> int:
        return self.stored_bytes()

    def end(self) -> int:
        return int((self.offset.astype(np.int64) + self._nbytes(slice(None))).max(initial=0))

    def _nbytes(self, numbers: Integers | slice) -> Integers:
        nbytes: Integers = np.prod(self.lengths[numbers], axis=1, dtype=np.int64) * self.dtype.itemsize
        return nbytes

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        for tile in rows.tiles(max(1, TILE_BYTES * self.rows // max(1, self.stored_bytes()))):
            numbers = tile.numbers
            offset, nbytes = self.offset[numbers].astype(np.int64), self._nbytes(numbers)
            yield ReadRequest(offset, nbytes, on_complete=partial(self._scatter, numbers, tile.destination, out))

    def _scatter(self, numbers: Integers, destination: Integers, out: Array, data: Bytes) -> None:
        elements = data.view(self.dtype)
        if out.dtype != object:
            out[destination] = elements.reshape(len(numbers), *out.shape[1:])
            return
        ends = np.concatenate([[0], np.cumsum(self._nbytes(numbers) // self.dtype.itemsize)])
        shapes = self.lengths[numbers].astype(np.int64).tolist()
        if self.lengths.shape[1] == 1:
            scatter_lists(out, destination, ends, elements)
            return
        native = elements.astype(self.dtype.newbyteorder("="))
        for to, low, high, shape in zip(destination.tolist(), ends[:-1], ends[1:], shapes, strict=True):
            out[to] = native[low:high].reshape(shape)
