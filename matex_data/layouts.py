"""The three ways in which rows lie in a file: at even distances, in chunks, or as only a library knows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from math import prod
from threading import Lock
from typing import Any

import numpy as np

from matex_data.cache import Chunk, ChunkCache
from matex_data.chunk_memory import Bytes, for_one_chunk
from matex_data.codecs import BrokenChunk, Pipeline
from matex_data.errors import DecodeError
from matex_data.index import Array, Integers, Part, Request, Rows
from matex_data.scatter import Convert, consecutive
from matex_data.scatter import scatter as scatter

DIRECT_BYTES = 16 * 1024  # rows of this size are read to their places one by one; smaller ones are scattered after
SCATTER_BYTES = 1 << 20  # read and scattered in one go
TOGETHER_BYTES = 2 * 1024 * 1024  # of decoded chunks, made by one thread in one go
NOTHING: Integers = np.empty(0, np.int64)


@dataclass(frozen=True)
class Strided(Part):
    """Rows of fixed size at even distances: contiguous HDF5, classic netCDF, npy, IDX, CIFAR.

    Parameters
    ----------
    rows : number of rows.
    offset : byte position of row 0 in the file.
    stride : bytes from one row to the next.
    dtype : as stored, of either byte order.
    shape : of one row.
    convert : makes the field's rows of the stored ones; None: they are the same numbers.
    """

    rows: int
    offset: int
    stride: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    block_rows: int = 1
    convert: Convert | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in the file."""
        return prod(self.shape) * self.dtype.itemsize

    def stored_bytes(self) -> int:
        return self.rows * self.row_bytes

    def end(self) -> int:
        return self.offset + (self.rows - 1) * self.stride + self.row_bytes if self.rows else 0

    def requests(self, rows: Rows, out: Array, cache: ChunkCache) -> Iterator[Request]:
        ready = self.convert is None and self.dtype == out.dtype and out.flags.c_contiguous
        if self.row_bytes == 0 or not len(rows.place):
            return
        if ready and (self.row_bytes >= DIRECT_BYTES or consecutive(rows.place)):
            yield self._direct(rows, out)
            return
        for tile in rows.tiles(max(1, SCATTER_BYTES // self.row_bytes)):
            offset, nbytes = self._ranges(tile)
            yield Request(offset, nbytes, finish=partial(self._finish, tile.place, out))

    def _ranges(self, rows: Rows) -> tuple[Integers, Integers]:
        """Offsets and lengths of the bytes of the rows, neighbours as one."""
        if self.stride == self.row_bytes:
            return self.offset + rows.start * self.stride, (rows.stop - rows.start) * self.row_bytes
        offset = self.offset + rows.numbers * self.stride
        return offset, np.full(len(offset), self.row_bytes)

    def _direct(self, rows: Rows, out: Array) -> Request:
        """Each run of neighbouring rows that stay neighbours goes to its place in one piece."""
        numbers, place = rows.numbers, rows.place
        unbroken = (np.diff(numbers) == 1) & (np.diff(place) == 1) & (self.stride == self.row_bytes)
        first, count = _runs(unbroken)
        return Request(
            offset=self.offset + numbers[first] * self.stride,
            nbytes=count * self.row_bytes,
            target=_as_bytes(out),
            at=place[first] * self.row_bytes,
        )

    def _finish(self, place: Integers, out: Array, data: Bytes) -> None:
        scatter(out, place, data.view(self.dtype).reshape(-1, *self.shape), self.convert)


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
        first, count = _runs(band[1:] == band[:-1])
        band = band[first]
        local = numbers - np.repeat(band * depth, count)
        whole = count == np.minimum(depth, self.rows - band * depth)
        number = band[:, None] * cells + np.arange(cells)
        columns = (first, first + count, whole, number, self._entries(number))
        for begin, end, *found in zip(*(column.tolist() for column in columns), strict=True):
            yield _Want(local[begin:end], rows.place[begin:end], out, self.convert), *found

    def _entries(self, number: Integers) -> Integers:
        """Where the chunks of these numbers are in the table; -1 where they are not."""
        entry = np.searchsorted(self.number, number, side="right") - 1
        found = self.number[entry] == number if len(self.number) else np.zeros(number.shape, bool)
        return np.where(found & (entry >= 0), entry, -1)

    @cached_property
    def _cells(self) -> list[tuple[slice, ...]]:
        """Where the chunks of one band lie in a row, in the order of their numbers."""
        edges = [
            [slice(a, min(a + c, n)) for a in range(0, n, c)]
            for n, c in zip(self.shape[1:], self.chunk_shape[1:], strict=True)
        ]
        return list(product(*edges))

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

    local: Integers  # ascending
    place: Integers
    out: Array
    convert: Convert | None

    def memory(self, chunk_shape: tuple[int, ...], dtype: np.dtype[Any]) -> Bytes | None:
        """Where a chunk can be decoded straight to, if its rows stay together as they are."""
        out = self.out
        as_stored = self.convert is None and dtype == out.dtype and chunk_shape[1:] == out.shape[1:]
        together = len(self.local) == chunk_shape[0] and consecutive(self.place)
        if not as_stored or not together or not out.flags.c_contiguous:
            return None
        start = int(self.place[0])
        return _as_bytes(out[start : start + chunk_shape[0]])

    def fill(self, cell: tuple[slice, ...], value: Any, _: Bytes) -> None:
        rows = np.broadcast_to(value, (len(self.place), *(edge.stop - edge.start for edge in cell)))
        scatter(self.out[(slice(None), *cell)], self.place, rows, self.convert)

    def copy(self, cell: tuple[slice, ...], chunk: Future[Array], _: Bytes) -> None:
        self.take(cell, chunk.result())

    def take(self, cell: tuple[slice, ...], chunk: Array) -> None:
        inner = tuple(slice(0, edge.stop - edge.start) for edge in cell)
        low, high = int(self.local[0]), int(self.local[-1]) + 1
        local = slice(low, high) if high - low == len(self.local) else self.local
        scatter(self.out[(slice(None), *cell)], self.place, chunk[(local, *inner)], self.convert)


@dataclass(frozen=True)
class _Piece:
    """A chunk that is read: which rows of it are wanted, where it lies in a row, and who else waits for it."""

    want: _Want
    cell: tuple[slice, ...]
    entry: int
    promise: Chunk | None


class Foreign(Part):
    """Rows that only the format's library can read; each rank reads its own."""

    rows: int
    block_rows: int

    @abstractmethod
    def read(self, start: int, stop: int) -> Array:
        """Rows start to stop as the field's dtype. Never called on two threads at once."""

    def requests(self, rows: Rows, out: Array, cache: ChunkCache) -> Iterator[Request]:
        done = 0
        for start, stop in zip(rows.start.tolist(), rows.stop.tolist(), strict=True):
            place = rows.place[done : done + stop - start]
            done += stop - start
            yield Request(NOTHING, NOTHING, finish=partial(self._finish, start, stop, place, out))

    def _finish(self, start: int, stop: int, place: Integers, out: Array, _: Bytes) -> None:
        with _LIBRARIES:
            rows = self.read(start, stop)
        scatter(out, place, rows)


_LIBRARIES = Lock()  # neither HDF5 nor netCDF may be entered by two threads


def _runs(unbroken: np.ndarray[Any, Any]) -> tuple[Integers, Integers]:
    """First element and length of each run, given whether each element continues the one before."""
    first = np.concatenate([[0], np.flatnonzero(~unbroken) + 1]).astype(np.int64)
    return first, np.diff(np.append(first, len(unbroken) + 1))


def _as_bytes(array: Array) -> Bytes:
    return array.reshape(-1).view(np.uint8)
