"""Many paths in little memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from matex_data._types import Array, Bytes
from matex_data.index.columns import check_ends, compact
from matex_data.index.container import ColumnReader, ColumnWriter, member
from matex_data.index.descriptors import damaged


@dataclass(frozen=True, eq=False)
class PathTable(Sequence[str]):
    """Paths, of which the common beginning is kept once.

    Parameters
    ----------
    prefix : common beginning of all paths.
    endings : uint8[n], what is left of the paths, one after the other, as bytes of the file system.
    ends : integers[paths], end of each of them.

    Examples
    --------
    >>> table = PathTable.of(["data/a.h5", "data/bc.h5"])
    >>> table.prefix, table[1], list(table)
    ('data/', 'data/bc.h5', ['data/a.h5', 'data/bc.h5'])
    """

    prefix: str
    endings: Bytes
    ends: Array

    @classmethod
    def of(cls, paths: Sequence[str]) -> PathTable:
        """Return the table of these paths."""
        prefix = os.path.commonprefix(paths)  # noqa: RUF071 (cut to whole names below)
        prefix = prefix[: prefix.rfind(os.sep) + 1]
        endings = [os.fsencode(path[len(prefix) :]) for path in paths]
        ends = np.cumsum([len(ending) for ending in endings], dtype=np.int64)
        return cls(prefix, np.frombuffer(b"".join(endings), np.uint8), compact(ends))

    def to_json(self, columns: ColumnWriter) -> Any:
        """Return the table as a value of JSON."""
        endings = columns.add(self.endings, fold=False)
        return {"prefix": self.prefix, "endings": endings, "ends": columns.add(self.ends, fold=False)}

    @classmethod
    def from_json(cls, value: Any, columns: ColumnReader) -> PathTable:
        """Return the table of a value of JSON.

        Raises
        ------
        FormatError : it is damaged.
        """
        prefix, endings, ends = member(value, "prefix", "endings", "ends")
        table = cls(prefix, columns.column(endings, kinds="u"), columns.column(ends))
        if not isinstance(prefix, str) or table.endings.itemsize != 1:
            raise damaged(f"{value!r:.100} instead of paths")
        check_ends(table.ends, len(table.endings))
        return table

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> list[str]: ...
    def __getitem__(self, number: int | slice) -> str | list[str]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        begin = int(self.ends[number - 1]) if number else 0
        return self.prefix + os.fsdecode(self.endings[begin : int(self.ends[number])].tobytes())

    def __iter__(self) -> Iterator[str]:
        return (self[number] for number in range(len(self)))

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return False
        if isinstance(other, PathTable) and self.prefix == other.prefix:
            return np.array_equal(self.ends, other.ends) and np.array_equal(self.endings, other.endings)
        return list(self) == list(other)

    def __hash__(self) -> int:
        return hash((self.prefix, len(self)))

    @classmethod
    def joined(cls, tables: Sequence[PathTable]) -> PathTable:
        """Return the paths of several tables, one after the other."""
        if len({table.prefix for table in tables}) > 1:
            return cls.of([path for table in tables for path in table])
        lengths = [np.diff(table.ends.astype(np.int64), prepend=0) for table in tables]
        endings = np.concatenate([table.endings for table in tables])
        return cls(tables[0].prefix, endings, compact(np.cumsum(np.concatenate(lengths))))
