"""Index of a shard: the byte range of each of its chunks.

https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/index.html
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import google_crc32c
import numpy as np

from matex_data._types import Array
from matex_data.errors import DataError, DecodeError
from matex_data.index.stamps import Stamp
from matex_data.readers.zarr.arrays import Shards
from matex_data.readers.zarr.stores import Extent, read

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


def shard_index(path: str, shards: Shards) -> ShardIndex | None:
    """Return the index of a shard that is a file, which is kept; None if there is no such file.

    Raises
    ------
    DecodeError : the index is damaged.
    DataError : the file cannot be read.
    """
    try:
        stamp = Stamp.of(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError("the file cannot be read", file=path, found=error) from error
    return _kept(Extent(path, 0, stamp.size), shards, stamp)


def inner_extents(shard: Extent, shards: Shards) -> Iterator[tuple[tuple[int, ...], Extent]]:
    """Yield position within the shard and byte range of each chunk of a shard.

    Raises
    ------
    DecodeError : the index is damaged.
    """
    index = _read_index(shard, shards)
    for chunk in np.flatnonzero((index.ranges != ABSENT).any(axis=1)).tolist():
        extent = index.extent(chunk)
        if extent is not None:
            yield tuple(map(int, np.unravel_index(chunk, shards.counts))), extent


@lru_cache(KEPT)
def _kept(shard: Extent, shards: Shards, stamp: Stamp) -> ShardIndex:
    """Return the index of a shard; the ``stamp`` of its file tells it from a later file of the same name."""
    return _read_index(shard, shards)


def _read_index(shard: Extent, shards: Shards) -> ShardIndex:
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
