"""Groups of objects that differ in numbers only: one descriptor, and columns of the numbers of all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from matex_data._types import Array
from matex_data.index.columns import Lists, compact, joined
from matex_data.index.container import ColumnReader, ColumnWriter, member
from matex_data.index.descriptors import OF_JOB, Maker, Origin, Separated, damaged
from matex_data.locks import cached_property


@dataclass(frozen=True, eq=False)
class Group:
    """Objects of one descriptor.

    Parameters
    ----------
    count : number of objects.
    described : descriptor of the objects, as JSON; see `descriptors.Separated`.
    numbers : a column for each number.
    arrays : the lists of each array.
    origin : of the descriptor.

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

    @classmethod
    def of(cls, members: Sequence[Separated]) -> Group:
        """Return the group of objects of equal descriptors, at least one."""
        numbers = zip(*(member.numbers for member in members), strict=True)
        arrays = zip(*(member.arrays for member in members), strict=True)
        return cls(
            len(members),
            json.dumps(members[0].described, separators=(",", ":")),
            [compact(np.array(column, np.int64)) for column in numbers],
            [Lists.of(lists) for lists in arrays],
        )

    @classmethod
    def joined(cls, groups: Sequence[Group]) -> Group:
        """Return the objects of groups of one descriptor as one group, in order."""
        first = groups[0]
        if len(groups) == 1:
            return first
        numbers = [joined(columns) for columns in zip(*(group.numbers for group in groups), strict=True)]
        arrays = [Lists.joined(lists) for lists in zip(*(group.arrays for group in groups), strict=True)]
        return cls(sum(map(len, groups)), first.described, numbers, arrays, first.origin)

    def __len__(self) -> int:
        return self.count

    def made(self, number: int, text: str) -> Any:
        """Return one of the objects, with ``text`` as its own.

        Raises
        ------
        FormatError : the descriptor is damaged, or of another release.
        """
        numbers = [int(column[number]) for column in self._varying]
        maker = self._maker if self.count > 1 else self._new_maker()
        return maker.make(numbers, [lists[number] for lists in self.arrays], text)

    @cached_property
    def _maker(self) -> Maker:
        return self._new_maker()

    def _new_maker(self) -> Maker:
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
        }

    @classmethod
    def from_json(cls, value: Any, columns: ColumnReader, most: int, origin: Origin) -> Group:
        """Return the group of a value of JSON, of at most ``most`` objects.

        Raises
        ------
        FormatError : it is damaged.
        """
        count, descriptor, numbers, arrays = member(value, "count", "descriptor", "numbers", "arrays")
        types = [type(count), type(descriptor), type(numbers), type(arrays)]
        if types != [int, str, list, list] or not 1 <= count <= most:
            raise damaged(f"{value!r:.100} instead of a group of files")
        of_numbers = [columns.column(column, count) for column in numbers]
        lists = [Lists.from_json(one, columns, count) for one in arrays]
        return cls(count, descriptor, of_numbers, lists, origin)
