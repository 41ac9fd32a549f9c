"""Rows of arrays that are compressed as a whole: each rank unpacks the array once and keeps it."""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import IO, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from matex_data.errors import DecodeError
from matex_data.index.library import LibraryRows
from matex_data.machine import check_fits

BLOCK_BYTES = 256 * 1024  # neighbours that are shuffled as one
PIECE_BYTES = 4 << 20  # read in one go, where only the checksum matters
DEFLATE = 1032  # to one: deflate does not pack more densely, see https://zlib.net/zlib_tech.html


def most_unpacked(nbytes: int) -> int:
    """Return the bytes that so many bytes of a deflated stream can become at most."""
    return DEFLATE * nbytes


def skip(file: IO[bytes]) -> int:
    """Read to the end, so that the stream compares its checksum; return how many bytes there were."""
    found = 0
    while piece := file.read(PIECE_BYTES):
        found += len(piece)
    return found


@dataclass(frozen=True, eq=False)
class UnpackedRows(LibraryRows):
    """Rows of an array in a gzip file, or in a member of a zip file.

    Parameters
    ----------
    path : of the file.
    member : of the zip file; None: it is a gzip file.
    shape, dtype : of the array as stored.
    offset : of its first byte, once unpacked.
    fortran : the first axis is the fastest.
    """

    path: str
    member: str | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int
    fortran: bool = False

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.shape[0]

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        row = max(1, prod(self.shape[1:]) * self.dtype.itemsize)
        return max(1, min(self.rows, BLOCK_BYTES // row))

    def read(self, start: int, stop: int) -> NDArray[Any]:
        if self not in _kept:
            _kept[self] = self.unpacked()
        return _kept[self][start:stop]

    def unpacked(self) -> NDArray[Any]:
        """Return the whole array, as stored.

        Raises
        ------
        PartitionError : it does not fit into the memory.
        DecodeError : it does not unpack to the end, or its checksum or its length is wrong.
        """
        field = None if self.member is None else self.member.removesuffix(".npy")
        count = prod(self.shape) * self.dtype.itemsize
        remedy = "unpack the file (or save it with np.savez): each rank reads only its own rows of it then"
        check_fits(count, "the unpacked array", file=self.path, field=field, remedy=remedy)
        data = np.empty(count, np.uint8)
        try:
            with _opened(self.path, self.member) as file:
                file.read(self.offset)
                found = _fill(file, data)
                found += skip(file)
        except MemoryError:
            raise
        except Exception as error:  # libraries raise anything on a damaged stream
            remedy = "the file is damaged: restore it from its source"
            raise DecodeError(
                "the array does not unpack", file=self.path, field=field, found=error, remedy=remedy
            ) from error
        if found < count or (found > count and self.member is None):
            raise DecodeError(
                "the array is not as long as its header says",
                file=self.path,
                field=field,
                expected=f"{count} bytes",
                found=f"{found} bytes",
                remedy="the file is damaged: restore it from its source",
            )
        return data.view(self.dtype).reshape(self.shape, order="F" if self.fortran else "C")


def _fill(file: IO[bytes], data: NDArray[np.uint8]) -> int:
    """Read as many bytes as there is room for, or as there are; return how many."""
    found = 0
    while found < len(data):
        count = file.readinto(data[found : found + PIECE_BYTES].data)  # type: ignore[attr-defined]
        if not count:
            break
        found += count
    return found


_kept: WeakKeyDictionary[UnpackedRows, NDArray[Any]] = WeakKeyDictionary()


@contextmanager
def _opened(path: str, member: str | None) -> Iterator[IO[bytes]]:
    if member is None:
        with gzip.open(path) as packed:
            yield packed  # type: ignore[misc]
    else:
        with zipfile.ZipFile(path) as archive, archive.open(member) as file:
            yield file
