"""Samples of several data sets with the same fields, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from matex_data.errors import FormatError, PartitionError
from matex_data.fields import Schema, shown, unlike
from matex_data.index.computed import Computed
from matex_data.index.files import JoinedFiles
from matex_data.index.model import Derivation, Finish, Index, Read, Wanted
from matex_data.index.runs import Chosen, Runs, Samples, cut
from matex_data.memory import NAME as IN_MEMORY
from matex_data.reading.source import Source
from matex_data.sampling.split import Ties

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

    @property
    def raw(self) -> Schema:
        return self.bases[0].raw.fields

    def plan(self, wanted: Wanted, read: Read, epoch: int) -> Finish | None:
        borders = np.cumsum([0, *map(len, self.bases)])
        runs = cut(wanted.runs, borders)
        base = np.searchsorted(borders, runs.start, side="right") - 1
        finishes = []
        for number in np.unique(base).tolist():
            own = np.flatnonzero(base == number)
            first = int(borders[number])
            base_runs = Runs(runs.start[own] - first, runs.count[own])
            rows = wanted.destination[runs.first[own[0]] : runs.first[own[-1] + 1]]
            of_base = replace(wanted, runs=base_runs, destination=rows, first=wanted.first + first)
            finishes.append(read(number, of_base))
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


def check_sources(sources: Sequence[Source]) -> None:
    """Raise ``PartitionError`` if data sets differ in the ranks that share them, or in options of reading."""
    first = sources[0]
    for number, other in enumerate(sources[1:], 2):
        if not first.shares_ranks(other):
            raise PartitionError(
                "the data sets are shared by different ranks",
                expected="one communicator for all of them",
                remedy="open them with the same comm=",
            )
        options, found = vars(first.options), vars(other.options)
        ignored = {"io"} if is_in_memory(first) or is_in_memory(other) else set()
        differ = [name for name in options if options[name] != found[name] and name not in ignored]
        if differ:
            raise PartitionError(
                "the data sets are read differently",
                expected=f"{differ[0]}={options[differ[0]]!r}, as of {named(first, 1)}",
                found=f"{differ[0]}={found[differ[0]]!r} of {named(other, number)}",
                remedy=f"open them with the same {differ[0]}=",
            )


def is_in_memory(source: Source) -> bool:
    """Return whether the samples of a data set are arrays in memory, which no file has."""
    return list(source.index.sources.paths[:2]) == [IN_MEMORY]


def named(source: Source, number: int) -> str:
    """Return the name of a data set among several, for errors."""
    return f"data set {number} ({source.index.files.paths[0]!r}, ...)"


def join_sources(sources: Sequence[Source]) -> Index:
    """Return one index of the samples of all data sets, one after the other.

    Raises
    ------
    FormatError : the fields differ in name, shape, dtype, units or names of codes, or the files in coordinates; or
        missing values are treated differently.
    """
    for number, source in enumerate(sources[1:], 2):
        _check_same(sources[0], source, number)
    return join_indexes([source.index for source in sources])


def _check_same(first: Source, other: Source, number: int) -> None:
    own, fields = first.index.fields, other.index.fields
    raw, raw_fields = first.index.raw.fields, other.index.raw.fields
    select = "select the fields that they share with inputs= and targets=, of one shape and dtype"
    convert = "pad and convert the field in all of them in the same way, or concatenate first"
    for mine, theirs, problem, remedy in (
        (own, fields, "the data sets do not have the same fields", select),
        (raw, raw_fields, "the data sets have made a field of different ones", convert),
    ):
        differing = next((name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)), None)
        if differing is not None:
            raise FormatError(
                problem,
                field=differing,
                expected=f"{_described(mine.get(differing))}, as in {named(first, 1)}",
                found=f"{_described(theirs.get(differing))} in {named(other, number)}",
                remedy=remedy,
            )
    for name, field in own.items():
        key = unlike(field, fields[name])
        if key is not None:
            raise FormatError(
                f"the data sets do not agree on {key!r} of {name!r}",
                field=name,
                expected=f"{shown(field, key)}, as in {named(first, 1)}",
                found=f"{shown(fields[name], key)} in {named(other, number)}",
                remedy="convert one of them; one open_dataset gives the texts of all its files the same codes",
            )
    facts, found = first.index.facts, other.index.facts
    unequal = [name for name in facts if name in found and facts[name] != found[name]]
    if unequal:
        raise FormatError(
            f"the data sets do not agree on {unequal[0]}",
            expected=f"{facts[unequal[0]]}, as in {named(first, 1)}",
            found=f"{found[unequal[0]]} in {named(other, number)}",
            remedy=f"open only files that agree on {unequal[0]}, or convert them",
        )
    if _fills(first.index) != _fills(other.index):
        raise FormatError(
            "the data sets treat missing values differently",
            expected=f"one treatment, as of {named(first, 1)}",
            found=f"another one of {named(other, number)}",
            remedy="open them with the same missing=",
        )


def _described(field: Any) -> str:
    return "no such field" if field is None else field.description


def _fills(index: Index) -> frozenset[str]:
    """Return texts that identify by what the missing values of an index are replaced."""
    made = index.made
    if made is None:
        return frozenset()
    own = {step.fills for step in made.steps if step.fills} if isinstance(made, Computed) else set()
    return frozenset(own).union(*map(_fills, made.bases))


def join_ties(ties: Sequence[Ties], totals: Sequence[int]) -> Ties:
    """Return the ties of the samples of several data sets, one after the other.

    Parameters
    ----------
    ties : of each data set.
    totals : number of samples of the files of each.
    """
    first = np.cumsum([0, *totals])
    sections = [(np.zeros(1, np.int64) if t.sections is None else t.sections) for t in ties]
    begins = np.concatenate([begin + of_set for begin, of_set in zip(first[:-1], sections, strict=True)])
    events: Chosen | None = None
    if any(t.events is not None for t in ties):
        sets = [Runs.between(0, total) if t.events is None else t.events for t, total in zip(ties, totals, strict=True)]
        joined_events = join_samples(sets, first[:-1].tolist(), int(first[-1]))
        assert isinstance(joined_events, Chosen)
        events = joined_events
    return Ties(max(t.overlap for t in ties), begins, events, any(t.slid for t in ties))
