"""Layouts of samples of variable length: with the elements of all samples one after the other, or anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import DataError
from matex_data.index.cache import ChunkCache
from matex_data.index.columns import compact
from matex_data.index.layout import Composed, Layout, OnComplete, ReadRequest, call_after_last
from matex_data.index.ragged import scatter_lists
from matex_data.index.runs import RowSelection, Runs, merge
from matex_data.index.table import Column, Outputs, Table, plan_reads
from matex_data.locks import cached_property

TILE_BYTES = 4 << 20  # of the elements that are read to one array, about
MOST_BLOCKS = 8  # of the content in a block of samples: an eighth is read twice, if samples reach over their ends
ENOUGH_BLOCKS = 512  # of samples; less would shuffle poorly


@declared
@dataclass(frozen=True)
class Content:
    """Elements of one field of all samples, in order.

    Parameters
    ----------
    layout : a row for each element.
    dtype : of the field, in native byte order.

    Examples
    --------
    >>> from matex_data.index.strided import Strided
    >>> Content(Strided(5, 0, 4, np.dtype(">f4"), ()), np.dtype("f4")).layout.rows
    5
    """

    layout: Layout
    dtype: np.dtype[Any]


@declared
@dataclass(frozen=True, eq=False)
class Jagged(Composed, Table):
    """Fields of variable length with the same number of elements in each sample: a sample is a 1-D array.

    The layouts of the contents read the elements of neighbouring samples as one range. Contents that are columns of
    one table are read together.

    Parameters
    ----------
    offsets : integers[rows + 1], non-decreasing. Sample i has the elements ``offsets[i]`` to ``offsets[i + 1]``. Held
        in memory by each rank: see `compact`.
    contents : of the fields, by name.

    Examples
    --------
    Three samples of 2, 0 and 3 elements:

    >>> from matex_data.index.library import MemoryRows
    >>> content = Content(MemoryRows(np.array([1.5, 2.5, 3.5, 4.5, 5.5])), np.dtype("f8"))
    >>> jagged = Jagged(compact(np.array([0, 2, 2, 5])), {"pt": content})
    >>> out = np.empty(3, object)
    >>> selection = RowSelection(np.array([0]), np.array([3]), np.array([0, 1, 2]))
    >>> for request in jagged.requests(selection, [("pt", out)], ChunkCache(0)):
    ...     request.on_complete(np.empty(0, np.uint8))
    >>> [sample.tolist() for sample in out]
    [[1.5, 2.5], [], [3.5, 4.5, 5.5]]
    """

    offsets: Array
    contents: Mapping[str, Content]

    @property
    def rows(self) -> int:  # type: ignore[override]
        return len(self.offsets) - 1

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return 1 if self._borders is None else self.longest(self._borders)

    @property
    def origins(self) -> list[Layout]:
        return [content.layout for content in self.contents.values()]

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.contents)

    def borders(self) -> Integers | None:
        """Return the first sample of every block: blocks of samples follow those of the largest content with blocks.

        A sample belongs to the block in which its first element lies. A block of samples has several blocks of a
        content that has many, since the one at its end is read again for the next block.
        """
        return self._borders

    @cached_property
    def _borders(self) -> Integers | None:
        layout = max(self.origins, key=lambda layout: (layout.block_rows > 1, layout.stored_bytes()))
        if layout.block_rows <= 1 and layout.borders() is None:
            return None
        borders = layout.first_rows()
        borders = borders[:: min(MOST_BLOCKS, max(1, len(borders) // ENOUGH_BLOCKS))]
        borders = borders[borders <= int(self.offsets[-1])].astype(self.offsets.dtype)
        first = np.searchsorted(self.offsets[:-1], borders, side="left").astype(np.int64)
        return np.unique(np.append(0, first[first < self.rows])).astype(np.int64)

    def inner_bytes(self, name: str) -> int:
        return int(self.offsets[-1] - self.offsets[0]) * self.contents[name].dtype.itemsize

    def requests(self, rows: RowSelection, outs: Outputs, cache: ChunkCache) -> Iterator[ReadRequest]:
        if not len(rows.destination):
            return
        for tile in self._tiles(rows, outs):
            yield from self._read(tile, outs, cache)

    def _tiles(self, rows: RowSelection, outs: Outputs) -> Iterator[RowSelection]:
        """Split the selection where contents have no blocks; chunks are decoded to one array, each of them once."""
        if self._borders is not None or not self.rows:
            return iter([rows])
        inner = sum(self.inner_bytes(name) for name, _ in outs)
        return rows.tiles(max(1, TILE_BYTES * self.rows // max(1, inner)))

    def _read(self, rows: RowSelection, outs: Outputs, cache: ChunkCache) -> Iterator[ReadRequest]:
        selected = self._elements(rows)
        total = len(selected.destination)
        flat = {name: np.empty(total, self.contents[name].dtype) for name, _ in outs}
        layouts = {name: self.contents[name].layout for name, _ in outs}
        requests = [self._located(request) for _, request in plan_reads(layouts, selected, flat, cache) if total]
        finish = partial(self._cut, rows, [(flat[name], out) for name, out in outs])
        return iter(call_after_last(requests, finish))

    def _located(self, request: ReadRequest) -> ReadRequest:
        """Return the request with the sample in place of the element as the row of its errors."""
        if request.on_complete is None:
            return request
        return request.calling(partial(self._complete, request.on_complete))

    def _complete(self, on_complete: OnComplete, data: Bytes) -> None:
        try:
            on_complete(data)
        except DataError as error:
            if error.row is None:
                raise
            error.at_row(max(0, int(np.searchsorted(self.offsets, error.row, side="right")) - 1))
            raise

    def _elements(self, rows: RowSelection) -> RowSelection:
        """Return the elements of the samples, one after the other."""
        start = self.offsets[rows.start].astype(np.int64)
        count = self.offsets[rows.stop].astype(np.int64) - start
        filled = count > 0
        runs = merge(Runs(start[filled], count[filled]))
        return runs.selection()

    def _cut(self, rows: RowSelection, outputs: list[tuple[Array, Array]]) -> None:
        """Cut the elements into samples."""
        numbers = rows.numbers
        lengths = self.offsets[numbers + 1].astype(np.int64) - self.offsets[numbers].astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        for flat, out in outputs:
            scatter_lists(out, rows.destination, offsets, flat)


def jagged_columns(offsets: Integers, contents: Mapping[str, Content]) -> dict[str, Layout]:
    """Return the layouts of the fields of one `Jagged` table, by name.

    Examples
    --------
    Three samples of 2, 0 and 3 elements, whose momenta begin at byte 0 and whose charges begin at byte 20:

    >>> from matex_data.index.strided import Strided
    >>> momentum = Content(Strided(5, 0, 4, np.dtype("f4"), ()), np.dtype("f4"))
    >>> charge = Content(Strided(5, 20, 1, np.dtype("i1"), ()), np.dtype("i1"))
    >>> columns = jagged_columns(np.array([0, 2, 2, 5]), {"pt": momentum, "charge": charge})
    >>> columns["pt"].rows, columns["pt"].inner_bytes(), columns["charge"].inner_bytes()
    (3, 20, 5)
    """
    table = Jagged(compact(offsets), dict(contents))
    return {name: Column(table, name) for name in contents}


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
