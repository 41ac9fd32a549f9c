"""Layouts without byte ranges: rows that a format's library reads, that the index carries, or that have one value."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.fields import EXACT
from matex_data.index.cache import ChunkCache
from matex_data.index.model import EMPTY, Layout, Limits, ReadRequest, RowSelection
from matex_data.index.scatter import scatter
from matex_data.locks import Lock

_LIBRARY_LOCK = Lock()  # neither HDF5 nor netCDF may be entered by two threads


class LibraryRows(Layout):
    """Rows that only the format's library can read; each rank reads its own.

    A subclass implements `read`. Use it for data without byte ranges: variable-length strings, references, virtual
    and external datasets. Calls of the library do not overlap within a process, so decoding does not run in parallel.

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
        done = 0
        for start, stop in zip(rows.start.tolist(), rows.stop.tolist(), strict=True):
            destination = rows.destination[done : done + stop - start]
            done += stop - start
            yield ReadRequest(EMPTY, EMPTY, on_complete=partial(self._read_into, start, stop, destination, out))

    def _read_into(self, start: int, stop: int, destination: Integers, out: Array, _: Bytes) -> None:
        with _LIBRARY_LOCK:
            rows = self.read(start, stop)
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
    rows : number of rows.
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
