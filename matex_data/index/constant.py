"""Layout of a value that all rows of a file share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from matex_data._types import Array, Bytes
from matex_data.declared import declared
from matex_data.index.cache import ChunkCache
from matex_data.index.model import EMPTY, Layout, Limits, ReadRequest, RowSelection

EXACT = 1 << 53  # integers below are exact in float64


@declared
@dataclass(frozen=True, eq=False)
class Constant(Layout):
    """One value for all rows; nothing is read.

    Parameters
    ----------
    rows : number of rows.
    value : number, bytes, or an array of the shape of a sample.
    """

    rows: int
    value: Any
    block_rows: int = 1

    def limits(self) -> Limits | None:
        if isinstance(self.value, bytes) or np.ndim(self.value) or abs(self.value) >= EXACT:
            return None
        bounds = np.full(1, self.value, np.float64)  # of NaN no comparison is true
        return Limits(np.array([0, self.rows]), bounds, bounds)

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        yield ReadRequest(EMPTY, EMPTY, on_complete=partial(self._fill, rows, out))

    def _fill(self, rows: RowSelection, out: Array, _: Bytes) -> None:
        out[rows.destination] = self.value


@declared
@dataclass(frozen=True, eq=False)
class FolderValue(Constant):
    """Value that the name of a folder gives to all rows of its files.

    Parameters
    ----------
    text : the value as it is written, if that is not how Python writes the number.
    """

    text: str | None = None

    @property
    def written(self) -> bytes:
        """Value as text; empty if it is missing."""
        missing = self.value != self.value
        return b"" if missing else (str(self.value) if self.text is None else self.text).encode()
