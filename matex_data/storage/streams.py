"""Streams of bytes that libraries read by position."""

from __future__ import annotations

import errno
import io
import os
from typing import BinaryIO


class Seekable(io.RawIOBase):
    """Stream for reading that has a size and a position; a subclass reads.

    Parameters
    ----------
    size : bytes.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size, self._position = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, f"position {base + offset}, in front of the first byte")
        self._position = base + offset
        return self._position


class Slices:
    """Bytes of an open file, which are read as they are sliced.

    Parameters
    ----------
    file : open for reading.
    size : of the file, in bytes.

    Examples
    --------
    >>> Slices(io.BytesIO(b"abcdef"), 6)[2:4]
    b'cd'
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, bounds: slice) -> bytes:
        begin, end, _ = bounds.indices(self._size)
        self._file.seek(begin)
        return self._file.read(max(0, end - begin))
