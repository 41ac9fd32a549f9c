"""Files and samples of several data sets, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from matex_data._types import Integers
from matex_data.index.chosen import Chosen, Samples
from matex_data.index.files import FileIndex, FileTable, LayoutFacts
from matex_data.index.paths import PathTable
from matex_data.index.runs import Runs
from matex_data.index.stamps import Stamp

TILE = 1 << 20  # samples whose numbers are computed at once


class JoinedFiles(FileTable):
    """Files of several tables with layouts for the same fields, one table after the other.

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
        if filled and all(table.has_facts for table in filled):
            names = filled[0].facts
            self.__dict__["facts"] = {n: LayoutFacts.joined([table.facts[n] for table in filled]) for n in names}

    def __reduce__(self) -> tuple[Any, ...]:
        return JoinedFiles, (self._tables,)

    def _entry(self, number: int) -> FileIndex:
        table = self._table_of(number)
        return self._tables[table][number - int(self._first[table])]

    def stamp(self, number: int) -> Stamp | None:
        table = self._table_of(number)
        return self._tables[table].stamp(number - int(self._first[table]))

    def _table_of(self, number: int) -> int:
        return int(np.searchsorted(self._first, number, side="right")) - 1


def join_samples(sets: Sequence[Samples], first: Sequence[int], total: int) -> Samples:
    """Return the samples of all sets, which are ascending.

    Parameters
    ----------
    sets : of samples, each counted from the ``first`` sample of its own.
    first : ascending number of the first sample of each set among all.
    total : number of all samples, chosen or not.

    Examples
    --------
    >>> runs = join_samples([Runs(np.array([1]), np.array([2])), Runs(np.array([0]), np.array([4]))], [0, 5], 9)
    >>> runs.start.tolist(), runs.count.tolist()
    ([1, 5], [2, 4])
    """
    runs = [samples for samples in sets if isinstance(samples, Runs)]
    if len(runs) == len(sets):
        start = np.concatenate([samples.start + begin for samples, begin in zip(runs, first, strict=True)])
        count = np.concatenate([samples.count for samples in runs])
        return Runs(start[count > 0], count[count > 0])
    mask = np.zeros(total, bool)
    for samples, begin in zip(sets, first, strict=True):
        for low in range(0, samples.total, TILE):
            mask[begin + samples.numbers(np.arange(low, min(low + TILE, samples.total)))] = True
    return Chosen.of(mask)


def within(samples: Samples, begin: int, end: int) -> Samples:
    """Return those of ascending samples whose numbers are at least ``begin`` and below ``end``."""
    if isinstance(samples, Chosen):
        low, high = samples.rank(np.array([begin, end], np.int64)).tolist()
        return samples.at(Runs(np.array([low]), np.array([high - low])))
    start = np.maximum(samples.start, begin)
    count: Integers = np.minimum(samples.start + samples.count, end) - start
    return Runs(start[count > 0], count[count > 0])
