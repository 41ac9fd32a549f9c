"""Rows in chunks that may be compressed: HDF5 and netCDF-4."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.codecs.inflate import inflate_rows, width_for
from matex_data.codecs.pipeline import BrokenChunk, Pipeline
from matex_data.codecs.scratch import thread_scratch
from matex_data.codecs.shuffle import unshuffle_rows
from matex_data.errors import DecodeError
from matex_data.index.blocks import Blocks, even_blocks
from matex_data.index.cache import ChunkCache, ChunkFuture
from matex_data.index.model import EMPTY, Layout, ReadRequest, RowSelection
from matex_data.index.scatter import Convert, RowIndices, as_bytes, scatter
from matex_data.machine import threads

TOGETHER_BYTES = (1 << 20, 8 << 20)  # of decoded chunks, least and most that one thread makes in one go

_Rows = tuple[RowIndices, RowIndices]  # of a chunk, and where they go
_NO_ROWS: _Rows = (EMPTY, EMPTY)
Cell = tuple[tuple[slice, ...], tuple[slice, ...]]  # of the field's array, with all its rows, and of a row of the chunk


@dataclass(frozen=True)
class Chunked(Layout):
    """Rows in chunks of equal shape, each stored, maybe compressed, in one piece: HDF5 and netCDF-4.

    Chunks are numbered in C order over the grid of chunks, the last axis fastest. One that is missing from
    the table was never written: its rows are ``fill``.

    Parameters
    ----------
    shape : of the whole dataset, sample axis first.
    chunk_shape : of one chunk, of as many axes. Chunks at the far edges reach over it.
    dtype : as stored, of either byte order.
    pipeline : what the chunks went through.
    number, offset, nbytes, mask : int64[n] columns, ascending in ``number``: which chunk, its byte range in
        the file, and its filter mask.
    fill : one element, of dtype ``dtype`` in native order.
    convert : makes the field's numbers of the stored ones, one by one; None: they are the same.
    axis : of the chunks in the file that is the sample axis. ``shape``, ``chunk_shape`` and ``number`` have it first.
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

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.shape[0]

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return self.chunk_shape[0]

    def stored_bytes(self) -> int:
        return int(self.nbytes.sum())

    def end(self) -> int:
        return int((self.offset + self.nbytes).max()) if len(self.offset) else 0

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        depth, cells = self.chunk_shape[0], len(self._cells)
        bands = even_blocks(rows, depth)
        number = (bands.number[:, None] * cells + np.arange(cells)).reshape(-1)
        entry = self._entries(number)
        wanted = _Wanted(bands, entry, out, {})
        whole = np.repeat(bands.count == np.minimum(depth, self.rows - bands.number * depth), cells)
        fresh = whole & (entry >= 0)
        for i in np.flatnonzero(entry < 0).tolist():
            yield ReadRequest(EMPTY, EMPTY, on_complete=partial(self._fill, wanted, i))
        for i in np.flatnonzero(~whole & (entry >= 0)).tolist():
            key = (id(self), int(number[i]))
            kept = cache.get(key)
            if kept is not None:
                yield ReadRequest(EMPTY, EMPTY, on_complete=partial(self._copy, wanted, i, kept))
                continue
            wanted.promises[i] = cache.reserve(key, self.pipeline.nbytes)
            fresh[i] = True
        width = width_for(self.pipeline) if self._as_stored(out) else None
        quick = fresh & whole & (width is not None)
        quick[quick] = self.mask[entry[quick]] == 0
        for chunks, finish in ((quick, partial(self._inflate, width or 0)), (fresh & ~quick, self._finish)):
            for some in self._shares(np.flatnonzero(chunks)):
                at = entry[some]
                yield ReadRequest(self.offset[at], self.nbytes[at], on_complete=partial(finish, wanted, some))

    def _entries(self, number: Integers) -> Integers:
        """Where the chunks of these numbers are in the table; -1 where they are not."""
        entry = np.searchsorted(self.number, number, side="right") - 1
        found = self.number[entry] == number if len(self.number) else np.zeros(number.shape, bool)
        return np.where(found & (entry >= 0), entry, -1)

    @cached_property
    def _cells(self) -> list[Cell]:
        """Where the chunks of one band lie in a row, in the order of their numbers."""
        edges = [
            [slice(a, min(a + c, n)) for a in range(0, n, c)]
            for n, c in zip(self.shape[1:], self.chunk_shape[1:], strict=True)
        ]
        return [
            ((slice(None), *cell), tuple(slice(0, edge.stop - edge.start) for edge in cell)) for cell in product(*edges)
        ]

    def _shares(self, chunks: Integers) -> Iterator[Integers]:
        """Those that one thread decodes one after the other: few large shares, but two for each thread."""
        (least, most), each = TOGETHER_BYTES, max(1, self.pipeline.nbytes)
        together = max(1, min(most, max(least, len(chunks) * each // (2 * threads()))) // each)
        return (chunks[start : start + together] for start in range(0, len(chunks), together))

    def _inflate(self, width: int, wanted: _Wanted, chunks: Integers, stored: Bytes) -> None:
        """Whole chunks to their rows in one go; from one that is broken on as ``_finish`` does it."""
        nbytes, first = self.nbytes[wanted.entry[chunks]], wanted.bands.first
        places = wanted.bands.destination, first[chunks], first[chunks + 1]
        done = inflate_rows(stored, nbytes, self.pipeline.nbytes, width, wanted.out, *places)
        if done < len(chunks):
            self._finish(wanted, chunks[done:], stored[nbytes[:done].sum() :])

    def _finish(self, wanted: _Wanted, chunks: Integers, stored: Bytes) -> None:
        """Decode one chunk after the other; whoever waits for one of them hears of any failure."""
        numbers, entries = chunks.tolist(), wanted.entry[chunks].tolist()
        cells, band, rows, end = len(self._cells), -1, _NO_ROWS, 0
        for turn, (i, entry) in enumerate(zip(numbers, entries, strict=True)):
            begin, end = end, end + int(self.nbytes[entry])
            try:
                if i // cells != band:
                    band, rows = i // cells, self._rows(wanted, i)
                self._decode(wanted, i, entry, rows, stored[begin:end])
            except Exception as error:
                failure = self._located(entry, error) if isinstance(error, BrokenChunk) else error
                for promise in map(wanted.promises.get, numbers[turn:]):
                    if promise is not None and not promise.done():
                        promise.set_exception(failure)
                raise failure from error

    def _located(self, entry: int, error: BrokenChunk) -> DecodeError:
        return DecodeError(
            "a chunk does not decode",
            row=int(self.number[entry]) // len(self._cells) * self.chunk_shape[0],
            byte=int(self.offset[entry]),
            found=error,
            remedy="the file is damaged there: restore it from its source",
        )

    def _decode(self, wanted: _Wanted, i: int, entry: int, rows: _Rows, stored: Bytes) -> None:
        promise, mask = wanted.promises.get(i), int(self.mask[entry])
        if promise is None and self._decoded_in_place(rows, wanted.out, stored, mask):
            return
        scratch = promise is None and self.pipeline.filters
        data = self.pipeline.decode(stored, mask, thread_scratch(self.pipeline.nbytes) if scratch else None)
        depth, *others = self.chunk_shape
        chunk = data.view(self.dtype).reshape(*others[: self.axis], depth, *others[self.axis :])
        if self.axis:
            chunk = np.moveaxis(chunk, self.axis, 0)
        if promise is not None:
            chunk = chunk.copy() if np.may_share_memory(data, stored) else chunk  # scratch is used again
            if not promise.done():  # a read beside this one may have failed
                promise.set_result(chunk)
        self._take(wanted, i, rows, chunk)

    def _decoded_in_place(self, rows: _Rows, out: Array, stored: Bytes, mask: int) -> bool:
        """Decode a chunk of whole rows straight to where they go, if nothing has to be made of their numbers."""
        local, destination = rows
        if not self._as_stored(out):
            return False
        planes = None if mask & 1 else self.pipeline.before_shuffle
        if isinstance(destination, slice) and local == slice(0, self.chunk_shape[0]):
            self.pipeline.decode(stored, mask, as_bytes(out[destination]))
        elif planes is not None and not isinstance(destination, slice):
            scratch = thread_scratch(planes.nbytes) if planes.filters else None
            unshuffle_rows(planes.decode(stored, mask >> 1, scratch), out, destination)
        else:
            return False
        return True

    def _as_stored(self, out: Array) -> bool:
        """Whether the bytes of a chunk are those of whole rows."""
        whole = self.chunk_shape[1:] == out.shape[1:] and not self.axis
        return whole and self.convert is None and self.dtype == out.dtype and out.flags.c_contiguous

    def _rows(self, wanted: _Wanted, i: int) -> _Rows:
        """The rows that are wanted of a chunk, counted within it, and their places; the same for all of a band."""
        band = i // len(self._cells)
        begin = int(wanted.bands.number[band]) * self.chunk_shape[0]
        return wanted.bands.rows(band, begin), wanted.bands.destinations(band)

    def _take(self, wanted: _Wanted, i: int, rows: _Rows, chunk: Array) -> None:
        local, destination = rows
        outer, inner = self._cells[i % len(self._cells)]
        scatter(wanted.out[outer], destination, chunk[(local, *inner)], self.convert)

    def _copy(self, wanted: _Wanted, i: int, chunk: Future[Array], _: Bytes) -> None:
        self._take(wanted, i, self._rows(wanted, i), chunk.result())

    def _fill(self, wanted: _Wanted, i: int, _: Bytes) -> None:
        """Rows of a chunk that was never written."""
        outer, inner = self._cells[i % len(self._cells)]
        destination = wanted.bands.destinations(i // len(self._cells))
        count = destination.stop - destination.start if isinstance(destination, slice) else len(destination)
        rows = np.broadcast_to(self.fill, (count, *(edge.stop for edge in inner)))
        scatter(wanted.out[outer], destination, rows, self.convert)


@dataclass(frozen=True)
class _Wanted:
    """Chunks of which some rows are wanted, the cells of each band one behind the other.

    Parameters
    ----------
    bands : the rows, by bands of chunks.
    entry : int64[bands * cells], where each chunk is in the table; -1: it was never written.
    out : receives the rows.
    promises : of the chunks that others wait for, too.
    """

    bands: Blocks
    entry: Integers
    out: Array
    promises: dict[int, ChunkFuture]
