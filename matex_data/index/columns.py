"""Columns of integers of many files, in little memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
        return {"values": columns.add(self.values, fold=short), "ends": columns.add(self.ends)}

    @classmethod
    def from_json(cls, value: Any, columns: ColumnReader, count: int) -> Lists:
        """Return ``count`` lists of a value of JSON.

        Raises
        ------
        FormatError : it is damaged.
        """
        values, ends = member(value, "values", "ends")
        lists = cls(columns.column(values, most_folded=LONG_LIST * count), columns.column(ends, count))
        check_ends(lists.ends, len(lists.values))
        return lists

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> Array:
        """Return a list as a view."""
        return self.values[int(self.ends[number - 1]) if number else 0 : int(self.ends[number])]

    def __iter__(self) -> Iterator[Array]:
        return (self[number] for number in range(len(self)))


def check_ends(ends: Array, total: int) -> None:
    """Raise ``FormatError`` unless these are ends of lists with ``total`` values."""
    if len(ends) and (int(ends[0]) < 0 or int(ends[-1]) > total or bool((ends[1:] < ends[:-1]).any())):
        raise damaged(f"lists that end at {int(ends.max())} of {total} values")
