"""Samples of several data sets, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from matex_data.index.chosen import Chosen, Samples
from matex_data.index.files import JoinedFiles
from matex_data.index.model import Derivation, Finish, Index, Read, Wanted
from matex_data.index.runs import Runs, cut

TILE = 1 << 20  # samples whose numbers are computed at once


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


def join_indexes(indexes: Sequence[Index]) -> Index:
    """Return one index of the samples of all, one after the other, which have the same fields.

    Static arrays and facts are those of the first one.
    """
    first = indexes[0]
    selected = [index.select(list(first.fields)) for index in indexes]
    made = Joined(tuple(selected)) if any(index.made is not None for index in selected) else None
    return Index(first.fields, JoinedFiles([index.files for index in selected]), first.static, first.facts, made)


@dataclass(frozen=True, eq=False)
class Joined(Derivation):
    """Samples of indexes with the same fields, one after the other.

    Parameters
    ----------
    bases : the indexes.
    """

    bases: tuple[Index, ...]

    def on(self, bases: Sequence[Index]) -> Joined:
        return Joined(tuple(bases))

    def plan(self, wanted: Wanted, read: Read, epoch: int) -> Finish | None:
        borders = np.cumsum([0, *map(len, self.bases)])
        runs = cut(wanted.runs, borders)
        base = np.searchsorted(borders, runs.start, side="right") - 1
        finishes = []
        for number in np.unique(base).tolist():
            own = np.flatnonzero(base == number)
            first = int(borders[number])
            of_base = Runs(runs.start[own] - first, runs.count[own])
            rows = wanted.destination[runs.first[own[0]] : runs.first[own[-1] + 1]]
            finishes.append(read(number, Wanted(of_base, rows, wanted.arrays, wanted.first + first)))
        return all_of(finishes)


def all_of(finishes: Sequence[Finish | None]) -> Finish | None:
    """Return one function that calls all of these that there are, in order."""
    given = [finish for finish in finishes if finish is not None]
    if len(given) < 2:
        return given[0] if given else None

    def finish() -> None:
        for one in given:
            one()

    return finish
