"""Opening of a shard to index it: the archive itself, or what it decompresses to, once and in memory."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from matex_data.errors import DataError
from matex_data.locks import Lock
from matex_data.readers.text.compression import stored_as, unpacked
from matex_data.storage.files import open_binary, size_of_open

HEAD_BYTES = 16  # that tell a compression
CONTENT = "the decompressed archive"
REMEDY = "unpack the shards (gunzip, bunzip2, unxz, zstd -d): ranks read nothing but their own samples of them then"
_AT_ONCE = [Lock() for _ in range(4)]  # shards in memory, however many threads index files


@dataclass(frozen=True)
class Archive:
    """An open archive.

    Parameters
    ----------
    file : its bytes, decompressed.
    packing : compression of the shard, such as "gzip"; "" if there is none.
    stored : size of the shard in the storage, in bytes.
    """

    file: IO[bytes]
    packing: str
    stored: int


@contextmanager
def open_archive(path: str) -> Iterator[Archive]:
    """Open a shard. One that is compressed is decompressed to memory, since every step back would begin anew.

    Raises
    ------
    DataError : the file cannot be read or decompressed. An error within the context gets the name of the file, and
        says where its byte is counted.
    PartitionError : the decompressed shard does not fit into memory.
    """
    packing = ""
    try:
        with open_binary(path) as file:
            packing, stored = stored_as(file.read(HEAD_BYTES), "utf-8"), size_of_open(file)
            file.seek(0)
            if not packing:
                yield Archive(file, packing, stored)
                return
            with _AT_ONCE[zlib.crc32(path.encode()) % len(_AT_ONCE)]:
                content = unpacked(file, packing, "the unpacked shard", REMEDY)
                yield Archive(content, packing, stored)
    except DataError as error:
        if not packing:
            raise
        error.at(path, None).within(CONTENT)
        raise
    except OSError as error:
        raise DataError("the file cannot be read", file=path, found=error) from error
