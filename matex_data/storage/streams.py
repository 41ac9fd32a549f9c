"""Streams of bytes that libraries read by position."""

from __future__ import annotations

import errno
import io
import os


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
