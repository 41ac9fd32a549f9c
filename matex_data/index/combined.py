"""Layouts made of other layouts: one after the other, and a sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from matex_data._types import Array, Integers
from matex_data.declared import declared
from matex_data.index.cache import ChunkCache
from matex_data.index.model import EMPTY, Composed, Layout, ReadRequest, RowSelection, call_after_last

PLAIN_BLOCK = 1024  # rows of a block where a layout without blocks follows one with blocks


@declared
@dataclass(frozen=True, eq=False)
class Concatenated(Composed, Layout):
    """Rows of several layouts of one file, one layout after the other.

    Parameters
    ----------
    parts : of one field; none: there are no rows.
    first : int64[n], first row of every block, where blocks are shared with other fields; None: those of the parts.

    Examples
    --------
    >>> from matex_data.index.library import Constant
    >>> layout = Concatenated((Constant(2, 1.5), Constant(3, 2.5)))
    >>> out = np.zeros(3)
    >>> rows = RowSelection(np.array([1]), np.array([4]), np.array([0, 1, 2]))
    >>> for request in layout.requests(rows, out, ChunkCache(0)):
    ...     request.on_complete(np.empty(0, np.uint8))
    >>> out.tolist()
    [1.5, 2.5, 2.5]
    """

    parts: tuple[Layout, ...]
    first: Integers | None = None

    @property
    def origins(self) -> tuple[Layout, ...]:
        return self.parts

    @property
    def rows(self) -> int:  # type: ignore[override]
        return sum(part.rows for part in self.parts)

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return super().block_rows if self.first is None else self.longest(self.first)

    def borders(self) -> Integers | None:
        if self.first is not None or self.block_rows == 1:
            return self.first
        found, begin = [EMPTY], 0
        for part in self.parts:
            step = part.block_rows if part.block_rows > 1 else PLAIN_BLOCK
            borders = part.borders()
            found.append(begin + (np.arange(0, part.rows, step) if borders is None else borders))
            begin += part.rows
        return np.concatenate(found)

    def inner_bytes(self) -> int:
        return sum(part.inner_bytes() for part in self.parts)

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        numbers, begin = rows.numbers, 0
        for part in self.parts:
            end = begin + part.rows
            low, high = np.searchsorted(rows.stop, begin, side="right"), np.searchsorted(rows.start, end)
            if low < high:
                start = np.maximum(rows.start[low:high], begin) - begin
                stop = np.minimum(rows.stop[low:high], end) - begin
                first, last = np.searchsorted(numbers, (begin, end))
                yield from part.requests(RowSelection(start, stop, rows.destination[first:last]), out, cache)
            begin = end


def with_shared_blocks(layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Return concatenated layouts of several fields with the blocks of the one whose blocks are largest.

    Rows of a block are read together, so that no chunk is decoded for two blocks.
    """
    deepest = max(layouts.values(), key=lambda layout: layout.block_rows, default=None)
    if not isinstance(deepest, Concatenated) or deepest.block_rows == 1:
        return dict(layouts)
    first = deepest.borders()
    return {
        name: replace(layout, first=first) if isinstance(layout, Concatenated) else layout
        for name, layout in layouts.items()
    }


@declared
@dataclass(frozen=True, eq=False)
class Sum(Composed, Layout):
    """Sums of the rows of two layouts of equal length and shape.

    Parameters
    ----------
    first, second : the terms.
    dtype : of ``second``, as its rows are delivered.
    """

    first: Layout
    second: Layout
    dtype: np.dtype[Any]

    @property
    def origins(self) -> tuple[Layout, Layout]:
        return self.first, self.second

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.first.rows

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        count = len(rows.destination)
        added = np.empty((count, *out.shape[1:]), self.dtype)
        second = RowSelection(rows.start, rows.stop, np.arange(count, dtype=np.int64))
        requests = [*self.first.requests(rows, out, cache), *self.second.requests(second, added, cache)]
        yield from call_after_last(requests, partial(_add, out, rows.destination, added))


def _add(out: Array, destination: Integers, added: Array) -> None:
    out[destination] += added
