"""Layout of rows in chunks, which may be compressed: HDF5 and netCDF-4."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from typing import Any

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.codecs.bounded import BrokenChunk
from matex_data.codecs.pipeline import Pipeline
from matex_data.codecs.scratch import thread_scratch
from matex_data.declared import declared
from matex_data.errors import RESTORE, DecodeError
from matex_data.index.blocks import Blocks, even_blocks
from matex_data.index.cache import Chunk, ChunkCache, Reserved
from matex_data.index.layout import EMPTY, Composed, Layout, ReadRequest
from matex_data.index.runs import RowSelection
from matex_data.index.scatter import Convert, RowIndices, as_bytes, scatter
from matex_data.index.table import Outputs, Table
from matex_data.locks import cached_property
from matex_data.machine import tasks_of_window

DECODE_BYTES = (256 << 10, 8 << 20)  # least and most decoded bytes of the chunks of one read request

MemberPath = tuple[str, ...]
"""Names that lead to a member of a structured dtype, from the outside in; (): the whole element."""
_Rows = tuple[RowIndices, RowIndices]
"""Rows within a chunk, and their destinations."""
_NO_ROWS: _Rows = (EMPTY, EMPTY)
_Along = slice | Integers
_Cell = tuple[tuple[slice, ...], tuple[_Along, ...]]
"""Region of a chunk in the output array (all rows), and in a row of the chunk."""


@declared
@dataclass(frozen=True, eq=False)
class Chunked(Layout):
    """Rows in chunks of equal shape, each of which is stored in one byte range.

    Chunks are numbered in C order over the grid of chunks, the last axis fastest. A chunk that is missing from the
    table was never written: its elements are ``fill``.

    Parameters
    ----------
    shape : of the whole dataset, sample axis first.
    chunk_shape : of one chunk, in the same order of axes; chunks at the far edges extend beyond the dataset.
    dtype : as stored, of either byte order.
    pipeline : the filters that were applied to the chunks.
    number, offset, nbytes, mask : int64[n], the table of stored chunks, ascending in ``number``: the chunk, its byte
        range in the file, and its filter mask.
    fill : one element, of ``dtype`` in native byte order.
    convert : writes the field's values for stored ones, element by element; None: they are equal.
    axis : position of the sample axis in the stored chunks. ``shape``, ``chunk_shape`` and ``number`` have it first.
    chosen : ascending entries of each axis of a row that are read, or None for all; (): all of all axes.
    owner : layout of the same chunks, of which this one has a part of the rows: what one part has decoded serves the
        others. None: no other layout needs these chunks.

    Examples
    --------
    Six rows of two numbers in chunks of four rows, without filters; the first chunk is at byte 100, the second at 200:

    >>> plain = Pipeline((), itemsize=4, nbytes=32)
    >>> table = np.array([0, 1]), np.array([100, 200]), np.array([32, 32]), np.array([0, 0])
    >>> layout = Chunked((6, 2), (4, 2), np.dtype("f4"), plain, *table, fill=np.float32(0))
    >>> layout.rows, layout.block_rows, layout.end()
    (6, 4, 232)
    >>> selection = RowSelection(np.array([5]), np.array([6]), np.array([0]))
    >>> [request.offset.tolist() for request in layout.requests(selection, np.empty((1, 2), "f4"), ChunkCache(0))]
    [[200]]
    """

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    pipeline: Pipeline
    number: Integers
    offset: Integers
    nbytes: Integers
    mask: Integers
    fill: Any
    convert: Convert | None = None
    axis: int = 0
    chosen: tuple[range | tuple[int, ...] | None, ...] = ()
    owner: Chunked | None = None

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.shape[0]

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return self.chunk_shape[0]

    def stored_bytes(self) -> int:
        if not self.chosen:
            return int(self.nbytes.sum())
        return int(self.nbytes[np.isin(self.number % self.band_cells, self._numbers)].sum())

    def end(self) -> int:
        return int((self.offset + self.nbytes).max()) if len(self.offset) else 0

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        return self.read_members(rows, [((), out)], cache)

    def read_members(
        self, rows: RowSelection, outs: Sequence[tuple[MemberPath, Array]], cache: ChunkCache
    ) -> Iterator[ReadRequest]:
        """Yield the reads of members of a structured ``dtype``; a chunk is decoded once for all of them.

        Parameters
        ----------
        outs : pairs of a member and the array that receives it.
        """
        depth, cells = self.chunk_shape[0], len(self._cells)
        bands = even_blocks(rows, depth)
        number = (bands.number[:, None] * self.band_cells + self._numbers).reshape(-1)
        entry = self.entries(number)
        selection = SelectedChunks(bands, entry, outs, Reserved())
        alone = (bands.count == np.minimum(depth, self.rows - bands.number * depth)) & (self.owner is None)
        whole = np.repeat(alone, cells)
        to_read = whole & (entry >= 0)
        for i in np.flatnonzero(entry < 0).tolist():
            yield ReadRequest(EMPTY, EMPTY, on_complete=partial(self._fill, selection, i))
        for i in np.flatnonzero(~whole & (entry >= 0)).tolist():
            key = (self.owner or self, int(number[i]))
            cached = cache.get(key)
            if cached is not None:
                copy = partial(self._copy_cached, selection, i, cached)
                yield ReadRequest(EMPTY, EMPTY, on_complete=copy, after=cached)
                continue
            selection.reserved[i] = cache.reserve(key, self.pipeline.nbytes)
            to_read[i] = True
        for chunks in self._groups(np.flatnonzero(to_read)):
            yield self.read_chunks(selection, chunks)

    def read_chunks(self, selection: SelectedChunks, chunks: Integers) -> ReadRequest:
        """Return the read of a group of chunks, which one thread decodes."""
        at = selection.entry[chunks]
        return ReadRequest(self.offset[at], self.nbytes[at], on_complete=partial(self._decode, selection, chunks))

    def entries(self, number: Integers) -> Integers:
        """Return the positions of these chunks in the table; -1 for missing ones."""
        entry = np.searchsorted(self.number, number, side="right") - 1
        found = self.number[entry] == number if len(self.number) else np.zeros(number.shape, bool)
        return np.where(found & (entry >= 0), entry, -1)

    @cached_property
    def band_cells(self) -> int:
        """Number of chunks that share their rows (a band)."""
        return prod(-(-n // c) for n, c in zip(self.shape[1:], self.chunk_shape[1:], strict=True))

    @cached_property
    def _numbers(self) -> Integers:
        """Numbers within a band of the chunks that are read, int64, ascending."""
        numbers = np.zeros(1, np.int64)
        edges = zip(self.shape[1:], self.chunk_shape[1:], self._axes, strict=True)
        for length, chunk, along in edges:
            numbers = (numbers[:, None] * -(-length // chunk) + np.array([n for n, _ in along], np.int64)).reshape(-1)
        return numbers

    @cached_property
    def _cells(self) -> list[_Cell]:
        """Regions of the chunks of a band that are read, in the order of their numbers."""
        cells = product(*([region for _, region in along] for along in self._axes))
        return [((slice(None), *(outer for outer, _ in cell)), tuple(inner for _, inner in cell)) for cell in cells]

    @property
    def _axes(self) -> list[list[tuple[int, tuple[slice, _Along]]]]:
        """Chunks along each axis of a row: number, region in the output array, and region in the chunk."""
        chosen = self.chosen or (None,) * (len(self.shape) - 1)
        lengths = zip(self.shape[1:], self.chunk_shape[1:], chosen, strict=True)
        return [list(_along(length, chunk, numbers)) for length, chunk, numbers in lengths]

    def _groups(self, chunks: Integers) -> Iterator[Integers]:
        """Split the chunks into groups for one thread each: large ones, but enough for all threads."""
        (least, most), nbytes = DECODE_BYTES, max(1, self.pipeline.nbytes)
        count = max(1, min(most, max(least, len(chunks) * nbytes // tasks_of_window())) // nbytes)
        return (chunks[start : start + count] for start in range(0, len(chunks), count))

    def _decode(self, selection: SelectedChunks, chunks: Integers, stored: Bytes) -> None:
        ends = np.cumsum(self.nbytes[selection.entry[chunks]]).tolist()
        self.decode_chunks(
            selection, chunks, (stored[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True))
        )

    def decode_chunks(self, selection: SelectedChunks, chunks: Integers, stored: Iterable[Bytes | None]) -> None:
        """Decode chunks; on an error, fail the one, and give up the others that are left.

        Parameters
        ----------
        chunks : numbers within the selection.
        stored : of each chunk its bytes, or None if it was never written.
        """
        numbers, entries = chunks.tolist(), selection.entry[chunks].tolist()
        cells, band, rows = len(self._cells), -1, _NO_ROWS
        for done, (i, entry, data) in enumerate(zip(numbers, entries, stored, strict=True)):
            try:
                if data is None:
                    self._fill_pending(selection, i)
                    continue
                if i // cells != band:
                    band, rows = i // cells, self._rows(selection, i)
                self._decode_chunk(selection, i, entry, rows, data)
            except Exception as error:
                located = self.located(entry, error) if isinstance(error, BrokenChunk) else error
                selection.reserved.fail(numbers[done:], located)
                raise located from error

    def located(self, entry: int, error: BrokenChunk) -> DecodeError:
        """Return the error for a chunk that does not decode."""
        return DecodeError(
            "a chunk does not decode",
            row=int(self.number[entry]) // self.band_cells * self.chunk_shape[0],
            byte=int(self.offset[entry]),
            found=error,
            remedy=RESTORE,
        )

    def _decode_chunk(self, selection: SelectedChunks, i: int, entry: int, rows: _Rows, stored: Bytes) -> None:
        kept, mask = i in selection.reserved, self.mask_of(entry)
        (path, out), *others = selection.outs
        if not (kept or path or others) and self._decode_in_place(rows, out, stored, mask):
            return
        scratch = self.pipeline.filters and not kept
        data = self.elements(stored, mask, thread_scratch(self.pipeline.nbytes) if scratch else None)
        depth, *edges = self.chunk_shape
        chunk = data.reshape(*edges[: self.axis], depth, *edges[self.axis :])
        if self.axis:
            chunk = np.moveaxis(chunk, self.axis, 0)
        if kept:
            chunk = chunk.copy() if np.may_share_memory(data, stored) else chunk  # the read's memory is reused
            selection.reserved.complete(i, chunk)
        self._scatter(selection, i, rows, chunk)

    def elements(self, stored: Bytes, mask: int, out: Bytes | None) -> Array:
        """Return the elements of a chunk, in the order in which it is stored; ``out``: memory for them."""
        return self.pipeline.decode(stored, mask, out).view(self.dtype)

    def mask_of(self, entry: int) -> int:
        """Return the filter mask of a chunk."""
        return int(self.mask[entry])

    def _decode_in_place(self, rows: _Rows, out: Array, stored: Bytes, mask: int) -> bool:
        """Decode a whole chunk straight to its destinations, and return True; return False if that is not possible."""
        local, destination = rows
        whole = isinstance(destination, slice) and local == slice(0, self.chunk_shape[0])
        if not whole or not self._has_same_rows(out):
            return False
        self.pipeline.decode(stored, mask, as_bytes(out[destination]))
        return True

    def _has_same_rows(self, out: Array) -> bool:
        """Return whether the decoded bytes of a chunk are those of whole rows of ``out``."""
        whole = self.chunk_shape[1:] == out.shape[1:] and not self.axis and not self.chosen
        return whole and self.convert is None and self.dtype == out.dtype and out.flags.c_contiguous

    def _rows(self, selection: SelectedChunks, i: int) -> _Rows:
        """Return the selected rows of a chunk, counted from its first one, and their destinations."""
        band = i // len(self._cells)
        begin = int(selection.bands.number[band]) * self.chunk_shape[0]
        return selection.bands.rows(band, begin), selection.bands.destinations(band)

    def _scatter(self, selection: SelectedChunks, i: int, rows: _Rows, chunk: Array) -> None:
        local, destination = rows
        outer, inner = self._cells[i % len(self._cells)]
        for path, out in selection.outs:
            scatter(out[outer], destination, _region(member(chunk, path), local, inner), self.convert)

    def _copy_cached(self, selection: SelectedChunks, i: int, chunk: Chunk, _: Bytes) -> None:
        self._scatter(selection, i, self._rows(selection, i), chunk.value)

    def _fill_pending(self, selection: SelectedChunks, i: int) -> None:
        """Fill the rows of a chunk that turned out to be missing, and pass it on to the windows that need it."""
        selection.reserved.complete(i, np.broadcast_to(self.fill, self.chunk_shape))
        self._fill(selection, i, EMPTY.view(np.uint8))

    def _fill(self, selection: SelectedChunks, i: int, _: Bytes) -> None:
        """Fill the rows of a chunk that was never written."""
        outer = self._cells[i % len(self._cells)][0]
        destination = selection.bands.destinations(i // len(self._cells))
        count = destination.stop - destination.start if isinstance(destination, slice) else len(destination)
        rows = np.broadcast_to(self.fill, (count, *(edge.stop - edge.start for edge in outer[1:])))
        for path, out in selection.outs:
            scatter(out[outer], destination, member(rows, path), self.convert)


def axis_first(lengths: Sequence[int], axis: int) -> tuple[int, ...]:
    """Return lengths along the axes of an array with that of one axis in front.

    >>> axis_first((4, 5, 6), 1)
    (5, 4, 6)
    """
    return (lengths[axis], *lengths[:axis], *lengths[axis + 1 :])


def _along(
    length: int, chunk: int, chosen: range | tuple[int, ...] | None
) -> Iterator[tuple[int, tuple[slice, _Along]]]:
    """Yield the chunks along an axis: number, region in the output array, and region in the chunk.

    Parameters
    ----------
    length, chunk : of the axis, and of a chunk along it.
    chosen : ascending entries that are read; None: all.
    """
    if chosen is None:
        for first in range(0, length, chunk):
            stop = min(first + chunk, length)
            yield first // chunk, (slice(first, stop), slice(0, stop - first))
        return
    entries = np.array(chosen, np.int64)
    numbers, begin = np.unique(entries // chunk, return_index=True)
    for number, low, high in zip(numbers.tolist(), begin.tolist(), [*begin[1:].tolist(), len(entries)], strict=True):
        inner = entries[low:high] - number * chunk
        regular = isinstance(chosen, range)
        step = chosen.step if isinstance(chosen, range) else 1
        yield number, (slice(low, high), slice(int(inner[0]), int(inner[-1]) + 1, step) if regular else inner)


def _region(chunk: Array, rows: RowIndices, inner: tuple[_Along, ...]) -> Array:
    """Return rows of a chunk, and of these the regions along each axis."""
    region = chunk[(rows, *(along if isinstance(along, slice) else slice(None) for along in inner))]
    for axis, along in enumerate(inner, 1):
        if not isinstance(along, slice):
            region = region[(slice(None),) * axis + (along,)]
    return region


@dataclass(frozen=True)
class SelectedChunks:
    """Chunks that hold selected rows, numbered band by band.

    Parameters
    ----------
    bands : the selected rows, grouped by bands: the chunks with the same rows.
    entry : int64[bands * cells], position of each chunk in the table; -1: it was never written.
    outs : pairs of a member of the stored elements and the array that receives it.
    reserved : by chunk, those that the cache keeps for other windows.
    """

    bands: Blocks
    entry: Integers
    outs: Sequence[tuple[MemberPath, Array]]
    reserved: Reserved


def member(rows: Array, path: MemberPath) -> Array:
    """Return the view of a member of structured rows.

    >>> rows = np.zeros(5, [("id", "i4"), ("p", [("x", "f4"), ("y", "f4", (3,))])])
    >>> member(rows, ("p", "y")).shape
    (5, 3)
    """
    for name in path:
        rows = rows[name]
    return rows


@declared
@dataclass(frozen=True, eq=False)
class ChunkedMembers(Composed, Table):
    """Members of chunked rows of a structured dtype.

    Parameters
    ----------
    members : the selected members, by the name of their field.
    """

    chunked: Chunked
    members: Mapping[str, MemberPath]

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.chunked.rows

    @property
    def origins(self) -> tuple[Chunked]:
        return (self.chunked,)

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.members)

    def requests(self, rows: RowSelection, outs: Outputs, cache: ChunkCache) -> Iterator[ReadRequest]:
        return self.chunked.read_members(rows, [(self.members[name], out) for name, out in outs], cache)
