"""Layout of rows along an axis that is not the first one in the file."""

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
from matex_data.index.scatter import Convert, scatter

RANGE_BYTES = 64 * 1024  # of one byte range of a block: the block size aims at it,
BLOCK_BYTES = 4 * 1024 * 1024  # unless a block would exceed this


@declared
@dataclass(frozen=True)
class Transposed(Layout):
    """Rows of an array in C order along an axis that is not its first.

    A row consists of ``prod(before)`` segments of ``prod(after)`` elements each, which lie far apart in the file.

    Parameters
    ----------
    rows : length of the sample axis.
    offset : byte position of the array in the file.
    before, after : lengths of the axes before and after the sample axis.
    step : bytes from one entry of the first axis to the next.
    dtype : as stored, of either byte order.
    order : for each axis of a row, its position among the axes ``before + after``.
    convert : writes the field's values for the stored rows; None: they are equal.

    Examples
    --------
    An array of shape (2, 5), of which the samples are the second axis: a sample is a column.

    >>> layout = Transposed(5, offset=0, before=(2,), after=(), step=20, dtype=np.dtype("f4"), order=(0,))
    >>> selection = RowSelection(np.array([1]), np.array([2]), np.array([0]))
    >>> [request.offset.tolist() for request in layout.requests(selection, np.empty((1, 2), "f4"), ChunkCache(0))]
    [[4, 24]]
    """

    rows: int
    offset: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    step: int
    dtype: np.dtype[Any]
    order: tuple[int, ...]
    convert: Convert | None = None

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        preferred = min(RANGE_BYTES // max(1, self._segment_bytes), BLOCK_BYTES // max(1, self._row_bytes))
        return max(1, min(preferred, self.rows))

    @property
    def _segment_bytes(self) -> int:
        return prod(self.after) * self.dtype.itemsize

    @property
    def _row_bytes(self) -> int:
        return prod(self.before) * self._segment_bytes

    def stored_bytes(self) -> int:
        return self.rows * self._row_bytes

    def end(self) -> int:
        if not self.stored_bytes():
            return 0
        return self.offset + int(self._segments()[-1]) + self.rows * self._segment_bytes

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        if not self._row_bytes or not len(rows.destination):
            return
        segments = self._segments()
        numbers, most = rows.numbers, max(1, BLOCK_BYTES // self._row_bytes)
        for i in range(0, len(numbers), most):
            selected = numbers[i : i + most]
            first, count = runs_where(np.diff(selected) == 1)
            start = self.offset + selected[first] * self._segment_bytes
            yield ReadRequest(
                offset=(segments[:, None] + start).reshape(-1),
                nbytes=np.tile(count * self._segment_bytes, len(segments)),
                on_complete=partial(self._scatter, rows.destination[i : i + most], out),
            )

    def _segments(self) -> Integers:
        """Return where the segments of row 0 begin, in bytes from ``offset``."""
        if not self.before:
            return np.zeros(1, np.int64)
        inner = self.rows * self._segment_bytes
        within = np.arange(prod(self.before[1:]), dtype=np.int64) * inner
        outer = np.arange(self.before[0], dtype=np.int64) * self.step
        return (outer[:, None] + within).reshape(-1)

    def _scatter(self, destination: Integers, out: Array, data: Bytes) -> None:
        stored = data.view(self.dtype).reshape(*self.before, len(destination), *self.after)
        rows = np.moveaxis(stored, len(self.before), 0)
        scatter(out, destination, rows.transpose(0, *(axis + 1 for axis in self.order)), self.convert)
