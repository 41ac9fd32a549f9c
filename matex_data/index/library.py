"""Layouts without byte ranges: rows that a format's library reads, that the index carries, or that have one value."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import DataError
from matex_data.fields import EXACT
from matex_data.index.cache import ChunkCache
from matex_data.index.layout import EMPTY, Layout, Limits, ReadRequest
from matex_data.index.runs import RowSelection, Runs, ranges, runs_where
from matex_data.index.scatter import scatter
from matex_data.locks import Lock

Opened = TypeVar("Opened")  # has a method close, unless it is shared
MOST_UNWANTED = 100  # rows that are read for one that is wanted, rather than one call for each
_LIBRARY_LOCK = Lock()  # neither HDF5 nor netCDF may be entered by two threads


class OpenFiles(Generic[Opened]):
    """Files that stay open while they are among those used last. Never to be used by two threads at once.

    Parameters
    ----------
    most : number of files.
    shared : the library has one open file for all that open it in a process, by whatever path, as HDF5 has, and closes
        it with the last object. Otherwise a forked process opens its own: libraries seek and read, and processes would
        share the position in a file.
    """

    def __init__(self, most: int, shared: bool = False) -> None:
        self.most = most
        self._shared = shared
        self._open: OrderedDict[Hashable, Any] = OrderedDict()
        if shared:
            _SHARED.append(self._open)
        else:
            os.register_at_fork(after_in_child=self._open.clear)

    def get(self, key: Hashable, opened: Callable[[], Opened]) -> Opened:
        """Return a file, which is opened unless it is open."""
        found: Opened | None = self._open.pop(key, None)
        if found is None:
            found = opened()
            if len(self._open) >= self.most:
                with suppress(KeyError):  # all were forgotten
                    _, oldest = self._open.popitem(last=False)
                    if not self._shared:
                        oldest.close()
        self._open[key] = found
        return found

    def forget(self, key: Hashable) -> None:
        """Close a file, unless a thread reads it."""
        self._open.pop(key, None)


_SHARED: list[OrderedDict[Hashable, Any]] = []


def forget_shared_files() -> None:
    """Close the files that libraries share. On each rank, before files are indexed, which may have been written anew.

    Otherwise the library would read them as they were.
    """
    for files in _SHARED:
        with suppress(KeyError):  # none is left; ``clear`` would lose those that another thread opens meanwhile
            while files:
                files.popitem()


class LibraryRows(Layout):
    """Rows that only the format's library can read; each rank reads its own.

    A subclass implements `read`. Use it for data without byte ranges: variable-length strings, references, virtual
    and external datasets. Calls of the library do not overlap within a process, so decoding does not run in parallel.
    Scattered rows of a block are read by one call, with those between them, unless few are wanted.

    Examples
    --------
    >>> class Texts(LibraryRows):
    ...     rows, block_rows = 3, 1
    ...
    ...     def read(self, start, stop):
    ...         return np.array([b"a", b"bb", b"ccc"], object)[start:stop]
    >>> out, selection = np.empty(2, object), RowSelection(np.array([1]), np.array([3]), np.array([0, 1]))
    >>> for request in Texts().requests(selection, out, ChunkCache(0)):
    ...     request.on_complete(np.empty(0, np.uint8))
    >>> out.tolist()
    [b'bb', b'ccc']
    """

    rows: int
    block_rows: int

    @abstractmethod
    def read(self, start: int, stop: int) -> Array:
        """Read rows ``start`` to ``stop`` as the field's dtype. Never called on two threads at once."""

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        position = np.cumsum(np.append(0, rows.stop - rows.start))
        first = self._first_runs(rows.start, rows.stop)
        for low, high in pairwise([*first.tolist(), len(rows.start)]):
            runs = Runs(rows.start[low:high], (rows.stop - rows.start)[low:high])
            destination = rows.destination[position[low] : position[high]]
            yield ReadRequest(EMPTY, EMPTY, on_complete=partial(self._read_into, runs, destination, out))

    def _first_runs(self, start: Integers, stop: Integers) -> Integers:
        """Return the first run of rows of each read: runs of one block are read with the rows between them.

        A call takes as long as some hundred small rows, and may decode the block. Where far fewer are wanted, each run
        is read alone.
        """
        if not len(start):
            return EMPTY
        begin, count = runs_where((stop[:-1] - 1) // self.block_rows == start[1:] // self.block_rows)
        span = stop[begin + count - 1] - start[begin]
        sparse = np.repeat(span > MOST_UNWANTED * np.add.reduceat(stop - start, begin), count)
        sparse[begin] = True
        return np.flatnonzero(sparse)

    def _read_into(self, runs: Runs, destination: Integers, out: Array, _: Bytes) -> None:
        start, stop = int(runs.start[0]), int(runs.stop[-1])
        with _LIBRARY_LOCK:
            try:
                rows = self.read(start, stop)
                if len(runs.start) > 1:
                    rows = rows[ranges(runs.start - start, runs.count)]
            except DataError:  # maybe of a row that is not wanted
                if len(runs.start) == 1:
                    raise
                rows = np.concatenate(
                    [self.read(*run) for run in zip(runs.start.tolist(), runs.stop.tolist(), strict=True)]
                )
        scatter(out, destination, rows)


@declared
@dataclass(frozen=True)
class MemoryRows(Layout):
    """Rows that the index carries: at most some 64 KiB, since the index is broadcast to all ranks.

    Parameters
    ----------
    values : [rows, ...], one element of the field per row.

    Examples
    --------
    >>> MemoryRows(np.array([1.5, 2.5, 3.5])).rows
    3
    """

    values: Array
    block_rows: int = 1

    @property
    def rows(self) -> int:  # type: ignore[override]
        return len(self.values)

    def stored_bytes(self) -> int:
        return self.values.nbytes

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        yield ReadRequest(EMPTY, EMPTY, on_complete=partial(self._copy_into, rows, out))

    def _copy_into(self, rows: RowSelection, out: Array, _: Bytes) -> None:
        scatter(out, rows.destination, self.values[rows.numbers])


@declared
@dataclass(frozen=True, eq=False)
class Constant(Layout):
    """One value for all rows; nothing is read.

    Parameters
    ----------
    value : number, bytes, or an array of the shape of a sample.
    """

    rows: int
    value: Any
    block_rows: int = 1

    def limits(self) -> Limits | None:
        if isinstance(self.value, bytes) or np.ndim(self.value) or abs(self.value) >= EXACT:
            return None
        bounds = np.full(1, self.value, np.float64)  # of NaN no comparison is true
        return Limits(np.array([0, self.rows]), bounds, bounds)

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        yield ReadRequest(EMPTY, EMPTY, on_complete=partial(self._fill, rows, out))

    def _fill(self, rows: RowSelection, out: Array, _: Bytes) -> None:
        out[rows.destination] = self.value


@declared
@dataclass(frozen=True, eq=False)
class FolderValue(Constant):
    """Value that the name of a folder gives to all rows of its files.

    Parameters
    ----------
    text : the value as it is written, if that is not how Python writes the number.
    """

    text: str | None = None

    @property
    def written(self) -> bytes:
        """Value as text; empty if it is missing."""
        missing = self.value != self.value
        return b"" if missing else (str(self.value) if self.text is None else self.text).encode()
