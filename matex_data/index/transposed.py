"""Rows that do not lie in one piece: the sample axis is not the first one in the file."""

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
from matex_data.index.scatter import Convert, scatter

PIECE_BYTES = 64 * 1024  # as much of neighbouring rows is read in one piece, if a block does not become too large
BLOCK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Transposed(Layout):
    """Rows of an array in C order along an axis that is not its first.

    Parameters
    ----------
    rows : length of the sample axis.
    offset : byte position of the array in the file.
    before, after : lengths of the axes before and after the sample axis.
    step : bytes from one entry of the first axis to the next.
    dtype : as stored, of either byte order.
    order : which of the axes ``before + after`` is each axis of a row.
    convert : makes the field's rows of the stored ones; None: they are the same numbers.
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
        fair = min(PIECE_BYTES // max(1, self._piece), BLOCK_BYTES // max(1, self._row_bytes))
        return max(1, min(fair, self.rows))

    @property
    def _piece(self) -> int:
        """Bytes of a row that lie together."""
        return prod(self.after) * self.dtype.itemsize

    @property
    def _row_bytes(self) -> int:
        return prod(self.before) * self._piece

    def stored_bytes(self) -> int:
        return self.rows * self._row_bytes

    def end(self) -> int:
        if not self.stored_bytes():
            return 0
        return self.offset + int(self._pieces()[-1]) + self.rows * self._piece

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        if not self._row_bytes or not len(rows.destination):
            return
        pieces = self._pieces()
        together = max(1, BLOCK_BYTES // self._row_bytes)
        numbers = rows.numbers
        for i in range(0, len(numbers), together):
            some = numbers[i : i + together]
            first = np.flatnonzero(np.concatenate([[True], np.diff(some) != 1]))
            count = np.diff(np.append(first, len(some)))
            start = self.offset + some[first] * self._piece
            yield ReadRequest(
                offset=(pieces[:, None] + start).reshape(-1),
                nbytes=np.tile(count * self._piece, len(pieces)),
                on_complete=partial(self._finish, rows.destination[i : i + together], out),
            )

    def _pieces(self) -> Integers:
        """Where the pieces of row 0 begin, in bytes from ``offset``."""
        if not self.before:
            return np.zeros(1, np.int64)
        inner = self.rows * self._piece
        within = np.arange(prod(self.before[1:]), dtype=np.int64) * inner
        outer = np.arange(self.before[0], dtype=np.int64) * self.step
        return (outer[:, None] + within).reshape(-1)

    def _finish(self, destination: Integers, out: Array, data: Bytes) -> None:
        stored = data.view(self.dtype).reshape(*self.before, len(destination), *self.after)
        rows = np.moveaxis(stored, len(self.before), 0)
        scatter(out, destination, rows.transpose(0, *(axis + 1 for axis in self.order)), self.convert)
