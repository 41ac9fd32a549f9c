"""The three ways in which rows lie in a file: at even distances, in chunks, or as only a library knows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
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
SCATTER_BYTES = 4 * 1024 * 1024  # read and scattered in one go
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
        numbers, place = rows.numbers, rows.place
        if ready and (self.row_bytes >= DIRECT_BYTES or consecutive(place)):
            yield self._direct(numbers, place, out)
            return
        step = max(1, SCATTER_BYTES // self.row_bytes)
        for i in range(0, len(numbers), step):
            yield self._scattered(numbers[i : i + step], place[i : i + step], out)

    def _direct(self, numbers: Integers, place: Integers, out: Array) -> Request:
        """Each run of neighbouring rows that stay neighbours goes to its place in one piece."""
        unbroken = (np.diff(numbers) == 1) & (np.diff(place) == 1) & (self.stride == self.row_bytes)
        first, count = _runs(unbroken)
        return Request(
            offset=self.offset + numbers[first] * self.stride,
            nbytes=count * self.row_bytes,
            target=_as_bytes(out),
            at=place[first] * self.row_bytes,
        )

    def _scattered(self, numbers: Integers, place: Integers, out: Array) -> Request:
        first, count = _runs((np.diff(numbers) == 1) & (self.stride == self.row_bytes))
        return Request(
            offset=self.offset + numbers[first] * self.stride,
            nbytes=count * self.row_bytes,
            finish=partial(self._finish, place, out),
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
        numbers = rows.numbers
        if not len(numbers):
            return
        depth = self.chunk_shape[0]
        cells = self._cells()
        first, count = _runs(np.diff(numbers // depth) == 0)
        for i, n in zip(first.tolist(), count.tolist(), strict=True):
            band = int(numbers[i]) // depth
            want = _Want(numbers[i : i + n] - band * depth, rows.place[i : i + n], out, self.convert)
            whole = n == min(depth, self.rows - band * depth)
            lowest = band * len(cells)
            found = np.searchsorted(self.number, np.arange(lowest, lowest + len(cells)))
            for cell, entry in enumerate(found.tolist()):
                yield self._request(want, cells[cell], lowest + cell, entry, whole, cache)

    def _cells(self) -> list[tuple[slice, ...]]:
        """Where the chunks of one band lie in a row, in the order of their numbers."""
        edges = [
            [slice(a, min(a + c, n)) for a in range(0, n, c)]
            for n, c in zip(self.shape[1:], self.chunk_shape[1:], strict=True)
        ]
        cells: list[tuple[slice, ...]] = [()]
        for axis in edges:
            cells = [(*cell, edge) for cell in cells for edge in axis]
        return cells

    def _request(
        self, want: _Want, cell: tuple[slice, ...], number: int, entry: int, whole: bool, cache: ChunkCache
    ) -> Request:
        if entry == len(self.number) or self.number[entry] != number:
            return Request(NOTHING, NOTHING, finish=partial(want.fill, cell, self.fill))
        promise = None
        if not whole:
            kept = cache.get((id(self), number))
            if kept is not None:
                return Request(NOTHING, NOTHING, finish=partial(want.copy, cell, kept))
            promise = cache.promise((id(self), number), self.pipeline.nbytes)
        return Request(
            offset=self.offset[entry : entry + 1],
            nbytes=self.nbytes[entry : entry + 1],
            finish=partial(self._finish, want, cell, entry, promise),
        )

    def _finish(self, want: _Want, cell: tuple[slice, ...], entry: int, promise: Chunk | None, stored: Bytes) -> None:
        try:
            self._decode(want, cell, entry, promise, stored)
        except Exception as error:  # whoever waits for the chunk must hear of any failure
            failure = self._located(entry, error) if isinstance(error, BrokenChunk) else error
            if promise is not None and not promise.done():
                promise.set_exception(failure)
            raise failure from error

    def _located(self, entry: int, error: BrokenChunk) -> DecodeError:
        return DecodeError(
            "a chunk does not decode",
            row=int(self.number[entry]) // len(self._cells()) * self.chunk_shape[0],
            byte=int(self.offset[entry]),
            found=error,
            remedy="the file is damaged there: restore it from its source",
        )

    def _decode(self, want: _Want, cell: tuple[slice, ...], entry: int, promise: Chunk | None, stored: Bytes) -> None:
        mask = int(self.mask[entry])
        ready = want.memory(self.chunk_shape, self.dtype) if promise is None and self.axis == 0 else None
        used_up = ready is None and promise is None and self.pipeline.filters
        data = self.pipeline.decode(stored, mask, for_one_chunk(self.pipeline.nbytes) if used_up else ready)
        if ready is not None:
            return
        depth, *others = self.chunk_shape
        stored_shape = (*others[: self.axis], depth, *others[self.axis :])
        chunk = np.moveaxis(data.view(self.dtype).reshape(stored_shape), self.axis, 0)
        if promise is not None:
            chunk = chunk.copy() if np.may_share_memory(data, stored) else chunk  # scratch is used again
            promise.set_result(chunk)
        want.take(cell, chunk)


@dataclass(frozen=True)
class _Want:
    """Rows of one band of chunks that are wanted: their numbers within it, and their places in ``out``."""

    local: Integers
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
        together = consecutive(self.local)
        local = slice(int(self.local[0]), int(self.local[-1]) + 1) if together else self.local
        scatter(self.out[(slice(None), *cell)], self.place, chunk[(local, *inner)], self.convert)


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
