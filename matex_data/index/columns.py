"""Columns of integers of many files, in little memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self, overload

import numpy as np

from matex_data._types import Array, Integers
from matex_data.index.container import ColumnReader, ColumnWriter, member
from matex_data.index.descriptors import damaged

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


def joined(columns: Sequence[Array]) -> Array:
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
        return cls(*(joined([getattr(table, name) for table in tables]) for name in cls._names()))

    def to_json(self, columns: ColumnWriter) -> Any:
        """Return the table as a value of JSON."""
        return {name: columns.add(getattr(self, name)) for name in self._names()}

    @classmethod
    def from_json(cls, value: Any, columns: ColumnReader, count: int) -> Self:
        """Return the table of ``count`` files of a value of JSON.

        Raises
        ------
        FormatError : it is damaged.
        """
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
    def joined(cls, several: Sequence[Lists]) -> Lists:
        """Return the lists of several objects, one after the other."""
        lengths = np.concatenate([np.diff(lists.ends.astype(np.int64), prepend=0) for lists in several])
        return cls._with_lengths(np.concatenate([lists.values for lists in several]), lengths)

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
        found = columns.column(ends, count)
        lists = cls(columns.column(values, most_folded=LONG_LIST * len(found)), found)
        total = len(lists.values)
        if len(found) and (int(found[0]) < 0 or int(found[-1]) > total or bool((found[1:] < found[:-1]).any())):
            raise damaged(f"lists that end at {int(found.max())} of {total} values")
        return lists

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> Array:
        """Return a list as a view."""
        return self.values[int(self.ends[number - 1]) if number else 0 : int(self.ends[number])]

    def __iter__(self) -> Iterator[Array]:
        return (self[number] for number in range(len(self)))


@dataclass(frozen=True, eq=False)
class PathTable(Sequence[str]):
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
        """Return the table of a value of JSON.

        Raises
        ------
        FormatError : it is damaged.
        """
        prefix, endings = member(value, "prefix", "endings")
        table = cls(prefix, Lists.from_json(endings, columns))
        if not isinstance(prefix, str) or table.endings.values.dtype != np.uint8:
            raise damaged(f"{value!r:.100} instead of paths")
        return table

    def __len__(self) -> int:
        return len(self.endings)

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> list[str]: ...
    def __getitem__(self, number: int | slice) -> str | list[str]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        return self.prefix + os.fsdecode(self.endings[range(len(self))[number]].tobytes())

    def __iter__(self) -> Iterator[str]:
        return (self[number] for number in range(len(self)))

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
