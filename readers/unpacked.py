"""Rows of arrays that are compressed as a whole: each rank unpacks the array once and keeps it."""

from __future__ import annotations

import gzip
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import IO, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from matex_data.errors import DecodeError
from matex_data.layouts import Foreign

BLOCK_BYTES = 256 * 1024  # neighbours that are shuffled as one


@dataclass(frozen=True, eq=False)
class UnpackedRows(Foreign):
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
            _kept[self] = self._unpack()
        return _kept[self][start:stop]

    def _unpack(self) -> NDArray[Any]:
        count = prod(self.shape) * self.dtype.itemsize
        try:
            with _opened(self.path, self.member) as file:
                file.read(self.offset)
                data = file.read(count)
        except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise DecodeError("the array does not unpack", file=self.path, found=error) from error
        if len(data) < count:
            raise DecodeError(
                "the array is truncated", file=self.path, expected=f"{count} bytes", found=f"{len(data)} bytes"
            )
        return np.frombuffer(data, self.dtype).reshape(self.shape, order="F" if self.fortran else "C")


_kept: WeakKeyDictionary[UnpackedRows, NDArray[Any]] = WeakKeyDictionary()


@contextmanager
def _opened(path: str, member: str | None) -> Iterator[IO[bytes]]:
    if member is None:
        with gzip.open(path) as packed:
            yield packed  # type: ignore[misc]
    else:
        with zipfile.ZipFile(path) as archive, archive.open(member) as file:
            yield file
