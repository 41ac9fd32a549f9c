"""Layouts: the rule by which the rows of a field lie in a file, and the reads that it yields.

The engine passes a `RowSelection` and an output array to a layout, executes the `ReadRequest` objects that it yields,
and calls their callbacks with the bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.index.cache import Chunk, ChunkCache
from matex_data.index.runs import RowSelection
from matex_data.locks import cached_property

EMPTY: Integers = np.empty(0, np.int64)
"""No byte ranges: ``ReadRequest(EMPTY, EMPTY, on_complete=...)`` reads nothing and only runs its callback."""


OnComplete = Callable[[Bytes], None]
"""Callback of a read request. It may run on any thread, and raises `DecodeError` for bytes that do not decode."""
ReadPart = tuple[int, memoryview]
"""Byte offset in a file, and memory that receives the bytes from there on."""


@dataclass(frozen=True)
class ReadRequest:
    """Byte ranges of one file to read, with their destination and a callback.

    Parameters
    ----------
    offset, nbytes : int64[k], byte ranges of the file. With k = 0 nothing is read, and ``on_complete`` gets an empty
        array.
    target : uint8[n], memory that receives range i at ``target[at[i]:at[i] + nbytes[i]]``. None: the ranges are read
        to scratch memory, one after the other, for ``on_complete``.
    at : int64[k], or None without a target.
    fetch : called before ``on_complete``, in a thread that waits for the storage: reads what byte ranges of the file
        cannot express, such as other files. None: nothing.
    after : chunk of the cache that ``on_complete`` needs, of a request without byte ranges: it is called once the chunk
        is done, decoded or failed. No thread waits for it. None: there is none.
    on_complete : called exactly once after the read, with the scratch memory (uint8, to be treated as read-only), or
        with an empty array if there is a target. Scratch memory is reused after the call.

    Examples
    --------
    Two ranges of four bytes, read into one array one after the other:

    >>> memory = np.empty(8, np.uint8)
    >>> request = ReadRequest(np.array([100, 200]), np.array([4, 4]), target=memory, at=np.array([0, 4]))
    >>> request.total
    8
    """

    offset: Integers
    nbytes: Integers
    target: Bytes | None = None
    at: Integers | None = None
    on_complete: OnComplete | None = None
    fetch: Callable[[], None] | None = None
    after: Chunk | None = None

    @cached_property
    def total(self) -> int:
        """Number of bytes of all ranges."""
        return int(self.nbytes.sum())

    def calling(self, on_complete: OnComplete | None) -> ReadRequest:
        """Return the same request with another callback.

        Examples
        --------
        >>> ReadRequest(np.array([100]), np.array([4])).calling(print).on_complete
        <built-in function print>
        """
        return ReadRequest(self.offset, self.nbytes, self.target, self.at, on_complete, self.fetch, self.after)

    @property
    def address(self) -> Integers | None:
        """Memory address of each byte range, int64[k]; None for scratch memory.

        Examples
        --------
        >>> memory = np.empty(8, np.uint8)
        >>> request = ReadRequest(np.array([100, 200]), np.array([4, 4]), memory, np.array([0, 4]))
        >>> (request.address - memory.ctypes.data).tolist()
        [0, 4]
        """
        return None if self.target is None else self.target.ctypes.data + self._at

    @property
    def _at(self) -> Integers:
        return np.cumsum(self.nbytes) - self.nbytes if self.at is None else self.at

    def parts(self, memory: memoryview) -> Iterator[ReadPart]:
        """Yield for each byte range its offset and its part of ``memory``: the target, or scratch memory.

        Examples
        --------
        >>> request = ReadRequest(np.array([100, 200]), np.array([4, 4]))
        >>> [(offset, len(part)) for offset, part in request.parts(np.empty(8, np.uint8).data)]
        [(100, 4), (200, 4)]
        """
        for offset, begin, count in zip(self.offset.tolist(), self._at.tolist(), self.nbytes.tolist(), strict=True):
            yield offset, memory[begin : begin + count]


def read_elsewhere(request: ReadRequest, fill: Callable[[Iterable[ReadPart]], None]) -> ReadRequest:
    """Return a request whose bytes are not those of the file itself; the same request if it has no byte ranges.

    Parameters
    ----------
    fill : fills each part of memory with the bytes from an offset on.
    """
    if not request.total:
        return request
    scratch: list[Bytes] = []

    def fetch() -> None:
        memory = request.target
        if memory is None:
            memory = np.empty(request.total, np.uint8)
            scratch.append(memory)
        fill(request.parts(memory.data))
        if request.fetch is not None:
            request.fetch()

    def complete(nothing: Bytes) -> None:
        if request.on_complete is not None:
            request.on_complete(scratch.pop() if scratch else nothing)

    return ReadRequest(EMPTY, EMPTY, on_complete=complete, fetch=fetch)


def call_after_last(requests: Iterable[ReadRequest], action: Callable[[], None]) -> list[ReadRequest]:
    """Return the requests with ``action`` attached: the last one to complete, in whatever order, calls it.

    Without any request, one that reads nothing calls it.
    """
    requests = list(requests) or [ReadRequest(EMPTY, EMPTY)]
    countdown = Countdown(len(requests), action)
    return [request.calling(partial(countdown.complete, request.on_complete)) for request in requests]


class Countdown:
    """Thread-safe count of the requests that have not completed."""

    def __init__(self, count: int, action: Callable[[], None]) -> None:
        self._left = count
        self._action = action
        self._lock = Lock()

    def complete(self, on_complete: OnComplete | None, data: Bytes) -> None:
        """Run the callback of one request, then ``action`` if it was the last one."""
        if on_complete is not None:
            on_complete(data)
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._action()


@dataclass(frozen=True, eq=False)
class Limits:
    """Bounds of the numbers of a field in each block of its rows; a value that is missing (NaN) counts in no bound.

    Parameters
    ----------
    edges : int64[blocks + 1], the first row of each block, and the number of rows.
    low, high : float64[blocks], no number of the block is less or greater; infinite if that is not known.
    """

    edges: Integers
    low: Array
    high: Array


class StoredRows(ABC):
    """Rows of one file: their number, their blocks, and their bytes.

    Attributes
    ----------
    rows : number of rows.
    block_rows : rows of a block, the unit that is cheapest to read; blocks are counted from row 0. 1 if every row can
        be read alone. Of blocks that differ in length, that of the longest one.
    separate : neighbouring blocks are read no faster than others, as of files of their own: none are put together.
    notice : what a user should know about reads of such files; rank 0 says it once, when they are opened. "": nothing.
    """

    rows: int
    block_rows: int
    separate: bool = False
    notice: str = ""

    def borders(self) -> Integers | None:
        """Return the first row of every block, if blocks differ in length; None: every ``block_rows`` rows."""
        return None

    def first_rows(self) -> Integers:
        """Return the first row of every block, int64[blocks]."""
        borders = self.borders()
        return np.arange(0, self.rows, self.block_rows, dtype=np.int64) if borders is None else borders

    def longest(self, borders: Integers) -> int:
        """Return the rows of the longest of the blocks that begin at these rows."""
        return int(np.diff(borders, append=self.rows).max(initial=1))

    def stored_bytes(self) -> int:
        """Return the size of the rows in the file, in bytes; 0 if it is unknown."""
        return 0

    def end(self) -> int:
        """Return the first byte position after all bytes that may be read; 0 if there are no byte ranges."""
        return 0

    def kept_bytes(self) -> int:
        """Return the size of what a rank keeps of all blocks while it reads them, in bytes; 0: that of the rows."""
        return 0


class Composed(StoredRows):
    """Rows that are made of those of others, with the bytes of all of them, and the blocks of the largest ones.

    Attributes
    ----------
    origins : the others, of the same file.
    """

    @property
    @abstractmethod
    def origins(self) -> Sequence[StoredRows]:
        """Rows of which these are made."""

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return max((one.block_rows for one in self.origins), default=1)

    @property
    def separate(self) -> bool:  # type: ignore[override]
        return any(one.separate for one in self.origins)

    def borders(self) -> Integers | None:
        deepest = max(self.origins, key=lambda one: one.block_rows, default=None)
        return None if deepest is None else deepest.borders()

    def stored_bytes(self) -> int:
        return sum(one.stored_bytes() for one in self.origins)

    def end(self) -> int:
        return max((one.end() for one in self.origins), default=0)

    def kept_bytes(self) -> int:
        return max((one.kept_bytes() for one in self.origins), default=0)


class Layout(StoredRows):
    """Mapping of the rows of one field to byte ranges of one file.

    A subclass is immutable, can be pickled, and is small enough to broadcast. `Strided`, `Transposed`, `Chunked`,
    `LibraryRows` and `MemoryRows` cover most formats; derive from `Layout` for any other one.

    For an index that is stored (``index=`` of `open_dataset`), a subclass of another package has two methods:
    ``to_json(self)`` returns a dict of values by name, and the class method ``from_json(cls, values)`` makes an equal
    layout of them. The values are None, bool, int, float, str, bytes, NumPy arrays and dtypes, other layouts, and
    lists, tuples and dicts of these. The module of the entry point defines or imports the class.

    Examples
    --------
    Rows whose numbers follow from the row, without bytes of the file:

    >>> class Squares(Layout):
    ...     rows, block_rows = 10, 1
    ...
    ...     def requests(self, rows, out, cache):
    ...         def fill(_):
    ...             out[rows.destination] = rows.numbers**2
    ...         yield ReadRequest(EMPTY, EMPTY, on_complete=fill)
    >>> out, selection = np.zeros(2, int), RowSelection(np.array([3]), np.array([5]), np.array([0, 1]))
    >>> for request in Squares().requests(selection, out, ChunkCache(0)):
    ...     request.on_complete(np.empty(0, np.uint8))
    >>> out.tolist()
    [9, 16]
    """

    @abstractmethod
    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        """Yield the reads after which ``out[rows.destination[i]]`` holds row ``rows.numbers[i]``, for all i.

        Parameters
        ----------
        rows : rows to read.
        out : [n, ...], array of the field's dtype; other rows of it must not be written.
        cache : decoded chunks, for a layout that decodes more rows than it is asked for.
        """

    def inner_bytes(self) -> int:
        """Return the size of the elements of all ragged samples in memory, in bytes; 0 if it is unknown."""
        return 0

    def limits(self) -> Limits | None:
        """Return bounds of the numbers, which may read metadata of the file; None if there are none."""
        return None

    def sources(self) -> Sequence[str]:
        """Return the paths of the files that the layout opens by itself: other files, or its own one by a library."""
        return ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "from_json" in cls.__dict__:
            declared(cls)
