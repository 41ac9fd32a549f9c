"""Least-recently-used cache of decoded chunks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from threading import Lock
from typing import Any


class ChunkFuture(Future[Any]):
    """Future of a decoded chunk: an array, or the arrays that a table decodes from one block.

    The window that reserves it completes it, exactly once: whatever comes first, its decoder or the end of a read of
    the window that fails. What comes later has no effect.
    """

    def set_result(self, result: Any) -> None:
        """Complete the future with the decoded chunk, unless the window has failed it."""
        with suppress(InvalidStateError):
            super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        """Fail the future, unless it is complete."""
        with suppress(InvalidStateError):
            super().set_exception(exception)


class ChunkCache:
    """Decoded chunks by key, as futures, since one window may need a chunk that is still being decoded for another.

    The least recently used chunks are evicted first. A chunk that is evicted stays alive as long as a window holds its
    future. A key contains the layout itself, which is compared by identity and stays alive as long as its chunks.

    Parameters
    ----------
    nbytes : capacity: total size of the decoded chunks, in bytes. The newest chunk is kept whatever its size.
    epoch : number of the epoch whose windows are read, for layouts whose rows depend on it.

    Examples
    --------
    >>> cache = ChunkCache(1000)
    >>> cache.reserve("chunk 7", 400).set_result("decoded")
    >>> cache.get("chunk 7").result()
    'decoded'
    """

    def __init__(self, nbytes: int, epoch: int = 0) -> None:
        self.epoch = epoch
        self._chunks = _Chunks(nbytes)
        self._reserved: list[ChunkFuture] = []

    def of_window(self) -> ChunkCache:
        """Return the same cache for one window, which owns the chunks that it reserves.

        Examples
        --------
        >>> cache = ChunkCache(1000)
        >>> cache.of_window().reserve("chunk 7", 400).set_result("decoded")
        >>> cache.get("chunk 7").result()
        'decoded'
        """
        cache = ChunkCache(0, self.epoch)
        cache._chunks = self._chunks
        return cache

    def fail_pending(self, error: BaseException) -> None:
        """Fail the chunks that this window has reserved and that are not decoded with ``error``.

        Examples
        --------
        >>> cache = ChunkCache(1000)
        >>> chunk = cache.reserve("chunk 7", 400)
        >>> cache.fail_pending(OSError("no such device"))
        >>> chunk.exception()
        OSError('no such device')
        """
        for chunk in self._reserved:
            chunk.set_exception(error)

    def get(self, key: Hashable) -> ChunkFuture | None:
        """Return the chunk, decoded or pending; None if it is not in the cache.

        Examples
        --------
        >>> ChunkCache(1000).get("chunk 7") is None
        True
        """
        return self._chunks.get(key)

    def reserve(self, key: Hashable, nbytes: int) -> ChunkFuture:
        """Add a pending chunk of ``nbytes``, and return the future that the caller sets when it has decoded it.

        Examples
        --------
        >>> cache = ChunkCache(1000)
        >>> chunk = cache.reserve("chunk 7", 400)
        >>> cache.get("chunk 7") is chunk, chunk.done()
        (True, False)
        """
        chunk = ChunkFuture()
        self._reserved.append(chunk)
        self._chunks.add(key, chunk, nbytes)
        return chunk


class _Chunks:
    """Chunks that all windows of a reader share. Thread-safe."""

    def __init__(self, nbytes: int) -> None:
        self._most = nbytes
        self._chunks: OrderedDict[Hashable, tuple[ChunkFuture, int]] = OrderedDict()
        self._used = 0
        self._lock = Lock()

    def get(self, key: Hashable) -> ChunkFuture | None:
        with self._lock:
            entry = self._chunks.get(key)
            if entry is None:
                return None
            self._chunks.move_to_end(key)
            return entry[0]

    def add(self, key: Hashable, chunk: ChunkFuture, nbytes: int) -> None:
        with self._lock:
            _, replaced = self._chunks.pop(key, (None, 0))
            self._chunks[key] = (chunk, nbytes)
            self._used += nbytes - replaced
            while self._used > self._most and len(self._chunks) > 1:
                _, (_, freed) = self._chunks.popitem(last=False)
                self._used -= freed
