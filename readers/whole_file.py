"""Arrays that are compressed as a whole."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import IO, Any

import numpy as np

from matex_data._types import Array, Bytes
from matex_data.declared import declared
from matex_data.errors import RESTORE, DataError, DecodeError
from matex_data.machine import check_fits
from matex_data.readers.kept import KeptRows
from matex_data.storage.files import is_of_system, open_sequential, open_zip

READ_BYTES = 4 << 20  # per read where only the checksum matters
MAX_DEFLATE_RATIO = 1032  # see https://zlib.net/zlib_tech.html


def max_decompressed(nbytes: int) -> int:
    """Return the largest decompressed size, in bytes, of a deflate stream of ``nbytes`` bytes."""
    return MAX_DEFLATE_RATIO * nbytes


def read_to_end(file: IO[bytes]) -> int:
    """Read and discard the rest, so that the stream compares its checksum. Return the number of bytes."""
    count = 0
    while data := file.read(READ_BYTES):
        count += len(data)
    return count


@declared
@dataclass(frozen=True, eq=False)
class CompressedFileRows(KeptRows):
    """Rows of an array in a gzip file, or in a member of a zip file.

    Parameters
    ----------
    member : name of the member of the zip file; None: a gzip file.
    shape, dtype : of the array as stored.
    offset : of its first byte in the decompressed data.
    fortran : the first axis varies fastest.
    """

    member: str | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int
    fortran: bool = False

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        return prod(self.shape[1:]) * self.dtype.itemsize

    def decode(self) -> Array:
        """Read the whole array, as stored.

        Raises
        ------
        PartitionError : the array does not fit into memory.
        DecodeError : the stream is damaged, or its checksum or its length is wrong.
        """
        field = None if self.member is None else self.member.removesuffix(".npy")
        nbytes = prod(self.shape) * self.dtype.itemsize
        remedy = "decompress the file (or save it with np.savez), so that each rank reads only its own rows"
        check_fits(nbytes, "the decompressed array", file=self.path, field=field, remedy=remedy)
        data = np.empty(nbytes, np.uint8)
        try:
            with _open(self.path, self.member) as file:
                file.read(self.offset)
                found = _read_into(file, data)
                found += read_to_end(file)
        except MemoryError:
            raise
        except Exception as error:  # the libraries raise many kinds on a damaged stream
            if is_of_system(error):
                raise DataError("the file cannot be read", file=self.path, field=field, found=error) from error
            raise DecodeError(
                "the array does not decompress",
                file=self.path,
                field=field,
                found=error,
                remedy=RESTORE,
            ) from error
        if found < nbytes or (found > nbytes and self.member is None):
            raise DecodeError(
                "the array is not as long as its header says",
                file=self.path,
                field=field,
                expected=f"{nbytes} bytes",
                found=f"{found} bytes",
                remedy=RESTORE,
            )
        return data.view(self.dtype).reshape(self.shape, order="F" if self.fortran else "C")


def _read_into(file: IO[bytes], data: Bytes) -> int:
    """Fill ``data`` as far as the file goes. Return the number of bytes."""
    found = 0
    while found < len(data):
        count = file.readinto(data[found : found + READ_BYTES].data)  # type: ignore[attr-defined]
        if not count:
            break
        found += count
    return found


@contextmanager
def _open(path: str, member: str | None) -> Iterator[IO[bytes]]:
    if member is None:
        with open_sequential(path) as stored, gzip.GzipFile(fileobj=stored) as file:
            yield file  # type: ignore[misc]
    else:
        with open_sequential(path) as stored, open_zip(stored) as archive, archive.open(member) as file:
            yield file
