"""Rows in chunks that may be compressed: HDF5 and netCDF-4."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any

import numpy as np

from matex_data.cache import Chunk, ChunkCache
from matex_data.chunk_memory import Bytes, for_one_chunk
from matex_data.codecs import BrokenChunk, Pipeline
from matex_data.errors import DecodeError
from matex_data.index import Array, Integers, Part, Request, Rows
from matex_data.layouts import NOTHING, as_bytes, runs_of
from matex_data.scatter import Convert, Some, scatter

TOGETHER_BYTES = 2 * 1024 * 1024  # of decoded chunks, made by one thread in one go

Cell = tuple[tuple[slice, ...], tuple[slice, ...]]  # of the field's array, with all its rows, and of a row of the chunk


@dataclass(frozen=True)
class Chunked(Part):
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

    def requests(self, rows: Rows, out: Array, cache: ChunkCache) -> Iterator[Request]:
        several: list[_Piece] = []
        for want, whole, numbers, entries in self._bands(rows, out):
            for cell, number, entry in zip(self._cells, numbers, entries, strict=True):
                if entry < 0:
                    yield Request(NOTHING, NOTHING, finish=partial(want.fill, cell, self.fill))
                    continue
                kept = None if whole else cache.get((id(self), number))
                if kept is not None:
                    yield Request(NOTHING, NOTHING, finish=partial(want.copy, cell, kept))
                    continue
                promise = None if whole else cache.promise((id(self), number), self.pipeline.nbytes)
                several.append(_Piece(want, cell, entry, promise))
        stored = np.array([piece.entry for piece in several], np.int64)
        offset, nbytes = self.offset[stored], self.nbytes[stored]
        for start in range(0, len(several), self._together):
            some = slice(start, start + self._together)
            yield Request(offset[some], nbytes[some], finish=partial(self._finish, several[some]))

    def _bands(self, rows: Rows, out: Array) -> Iterator[tuple[_Want, bool, list[int], list[int]]]:
        """For each band of chunks: what is wanted, whether that is all rows, and the chunks with their entries.

        The entry of a chunk in the table is -1 if it was never written.
        """
        if not len(rows.place):
            return
        numbers, depth, cells = rows.numbers, self.chunk_shape[0], len(self._cells)
        band = numbers // depth
        first, count = runs_of(band[1:] == band[:-1])
        band = band[first]
        local = numbers - np.repeat(band * depth, count)
        whole = count == np.minimum(depth, self.rows - band * depth)
        number = band[:, None] * cells + np.arange(cells)
        chunks = zip(whole.tolist(), number.tolist(), self._entries(number).tolist(), strict=True)
        wanted = zip(_slices(local, first, count), _slices(rows.place, first, count), chunks, strict=True)
        for inner, place, found in wanted:
            yield _Want(inner, place, out, self.convert), *found

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

    @property
    def _together(self) -> int:
        """Chunks that one thread decodes one after the other."""
        return max(1, TOGETHER_BYTES // max(1, self.pipeline.nbytes))

    def _finish(self, pieces: list[_Piece], stored: Bytes) -> None:
        """Decode one chunk after the other; whoever waits for one of them hears of any failure."""
        end = 0
        for number, piece in enumerate(pieces):
            begin, end = end, end + int(self.nbytes[piece.entry])
            try:
                self._decode(piece, stored[begin:end])
            except Exception as error:
                failure = self._located(piece.entry, error) if isinstance(error, BrokenChunk) else error
                for left in pieces[number:]:
                    if left.promise is not None and not left.promise.done():
                        left.promise.set_exception(failure)
                raise failure from error

    def _located(self, entry: int, error: BrokenChunk) -> DecodeError:
        return DecodeError(
            "a chunk does not decode",
            row=int(self.number[entry]) // len(self._cells) * self.chunk_shape[0],
            byte=int(self.offset[entry]),
            found=error,
            remedy="the file is damaged there: restore it from its source",
        )

    def _decode(self, piece: _Piece, stored: Bytes) -> None:
        want, mask, promise = piece.want, int(self.mask[piece.entry]), piece.promise
        ready = want.memory(self.chunk_shape, self.dtype) if promise is None and self.axis == 0 else None
        used_up = ready is None and promise is None and self.pipeline.filters
        data = self.pipeline.decode(stored, mask, for_one_chunk(self.pipeline.nbytes) if used_up else ready)
        if ready is not None:
            return
        depth, *others = self.chunk_shape
        chunk = data.view(self.dtype).reshape(*others[: self.axis], depth, *others[self.axis :])
        if self.axis:
            chunk = np.moveaxis(chunk, self.axis, 0)
        if promise is not None:
            chunk = chunk.copy() if np.may_share_memory(data, stored) else chunk  # scratch is used again
            if not promise.done():  # a read beside this one may have failed
                promise.set_result(chunk)
        want.take(piece.cell, chunk)


@dataclass(frozen=True)
class _Want:
    """Rows of one band of chunks that are wanted: their numbers within it, and their places in ``out``."""

    local: Some  # ascending
    place: Some
    out: Array
    convert: Convert | None

    def memory(self, chunk_shape: tuple[int, ...], dtype: np.dtype[Any]) -> Bytes | None:
        """Where a chunk can be decoded straight to, if its rows stay together as they are."""
        out = self.out
        together = isinstance(self.local, slice) and isinstance(self.place, slice)
        if not together or self.local != slice(0, chunk_shape[0]):
            return None
        as_stored = self.convert is None and dtype == out.dtype and chunk_shape[1:] == out.shape[1:]
        return as_bytes(out[self.place]) if as_stored and out.flags.c_contiguous else None

    def fill(self, cell: Cell, value: Any, _: Bytes) -> None:
        outer, inner = cell
        count = self.place.stop - self.place.start if isinstance(self.place, slice) else len(self.place)
        rows = np.broadcast_to(value, (count, *(edge.stop for edge in inner)))
        scatter(self.out[outer], self.place, rows, self.convert)

    def copy(self, cell: Cell, chunk: Future[Array], _: Bytes) -> None:
        self.take(cell, chunk.result())

    def take(self, cell: Cell, chunk: Array) -> None:
        outer, inner = cell
        scatter(self.out[outer], self.place, chunk[(self.local, *inner)], self.convert)


@dataclass(frozen=True)
class _Piece:
    """A chunk that is read: which rows of it are wanted, where it lies in a row, and who else waits for it."""

    want: _Want
    cell: Cell
    entry: int
    promise: Chunk | None


def _slices(numbers: Integers, first: Integers, count: Integers) -> list[Some]:
    """The numbers of each run; as a slice where each is the one before and one."""
    breaks = np.cumsum(np.diff(numbers, prepend=numbers[:1]) != 1)
    last = first + count - 1
    columns = (first, first + count, numbers[first], breaks[first] == breaks[last])
    return [
        slice(low, low + end - begin) if steady else numbers[begin:end]
        for begin, end, low, steady in zip(*(column.tolist() for column in columns), strict=True)
    ]
