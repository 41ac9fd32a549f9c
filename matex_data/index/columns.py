"""Columns of numbers of many files, in little memory, and as bytes: in files, messages and shared memory.

The bytes have a description in JSON in front. Columns begin at 64-byte borders, and are views once the bytes are
mapped: in one copy for all processes that map them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self, TypeVar, overload

import numpy as np

from matex_data._types import Array, Integers
from matex_data.index.descriptors import OF_JOB, Maker, Origin, Separated, damaged
from matex_data.locks import cached_property

FAMILY = b"matex index "
MAGIC = FAMILY + b"2\n\0\0"
_HEADER = struct.Struct("<16s16sQ")  # magic, digest of all that follows it, bytes of the description
_ALIGNMENT = 64
_DTYPE = re.compile(r"[<>|]([iu][1248]|b1)")


class ColumnWriter:
    """Columns of integers or booleans, and where they lie."""

    def __init__(self) -> None:
        self._parts: list[bytes | memoryview] = []
        self._end = 0

    def add(self, column: Array, fold: bool = True) -> Any:
        """Add a column, and return its description for `ColumnReader.column`.

        Parameters
        ----------
        column : 1-D.
        fold : write equal numbers once.
        """
        described = {"dtype": column.dtype.str, "count": len(column)}
        if fold and len(column) and column.strides == (0,):
            return {**described, "all": column[0].item()}
        raw = np.ascontiguousarray(column).data.cast("B") if column.nbytes else memoryview(b"")
        gap = -self._end % _ALIGNMENT
        self._parts += [bytes(gap), raw]
        self._end += gap + raw.nbytes
        return {**described, "at": self._end - raw.nbytes}

    def packed(self, description: Any) -> bytes:
        """Return a description, which can be written as JSON, and the columns as bytes."""
        text = json.dumps(description, separators=(",", ":")).encode()
        body = b"".join([text, bytes(-(_HEADER.size + len(text)) % _ALIGNMENT), *self._parts])
        return _HEADER.pack(MAGIC, hashlib.blake2b(body, digest_size=16).digest(), len(text)) + body


class ColumnReader:
    """Columns of bytes that may be damaged, or made to do harm.

    Parameters
    ----------
    memory : of the columns.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def column(self, described: Any, count: int | None = None, kinds: str = "iu", most_folded: int = 0) -> Array:
        """Return a column as a view of the bytes.

        Parameters
        ----------
        described : what `ColumnWriter.add` has returned.
        count : that it must have; None: any.
        kinds : of its dtype.
        most_folded : without ``count``, the count that equal numbers may have which are stored once.

        Raises
        ------
        FormatError : there is no such column.
        """
        match described:
            case {"dtype": str(text), "count": int(length)} if _DTYPE.fullmatch(text) and length >= 0:
                dtype = np.dtype(text)
            case _:
                raise damaged(f"{described!r:.100} instead of a column")
        if dtype.kind not in kinds or (count is not None and length != count):
            raise damaged(f"{length} numbers of {dtype} instead of {'' if count is None else count} of {kinds!r}")
        match described:
            case {"all": bool(value) | int(value)} if length <= (most_folded if count is None else count):
                return np.broadcast_to(_number(value, dtype), (length,))
            case {"at": int(at)} if (
                at >= 0 and at % _ALIGNMENT == 0 and at + length * dtype.itemsize <= len(self._memory)
            ):
                return np.frombuffer(self._memory, dtype, length, at) if length else np.empty(0, dtype)
        raise damaged(f"a column beyond the end of the bytes: {described!r:.100}")


def _number(value: int, dtype: np.dtype[Any]) -> Array:
    try:
        return np.array([value], dtype)
    except OverflowError as error:
        raise damaged(f"{value} as {dtype}") from error


def unpacked(data: bytes | memoryview, of_job: bool = False) -> tuple[Any, ColumnReader]:
    """Return the description and the columns of bytes.

    Parameters
    ----------
    data : as `ColumnWriter.packed` returns them.
    of_job : they come from a rank of this job, and are not compared with their checksum.

    Raises
    ------
    FormatError : the bytes are damaged.
    """
    view = memoryview(data).cast("B").toreadonly()
    if view.nbytes < _HEADER.size:
        raise damaged("it ends within its header")
    magic, digest, length = _HEADER.unpack_from(view)
    body = view[_HEADER.size :]
    if magic != MAGIC:
        raise damaged(f"it begins with {magic!r}")
    if not of_job and hashlib.blake2b(body, digest_size=16).digest() != digest:
        raise damaged("its checksum is wrong")
    try:
        description = json.loads(body[:length].tobytes())
    except (ValueError, RecursionError) as error:
        raise damaged(f"a description that is no JSON: {error!s:.100}") from error
    begin = _HEADER.size + length
    return description, ColumnReader(view[begin + -begin % _ALIGNMENT :])


def member(description: Any, *names: str) -> Sequence[Any]:
    """Return the values of the members of an object of JSON, which must have them and no others.

    Raises
    ------
    FormatError : it has others.
    """
    if not isinstance(description, dict) or set(description) != set(names):
        raise damaged(f"{description!r:.100} instead of an object with {list(names)}")
    return [description[name] for name in names]


LONG_LIST = 4096  # integers of a list, on average, from which they keep their dtype: a list is then a view, not a copy


def compact(column: Array) -> Array:
    """Return a column of integers or booleans in the least memory: one number if all are equal, or a smaller dtype.

    >>> compact(np.array([7, 7, 7])).strides, compact(np.array([3, 300])).dtype
    ((0,), dtype('uint16'))
    """
    if not len(column):
        return column
    low, high = column.min(), column.max()
    if low == high:
        return np.broadcast_to(column[:1].copy(), column.shape)
    dtype = np.result_type(np.min_scalar_type(low), np.min_scalar_type(high))
    return column.astype(dtype) if dtype.kind in "iub" and dtype.itemsize < column.itemsize else column


def join_columns(columns: Sequence[Array]) -> Array:
    """Return columns, of whatever widths, one after the other."""
    return compact(np.concatenate(columns)) if len(columns) > 1 else columns[0]


@dataclass(frozen=True, eq=False)
class ColumnTable:
    """Columns of integers or booleans with a number for each file; a subclass names them.

    Attributes
    ----------
    kinds : kinds of the dtypes of each column, for those that come from a stored index.
    """

    kinds: ClassVar[tuple[str, ...]]

    @classmethod
    def _names(cls) -> list[str]:
        return [column.name for column in fields(cls)]

    @classmethod
    def joined(cls, tables: Sequence[Self]) -> Self:
        """Return the numbers of the files of several tables, one after the other."""
        return cls(*(join_columns([getattr(table, name) for table in tables]) for name in cls._names()))

    def to_json(self, columns: ColumnWriter) -> Any:
        """Return the table as a value of JSON."""
        return {name: columns.add(getattr(self, name)) for name in self._names()}

    @classmethod
    def from_json(cls, value: Any, columns: ColumnReader, count: int) -> Self:
        """Return the table of ``count`` files of a value of JSON; raise ``FormatError`` if it is damaged."""
        described = zip(member(value, *cls._names()), cls.kinds, strict=True)
        return cls(*(columns.column(column, count, kind) for column, kind in described))


@dataclass(frozen=True, eq=False)
class Lists:
    """Lists of integers, such as the tables of chunks of many files, one after the other.

    Parameters
    ----------
    values : integers of all lists.
    ends : integers[lists], end of each list among the values.
    """

    values: Array
    ends: Integers

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> Lists:
        """Return the lists of these arrays."""
        return cls._with_lengths(np.concatenate(arrays), np.array([len(array) for array in arrays], np.int64))

    @classmethod
    def joined(cls, objects: Sequence[Lists]) -> Lists:
        """Return the lists of several objects, one after the other."""
        lengths = np.concatenate([np.diff(lists.ends.astype(np.int64), prepend=0) for lists in objects])
        return cls._with_lengths(np.concatenate([lists.values for lists in objects]), lengths)

    @classmethod
    def _with_lengths(cls, values: Array, lengths: Integers) -> Lists:
        long = len(values) > LONG_LIST * len(lengths)
        return cls(values if long else compact(values), compact(np.cumsum(lengths)))

    def to_json(self, columns: ColumnWriter) -> Any:
        """Return the lists as a value of JSON."""
        short = len(self.values) <= LONG_LIST * len(self.ends)
        return {"values": columns.add(self.values, fold=short), "ends": columns.add(self.ends, fold=False)}

    @classmethod
    def from_json(cls, value: Any, columns: ColumnReader, count: int | None = None) -> Lists:
        """Return the lists of a value of JSON, ``count`` of them; None: any number.

        Raises
        ------
        FormatError : it is damaged.
        """
        values, ends = member(value, "values", "ends")
        behind = columns.column(ends, count)
        lists = cls(columns.column(values, most_folded=LONG_LIST * len(behind)), behind)
        total = len(lists.values)
        if len(behind) and (int(behind[0]) < 0 or int(behind[-1]) > total or bool((behind[1:] < behind[:-1]).any())):
            raise damaged(f"lists that end at {int(behind.max())} of {total} values")
        return lists

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> Array:
        """Return a list as a view."""
        return self.values[int(self.ends[number - 1]) if number else 0 : int(self.ends[number])]

    def __iter__(self) -> Iterator[Array]:
        return (self[number] for number in range(len(self)))


Entry_co = TypeVar("Entry_co", covariant=True)


class EntryTable(Sequence[Entry_co], ABC):
    """Sequence whose entries are made when they are needed."""

    @abstractmethod
    def entry(self, number: int) -> Entry_co:
        """Return the entry of a number from 0 on."""

    @overload
    def __getitem__(self, number: int) -> Entry_co: ...
    @overload
    def __getitem__(self, number: slice) -> list[Entry_co]: ...
    def __getitem__(self, number: int | slice) -> Entry_co | list[Entry_co]:
        if isinstance(number, slice):
            return [self.entry(i) for i in range(*number.indices(len(self)))]
        return self.entry(range(len(self))[number])

    def __iter__(self) -> Iterator[Entry_co]:
        return map(self.entry, range(len(self)))


@dataclass(frozen=True, eq=False)
class PathTable(EntryTable[str]):
    """Paths, of which the common beginning is kept once.

    Parameters
    ----------
    prefix : common beginning of all paths.
    endings : what is left of each path, as bytes of the file system.

    Examples
    --------
    >>> table = PathTable.of(["data/a.h5", "data/bc.h5"])
    >>> table.prefix, table[1], list(table)
    ('data/', 'data/bc.h5', ['data/a.h5', 'data/bc.h5'])
    """

    prefix: str
    endings: Lists

    @classmethod
    def of(cls, paths: Sequence[str]) -> PathTable:
        """Return the table of these paths."""
        prefix = os.path.commonprefix(paths)  # noqa: RUF071 (cut to whole names below)
        prefix = prefix[: prefix.rfind(os.sep) + 1]
        endings = [os.fsencode(path[len(prefix) :]) for path in paths]
        ends = np.cumsum([len(ending) for ending in endings], dtype=np.int64)
        return cls(prefix, Lists(np.frombuffer(b"".join(endings), np.uint8), compact(ends)))

    def to_json(self, columns: ColumnWriter) -> Any:
        """Return the table as a value of JSON."""
        return {"prefix": self.prefix, "endings": self.endings.to_json(columns)}

    @classmethod
    def from_json(cls, value: Any, columns: ColumnReader) -> PathTable:
        """Return the table of a value of JSON; raise ``FormatError`` if it is damaged."""
        prefix, endings = member(value, "prefix", "endings")
        table = cls(prefix, Lists.from_json(endings, columns))
        if not isinstance(prefix, str) or table.endings.values.dtype != np.uint8:
            raise damaged(f"{value!r:.100} instead of paths")
        return table

    def __len__(self) -> int:
        return len(self.endings)

    def entry(self, number: int) -> str:
        return self.prefix + os.fsdecode(self.endings[number].tobytes())

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return False
        if isinstance(other, PathTable) and self.prefix == other.prefix:
            mine, theirs = self.endings, other.endings
            return np.array_equal(mine.ends, theirs.ends) and np.array_equal(mine.values, theirs.values)
        return list(self) == list(other)

    def __hash__(self) -> int:
        return hash((self.prefix, len(self)))

    @classmethod
    def joined(cls, tables: Sequence[PathTable]) -> PathTable:
        """Return the paths of several tables, one after the other."""
        if len({table.prefix for table in tables}) > 1:
            return cls.of([path for table in tables for path in table])
        return cls(tables[0].prefix, Lists.joined([table.endings for table in tables]))


@dataclass(frozen=True, eq=False)
class Group:
    """Objects of one descriptor: layouts of files.

    Parameters
    ----------
    described : descriptor of the objects, as JSON; see `descriptors.Separated`.
    numbers : a column for each number.
    arrays : the lists of each array.
    origin : of the descriptor.
    parts : of the stamps of the files, see `Stamp`; most have none.

    Examples
    --------
    >>> from matex_data.index.descriptors import separate
    >>> group = Group.of([separate({"begin": n, "of": "x" * n}, "x" * n) for n in (5, 7)])
    >>> group.made(1, "abc")
    {'begin': 7, 'of': 'abc'}
    """

    count: int
    described: str
    numbers: Sequence[Array]
    arrays: Sequence[Lists]
    origin: Origin = OF_JOB
    parts: tuple[str, ...] = ()

    @classmethod
    def of(cls, members: Sequence[Separated], parts: tuple[str, ...] = ()) -> Group:
        """Return the group of objects of equal descriptors, at least one."""
        numbers = zip(*(member.numbers for member in members), strict=True)
        arrays = zip(*(member.arrays for member in members), strict=True)
        return cls(
            len(members),
            json.dumps(members[0].described, separators=(",", ":")),
            [compact(np.array(column, np.int64)) for column in numbers],
            [Lists.of(lists) for lists in arrays],
            parts=parts,
        )

    @classmethod
    def joined(cls, groups: Sequence[Group]) -> Group:
        """Return the objects of groups of one descriptor, and of the same parts, as one group, in order."""
        first = groups[0]
        if len(groups) == 1:
            return first
        numbers = [join_columns(columns) for columns in zip(*(group.numbers for group in groups), strict=True)]
        arrays = [Lists.joined(lists) for lists in zip(*(group.arrays for group in groups), strict=True)]
        return cls(sum(map(len, groups)), first.described, numbers, arrays, first.origin, first.parts)

    def __len__(self) -> int:
        return self.count

    def made(self, number: int, text: str) -> Any:
        """Return one of the objects, with ``text`` as its own.

        Raises
        ------
        FormatError : the descriptor is damaged, or of another release.
        """
        numbers = [int(column[number]) for column in self._varying]
        return self._maker.make(numbers, [lists[number] for lists in self.arrays], text)

    @cached_property
    def _maker(self) -> Maker:
        known = [None if column.strides != (0,) else int(column[0]) for column in self.numbers]
        try:
            descriptor = json.loads(self.described)
        except (ValueError, RecursionError) as error:
            raise damaged(f"a descriptor that is no JSON: {error!s:.100}") from error
        return Maker(descriptor, known, len(self.arrays), self.origin)

    @cached_property
    def _varying(self) -> list[Array]:
        return [column for column in self.numbers if column.strides != (0,)]

    def to_json(self, columns: ColumnWriter) -> Any:
        """Return the group as a value of JSON."""
        return {
            "count": self.count,
            "descriptor": self.described,
            "numbers": [columns.add(column) for column in self.numbers],
            "arrays": [lists.to_json(columns) for lists in self.arrays],
            "parts": self.parts,
        }

    @classmethod
    def from_json(cls, value: Any, columns: ColumnReader, most: int, origin: Origin) -> Group:
        """Return the group of a value of JSON, of at most ``most`` objects; raise ``FormatError`` if it is damaged."""
        count, descriptor, numbers, arrays, parts = member(value, "count", "descriptor", "numbers", "arrays", "parts")
        types = [type(count), type(descriptor), type(numbers), type(arrays), type(parts)]
        if types != [int, str, list, list, list] or not 1 <= count <= most or {*map(type, parts)} - {str}:
            raise damaged(f"{value!r:.100} instead of a group of files")
        of_numbers = [columns.column(column, count) for column in numbers]
        lists = [Lists.from_json(one, columns, count) for one in arrays]
        return cls(count, descriptor, of_numbers, lists, origin, tuple(parts))
