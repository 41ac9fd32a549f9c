"""What a reader says about its files: which bytes hold which rows. Frozen columns, validated once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from threading import Lock

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.errors import FormatError
from matex_data.fields import Field, Schema
from matex_data.index.cache import ChunkCache
from matex_data.index.stamps import Stamp

EMPTY: Integers = np.empty(0, np.int64)
"""No byte ranges: ``ReadRequest(EMPTY, EMPTY, on_complete=...)`` reads nothing and only runs its callback."""


@dataclass(frozen=True)
class RowSelection:
    """Rows of one file that are wanted, and their places in the arrays that receive them.

    Parameters
    ----------
    start, stop : int64[k], disjoint runs of rows in ascending order.
    destination : int64[sum(stop - start)], the receiving index of each row.
    """

    start: Integers
    stop: Integers
    destination: Integers

    @property
    def numbers(self) -> Integers:
        """The row of every destination, int64 of the same length."""
        counts = self.stop - self.start
        return ranges(self.start, counts)

    def tiles(self, most: int) -> Iterator[RowSelection]:
        """The same rows, at most so many at a time."""
        ends = np.cumsum(self.stop - self.start)
        for low in range(0, len(self.destination), most):
            high = min(low + most, len(self.destination))
            first, last = np.searchsorted(ends, (low, high - 1), side="right").tolist()
            start, stop = self.start[first : last + 1].copy(), self.stop[first : last + 1].copy()
            start[0] = stop[0] - (ends[first] - low)
            stop[-1] -= ends[last] - high
            yield RowSelection(start, stop, self.destination[low:high])


def ranges(start: Integers, count: Integers) -> Integers:
    """``start[0], start[0]+1, ... (count[0] of them), start[1], ...``"""
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    numbers: Integers = np.arange(total, dtype=np.int64) + np.repeat(start - (ends - count), count)
    return numbers


OnComplete = Callable[[Bytes], None]


@dataclass(frozen=True)
class ReadRequest:
    """Bytes of one file to read, and what becomes of them.

    Parameters
    ----------
    offset, nbytes : int64[k], byte ranges of the file. None at all is allowed: then nothing is read
        and ``on_complete`` gets no bytes.
    target : uint8 memory the ranges go to, range i to ``target[at[i]:at[i] + nbytes[i]]``. None: they are
        put one behind the other in scratch memory, which is handed to ``on_complete``.
    at : int64[k] or None, see ``target``.
    on_complete : called once with the bytes in scratch memory (uint8, read-only by convention; none where there is a
        target), on any thread; turns them into rows. Raises ``DecodeError``.
    """

    offset: Integers
    nbytes: Integers
    target: Bytes | None = None
    at: Integers | None = None
    on_complete: OnComplete | None = None


def call_after_last(requests: Sequence[ReadRequest], action: Callable[[], None]) -> list[ReadRequest]:
    """Return the requests with ``action`` attached: the last one to complete, in whatever order, calls it."""
    countdown = _Countdown(len(requests), action)
    return [replace(request, on_complete=partial(countdown.complete, request.on_complete)) for request in requests]


class _Countdown:
    """Count of requests that have not completed; safe to use from several threads."""

    def __init__(self, count: int, action: Callable[[], None]) -> None:
        self._left = count
        self._action = action
        self._lock = Lock()

    def complete(self, on_complete: OnComplete | None, data: Bytes) -> None:
        if on_complete is not None:
            on_complete(data)
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._action()


class Layout(ABC):
    """How the rows of one field lie in one file. Immutable, and small enough to broadcast.

    Attributes
    ----------
    rows : number of rows.
    block_rows : how many rows are cheapest to read together, counted from row 0; 1 if any row can be
        read alone.
    """

    rows: int
    block_rows: int

    @abstractmethod
    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        """What to read so that ``out[rows.destination[i]]`` becomes row ``rows.numbers[i]``.

        ``cache`` keeps decoded chunks of which only some rows were wanted.
        """

    def borders(self) -> Integers | None:
        """First row of every block, where blocks differ in length; None: every ``block_rows`` rows."""
        return None

    def stored_bytes(self) -> int:
        """Bytes that the rows take in the file; 0 if that is not known."""
        return 0

    def end(self) -> int:
        """First byte after the last one that the part may read; 0 if it reads no byte ranges."""
        return 0


@dataclass(frozen=True)
class FileIndex:
    """One file of a data set: its rows, and the part that holds each field.

    ``stamp`` is its state when it was indexed; None: not known.
    """

    path: str
    rows: int
    layouts: Mapping[str, Layout]
    stamp: Stamp | None = None


PostProcess = Callable[[Mapping[str, Array], Integers], None]


class Index:
    """The rows of several files of one schema, one behind the other.

    Parameters
    ----------
    fields : what each sample is made of.
    files : where the samples are. Every file has a part for every field, all of the file's rows.
    static : whole arrays that belong to no sample (a coordinate axis, a mask), by name.
    facts : what has to be the same in all files of one data set beside the fields (units, a calendar), as texts.
    post_process : called with the arrays by name and the indices that were filled, once all rows of a window are in
        memory; on any thread.

    Raises
    ------
    FormatError : a file lacks a field, or its parts differ in length.
    """

    def __init__(
        self,
        fields: Schema,
        files: Sequence[FileIndex],
        static: Mapping[str, Array] | None = None,
        facts: Mapping[str, str] | None = None,
        post_process: PostProcess | None = None,
    ) -> None:
        self.fields = dict(fields)
        self.files = tuple(files)
        self.static = dict(static or {})
        self.facts = dict(facts or {})
        self.post_process = post_process
        for file in self.files:
            _check_file(file, self.fields)
        self.first_row: Integers = np.concatenate(
            [[0], np.cumsum([file.rows for file in self.files], dtype=np.int64)]
        ).astype(np.int64)

    def __len__(self) -> int:
        return int(self.first_row[-1])

    @cached_property
    def raw(self) -> Index:
        """The same without ``after``: missing numbers are NaN."""
        return self if self.post_process is None else Index(self.fields, self.files, self.static, self.facts)

    def select(self, names: Sequence[str]) -> Index:
        """The same rows with fewer fields."""
        fields = {name: self.fields[name] for name in names}
        files = [replace(f, layouts={n: f.layouts[n] for n in names}) for f in self.files]
        return Index(fields, files, self.static, self.facts, self.post_process)

    def with_stamps(self, stamps: Mapping[str, Stamp | None]) -> Index:
        """The same with the states of the files, by path."""
        files = [replace(file, stamp=stamps.get(file.path)) for file in self.files]
        return Index(self.fields, files, self.static, self.facts, self.post_process)


def concatenate(indexes: Sequence[Index]) -> Index:
    """The rows of all, one behind the other.

    Raises
    ------
    FormatError : the fields differ in name, shape or dtype.
    """
    first = indexes[0]
    for other in indexes[1:]:
        if other.fields != first.fields:
            raise _schema_error(first, other)
        if other.facts != first.facts:
            raise _fact_error(first, other)
    return Index(first.fields, [file for index in indexes for file in index.files], first.static, first.facts)


def _schema_error(first: Index, other: Index) -> FormatError:
    names = [n for n in {**first.fields, **other.fields} if first.fields.get(n) != other.fields.get(n)]
    return FormatError(
        "the files do not have the same fields",
        file=other.files[0].path,
        field=names[0],
        expected=f"{_describe(first.fields.get(names[0]))}, as in {first.files[0].path!r}",
        found=_describe(other.fields.get(names[0])),
        remedy="open files of one schema together, or choose the fields they share with inputs= and targets=",
    )


def _fact_error(first: Index, other: Index) -> FormatError:
    names = [n for n in {**first.facts, **other.facts} if first.facts.get(n) != other.facts.get(n)]
    begin = next((file.path for file in first.files), None)
    return FormatError(
        f"the files do not agree on {names[0]}",
        file=next((file.path for file in other.files), None),
        expected=f"{first.facts.get(names[0], 'nothing said')}, as in {begin!r}",
        found=other.facts.get(names[0], "nothing said"),
        remedy="open files that agree together, or convert them",
    )


def _describe(field: Field | None) -> str:
    if field is None:
        return "no such field"
    return f"{field.dtype} of shape {field.shape}" + (" (ragged)" if field.ragged else "")


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
                found=_lengths(file),
                remedy="choose fields of equal length with inputs= and targets=",
            )


def _lengths(file: FileIndex) -> str:
    """Which fields have how many samples, the most common number first."""
    fields: dict[int, list[str]] = {}
    for name, part in file.layouts.items():
        fields.setdefault(part.rows, []).append(name)
    groups = sorted(fields.items(), key=lambda group: -len(group[1]))
    shown = [f"{rows} samples in {_some(names)}" for rows, names in groups[:8]]
    return "; ".join(shown + ([f"{len(groups) - 8} other lengths"] if len(groups) > 8 else []))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(repr(name) for name in names[:4]) + more
