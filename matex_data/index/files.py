"""Tables of files: the paths, rows, stamps and layouts of up to millions of files in columns.

An entry of a table is a `FileIndex`, which is made when it is needed. What all files together are asked for (their
rows, the sizes of their blocks) is a column, so that nothing loops over all files while data are read.
"""

from __future__ import annotations

import dataclasses
import json
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from matex_data._types import Array, Integers
from matex_data.index.columns import (
    ColumnReader,
    ColumnTable,
    ColumnWriter,
    EntryTable,
    Group,
    PathTable,
    compact,
    member,
    unpacked,
)
from matex_data.index.descriptors import OF_JOB, Descriptor, Origin, Separated, damaged, pickled_class, separate
from matex_data.index.layout import Layout
from matex_data.index.stamps import NO_INODE, Stamp
from matex_data.locks import cached_property
from matex_data.lru import LeastRecentlyUsed
from matex_data.storage.objects import is_url

KEPT = 4096  # entries of a table that stay made: chunks of a file are found in the cache by its layout


@dataclass(frozen=True)
class FileIndex:
    """One file of a data set.

    Parameters
    ----------
    path : of the file. A separator at its end tells that it is a folder, whose layouts have no byte ranges.
    rows : number of rows, equal for all fields.
    layouts : the layout of each field, by name.
    stamp : state of the file when it was indexed; None: unknown.

    Examples
    --------
    >>> from matex_data.abc import MemoryRows
    >>> FileIndex("run1.bin", 3, {"energy": MemoryRows(np.array([1.5, 2.5, 3.5]))}).rows
    3
    """

    path: str
    rows: int
    layouts: Mapping[str, Layout]
    stamp: Stamp | None = None


@dataclass(frozen=True, eq=False)
class LayoutFacts(ColumnTable):
    """Properties of the layouts of one field, a column each, by which blocks and windows are chosen.

    Parameters
    ----------
    block_rows : integers[files], see `Layout`.
    inner_bytes : integers[files], see ``Layout.inner_bytes``.
    uneven : bool[files], whether the layout has borders of its own.
    separate : bool[files], see `Layout`.
    """

    block_rows: Array
    inner_bytes: Array
    uneven: Array
    separate: Array
    kinds = ("iu", "iu", "b", "b")

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> LayoutFacts:
        """Return the facts of these layouts."""
        return cls(
            compact(np.array([layout.block_rows for layout in layouts], np.int64)),
            compact(np.array([layout.inner_bytes() for layout in layouts], np.int64)),
            compact(np.array([layout.borders() is not None for layout in layouts], bool)),
            compact(np.array([layout.separate for layout in layouts], bool)),
        )

    @cached_property
    def total_inner_bytes(self) -> int:
        """Sum of ``inner_bytes`` over all files."""
        return int(self.inner_bytes.sum(dtype=np.int64))

    @classmethod
    def from_json(cls, value: Any, columns: ColumnReader, count: int) -> Self:
        facts = super().from_json(value, columns, count)
        if count and min(facts.block_rows.min(), facts.inner_bytes.min()) < 0:
            raise damaged("blocks of a negative size")
        return facts


Facts = Mapping[str, LayoutFacts]
"""The facts of the layouts of each field, by name."""


class FileTable(EntryTable[FileIndex]):
    """Files of a data set, in order. An entry is one object, unless many others are made before it is needed again.

    Attributes
    ----------
    rows : integers[files], number of rows of each file.
    """

    paths: Sequence[str]
    rows: Array

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def first_row(self) -> Integers:
        """First sample of each file in all files, int64[files + 1]; at the end the number of all samples."""
        first: Integers = np.zeros(len(self.rows) + 1, np.int64)
        np.cumsum(self.rows, out=first[1:])
        return first

    @abstractmethod
    def stamp(self, number: int) -> Stamp | None:
        """Return the stamp of one file."""

    @property
    def all_stamped(self) -> bool:
        """Return whether each file has a stamp."""
        return all(self.stamp(number) is not None for number in range(len(self)))

    @cached_property
    def facts(self) -> Facts:
        """Facts of all files, by field. Each file is looked at once, unless they are known."""
        return self.facts_of(range(len(self)))

    @property
    def has_facts(self) -> bool:
        """Return whether the facts are known."""
        return "facts" in self.__dict__

    def set_facts(self, by_block: Sequence[Facts]) -> None:
        """Set the facts that others have found for blocks of the files, in order."""
        filled = [facts for facts in by_block if facts]
        self.__dict__["facts"] = {name: LayoutFacts.joined([facts[name] for facts in filled]) for name in filled[0]}

    def facts_of(self, numbers: Iterable[int]) -> Facts:
        """Return the facts of these files, by field."""
        layouts: dict[str, list[Layout]] = {}
        for number in numbers:
            for name, layout in self.entry(number).layouts.items():
                layouts.setdefault(name, []).append(layout)
        return {name: LayoutFacts.of(of_field) for name, of_field in layouts.items()}


class FileList(FileTable):
    """Files as a list of objects: those of one reader, few of them."""

    def __init__(self, files: Iterable[FileIndex]) -> None:
        self._files = tuple(files)
        self.paths = tuple(file.path for file in self._files)
        self.rows = np.array([file.rows for file in self._files], np.int64)

    def entry(self, number: int) -> FileIndex:
        return self._files[number]

    def stamp(self, number: int) -> Stamp | None:
        return self._files[number].stamp


class DerivedFiles(FileTable):
    """Files whose entries are made of those of another table.

    Parameters
    ----------
    files : the other table.
    derive : called with the number and the entry of a file; returns an entry of the same path and stamp.
    rows : integers[files], number of rows of each entry; None: those of ``files``.
    facts : of the entries; None: they are looked at.
    """

    def __init__(
        self,
        files: FileTable,
        derive: Callable[[int, FileIndex], FileIndex],
        rows: Array | None = None,
        facts: Facts | None = None,
    ) -> None:
        self._files, self._derive = files, derive
        self.paths = files.paths
        self.rows = files.rows if rows is None else rows
        if rows is None:  # one copy for all tables of these files
            self.__dict__["first_row"] = files.first_row
        if facts is not None:
            self.__dict__["facts"] = facts
        self._recent = LeastRecentlyUsed[FileIndex](KEPT)

    def __reduce__(self) -> tuple[Any, ...]:
        rows = None if self.rows is self._files.rows else self.rows
        return DerivedFiles, (self._files, self._derive, rows, self.__dict__.get("facts"))

    def entry(self, number: int) -> FileIndex:
        return self._recent.made(number, lambda: self._made(number))

    def _made(self, number: int) -> FileIndex:
        return self._derive(number, self._files[number])

    def stamp(self, number: int) -> Stamp | None:
        return self._files.stamp(number)


class JoinedFiles(FileTable):
    """Files of several tables, one table after the other.

    Parameters
    ----------
    tables : of the files.
    """

    def __init__(self, tables: Sequence[FileTable]) -> None:
        self._tables = tuple(tables)
        self._first = np.cumsum([0, *map(len, tables)])
        paths = [table.paths for table in tables]
        self.paths = PathTable.joined([one if isinstance(one, PathTable) else PathTable.of(list(one)) for one in paths])
        self.rows = np.concatenate([table.rows.astype(np.int64) for table in tables])
        filled = [table for table in tables if len(table)]
        names = filled[0].facts if filled and all(table.has_facts for table in filled) else {}
        if names and all(table.facts.keys() == names.keys() for table in filled):
            self.__dict__["facts"] = {n: LayoutFacts.joined([table.facts[n] for table in filled]) for n in names}

    def __reduce__(self) -> tuple[Any, ...]:
        return JoinedFiles, (self._tables,)

    def entry(self, number: int) -> FileIndex:
        table = self._table_of(number)
        return self._tables[table][number - int(self._first[table])]

    def stamp(self, number: int) -> Stamp | None:
        table = self._table_of(number)
        return self._tables[table].stamp(number - int(self._first[table]))

    def _table_of(self, number: int) -> int:
        return int(np.searchsorted(self._first, number, side="right")) - 1


@dataclass(frozen=True, eq=False)
class FileNumbers(ColumnTable):
    """Numbers of each file.

    Parameters
    ----------
    rows : integers[files], number of rows.
    size, mtime_ns, inode : integers[files], see `Stamp`.
    known : bool[files], False: the file has no stamp.
    group, position : integers[files], group of the layouts, and their position within it.
    """

    rows: Array
    size: Array
    mtime_ns: Array
    inode: Array
    known: Array
    group: Array
    position: Array
    kinds = ("iu", "iu", "iu", "iu", "b", "iu", "iu")

    @classmethod
    def of(cls, files: Sequence[FileIndex], group: Sequence[int], position: Sequence[int]) -> FileNumbers:
        """Return the numbers of these files."""
        stamps = [file.stamp or Stamp(0, 0, 0) for file in files]
        columns = (
            np.array([file.rows for file in files], np.int64),
            np.array([stamp.size for stamp in stamps], np.int64),
            np.array([stamp.mtime_ns for stamp in stamps], np.int64),
            np.array([stamp.inode for stamp in stamps], np.uint64),  # ino_t is unsigned
            np.array([file.stamp is not None for file in files], bool),
            np.array(group, np.int64),
            np.array(position, np.int64),
        )
        return cls(*map(compact, columns))


class FileColumns(FileTable):
    """Files in columns: some 40 bytes for each of many that differ in numbers only, and more for tables of chunks.

    Parameters
    ----------
    numbers : of each file.
    groups : layouts of the files, by descriptor.
    facts : of the layouts, by field.
    """

    def __init__(self, paths: PathTable, numbers: FileNumbers, groups: Sequence[Group], facts: Facts) -> None:
        self.paths: PathTable = paths
        self.rows, self._numbers, self._groups = numbers.rows, numbers, groups
        self.__dict__["facts"] = facts
        self._recent = LeastRecentlyUsed[FileIndex](KEPT)

    def __reduce__(self) -> tuple[Any, ...]:
        columns = ColumnWriter()
        return _of_bytes, (columns.packed(self.to_json(columns)), self._origin)

    def to_json(self, columns: ColumnWriter) -> Any:
        """Return the table as a value of JSON."""
        return {
            "paths": self.paths.to_json(columns),
            "groups": [group.to_json(columns) for group in self._groups],
            "facts": [[name, facts.to_json(columns)] for name, facts in self.facts.items()],
            "first_row": columns.add(self.first_row),
            "numbers": self._numbers.to_json(columns),
        }

    @property
    def _origin(self) -> Origin:
        return self._groups[0].origin if self._groups else OF_JOB

    @classmethod
    def from_json(cls, value: Any, columns: ColumnReader, origin: Origin) -> FileColumns:
        """Return the table of a value of JSON.

        Parameters
        ----------
        value, columns : of `to_json`.
        origin : of the value; that of a file is checked, with one entry of each group.

        Raises
        ------
        FormatError : the value is damaged, or of another release.
        """
        of_paths, of_groups, of_facts, of_first, of_files = member(
            value, "paths", "groups", "facts", "first_row", "numbers"
        )
        paths = PathTable.from_json(of_paths, columns)
        count = len(paths)
        pairs = isinstance(of_facts, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in of_facts)
        if not pairs or not isinstance(of_groups, list):
            raise damaged(f"{of_groups!r:.100} instead of groups of files, or {of_facts!r:.100} instead of facts")
        groups = [Group.from_json(one, columns, count, origin) for one in of_groups]
        facts = {str(name): LayoutFacts.from_json(one, columns, count) for name, one in of_facts}
        files = cls(paths, FileNumbers.from_json(of_files, columns, count), groups, facts)
        files.__dict__["first_row"] = columns.column(of_first, count + 1)  # in the memory that the ranks share
        if not origin.of_job:
            files._check()
        return files

    def _check(self) -> None:
        """Raise ``FormatError`` unless the columns fit to one another, and the first file of each group to its rows."""
        sizes = np.array([len(group) for group in self._groups], np.int64)
        groups, positions = self._numbers.group, self._numbers.position
        known = not len(self) or (int(groups.min()) >= 0 and int(groups.max()) < len(sizes))
        if not known or int(sizes.sum()) != len(self):
            raise damaged("files of groups that there are not")
        if len(self) and (int(positions.min()) < 0 or bool((positions >= sizes[groups]).any())):
            raise damaged("positions of files that their groups do not have")
        first = self.first_row
        if int(first[0]) or not np.array_equal(np.diff(first), self.rows) or bool((first[1:] < first[:-1]).any()):
            raise damaged("files with a negative number of rows, or first rows that are not those of the files")
        for file in self.exemplars:
            check_file(file, self.facts)

    @property
    def exemplars(self) -> Iterator[FileIndex]:
        """Yield the first file of each group, with layouts like those of the others."""
        return map(self._made, np.flatnonzero(self._numbers.position == 0).tolist())

    def entry(self, number: int) -> FileIndex:
        return self._recent.made(number, lambda: self._made(number))

    def _made(self, number: int) -> FileIndex:
        path = self.paths[number]
        numbers = self._numbers
        layouts = self._groups[numbers.group[number]].made(int(numbers.position[number]), path)
        if not self._origin.of_job:
            trust = self._origin.trust.beside(path)
            for source in dict.fromkeys(sources_of(layouts)):
                if source != path:
                    trust.check_hdf5(source, path)
        return FileIndex(path, int(self.rows[number]), layouts, self.stamp(number))

    def stamp(self, number: int) -> Stamp | None:
        n = self._numbers
        if not n.known[number]:
            return None
        parts = self._groups[n.group[number]].parts
        told = self._origin.of_job or parts or is_url(self.paths[number])  # else by another job, perhaps of a copy
        return Stamp(int(n.size[number]), int(n.mtime_ns[number]), int(n.inode[number]) if told else NO_INODE, parts)

    @property
    def all_stamped(self) -> bool:
        return bool(self._numbers.known.all())

    @property
    def undescribed_class(self) -> str | None:
        """Class of a layout that has no descriptor, and cannot be stored; None if all have one."""
        return next(filter(None, (pickled_class(json.loads(group.described)) for group in self._groups)), None)

    @classmethod
    def joined(cls, tables: Sequence[FileColumns]) -> FileColumns:
        """Return the files of several tables of the same fields, one after the other."""
        filled = [table for table in tables if len(table)]
        if len(filled) < 2:
            return (filled or list(tables))[0]
        number_of: dict[Any, int] = {}
        members: list[list[Group]] = []
        moved: list[FileNumbers] = []
        for table in filled:
            numbers, before = [], []
            for one in table._groups:
                number = number_of.setdefault((one.described, one.parts), len(number_of))
                if number == len(members):
                    members.append([])
                numbers.append(number)
                before.append(sum(len(other) for other in members[number]))
                members[number].append(one)
            own = table._numbers
            position = np.array(before)[own.group] + own.position
            moved.append(replace(own, group=np.array(numbers)[own.group], position=position))
        return cls(
            PathTable.joined([table.paths for table in filled]),
            FileNumbers.joined(moved),
            [Group.joined(of_descriptor) for of_descriptor in members],
            {name: LayoutFacts.joined([table.facts[name] for table in filled]) for name in filled[0].facts},
        )


def _of_bytes(data: bytes, origin: Origin) -> FileColumns:
    """Return the table of another process of this job."""
    return FileColumns.from_json(*unpacked(data, of_job=True), origin)


def check_file(file: FileIndex, names: Collection[str]) -> None:
    """Raise ``FormatError`` unless a file of a stored index has layouts of these fields, of its number of rows."""
    layouts = file.layouts
    if not isinstance(layouts, dict) or set(layouts) != set(names):
        raise damaged(f"layouts that are not those of {sorted(names)!r:.200}")
    for name, layout in layouts.items():
        try:
            fits = callable(layout.requests) and layout.rows == file.rows
        except Exception as error:  # of any kind: numbers may have the place of layouts
            raise damaged(f"no layout of {name!r}: {error!s:.100}") from error
        if not fits:
            raise damaged(f"a layout of {name!r} that does not have {file.rows} rows")


TABLE_FILES = 256  # that are kept as objects until they become columns


class FileColumnsBuilder:
    """Collector of files, most of which are kept in columns at any time."""

    def __init__(self) -> None:
        self._tables: list[FileColumns] = []
        self._files: list[FileIndex] = []

    def add(self, file: FileIndex) -> None:
        """Add a file; all have the same fields.

        Raises
        ------
        Exception : a layout has no descriptor, and cannot be pickled.
        """
        self._files.append(file)
        if len(self._files) == TABLE_FILES:
            self._tables.append(_columns_of(self._files))
            self._files.clear()

    def build(self) -> FileColumns:
        """Return the table of the files."""
        rest = [_columns_of(self._files)] if self._files or not self._tables else []
        return FileColumns.joined([*self._tables, *rest])


def columns_of(files: Iterable[FileIndex]) -> FileColumns:
    """Return the table of these files in columns."""
    if isinstance(files, FileColumns):
        return files
    builder = FileColumnsBuilder()
    for file in files:
        builder.add(file)
    return builder.build()


def _columns_of(files: Sequence[FileIndex]) -> FileColumns:
    members: dict[tuple[Descriptor, tuple[str, ...]], list[Separated]] = {}
    number_of: dict[Any, int] = {}
    group, position = [], []
    for file in files:
        separated = separate(dict(file.layouts), file.path)
        kind = separated.described, file.stamp.parts if file.stamp else ()
        alike = members.setdefault(kind, [])
        group.append(number_of.setdefault(kind, len(number_of)))
        position.append(len(alike))
        alike.append(separated)
    return FileColumns(
        PathTable.of([file.path for file in files]),
        FileNumbers.of(files, group, position),
        [Group.of(alike, parts) for (_, parts), alike in members.items()],
        FileList(files).facts,
    )


def sources_of(value: Any, visited: set[Any] | None = None) -> Iterator[str]:
    """Yield the paths of the files that a layout opens, and those of all that it consists of; maybe more than once.

    What thousands of columns share, such as the table that they are columns of, is looked at once.

    Whatever names such a file has a method ``sources``, see `Layout.sources`.

    Parameters
    ----------
    value : a layout, or what one consists of: objects, and sequences and mappings of them.
    visited : objects that were looked at, of those that are equal to themselves alone.

    Examples
    --------
    >>> from matex_data.abc import Layout
    >>> class Rows(Layout):
    ...     rows, block_rows, requests = 1, 1, None
    ...
    ...     def sources(self):
    ...         return ["/data/other.bin"]
    >>> list(sources_of({"x": Rows()}))
    ['/data/other.bin']
    """
    visited = set() if visited is None else visited
    kind: Any = type(value)
    if kind.__eq__ is object.__eq__:
        if value in visited:
            return
        visited.add(value)
    own = getattr(value, "sources", None)
    if callable(own):
        yield from own()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from sources_of(getattr(value, field.name), visited)
    elif isinstance(value, tuple | list | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from sources_of(item, visited)
