"""The index model: the contract between a reader and everything behind it.

A reader turns a file into an `Index`: its fields, its number of samples, and for each field a `Layout` that maps rows
to byte ranges. It reads metadata only. The engine passes a `RowSelection` and an output array to each layout, executes
the `ReadRequest` objects that the layout yields, and calls their callbacks with the bytes.

All of these objects are immutable. One rank builds the index of a file; the others get descriptors of its layouts, see
`matex_data.index.descriptors`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import FormatError
from matex_data.fields import Schema
from matex_data.index.cache import Chunk, ChunkCache
from matex_data.index.files import DerivedFiles, FileList, FileTable, JoinedFiles, columns_of
from matex_data.index.files import FileIndex as FileIndex
from matex_data.index.stamps import Stamp
from matex_data.locks import cached_property

if TYPE_CHECKING:
    from matex_data.index.runs import Runs

EMPTY: Integers = np.empty(0, np.int64)
"""No byte ranges: ``ReadRequest(EMPTY, EMPTY, on_complete=...)`` reads nothing and only runs its callback."""


@dataclass(frozen=True)
class RowSelection:
    """Rows of one file to read, and the index in the output array for each of them.

    Parameters
    ----------
    start, stop : int64[k], disjoint ranges of rows in ascending order.
    destination : int64[sum(stop - start)], the index in the output array for each row.

    Examples
    --------
    Rows 2, 3 and 7 of a file, in reverse order:

    >>> selection = RowSelection(np.array([2, 7]), np.array([4, 8]), np.array([2, 1, 0]))
    >>> selection.numbers.tolist()
    [2, 3, 7]
    """

    start: Integers
    stop: Integers
    destination: Integers

    @property
    def numbers(self) -> Integers:
        """Row numbers, int64 of the length of ``destination``, ascending.

        Examples
        --------
        >>> selection = RowSelection(np.array([2, 7]), np.array([4, 8]), np.array([2, 1, 0]))
        >>> selection.numbers.tolist()
        [2, 3, 7]
        """
        counts = self.stop - self.start
        return ranges(self.start, counts)

    def tiles(self, most: int) -> Iterator[RowSelection]:
        """Yield the selection in consecutive selections of at most ``most`` rows.

        Examples
        --------
        >>> selection = RowSelection(np.array([2, 7]), np.array([4, 8]), np.array([2, 1, 0]))
        >>> [tile.numbers.tolist() for tile in selection.tiles(2)]
        [[2, 3], [7]]
        """
        if 0 < len(self.destination) <= most:
            yield self
            return
        ends = np.cumsum(self.stop - self.start)
        for low in range(0, len(self.destination), most):
            high = min(low + most, len(self.destination))
            first, last = np.searchsorted(ends, (low, high - 1), side="right").tolist()
            start, stop = self.start[first : last + 1].copy(), self.stop[first : last + 1].copy()
            start[0] = stop[0] - (ends[first] - low)
            stop[-1] -= ends[last] - high
            yield RowSelection(start, stop, self.destination[low:high])


def ranges(start: Integers, count: Integers) -> Integers:
    """Return the concatenation of ``arange(start[i], start[i] + count[i])`` over all i.

    >>> ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    numbers: Integers = np.arange(total, dtype=np.int64) + np.repeat(start - (ends - count), count)
    return numbers


OnComplete = Callable[[Bytes], None]
"""Callback of a read request. It may run on any thread, and raises `DecodeError` for bytes that do not decode."""


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
        if self.target is None:
            return None
        at = np.cumsum(self.nbytes) - self.nbytes if self.at is None else self.at
        return self.target.ctypes.data + at


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


@dataclass(frozen=True, eq=False)
class Wanted:
    """Samples of an index that a window needs, and the arrays that receive them.

    Parameters
    ----------
    runs : the samples, ascending.
    destination : int64[runs.total], a row of the arrays for each sample.
    arrays : the output array of each wanted field, by name.
    first : added to the numbers of samples that functions get: those of a data set behind others.
    raw : the arrays are of the fields of ``Index.raw``.
    """

    runs: Runs
    destination: Integers
    arrays: Mapping[str, Array]
    first: int = 0
    raw: bool = False

    def fields(self, index: Index) -> Schema:
        """Return the fields of an index as they are wanted."""
        return index.raw.fields if self.raw else index.fields


Finish = Callable[[], None]
"""Function to call once all bytes of a window are in memory and decoded. It may run on any thread."""
Read = Callable[[int, Wanted], Finish | None]
"""Function that plans the reads of an index, given by its number among those that others are derived from."""


class Derivation(ABC):
    """Derivation of the samples of an index from those of other ones.

    Attributes
    ----------
    bases : the other indexes.
    """

    bases: tuple[Index, ...]

    @abstractmethod
    def plan(self, wanted: Wanted, read: Read, epoch: int) -> Finish | None:
        """Plan the reads of what the samples are made of, by calls of ``read``; return what makes them then."""

    @property
    @abstractmethod
    def raw(self) -> Schema:
        """Fields of the samples, of those of ``Index.raw`` of the bases."""

    @property
    def draws(self) -> bool:
        """True if a function gets seeds, so that samples differ between epochs."""
        return any(base.draws for base in self.bases)


@dataclass(frozen=True, eq=False)
class FromOne(Derivation):
    """Derivation of the samples of an index from those of another one.

    Parameters
    ----------
    base : the other index.
    """

    base: Index

    @property
    def bases(self) -> tuple[Index, ...]:  # type: ignore[override]
        return (self.base,)


@dataclass(frozen=True, eq=False)
class _Raw(FromOne):
    """Samples of an index with the fields of ``Index.raw``."""

    @property
    def raw(self) -> Schema:
        return self.base.raw.fields

    def plan(self, wanted: Wanted, read: Read, epoch: int) -> Finish | None:
        return read(0, replace(wanted, raw=True))


class Index:
    """The samples of a data set: fields, and the files that hold their rows, concatenated.

    Parameters
    ----------
    fields : the fields of a sample, by name.
    files : one `FileIndex` per file, each with a layout for every field; or a table of them, whose entries are not
        checked.
    static : whole arrays that belong to no sample (a coordinate axis, a mask), by name.
    facts : properties that all files of a data set must share beside the fields (units, a calendar), as text.
    made : how the samples are made of those of other indexes, whose files are read; None: the layouts read them.

    Raises
    ------
    FormatError : a file lacks a field, or its fields differ in length.

    Examples
    --------
    >>> from matex_data.abc import Field, Strided
    >>> temperature = Field("temperature", (3,), np.dtype("f4"))
    >>> layout = Strided(rows=10, offset=128, stride=12, dtype=np.dtype("<f4"), shape=(3,))
    >>> index = Index({"temperature": temperature}, [FileIndex("day1.bin", 10, {"temperature": layout})])
    >>> len(index)
    10
    """

    def __init__(
        self,
        fields: Schema,
        files: Sequence[FileIndex],
        static: Mapping[str, Array] | None = None,
        facts: Mapping[str, str] | None = None,
        made: Derivation | None = None,
    ) -> None:
        self.fields = dict(fields)
        self.files = files if isinstance(files, FileTable) else self._checked(files)
        self.static = dict(static or {})
        self.facts = dict(facts or {})
        self.made = made

    def _checked(self, files: Sequence[FileIndex]) -> FileTable:
        for file in files:
            _check_file(file, self.fields)
        return FileList(files)

    @property
    def first_row(self) -> Integers:
        """First sample of each file, int64[files + 1]; at the end the number of all samples.

        Examples
        --------
        >>> from matex_data.abc import Field, MemoryRows
        >>> files = [FileIndex(f"{day}.bin", 2, {"t": MemoryRows(np.array([day, day + 0.5]))}) for day in (1, 2)]
        >>> Index({"t": Field("t", (), np.dtype("f8"))}, files).first_row.tolist()
        [0, 2, 4]
        """
        return self.files.first_row

    def __len__(self) -> int:
        return int(self.first_row[-1])

    def file_of(self, samples: Integers) -> Integers:
        """Return the number of the file of each sample, int64 of the same length.

        Examples
        --------
        >>> from matex_data.abc import Field, MemoryRows
        >>> files = [FileIndex(f"{day}.bin", 2, {"t": MemoryRows(np.array([day, day + 0.5]))}) for day in (1, 2)]
        >>> index = Index({"t": Field("t", (), np.dtype("f8"))}, files)
        >>> index.file_of(np.array([0, 1, 2, 3])).tolist()
        [0, 0, 1, 1]
        """
        return np.searchsorted(self.first_row, samples, side="right") - 1

    def located(self, sample: int) -> tuple[str, int]:
        """Return the path of the file of a sample, and its row there.

        Examples
        --------
        >>> from matex_data.abc import Field, MemoryRows
        >>> files = [FileIndex(f"{day}.bin", 2, {"t": MemoryRows(np.array([day, day + 0.5]))}) for day in (1, 2)]
        >>> Index({"t": Field("t", (), np.dtype("f8"))}, files).located(3)
        ('2.bin', 1)
        """
        file = int(self.file_of(np.array(sample)))
        return self.files.paths[file], sample - int(self.first_row[file])

    @cached_property
    def raw(self) -> Index:
        """The index of the values that statistics and counts are about.

        These are missing numbers, whatever replaces them, the elements of lists without their padding, and classes in
        place of one-hot vectors.
        """
        if self.made is None:
            return self
        raw = self.made.raw
        return Index({name: raw[name] for name in self.fields}, self.files, self.static, self.facts, _Raw(self))

    @property
    def draws(self) -> bool:
        """True if a function gets seeds, so that samples differ between epochs.

        Examples
        --------
        >>> Index({}, []).draws
        False
        """
        return self.made is not None and self.made.draws

    @cached_property
    def sources(self) -> FileTable:
        """The files that are read: those of the samples, or those of the indexes that these are made of, in order."""
        if self.made is None:
            return self.files
        tables = [base.sources for base in self.made.bases]
        return tables[0] if len(tables) == 1 else JoinedFiles(tables)

    def with_static(self, static: Mapping[str, Array]) -> Index:
        """Return the index with other arrays that belong to no sample.

        Examples
        --------
        >>> Index({}, []).with_static({"latitude": np.array([10.0, 20.0])}).static["latitude"].tolist()
        [10.0, 20.0]
        """
        return Index(self.fields, self.files, static, self.facts, self.made)

    def row_bytes(self, name: str) -> int:
        """Return the mean size of a sample of a field in memory, in bytes, with the elements of ragged ones.

        The memory that samples take while they are made counts, too.

        Examples
        --------
        >>> from matex_data.abc import Field, MemoryRows
        >>> files = [FileIndex(f"{day}.bin", 2, {"t": MemoryRows(np.array([day, day + 0.5]))}) for day in (1, 2)]
        >>> index = Index({"t": Field("t", (), np.dtype("f8"))}, files)
        >>> index.row_bytes("t")
        8
        """
        field = self.fields[name]
        return field.row_bytes + field.scratch_bytes + int(self.inner_bytes(name))

    def inner_bytes(self, name: str) -> float:
        """Return the mean size of the elements of a sample of a field in memory, in bytes; 0 if it is not ragged.

        Examples
        --------
        >>> from matex_data.abc import Field, MemoryRows
        >>> files = [FileIndex(f"{day}.bin", 2, {"t": MemoryRows(np.array([day, day + 0.5]))}) for day in (1, 2)]
        >>> index = Index({"t": Field("t", (), np.dtype("f8"))}, files)
        >>> index.inner_bytes("t")
        0.0
        """
        has_inner = self.fields[name].ragged and len(self.files)
        return self.files.facts[name].total_inner_bytes / max(1, len(self)) if has_inner else 0.0

    def select(self, names: Sequence[str]) -> Index:
        """Return the index with only the named fields.

        Examples
        --------
        >>> from matex_data.abc import Field, MemoryRows
        >>> files = [FileIndex(f"{day}.bin", 2, {"t": MemoryRows(np.array([day, day + 0.5]))}) for day in (1, 2)]
        >>> index = Index({"t": Field("t", (), np.dtype("f8"))}, files)
        >>> list(index.select(["t"]).fields)
        ['t']
        """
        if list(names) == list(self.fields):
            return self
        fields = {name: self.fields[name] for name in names}
        return Index(fields, _selected(self.files, names), self.static, self.facts, self.made)

    def in_columns(self) -> Index:
        """Return the index with its files in columns, which take less memory; each is then made when it is needed.

        Examples
        --------
        >>> from matex_data.abc import Field, MemoryRows
        >>> files = [FileIndex(f"{day}.bin", 2, {"t": MemoryRows(np.array([day, day + 0.5]))}) for day in (1, 2)]
        >>> index = Index({"t": Field("t", (), np.dtype("f8"))}, files)
        >>> len(index.in_columns())
        4
        """
        files = columns_of(self.files)
        return Index(self.fields, files, self.static, self.facts, self.made)

    def with_stamps(self, stamps: Mapping[str, Stamp | None]) -> Index:
        """Return the index with the stamps of its files, given by path; other files keep theirs.

        Examples
        --------
        >>> from matex_data.abc import Field, MemoryRows
        >>> files = [FileIndex(f"{day}.bin", 2, {"t": MemoryRows(np.array([day, day + 0.5]))}) for day in (1, 2)]
        >>> index = Index({"t": Field("t", (), np.dtype("f8"))}, files)
        >>> index.with_stamps({}).files[0].stamp is None
        True
        """
        files = FileList(replace(file, stamp=stamps.get(file.path, file.stamp)) for file in self.files)
        return Index(self.fields, files, self.static, self.facts, self.made)


def _selected(files: FileTable, names: Sequence[str]) -> FileTable:
    known = files.has_facts and len(files) > 0
    return DerivedFiles(files, select_fields(names), facts={n: files.facts[n] for n in names} if known else None)


def select_fields(names: Sequence[str]) -> Callable[[int, FileIndex], FileIndex]:
    """Return the function that derives a file with only the named fields, in this order."""
    return partial(_select, names)


def _select(names: Sequence[str], _: int, file: FileIndex) -> FileIndex:
    return replace(file, layouts={name: file.layouts[name] for name in names})


def _check_file(file: FileIndex, fields: Schema) -> None:
    for name in fields:
        if name not in file.layouts:
            raise FormatError("the file lacks a field", file=file.path, field=name, expected=sorted(fields))
        if file.layouts[name].rows != file.rows:
            raise FormatError(
                "the fields have different numbers of samples",
                file=file.path,
                field=name,
                expected=f"{file.rows} samples",
                found=_describe_lengths(file),
                remedy="select fields of equal length with inputs= and targets=",
            )


def _describe_lengths(file: FileIndex) -> str:
    """Return the lengths of the fields as text, the most common length first."""
    fields: dict[int, list[str]] = {}
    for name, layout in file.layouts.items():
        fields.setdefault(layout.rows, []).append(name)
    groups = sorted(fields.items(), key=lambda group: -len(group[1]))
    shown = [f"{rows} samples in {_first_names(names)}" for rows, names in groups[:8]]
    return "; ".join(shown + ([f"{len(groups) - 8} other lengths"] if len(groups) > 8 else []))


def _first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(repr(name) for name in names[:4]) + more
