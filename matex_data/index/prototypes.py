"""Objects that differ in numbers only: one prototype of them, and the numbers of each.

The prototype is the pickle of an object without its numbers, so that any object that can be pickled has one. A data set
of a million files then has one prototype for all of its layouts, or a few, and columns of their numbers.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from matex_data._types import Array
from matex_data.index.columns import Folded, Lists, folded, joined, unfolded

_INTEGER, _FLOAT, _TEXT = range(3)  # what stands in the pickle for a number, and for the object's own text
_LIMITS = np.iinfo(np.int64)


@dataclass(frozen=True)
class Separated:
    """Object without its numbers, and these.

    Parameters
    ----------
    prototype : pickle of the object, with marks where the numbers were.
    numbers : of the object, in the order of the marks; of a float, the integer that has its bits.
    arrays : 1-D arrays of integers of the object, likewise.

    Examples
    --------
    >>> first, second = (separate({"begin": n, "of": "x" * n}, "x" * n) for n in (5, 7))
    >>> first.prototype == second.prototype, second.numbers
    (True, [7])
    >>> join(second, "abc")
    {'begin': 7, 'of': 'abc'}
    """

    prototype: bytes
    numbers: Sequence[int]
    arrays: Sequence[Array]


def separate(value: Any, text: str) -> Separated:
    """Separate an object that can be pickled from its numbers.

    Parameters
    ----------
    value : the object. Arrays of integers that it has twice are two arrays of their own afterwards.
    text : text of this object alone, such as the path of its file, which becomes a mark as well.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream, text)
    pickler.dump(value)
    return Separated(stream.getvalue(), pickler.numbers, pickler.arrays)


def join(separated: Separated, text: str) -> Any:
    """Return an object that equals the one that was separated, with ``text`` in place of its own."""
    return _Unpickler(separated, text).load()


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, text: str) -> None:
        super().__init__(stream, protocol=5)
        self.numbers: list[int] = []
        self.arrays: list[Array] = []
        self._text = text

    def persistent_id(self, value: Any) -> Any:
        """Return the mark of a number, and keep the number; None: the value stays in the pickle."""
        kind = type(value)
        if kind is int and _LIMITS.min <= value <= _LIMITS.max:
            self.numbers.append(value)
            return _INTEGER
        if kind is str:
            return _TEXT if value == self._text else None
        if kind is float:
            self.numbers += struct.unpack("=q", struct.pack("=d", value))
            return _FLOAT
        if kind is np.ndarray and value.dtype.kind in "iu" and value.ndim == 1:
            self.arrays.append(value)
            return value.dtype.str, False
        if isinstance(value, np.dtype) and value.isbuiltin == 1 and value.metadata is None and not value.hasobject:
            return value.str, True  # its own pickle has eight numbers
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, separated: Separated, text: str) -> None:
        super().__init__(io.BytesIO(separated.prototype))
        self._numbers = iter(separated.numbers)
        self._arrays = iter(separated.arrays)
        self._text = text

    def persistent_load(self, mark: Any) -> Any:
        """Return what the mark stands for."""
        if mark == _INTEGER:
            return next(self._numbers)
        if mark == _TEXT:
            return self._text
        if mark == _FLOAT:
            return struct.unpack("=d", struct.pack("=q", next(self._numbers)))[0]
        dtype, alone = mark
        return np.dtype(dtype) if alone else np.ascontiguousarray(next(self._arrays), dtype)


@dataclass(frozen=True, eq=False)
class Group:
    """Objects of one prototype.

    Parameters
    ----------
    count : number of objects.
    prototype : of the objects; see `Separated`.
    numbers : a column for each number.
    arrays : the lists of each array.
    """

    count: int
    prototype: bytes
    numbers: Sequence[Array]
    arrays: Sequence[Lists]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Separated:
        """Return one of the objects, separated."""
        numbers = [int(column[number]) for column in self.numbers]
        return Separated(self.prototype, numbers, [lists[number] for lists in self.arrays])

    def __reduce__(self) -> tuple[Any, ...]:
        return _group, (self.count, self.prototype, [folded(column) for column in self.numbers], self.arrays)


def _group(count: int, prototype: bytes, numbers: Sequence[Folded], arrays: Sequence[Lists]) -> Group:
    return Group(count, prototype, [unfolded(column) for column in numbers], arrays)


def merge_groups(groups: Sequence[Group]) -> Group:
    """Return the objects of several groups of one prototype as one group, in order."""
    first = groups[0]
    if len(groups) == 1:
        return first
    numbers = [joined(columns) for columns in zip(*(group.numbers for group in groups), strict=True)]
    arrays = [Lists.joined(lists) for lists in zip(*(group.arrays for group in groups), strict=True)]
    return Group(sum(map(len, groups)), first.prototype, numbers, arrays)
