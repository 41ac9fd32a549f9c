"""Samples of a compressed tar shard: it is read and decompressed as a whole, once, and its members are decoded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from matex_data._types import Bytes
from matex_data.declared import declared
from matex_data.errors import DataError
from matex_data.index.cache import Chunk, ChunkCache
from matex_data.index.model import EMPTY, ReadRequest, RowSelection
from matex_data.index.table import Outputs
from matex_data.machine import check_fits
from matex_data.readers.tar.headers import CONTENT, REMEDY
from matex_data.readers.tar.rows import Members, TarRows
from matex_data.readers.text.compression import unpack

RANGE_BYTES = 64 << 20  # of the shard, per byte range: MPI libraries count bytes in 32 bits


@declared
@dataclass(frozen=True, eq=False)
class CompressedTarRows(TarRows):
    """Samples of a shard that is one block: a rank that needs any of them decompresses it, and keeps it for the others.

    Parameters
    ----------
    offset : integers[rows, fields], where each member begins in the decompressed archive.
    packing : compression of the shard, such as "gzip".
    size : of the shard, in bytes.
    unpacked : size of the decompressed archive, in bytes.
    """

    packing: str
    size: int
    unpacked: int

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return max(1, self.rows)

    @property
    def notice(self) -> str:  # type: ignore[override]
        return (
            f"tar shards that are stored as {self.packing} can only be read as a whole: every rank that needs samples "
            f"of a shard decompresses all of it, once in an epoch. To be faster, {REMEDY}"
        )

    def stored_bytes(self) -> int:
        return self.size

    def end(self) -> int:
        return self.size

    def kept_bytes(self) -> int:
        return self.unpacked

    def requests(self, rows: RowSelection, outs: Outputs, cache: ChunkCache) -> Iterator[ReadRequest]:
        if not len(rows.destination):
            return
        archive = cache.get(self)
        if archive is None:
            archive = cache.reserve(self, self.unpacked)
            offset = np.arange(0, self.size, RANGE_BYTES)
            nbytes = np.minimum(self.size - offset, RANGE_BYTES)
            yield ReadRequest(offset, nbytes, on_complete=partial(self._unpack, archive))
        for members in self.groups(rows, outs):  # by as many threads as there are
            yield ReadRequest(EMPTY, EMPTY, on_complete=partial(self._decode_within, archive, members), after=archive)

    def _unpack(self, archive: Chunk, stored: Bytes) -> None:
        """Decompress the shard for all who need it."""
        try:
            check_fits(self.unpacked, "the decompressed shard", remedy=REMEDY)
            archive.complete(unpack(stored, self.packing, self.unpacked))
        except Exception as error:
            archive.fail(error)
            raise

    def _decode_within(self, archive: Chunk, members: Members, _: Bytes) -> None:
        """Decode members of the decompressed shard."""
        at = self.offset[members.rows[:, None], members.columns]
        try:
            self.decode(members, at, archive.value)
        except DataError as error:
            raise error.within(CONTENT) from error
