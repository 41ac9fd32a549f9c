"""Layouts of arrays whose chunks do not lie in the data set's own file, or hold texts of variable length."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.codecs.bounded import BrokenChunk
from matex_data.codecs.scratch import new_memory
from matex_data.declared import declared
from matex_data.errors import DecodeError
from matex_data.index.cache import ChunkCache
from matex_data.index.chunked import Chunked, SelectedChunks, axis_first
from matex_data.index.model import EMPTY, ReadRequest
from matex_data.index.runs import Runs
from matex_data.readers.zarr.arrays import TEXT, ArrayMetadata
from matex_data.readers.zarr.chunks import ChunkExtents, StoredBytes
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
    """Chunks in files of their own, or of texts. The table of `Chunked` is empty: a read shows whether one was written.

    Parameters
    ----------
    source : of the stored chunks.
    """

    pipeline: StoreCodecs
    source: StoredBytes = field(kw_only=True)

    @property
    def separate(self) -> bool:  # type: ignore[override]
        return self.source.separate

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

    def elements(self, stored: Bytes, mask: int, out: Bytes | None) -> Array:
        return self.pipeline.decode_texts(stored) if self.dtype == TEXT else super().elements(stored, mask, out)

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
def as_utf8(texts: Array, out: Array) -> None:
    """Write texts as byte strings in UTF-8; raise ``DecodeError`` if a text is no Unicode."""
    encoded = np.empty(texts.size, object)
    try:
        encoded[:] = [text.encode() if isinstance(text, str) else bytes(text) for text in texts.ravel().tolist()]
    except (ValueError, SystemError) as error:  # the latter of NumPy, for a number beyond those of Unicode
        raise DecodeError("a text is no Unicode", found=error, remedy=DAMAGED) from error
    out[...] = encoded.reshape(texts.shape)


def layout_of(metadata: ArrayMetadata, source: StoredBytes, axis: int, path: str) -> Chunked:
    """Return the layout of the rows of an array; of a single value that of one row.

    Parameters
    ----------
    axis : position of the sample axis.
    path : of the data set's file, whose byte ranges may be the chunks; "": all chunks are fetched.
    """
    codecs = StoreCodecs.of(metadata.codecs, metadata.chunk_shape, metadata.order, metadata.dtype.itemsize)
    shape, chunk_shape = (axis_first(n or (1,), axis) for n in (metadata.shape, metadata.chunk_shape))
    common = {"fill": metadata.fill, "convert": as_utf8 if metadata.dtype.kind in "UO" else None, "axis": axis}
    if metadata.dtype != TEXT and isinstance(source, ChunkExtents) and source.are_ranges_of(path):
        table = (source.number, source.offset, source.nbytes, source.checksum)
        return Chunked(shape, chunk_shape, metadata.dtype, codecs, *table, **common)
    table = (EMPTY, EMPTY, EMPTY, EMPTY)
    return FetchedChunks(shape, chunk_shape, metadata.dtype, codecs, *table, **common, source=source)


def all_rows(layout: Chunked, dtype: np.dtype[Any]) -> Array:
    """Read all rows of a layout whose chunks are fetched; raise ``DecodeError`` if a chunk does not decode."""
    out = np.empty(layout.shape, dtype)
    for request in layout.requests(Runs.between(0, layout.rows).selection(), out, ChunkCache(0)):
        if request.fetch is not None:
            request.fetch()
        if request.on_complete is not None:
            request.on_complete(EMPTY.view(np.uint8))
    return out
