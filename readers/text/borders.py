"""Borders of blocks of records: lines, frames, or records with a length in front of them."""

from __future__ import annotations

import numpy as np

from matex_data._types import Integers


class Borders:
    """Blocks of whole records, as a format finds these one after the other.

    Parameters
    ----------
    least : bytes of a block, or more; the last one may have fewer.

    Attributes
    ----------
    rows : number of records so far.

    Examples
    --------
    >>> borders = Borders(10)
    >>> for end in (6, 12, 18, 24, 30):
    ...     borders.add(end)
    >>> borders.close(31)
    >>> [column.tolist() for column in borders.blocks()]
    [[0, 12, 24], [12, 12, 7], [0, 2, 4, 5]]
    """

    def __init__(self, least: int) -> None:
        self.rows = 0
        self._least = least
        self._begin = 0
        self._ranges: list[tuple[int, int]] = []
        self._edges = [0]

    def add(self, end: int, rows: int = 1) -> None:
        """Add records, of which the last one ends at a byte, where a block ends if it is long enough."""
        self.rows += rows
        if end - self._begin >= self._least:
            self.close(end)

    def close(self, end: int) -> None:
        """End the block at a byte; without records there is none."""
        if self.rows > self._edges[-1]:
            self._ranges.append((self._begin, end - self._begin))
            self._edges.append(self.rows)
        self._begin = end

    def blocks(self) -> tuple[Integers, Integers, Integers]:
        """Return offset and length in bytes of each block, int64[blocks], and the first row of each, and the rows."""
        offset, nbytes = np.array(self._ranges, np.int64).reshape(-1, 2).T.copy()
        return offset, nbytes, np.array(self._edges, np.int64)
