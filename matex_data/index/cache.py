"""Decoded chunks that are still wanted: kept until newer ones need the room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from concurrent.futures import Future
from threading import Lock
from typing import Any
from weakref import WeakSet

ChunkFuture = Future[Any]
"""An array, or whatever a table makes of one block."""


class ChunkCache:
    """Chunks by key, each a future: a window may want a chunk that an earlier one is still decoding.

    The least recently used ones go first. At least ``nbytes`` are kept; a chunk that somebody still waits
    for lives on with that waiter.

    Parameters
    ----------
    nbytes : size of the decoded chunks kept, in bytes.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._chunks: OrderedDict[Hashable, tuple[ChunkFuture, int]] = OrderedDict()
        self._held = 0
        self._lock = Lock()
        self._promised: WeakSet[ChunkFuture] = WeakSet()

    def fail_pending(self, error: BaseException) -> None:
        """Chunks that could not be read: whoever waits for one of them hears of it."""
        with self._lock:
            for chunk in self._promised:
                if not chunk.done():
                    chunk.set_exception(error)

    def get(self, key: Hashable) -> ChunkFuture | None:
        """The chunk, decoded or being decoded; None if nobody has asked for it lately."""
        with self._lock:
            entry = self._chunks.get(key)
            if entry is None:
                return None
            self._chunks.move_to_end(key)
            return entry[0]

    def reserve(self, key: Hashable, nbytes: int) -> ChunkFuture:
        """A future that the caller fulfils with the decoded chunk."""
        chunk: ChunkFuture = Future()
        with self._lock:
            self._promised.add(chunk)
            self._chunks[key] = (chunk, nbytes)
            self._held += nbytes
            while self._held > self.nbytes and len(self._chunks) > 1:
                _, (_, freed) = self._chunks.popitem(last=False)
                self._held -= freed
        return chunk
