"""Entries of one branch that are decoded a block at a time, and shared by all fields of the branch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from matex_data._types import Bytes, Integers
from matex_data.index.blocks import Blocks, uneven_blocks
from matex_data.index.cache import ChunkCache, ChunkFuture
from matex_data.index.model import EMPTY, ReadRequest, RowSelection
from matex_data.index.table import Outputs, Table
from matex_data.readers.root.entries import Entries, scatter_entries
from matex_data.readers.root.members import Member


@dataclass(frozen=True, eq=False)
class DecodedBlocks(Table):
    """Branch whose fields are decoded from the same blocks: the baskets of a ``TTree``, the clusters of an ``RNTuple``.

    Parameters
    ----------
    path : of the file.
    branch : name of the branch.
    members : the fields, by name.
    edges : int64[blocks + 1], the first entry of each block, and the number of entries; ascending, without repetition.
    clusters : int64[n], the first entry of each cluster of the fields that are read, the unit of shuffling.
    """

    path: str
    branch: str
    members: Mapping[str, Member]
    edges: Integers
    clusters: Integers

    @property
    def rows(self) -> int:  # type: ignore[override]
        return int(self.edges[-1])

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.members)

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return max(1, int(np.diff(self.clusters, append=self.rows).max(initial=1)))

    def borders(self) -> Integers:
        return self.clusters

    def requests(self, rows: RowSelection, outs: Outputs, cache: ChunkCache) -> Iterator[ReadRequest]:
        blocks = uneven_blocks(rows, self.edges)
        selection = Selection(blocks, outs, {})
        whole = blocks.count == np.diff(self.edges)[blocks.number]
        to_read = whole.copy()
        for i in np.flatnonzero(~whole).tolist():
            key = (self, int(blocks.number[i]))
            cached = cache.get(key)
            if cached is not None:
                yield ReadRequest(EMPTY, EMPTY, on_complete=partial(self._copy_cached, selection, i, cached))
                continue
            selection.pending[i] = cache.reserve(key, self.decoded_bytes(int(blocks.number[i])))
            to_read[i] = True
        yield from self.block_requests(selection, np.flatnonzero(to_read))

    @abstractmethod
    def block_requests(self, selection: Selection, positions: Integers) -> Iterator[ReadRequest]:
        """Yield the reads of the blocks at these positions of the selection; each is passed to `complete` or `fail`."""

    @abstractmethod
    def decoded_bytes(self, block: int) -> int:
        """Return the size of a decoded block in memory, in bytes, about."""

    def complete(self, selection: Selection, i: int, entries: Entries) -> None:
        """Copy the selected rows of a decoded block, and pass the block on to other windows."""
        future = selection.pending.get(i)
        if future is not None:
            future.set_result(entries)
        self._scatter(selection, i, entries)

    def _copy_cached(self, selection: Selection, i: int, block: ChunkFuture, _: Bytes) -> None:
        self._scatter(selection, i, block.result())

    def _scatter(self, selection: Selection, i: int, entries: Entries) -> None:
        blocks = selection.blocks
        local = blocks.rows(i, int(self.edges[blocks.number[i]]))
        for name, out in selection.outs:
            scatter_entries(entries, local, self.members[name], out, blocks.destinations(i))


@dataclass(frozen=True)
class Selection:
    """Selected rows, grouped by block.

    Parameters
    ----------
    blocks : the rows.
    outs : output arrays by name of the field.
    pending : by position in ``blocks``, the futures of the cache that other windows may wait for.
    """

    blocks: Blocks
    outs: Outputs
    pending: dict[int, ChunkFuture]

    def fail(self, positions: list[int], error: BaseException) -> None:
        """Fail the futures of these blocks that are pending."""
        for future in map(self.pending.get, positions):
            if future is not None:
                future.set_exception(error)
