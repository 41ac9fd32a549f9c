"""Stored chunks of an array by number: in files of their own, in shards, at known byte ranges, or by key alone.

Index of a shard: https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/index.html
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import google_crc32c
import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.codecs.scratch import Memory, new_memory
from matex_data.declared import declared
from matex_data.errors import DataError, DecodeError, FormatError
from matex_data.index.stamps import Stamp
from matex_data.readers.zarr.arrays import ArrayMetadata, Sharding
from matex_data.readers.zarr.stores import Directory, Extent, Store, read
from matex_data.storage.files import reading_if_present
from matex_data.storage.trust import NO_BASE

ABSENT = (1 << 64) - 1  # as offset and length of a chunk that was never written
KEPT = 1024  # indexes of shards that a rank keeps


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """Byte ranges of the chunks of a shard.

    Parameters
    ----------
    shard : byte range of the shard in its file.
    ranges : uint64[chunks, 2], offset within the shard and length of each chunk, in C order.
    """

    shard: Extent
    ranges: Array

    def extent(self, chunk: int) -> Extent | None:
        """Return the byte range of a chunk; None if it was never written.

        Raises
        ------
        DecodeError : it lies beyond the shard.
        """
        offset, nbytes = map(int, self.ranges[chunk])
        if offset == nbytes == ABSENT:
            return None
        path, begin, size, *_ = self.shard
        if offset + nbytes > size:
            raise DecodeError(
                "a chunk lies beyond its shard", file=path, byte=begin + offset, expected=f"{size} bytes", found=nbytes
            )
        return Extent(path, begin + offset, nbytes)


@lru_cache(KEPT)
def _kept(shard: Extent, shards: Sharding, stamp: Stamp) -> ShardIndex:
    """Return the index of a shard; the ``stamp`` of its file tells it from a later file of the same name."""
    return _read_index(shard, shards)


def _read_index(shard: Extent, shards: Sharding) -> ShardIndex:
    """Return the index of a shard; raise ``DecodeError`` if it is damaged."""
    path, begin, size, *_ = shard
    body = 16 * prod(shards.counts)
    length = body + 4 * shards.has_checksum
    start = begin + size - length if shards.index_at_end else begin
    data = read(Extent(path, start, length)) if length <= size else None
    if data is None:
        raise DecodeError(
            "the index of a shard is damaged", file=path, expected=f"{length} bytes", found=f"{size} bytes"
        )
    stored = int.from_bytes(data[body:].tobytes(), "little")
    if shards.has_checksum and (found := google_crc32c.value(data[:body].tobytes())) != stored:
        raise DecodeError(
            "the index of a shard is damaged",
            file=path,
            byte=start,
            expected=f"the checksum {stored:#010x}",
            found=f"{found:#010x}",
            remedy="restore the file from its source",
        )
    return ShardIndex(shard, data[:body].view("<u8").reshape(-1, 2))


class StoredBytes(ABC):
    """Chunks as they are stored.

    Attributes
    ----------
    separate : each of them is a file.
    """

    @property
    def separate(self) -> bool:
        return False

    @abstractmethod
    def read(self, numbers: Sequence[int], memory: Memory = new_memory) -> list[Bytes | None]:
        """Read chunks; None for one that was never written.

        Parameters
        ----------
        memory : receives the bytes of files.

        Raises
        ------
        DataError : a file cannot be read.
        DecodeError : a file is truncated, or the index of a shard is damaged.
        """


@declared
@dataclass(frozen=True)
class Grid:
    """Numbers of the chunks of an array: the chunks of equal samples are consecutive, whatever the sample axis.

    Parameters
    ----------
    counts : chunks along each axis.
    axis : position of the sample axis, by which chunks are numbered first.

    Examples
    --------
    >>> grid = Grid((2, 5), axis=1)
    >>> grid.position(3), grid.number((1, 1)), grid.number((2, 1))
    ((1, 1), 3, None)
    """

    counts: tuple[int, ...]
    axis: int = 0

    @classmethod
    def of(cls, shape: Sequence[int], chunk_shape: Sequence[int], axis: int) -> Grid:
        """Return the grid of an array."""
        return cls(tuple(-(-length // chunk) for length, chunk in zip(shape, chunk_shape, strict=True)), axis)

    @property
    def _order(self) -> list[int]:
        axes = range(len(self.counts))
        return [*axes[self.axis : self.axis + 1], *(axis for axis in axes if axis != self.axis)]

    def position(self, number: int) -> tuple[int, ...]:
        """Return the position of a chunk along each axis."""
        found = {}
        for axis in reversed(self._order):
            number, found[axis] = divmod(number, self.counts[axis])
        return tuple(found[axis] for axis in range(len(self.counts)))

    def number(self, position: Sequence[int]) -> int | None:
        """Return the number of a chunk; None outside of the array."""
        if any(at >= count for at, count in zip(position, self.counts, strict=True)):
            return None
        number = 0
        for axis in self._order:
            number = number * self.counts[axis] + position[axis]
        return number


@declared
@dataclass(frozen=True)
class ChunkKeys:
    """Keys of the chunks of an array, or of its shards.

    Parameters
    ----------
    folder : of the array in its store.
    prefix, separator : of the keys.
    grid : numbers of the chunks.
    """

    folder: str
    prefix: str
    separator: str
    grid: Grid

    def at(self, position: Sequence[int]) -> str:
        """Return the key of the chunk, or the shard, at a position.

        Examples
        --------
        >>> ChunkKeys("x", "c", "/", Grid((2, 5))).at((1, 4))
        'x/c/1/4'
        """
        names = [*([self.prefix] if self.prefix else []), *map(str, position)] or ["0"]
        return f"{self.folder}/{self.separator.join(names)}".lstrip("/")

    def of(self, number: int) -> str:
        """Return the key of a chunk by its number."""
        return self.at(self.grid.position(number))


@declared
@dataclass(frozen=True)
class KeyedChunks(StoredBytes):
    """Chunks, or shards of chunks, that their store reads by key: the rank that needs them opens their files.

    Parameters
    ----------
    shards : None: each chunk has a key.
    """

    store: Store
    keys: ChunkKeys
    shards: Sharding | None = None

    @property
    def separate(self) -> bool:
        return self.store.folder is not None and self.shards is None

    def read(self, numbers: Sequence[int], memory: Memory = new_memory) -> list[Bytes | None]:
        if self.shards is None:
            return [self.store.read(self.keys.of(number), memory) for number in numbers]
        return [self._read_inner(self.keys.grid.position(number), self.shards, memory) for number in numbers]

    def _read_inner(self, position: tuple[int, ...], shards: Sharding, memory: Memory) -> Bytes | None:
        key = self.keys.at([at // count for at, count in zip(position, shards.counts, strict=True)])
        inner = [at % count for at, count in zip(position, shards.counts, strict=True)]
        path = f"{self.store.path}/{key}"
        with reading_if_present(path):
            stamp = Stamp.of(path)
            index = _kept(Extent(path, 0, stamp.size), shards, stamp)
            extent = index.extent(int(np.ravel_multi_index(inner, shards.counts)))
            return None if extent is None else read(extent, memory)
        return None


@declared
@dataclass(frozen=True, eq=False)
class ChunkExtents(StoredBytes):
    """Chunks at known byte ranges.

    Parameters
    ----------
    number : int64[n], of the chunks, ascending.
    file, offset, nbytes, checksum, inflated : int64[n], file, byte range, checksum and size without zip's compression
        of each, see `Extent`.
    inline : chunks whose bytes stand in the references, by number.
    """

    paths: tuple[str, ...]
    number: Integers
    file: Integers
    offset: Integers
    nbytes: Integers
    checksum: Integers
    inflated: Integers
    inline: Mapping[int, bytes]

    def sources(self) -> Sequence[str]:
        return self.paths

    @classmethod
    def of(cls, found: Iterator[tuple[int, Extent | bytes]]) -> ChunkExtents:
        """Return the table of chunks in any order."""
        entries = dict(found)
        inline = {number: entry for number, entry in entries.items() if isinstance(entry, bytes)}
        numbered = sorted((number, entry) for number, entry in entries.items() if not isinstance(entry, bytes))
        paths = list(dict.fromkeys(extent.path for _, extent in numbered))
        numbers = {path: number for number, path in enumerate(paths)}
        rows = [(number, numbers[e.path], *e[1:]) for number, e in numbered]
        number, file, offset, nbytes, checksum, inflated = np.array(rows, np.int64).reshape(-1, 6).T.copy()
        return cls(tuple(paths), number, file, offset, nbytes, checksum, inflated, inline)

    def are_ranges_of(self, path: str) -> bool:
        """Return whether byte ranges of that file hold all chunks, as the codecs take them."""
        return bool(path) and self.paths in ((), (path,)) and not self.inline and not self.inflated.any()

    def read(self, numbers: Sequence[int], memory: Memory = new_memory) -> list[Bytes | None]:
        entries = np.searchsorted(self.number, numbers).tolist()
        return [self._read(number, entry, memory) for number, entry in zip(numbers, entries, strict=True)]

    def _read(self, number: int, entry: int, memory: Memory) -> Bytes | None:
        if number in self.inline:
            return np.frombuffer(self.inline[number], np.uint8)
        if entry == len(self.number) or int(self.number[entry]) != number:
            return None
        path = self.paths[int(self.file[entry])]
        columns = (self.offset, self.nbytes, self.checksum, self.inflated)
        data = read(Extent(path, *(int(column[entry]) for column in columns)), memory)
        if data is None:
            remedy = f"restore the file, or write the references again; {NO_BASE}"
            raise DataError("the file of a chunk is missing", file=path, remedy=remedy)
        return data


def stored_chunks(store: Store, folder: str, metadata: ArrayMetadata, axis: int) -> StoredBytes:
    """Return the chunks of an array.

    Parameters
    ----------
    folder : of the array in the store.
    axis : position of the sample axis.

    Raises
    ------
    DecodeError : the index of a shard within one file is damaged.
    FormatError : a shard is compressed by zip.
    """
    grid = Grid.of(metadata.shape, metadata.chunk_shape, axis)
    extents = store.extents(folder)
    if extents is None:
        keys = ChunkKeys(folder, metadata.prefix, metadata.separator, grid)
        of_index = (
            Directory(store.path) if isinstance(store, Directory) else store
        )  # what it is trusted with stays here
        return KeyedChunks(of_index, keys, metadata.shards)
    return ChunkExtents.of(_numbered(extents, metadata, grid))


def _numbered(
    extents: Iterator[tuple[str, Extent | bytes]], metadata: ArrayMetadata, grid: Grid
) -> Iterator[tuple[int, Extent | bytes]]:
    """Yield number and byte range of each chunk of an array, those within shards too."""
    prefix = f"{metadata.prefix}{metadata.separator}" if metadata.prefix and metadata.shape else metadata.prefix
    for key, extent in extents:
        position = _position(key, prefix, metadata)
        if position is None:
            continue
        for found, chunk in _within(position, extent, metadata.shards):
            number = grid.number(found)
            if number is not None:
                yield number, chunk


def _within(
    position: tuple[int, ...], extent: Extent | bytes, shards: Sharding | None
) -> Iterator[tuple[tuple[int, ...], Extent | bytes]]:
    """Yield position and byte range of the chunks of a shard; a chunk that is in none as it is."""
    if shards is None or isinstance(extent, bytes):
        yield position, extent
        return
    if extent.inflated:
        raise FormatError(
            "a shard is compressed by zip: no chunk of it can be read alone",
            file=extent.path,
            byte=extent.offset,
            remedy="unpack the zip file, or write it with zip -0",
        )
    index = _read_index(extent, shards)
    for number in np.flatnonzero((index.ranges != ABSENT).any(axis=1)).tolist():
        inner = np.unravel_index(number, shards.counts)
        chunk = index.extent(number)
        if chunk is not None:
            yield tuple(at * count + int(i) for at, count, i in zip(position, shards.counts, inner, strict=True)), chunk


def _position(key: str, prefix: str, metadata: ArrayMetadata) -> tuple[int, ...] | None:
    """Return the position of the chunk, or the shard, of a key; None if it is that of something else."""
    if not key.startswith(prefix):
        return None
    text, axes = key[len(prefix) :], len(metadata.shape)
    if not axes:
        return () if text == ("" if prefix else "0") else None
    names = text.split(metadata.separator)
    if len(names) != axes or not all(name.isascii() and name.isdecimal() and len(name) < 19 for name in names):
        return None
    return tuple(map(int, names))
