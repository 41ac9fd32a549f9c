"""Layouts of arrays whose chunks lie in other files than the data set's own, and of texts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod
from typing import Any

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.codecs.bounded import BrokenChunk
from matex_data.codecs.scratch import new_memory
from matex_data.declared import declared
from matex_data.errors import DecodeError
from matex_data.index.chunked import Chunked, SelectedChunks
from matex_data.index.library import LibraryRows
from matex_data.index.model import EMPTY, ReadRequest
from matex_data.readers.zarr.arrays import ArrayMetadata
from matex_data.readers.zarr.chunks import ChunkExtents, ChunkFiles, Grid, StoredBytes
from matex_data.readers.zarr.codecs import StoreCodecs

KEPT_BYTES = 4 << 20  # largest chunk whose memory is kept
DAMAGED = "the store is damaged there: restore it from its source"


class _ReadMemory:
    """Memory of one request, used again by later ones: fresh memory costs page faults, a fifth of the time of Blosc."""

    def __init__(self) -> None:
        self._chunks: list[Bytes] = []
        self._used = 0

    def give_back(self) -> None:
        """Let another request use the memory."""
        self._used = 0
        _FREE.append(self)

    def take(self, nbytes: int) -> Bytes:
        """Return uint8[nbytes] for the next chunk of the request."""
        if nbytes > KEPT_BYTES:
            return new_memory(nbytes)
        if self._used == len(self._chunks):
            self._chunks.append(new_memory(nbytes))
        elif len(self._chunks[self._used]) < nbytes:
            self._chunks[self._used] = new_memory(nbytes)
        self._used += 1
        return self._chunks[self._used - 1][:nbytes]


_FREE: deque[_ReadMemory] = deque(maxlen=32)


class _Fetched:
    """Chunks that are read at once, as they are stored."""

    def __init__(self, source: StoredBytes, numbers: Sequence[int]) -> None:
        self._source, self._numbers = source, numbers
        self.chunks: list[Bytes | None] = []
        self._memory = _ReadMemory()

    def read(self) -> None:
        """Read the chunks, in a thread that waits for the storage."""
        with suppress(IndexError):  # none is free
            self._memory = _FREE.pop()
        self.chunks = self._source.read(self._numbers, self._memory.take)

    def release(self) -> None:
        """Give back the memory of the chunks, which are decoded."""
        self.chunks = []
        self._memory.give_back()


@declared
@dataclass(frozen=True, eq=False)
class FetchedChunks(Chunked):
    """Chunks in files of their own. The table of `Chunked` is empty: whether a chunk was written shows as it is read.

    Parameters
    ----------
    source : of the stored chunks.
    """

    source: StoredBytes = field(kw_only=True)

    @property
    def separate(self) -> bool:  # type: ignore[override]
        return isinstance(self.source, ChunkFiles) and self.source.shards is None

    def stored_bytes(self) -> int:
        """Return the size of the rows without compression: nobody has looked at their files."""
        chosen = self.chosen or (None,) * (len(self.shape) - 1)
        lengths = [n if along is None else len(along) for n, along in zip(self.shape[1:], chosen, strict=True)]
        return self.rows * prod(lengths) * self.dtype.itemsize

    def end(self) -> int:
        return 0

    def entries(self, number: Integers) -> Integers:
        return number

    def mask_of(self, entry: int) -> int:
        return 0

    def read_chunks(self, selection: SelectedChunks, chunks: Integers) -> ReadRequest:
        fetched = _Fetched(self.source, selection.entry[chunks].tolist())
        on_complete = partial(self._decode_fetched, selection, chunks, fetched)
        return ReadRequest(EMPTY, EMPTY, fetch=fetched.read, on_complete=on_complete)

    def _decode_fetched(self, selection: SelectedChunks, chunks: Integers, fetched: _Fetched, _: Bytes) -> None:
        try:
            self.decode_chunks(selection, chunks, fetched.chunks)
        finally:
            fetched.release()

    def located(self, entry: int, error: BrokenChunk) -> DecodeError:
        row = entry // self.band_cells * self.chunk_shape[0]
        return DecodeError("a chunk does not decode", row=row, found=error, remedy=DAMAGED)


@declared
@dataclass(frozen=True, eq=False)
class ZarrArray:
    """Array of a store that is read by the chunk, with its sample axis first.

    Parameters
    ----------
    metadata : of the array.
    codecs : of its chunks.
    source : its stored chunks.
    axis : position of the sample axis.
    """

    metadata: ArrayMetadata
    codecs: StoreCodecs
    source: StoredBytes
    axis: int = 0

    def read(self, start: int, stop: int) -> Array:
        """Read rows: numbers and byte strings as they are stored, texts as objects, byte strings in UTF-8.

        Raises
        ------
        DecodeError : a chunk does not decode.
        """
        shape, chunk_shape = self.first(self.metadata.shape), self.first(self.metadata.chunk_shape)
        fill = self._plain(np.array(self.metadata.fill, self.metadata.dtype))
        out = np.full((stop - start, *shape[1:]), fill, fill.dtype)
        counts = Grid.of(shape, chunk_shape, 0).counts
        depth = chunk_shape[0]
        positions = product(range(start // depth, -(-stop // depth)), *map(range, counts[1:]))
        for position in positions:
            number = int(np.ravel_multi_index(position, counts))
            chunk = self._chunk(number, position[0] * depth)
            if chunk is None:
                continue
            low, high = max(start, position[0] * depth), min(stop, (position[0] + 1) * depth)
            begins = [at * length for at, length in zip(position[1:], chunk_shape[1:], strict=True)]
            ends = [min(b + c, n) for b, c, n in zip(begins, chunk_shape[1:], shape[1:], strict=True)]
            inner = (slice(0, end - begin) for begin, end in zip(begins, ends, strict=True))
            region = (slice(low - start, high - start), *map(slice, begins, ends))
            out[region] = chunk[(slice(low - position[0] * depth, high - position[0] * depth), *inner)]
        return out

    def values(self) -> Array:
        """Read all values; see `read`."""
        if self.metadata.shape:
            return np.moveaxis(self.read(0, self.metadata.shape[self.axis]), 0, self.axis)
        chunk = self._chunk(0, 0)
        return self._plain(np.array(self.metadata.fill, self.metadata.dtype)) if chunk is None else chunk

    def first(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Return lengths along the axes with that along the sample axis in front."""
        return (lengths[self.axis], *lengths[: self.axis], *lengths[self.axis + 1 :])

    def _chunk(self, number: int, row: int) -> Array | None:
        (stored,) = self.source.read([number])
        if stored is None:
            return None
        try:
            if self.metadata.dtype.kind == "O":
                chunk = self._plain(self.codecs.decode_texts(stored))
            else:
                data = self.codecs.decode(stored).view(self.metadata.dtype)
                chunk = self._plain(data.reshape(self.metadata.chunk_shape))
        except (BrokenChunk, UnicodeError) as error:
            raise DecodeError("a chunk does not decode", row=row, found=error, remedy=DAMAGED) from error
        return np.moveaxis(chunk, self.axis, 0) if chunk.ndim else chunk

    def _plain(self, values: Array) -> Array:
        """Return the values; texts as objects, byte strings in UTF-8."""
        if values.dtype.kind not in "UO":
            return values
        texts = [text.encode() if isinstance(text, str) else bytes(text) for text in values.ravel().tolist()]
        out = np.empty(len(texts), object)
        out[:] = texts
        return out.reshape(values.shape)


@declared
@dataclass(frozen=True, eq=False)
class ZarrTextRows(LibraryRows):
    """Texts, which are decoded to objects of Python, one thread at a time.

    Parameters
    ----------
    array : the texts.
    """

    array: ZarrArray

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.array.metadata.shape[self.array.axis]

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return self.array.metadata.chunk_shape[self.array.axis]

    def read(self, start: int, stop: int) -> Array:
        return self.array.read(start, stop)


def rows_of(array: ZarrArray, path: str, convert: Any) -> Chunked | ZarrTextRows:
    """Return the layout of the rows of an array.

    Parameters
    ----------
    path : of the data set's file.
    convert : of the stored numbers; None: they are the values.
    """
    metadata = array.metadata
    if metadata.dtype.kind in "UO":
        return ZarrTextRows(array)

    shape, chunk_shape = array.first(metadata.shape), array.first(metadata.chunk_shape)
    source = array.source
    common = {"fill": metadata.fill, "convert": convert, "axis": array.axis}
    if isinstance(source, ChunkExtents) and source.are_plain and source.paths in ((), (path,)):
        table = (source.number, source.offset, source.nbytes, source.checksum)
        return Chunked(shape, chunk_shape, metadata.dtype, array.codecs, *table, **common)
    table = (EMPTY, EMPTY, EMPTY, EMPTY)
    return FetchedChunks(shape, chunk_shape, metadata.dtype, array.codecs, *table, **common, source=source)
