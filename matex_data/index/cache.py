"""Least-recently-used cache of decoded chunks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from concurrent.futures import Future
from threading import Lock
from typing import Any
from weakref import WeakSet

ChunkFuture = Future[Any]
"""Future of a decoded chunk: an array, or the arrays that a table decodes from one block."""


class ChunkCache:
    """Decoded chunks by key, as futures, since one window may need a chunk that is still being decoded for another.

    The least recently used chunks are evicted first. A chunk that is evicted stays alive as long as a window holds its
    future.

    Parameters
    ----------
    nbytes : capacity: total size of the decoded chunks, in bytes. The newest chunk is kept whatever its size.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._chunks: OrderedDict[Hashable, tuple[ChunkFuture, int]] = OrderedDict()
        self._used = 0
        self._lock = Lock()
        self._reserved: WeakSet[ChunkFuture] = WeakSet()

    def fail_pending(self, error: BaseException) -> None:
        """Fail all chunks that are not decoded yet with ``error``."""
        with self._lock:
            for chunk in self._reserved:
                if not chunk.done():
                    chunk.set_exception(error)

    def get(self, key: Hashable) -> ChunkFuture | None:
        """Return the chunk, decoded or pending; None if it is not in the cache."""
        with self._lock:
            entry = self._chunks.get(key)
            if entry is None:
                return None
            self._chunks.move_to_end(key)
            return entry[0]

    def reserve(self, key: Hashable, nbytes: int) -> ChunkFuture:
        """Add a pending chunk of ``nbytes``, and return the future that the caller sets when it has decoded it."""
        chunk: ChunkFuture = Future()
        with self._lock:
            self._reserved.add(chunk)
            self._chunks[key] = (chunk, nbytes)
            self._used += nbytes
            while self._used > self.nbytes and len(self._chunks) > 1:
                _, (_, freed) = self._chunks.popitem(last=False)
                self._used -= freed
        return chunk
