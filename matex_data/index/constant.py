"""Layout of a value that all rows of a file share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from matex_data._types import Array, Bytes
from matex_data.index.cache import ChunkCache
from matex_data.index.model import EMPTY, Layout, ReadRequest, RowSelection


@dataclass(frozen=True)
class Constant(Layout):
    """One value for all rows; nothing is read.

    Parameters
    ----------
    rows : number of rows.
    value : number, or bytes.
    """

    rows: int
    value: bool | int | float | bytes
    block_rows: int = 1

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        yield ReadRequest(EMPTY, EMPTY, on_complete=partial(self._fill, rows, out))

    def _fill(self, rows: RowSelection, out: Array, _: Bytes) -> None:
        out[rows.destination] = self.value
