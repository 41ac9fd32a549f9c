"""Least-recently-used cache of decoded chunks, which windows decode for one another without waiting."""

from __future__ import annotations

import _thread
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from copy import copy
from typing import Any

from matex_data.errors import DataError, DecodeError
from matex_data.lru import LeastRecentlyUsed


class GivenUp(DecodeError):
    """The error of a chunk whose window has ended without reading it: whoever needs the chunk reads it again."""


class Chunk:
    """Decoded chunk, pending until its window completes it: an array, or the arrays that a table decodes from a block.

    The first outcome counts, whatever comes first: its decoder or the end of its window. Nobody waits for a chunk; a
    read that needs it is continued by `when_done`. No lock is held, so that any thread, a finalizer included, may call
    any method at any moment.

    Examples
    --------
    >>> chunk = Chunk()
    >>> chunk.when_done(lambda: print(chunk.value))
    >>> chunk.complete("decoded")
    decoded
    """

    def __init__(self) -> None:
        self._outcomes: list[tuple[Any, BaseException | None]] = []  # the first one counts
        self._callbacks: deque[Callable[[], None]] = deque()

    @property
    def done(self) -> bool:
        """Return whether the chunk is decoded, or has failed."""
        return bool(self._outcomes)

    @property
    def failed(self) -> bool:
        """Return whether the chunk cannot be decoded, or its window has given it up."""
        return self.done and self._outcomes[0][1] is not None

    @property
    def value(self) -> Any:
        """Return the decoded chunk, once it is done; raise the error if it has failed."""
        value, error = self._outcomes[0]
        if error is not None:
            raise _own(error)
        return value

    def complete(self, value: Any) -> None:
        """Give the decoded chunk to all who need it.

        Examples
        --------
        >>> chunk = Chunk()
        >>> chunk.complete("decoded")
        >>> chunk.value
        'decoded'
        """
        self._end(value, None)

    def fail(self, error: BaseException) -> None:
        """Give the error to all who need the chunk.

        Examples
        --------
        >>> chunk = Chunk()
        >>> chunk.fail(OSError("no such device"))
        >>> chunk.failed
        True
        """
        self._end(None, _own(error))

    def give_up(self) -> None:
        """Let those who need the chunk read it again.

        Examples
        --------
        >>> chunk = Chunk()
        >>> chunk.give_up()
        >>> chunk.failed
        True
        """
        if not self.done:
            self.fail(GivenUp("the read of a chunk has been given up", remedy="read the samples again"))

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call a function once the chunk is done, in the thread that ends it; at once if it is done.

        Examples
        --------
        >>> chunk = Chunk()
        >>> chunk.complete("decoded")
        >>> chunk.when_done(lambda: print(chunk.value))
        decoded
        """
        self._callbacks.append(callback)
        if self.done:
            self._call_back()

    def _end(self, value: Any, error: BaseException | None) -> None:
        if not self._outcomes:
            self._outcomes.append((value, error))
        self._call_back()

    def _call_back(self) -> None:
        while True:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return
            callback()


def _own(error: BaseException) -> BaseException:
    """Return an error to which one that needs the chunk adds the location of its field, and no other sees it."""
    if not isinstance(error, DataError):
        return error
    own = copy(error)
    own.__cause__ = error.__cause__
    return own


class Reserved(dict[int, Chunk]):
    """Chunks of the cache that a window has reserved, by their position among those that it reads.

    Examples
    --------
    >>> reserved = Reserved({2: Chunk(), 5: Chunk()})
    >>> reserved.complete(2, "decoded")
    >>> reserved.complete(3, "a chunk that is not kept")
    >>> reserved.fail([5], OSError("no such device"))
    >>> [(chunk.done, chunk.failed) for chunk in reserved.values()]
    [(True, False), (True, True)]
    """

    def complete(self, position: int, value: Any) -> None:
        """Give a decoded chunk to all who need it, if it is kept for them."""
        chunk = self.get(position)
        if chunk is not None:
            chunk.complete(value)

    def fail(self, positions: Sequence[int], error: BaseException) -> None:
        """Fail the first of these chunks, and give up the others, which the error has left undecoded."""
        for position in positions:
            chunk = self.get(position)
            if chunk is not None and position == positions[0]:
                chunk.fail(error)
            elif chunk is not None:
                chunk.give_up()


class ChunkCache:
    """Decoded chunks by key, decoded or pending, since one window may need a chunk that another one decodes.

    The least recently used chunks are evicted first. A chunk that is evicted stays alive as long as a window holds it.
    A chunk that has failed is not in the cache. A key contains the layout itself, which is compared by identity and
    stays alive as long as its chunks.

    This object owns the chunks that it reserves: it gives up those that are pending when it ends.

    Parameters
    ----------
    nbytes : capacity: total size of the decoded chunks, in bytes. The newest chunk is kept whatever its size.
    epoch : number of the epoch whose windows are read, for layouts whose rows depend on it.

    Examples
    --------
    >>> cache = ChunkCache(1000)
    >>> cache.reserve("chunk 7", 400).complete("decoded")
    >>> cache.get("chunk 7").value
    'decoded'
    """

    def __init__(self, nbytes: int, epoch: int = 0) -> None:
        self.epoch = epoch
        self._chunks = LeastRecentlyUsed[Chunk](nbytes)
        self._reserved: list[Chunk] = []

    def of_window(self) -> ChunkCache:
        """Return the same cache for one window, which owns the chunks that it reserves.

        Examples
        --------
        >>> cache = ChunkCache(1000)
        >>> window = cache.of_window()
        >>> window.reserve("chunk 7", 400).complete("decoded")
        >>> cache.get("chunk 7").value
        'decoded'
        """
        cache = ChunkCache(0, self.epoch)
        cache._chunks = self._chunks
        return cache

    def give_up(self) -> None:
        """Give up the chunks that this window has reserved and that are not decoded.

        Examples
        --------
        >>> cache = ChunkCache(1000)
        >>> chunk = cache.reserve("chunk 7", 400)
        >>> cache.give_up()
        >>> chunk.failed, cache.get("chunk 7")
        (True, None)
        """
        _give_up(self._reserved)

    def __del__(self) -> None:
        pending = [chunk for chunk in self._reserved if not chunk.done]
        if pending:  # their callbacks may need locks that the thread holds in which Python collects this object
            with suppress(RuntimeError):  # the interpreter ends
                _thread.start_new_thread(_give_up, (pending,))

    def get(self, key: Hashable) -> Chunk | None:
        """Return the chunk, decoded or pending; None if it is not in the cache.

        Examples
        --------
        >>> ChunkCache(1000).get("chunk 7") is None
        True
        """
        chunk = self._chunks.get(key)
        return None if chunk is None or chunk.failed else chunk

    def reserve(self, key: Hashable, nbytes: int) -> Chunk:
        """Add a pending chunk of ``nbytes``, which the caller completes when it has decoded it.

        Examples
        --------
        >>> cache = ChunkCache(1000)
        >>> chunk = cache.reserve("chunk 7", 400)
        >>> cache.get("chunk 7") is chunk, chunk.done
        (True, False)
        """
        chunk = Chunk()
        self._reserved.append(chunk)
        self._chunks.add(key, chunk, nbytes)
        return chunk


def _give_up(chunks: Iterable[Chunk]) -> None:
    for chunk in chunks:
        chunk.give_up()
