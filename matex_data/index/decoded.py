"""Tables of which a block is decoded as a whole: the baskets of a branch, the row groups of a columnar file."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.fields import Field
from matex_data.index import ragged
from matex_data.index.blocks import Blocks, uneven_blocks
from matex_data.index.cache import Chunk, ChunkCache, Reserved
from matex_data.index.layout import EMPTY, ReadRequest
from matex_data.index.runs import RowSelection
from matex_data.index.scatter import RowIndices
from matex_data.index.table import Outputs, Table
from matex_data.locks import cached_property


@dataclass(frozen=True, eq=False)
class DecodedBlocks(Table):
    """Fields that are decoded from the same blocks. A block that another window needs, too, is decoded once.

    Parameters
    ----------
    edges : int64[blocks + 1], the first row of each block, and the number of rows; ascending, without repetition.
    """

    path: str
    edges: Integers

    @property
    def rows(self) -> int:  # type: ignore[override]
        return int(self.edges[-1])

    @cached_property
    def block_rows(self) -> int:
        return self.longest(self.borders())

    def borders(self) -> Integers:
        return self.edges[:-1]

    def requests(self, rows: RowSelection, outs: Outputs, cache: ChunkCache) -> Iterator[ReadRequest]:
        blocks = uneven_blocks(rows, self.edges)
        selection = SelectedBlocks(blocks, outs, Reserved())
        whole = blocks.count == np.diff(self.edges)[blocks.number]
        to_read = whole.copy()
        for i in np.flatnonzero(~whole).tolist():
            number = int(blocks.number[i])
            cached = cache.get(key := self.key(number, outs))
            if cached is not None:
                copy = partial(self._copy_cached, selection, i, cached)
                yield ReadRequest(EMPTY, EMPTY, on_complete=copy, after=cached)
                continue
            selection.reserved[i] = cache.reserve(key, self.decoded_bytes(number, outs))
            to_read[i] = True
        yield from self.block_requests(selection, np.flatnonzero(to_read))

    def key(self, block: int, outs: Outputs) -> Hashable:
        """Return the key of a decoded block in the cache."""
        return self, block, tuple(name for name, _ in outs)

    @abstractmethod
    def block_requests(self, selection: SelectedBlocks, positions: Integers) -> Iterator[ReadRequest]:
        """Yield the reads of the blocks at these positions of the selection; each is passed to `complete` or fails."""

    @abstractmethod
    def decoded_bytes(self, block: int, outs: Outputs) -> int:
        """Return the size of a decoded block in memory, in bytes, about."""

    def copy_rows(self, name: str, block: Any, rows: RowIndices, out: Array, destination: RowIndices) -> None:
        """Assign ``out[destination]`` the rows of a decoded block, for the field of this name."""
        ragged.copy_rows(block[name], rows, out, destination)

    def complete(self, selection: SelectedBlocks, i: int, block: Any) -> None:
        """Copy the selected rows of a decoded block, and pass the block on to other windows."""
        selection.reserved.complete(i, block)
        self._scatter(selection, i, block)

    def _copy_cached(self, selection: SelectedBlocks, i: int, block: Chunk, _: Bytes) -> None:
        self._scatter(selection, i, block.value)

    def _scatter(self, selection: SelectedBlocks, i: int, block: Any) -> None:
        blocks = selection.blocks
        local, destination = blocks.rows(i, int(self.edges[blocks.number[i]])), blocks.destinations(i)
        for name, out in selection.outs:
            self.copy_rows(name, block, local, out, destination)


class SingleBlocks(DecodedBlocks):
    """Fields of blocks each of which is read and decoded by itself.

    Attributes
    ----------
    views : what `decode` returns may refer to the stored bytes.
    """

    views: ClassVar[bool] = False

    def block_ranges(self, block: int, names: Sequence[str]) -> tuple[Integers, Integers]:
        """Return offsets and lengths in bytes of fields in a block; none, if a library reads them."""
        return EMPTY, EMPTY

    def fetching(self, block: int) -> Callable[[], Any] | None:
        """Return what reads more for a block, in a thread that waits for the storage; None: there is no more."""
        return None

    @abstractmethod
    def decode(self, block: int, names: Sequence[str], stored: Bytes) -> Any:
        """Return the fields of a block, by name: arrays, or `RaggedArray` for lists of numbers.

        Parameters
        ----------
        block : number of the block.
        names : of the fields to decode.
        stored : its bytes, which are reused after the call.

        Examples
        --------
        See `ByteRangeBlocks`.
        """

    def block_requests(self, selection: SelectedBlocks, positions: Integers) -> Iterator[ReadRequest]:
        names = [name for name, _ in selection.outs]
        for i in positions.tolist():
            block = int(selection.blocks.number[i])
            decode = partial(self._decode, selection, i, block, names)
            yield ReadRequest(*self.block_ranges(block, names), fetch=self.fetching(block), on_complete=decode)

    def _decode(self, selection: SelectedBlocks, i: int, block: int, names: Sequence[str], stored: Bytes) -> None:
        """Decode a block, for all who need it; or fail for all."""
        try:
            decoded = self.decode(block, names, stored.copy() if self.views and i in selection.reserved else stored)
        except Exception as error:
            selection.reserved.fail([i], error)
            raise
        self.complete(selection, i, decoded)


@dataclass(frozen=True, eq=False)
class ByteRangeBlocks(SingleBlocks):
    """Fields that are decoded from blocks of which each is one byte range: whole lines, records or frames.

    Parameters
    ----------
    offset, nbytes : int64[blocks], byte ranges.
    fields : by name.

    Examples
    --------
    Lines of one number, three in each block:

    >>> class Lines(ByteRangeBlocks):
    ...     def decode(self, block, names, stored):
    ...         return {"x": np.array(stored.tobytes().split(), float)}
    >>> fields = {"x": Field("x", (), np.dtype(float))}
    >>> lines = Lines("a.txt", np.array([0, 3, 6]), np.array([0, 6]), np.array([6, 6]), fields)
    >>> lines.rows, lines.end()
    (6, 12)
    """

    offset: Integers
    nbytes: Integers
    fields: Mapping[str, Field]

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.fields)

    def inner_bytes(self, name: str) -> int:
        return int(self.nbytes.sum()) // max(1, len(self.fields)) if self.fields[name].ragged else 0

    def decoded_bytes(self, block: int, outs: Outputs) -> int:
        return int(self.nbytes[block])

    def stored_bytes(self) -> int:
        return int(self.nbytes.sum())

    def end(self) -> int:
        return int((self.offset + self.nbytes).max(initial=0))

    def block_ranges(self, block: int, names: Sequence[str]) -> tuple[Integers, Integers]:
        return self.offset[block : block + 1], self.nbytes[block : block + 1]


@dataclass(frozen=True)
class SelectedBlocks:
    """Selected rows, grouped by block.

    Parameters
    ----------
    blocks : the rows.
    outs : output arrays by name of the field.
    reserved : by position in ``blocks``, those that the cache keeps for other windows.
    """

    blocks: Blocks
    outs: Outputs
    reserved: Reserved
