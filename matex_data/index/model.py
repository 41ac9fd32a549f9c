"""The index model: the contract between a reader and everything behind it.

A reader turns a file into an `Index`: its fields, its number of samples, and for each field a `Layout` that maps rows
to byte ranges. It reads metadata only. All of these objects are immutable. One rank builds the index of a file; the
others get descriptors of its layouts, see `matex_data.index.descriptors`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import FormatError, shortened
from matex_data.fields import Schema
from matex_data.index.files import DerivedFiles, FileIndex, FileList, FileTable, JoinedFiles, columns_of
from matex_data.index.layout import EMPTY, Layout, Limits, ReadRequest, call_after_last
from matex_data.index.runs import RowSelection, Runs, ranges
from matex_data.index.stamps import Stamp
from matex_data.locks import cached_property

__all__ = [
    "EMPTY",
    "Derivation",
    "FileIndex",
    "Finish",
    "FromOne",
    "Index",
    "Layout",
    "Limits",
    "Read",
    "ReadRequest",
    "RowSelection",
    "Wanted",
    "call_after_last",
    "ranges",
]


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
        self.files = files if isinstance(files, FileTable) else FileList(_check_file(file, fields) for file in files)
        self.static = dict(static or {})
        self.facts = dict(facts or {})
        self.made = made

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
        if not stamps:
            return self
        files = FileList(replace(file, stamp=stamps.get(file.path, file.stamp)) for file in self.files)
        return Index(self.fields, files, self.static, self.facts, self.made)


def _selected(files: FileTable, names: Sequence[str]) -> FileTable:
    known = files.has_facts and len(files) > 0
    return DerivedFiles(files, partial(_select, names), facts={n: files.facts[n] for n in names} if known else None)


def _select(names: Sequence[str], _: int, file: FileIndex) -> FileIndex:
    return replace(file, layouts={name: file.layouts[name] for name in names})


def _check_file(file: FileIndex, fields: Schema) -> FileIndex:
    """Return a file; raise ``FormatError`` unless it has the fields, of equal length."""
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
    return file


def _describe_lengths(file: FileIndex) -> str:
    """Return the lengths of the fields as text, the most common length first."""
    fields: dict[int, list[str]] = {}
    for name, layout in file.layouts.items():
        fields.setdefault(layout.rows, []).append(name)
    groups = sorted(fields.items(), key=lambda group: -len(group[1]))
    shown = (f"{rows} samples in {', '.join(shortened(map(repr, names), 4))}" for rows, names in groups)
    return "; ".join(shortened(shown, 8))
