"""Fields of two data sets side by side, where the values of a coordinate are equal.

The samples keep the numbers that they have in the first data set; those of the second are looked up. Each rank compares
the coordinate of its block; all ranks keep the runs of samples that correspond, not the coordinate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import FormatError, PartitionError
from matex_data.fields import field_of
from matex_data.index.chosen import Chosen, Samples
from matex_data.index.computed import Made
from matex_data.index.files import DerivedFiles
from matex_data.index.joined import all_of
from matex_data.index.model import EMPTY, Derivation, FileIndex, Finish, Index, Read, Wanted, ranges
from matex_data.index.runs import Runs, compress, merge, runs_where
from matex_data.locks import cached_property
from matex_data.reading.plan import Arrays
from matex_data.reading.source import Source
from matex_data.sampling.schedule import rank_range
from matex_data.sampling.split import Ties
from matex_data.transforms.missing import is_missing

HOW = ("exact", "inner")
TIME_DECIMALS = 3  # to which times in seconds are equal: files count them in different units


@dataclass(frozen=True, eq=False)
class Pairs:
    """Samples of two data sets that correspond, as runs: of the first, of the second, and their lengths.

    Parameters
    ----------
    first, second, count : int64[runs], ascending in ``first``.
    """

    first: Integers
    second: Integers
    count: Integers

    @classmethod
    def of(cls, first: Integers, second: Integers) -> Pairs:
        """Return the runs of numbers that correspond, of which ``first`` ascends."""
        if not len(first):
            return cls(EMPTY, EMPTY, EMPTY)
        begin, count = runs_where((np.diff(first) == 1) & (np.diff(second) == 1))
        return cls(first[begin], second[begin], count)

    @classmethod
    def joined(cls, parts: Sequence[Pairs]) -> Pairs:
        """Return pairs of consecutive samples, such as those of the ranks, in as few runs as those of one rank."""
        first, second, count = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("first", "second", "count")
        )
        if not len(count):
            return cls(first, second, count)
        begin, _ = runs_where((np.diff(first) == count[:-1]) & (np.diff(second) == count[:-1]))
        return cls(first[begin], second[begin], np.add.reduceat(count, begin))

    @property
    def samples(self) -> Runs:
        """Samples of the first data set that have a counterpart."""
        return merge(Runs(self.first, self.count))

    def digest(self) -> str:
        """Return a text that identifies the pairs."""
        columns = b"".join(column.astype("<i8").tobytes() for column in (self.first, self.second, self.count))
        return hashlib.blake2b(columns, digest_size=16).hexdigest()

    def counterparts(self, samples: Integers) -> Integers:
        """Return the samples of the second data set that correspond to those of the first."""
        run = np.searchsorted(self.first, samples, side="right") - 1
        found: Integers = self.second[run] + samples - self.first[run]
        return found

    def of_rows(self, begin: int, end: int) -> Pairs:
        """Return the pairs of samples ``begin`` to ``end`` of the first data set, which are counted from ``begin``."""
        low, high = np.searchsorted(self.first + self.count, begin, side="right"), np.searchsorted(self.first, end)
        start = np.maximum(self.first[low:high], begin)
        shift = start - self.first[low:high]
        count = np.minimum((self.first + self.count)[low:high], end) - start
        return Pairs(start - begin, self.second[low:high] + shift, count)


@dataclass(frozen=True)
class Coordinate:
    """Field by which the samples of a data set are compared.

    Parameters
    ----------
    source : opened files that have the field.
    name : of the field.
    samples : of the data set, ascending.
    """

    source: Source
    name: str
    samples: Samples

    def read(self) -> tuple[Integers, Array]:
        """Return the numbers of this rank's samples, and their values; of windows those of the first row. *Collective*.

        Raises
        ------
        FieldNotFound : there is no such field.
        FormatError : a value is missing; the field has no value for each sample.
        """
        source, name = self.source, self.name
        field = field_of(source.index.fields, name)
        if field.ragged or len(field.shape) > 1 or field.dtype.kind not in "iufSUO":
            raise FormatError("the field to merge on has no value for each sample", field=name, found=field.description)
        begin, _ = rank_range(self.samples.total, source.comm.rank, source.comm.size)
        positions, values = [EMPTY], [np.empty(0, field.dtype)]

        def keep(part: Integers, arrays: Arrays) -> None:
            of_part = arrays[name].reshape(len(part), -1)[:, 0] if len(part) else arrays[name][:0].reshape(-1)
            missing = is_missing(of_part, field)
            if missing.any():
                number = int(self.samples.numbers(np.array([begin + part[np.argmax(missing)]]))[0])
                file = int(source.index.file_of(np.array(number)))
                row = number - int(source.index.first_row[file])
                path = source.index.files.paths[file]
                raise FormatError("the field to merge on has a missing value", file=path, field=name, row=row)
            positions.append(part)
            values.append(of_part.copy())

        source.use_block(self.samples, [name], keep)
        joined = np.concatenate(values)
        is_time = "since" in str(field.attributes.get("units")) and joined.dtype.kind == "f"
        numbers = self.samples.numbers(begin + np.concatenate(positions))
        return numbers, np.round(joined, TIME_DECIMALS) if is_time else joined


def pair_samples(first: Coordinate, second: Coordinate, how: str) -> Pairs:
    """Return the samples of two data sets with equal values. *Collective*.

    Parameters
    ----------
    first, second : the data sets.
    how : "exact": all values are equal, in the same order. "inner": samples of one data set whose value the other one
        does not have are left out; each rank then has the values of the second one for a moment.

    Raises
    ------
    PartitionError : unknown ``how``, or nothing is equal.
    FormatError : values differ, or, with "inner", a value occurs twice.
    """
    if how not in HOW:
        raise PartitionError("unknown way to merge", expected=f"how= one of {HOW}", found=repr(how))
    comm = first.source.comm
    own, values = first.read()
    other, others = second.read()
    if how == "exact":
        comm.agree(_difference(first, second, own, values, other, others))
        pairs = Pairs.of(own, other)
    else:
        numbers = np.concatenate(comm.allgather(other))
        every = np.concatenate(comm.allgather(others))
        order = np.argsort(every, kind="stable")
        every, numbers = every[order], numbers[order]
        comm.agree(_repeated(second.name, every))
        at = np.minimum(np.searchsorted(every, values), max(0, len(every) - 1))
        found = every[at] == values if len(every) else np.zeros(len(values), bool)
        pairs = Pairs.of(own[found], numbers[at[found]] if len(every) else numbers)
    joined = Pairs.joined(comm.allgather(pairs))
    if how == "inner":
        _check_unique(first, joined)
    if not len(joined.count):
        raise PartitionError("no values of the data sets are equal", field=first.name, expected="equal values")
    return joined


def _difference(
    first: Coordinate, second: Coordinate, own: Integers, values: Array, other: Integers, others: Array
) -> FormatError | None:
    remedy = 'give how="inner", or open the same samples of both'
    totals = first.samples.total, second.samples.total
    if totals[0] != totals[1]:
        return FormatError(
            "the data sets differ in length",
            field=first.name,
            expected=f"{totals[0]} samples, as in the first",
            found=f"{totals[1]} in the second",
            remedy=remedy,
        )
    if len(own) != len(other):  # samples that cannot be read
        return FormatError("samples of one data set cannot be read", field=first.name, remedy=remedy)
    differ = np.flatnonzero(values != others)
    if not len(differ):
        return None
    at = int(differ[0])
    index, number = second.source.index, int(other[at])
    file = int(index.file_of(np.array(number)))
    return FormatError(
        "the data sets differ in the field to merge on",
        file=index.files.paths[file],
        field=first.name,
        row=number - int(index.first_row[file]),
        expected=f"{values[at]!s}, as in the first data set",
        found=f"{others[at]!s}",
        remedy=remedy,
    )


def _repeated(name: str, ascending: Array) -> FormatError | None:
    twice = np.flatnonzero(ascending[1:] == ascending[:-1])
    if not len(twice):
        return None
    return FormatError(
        "a value to merge on occurs twice",
        field=name,
        expected="one sample for each value",
        found=f"{ascending[twice[0]]!s}",
    )


def _check_unique(first: Coordinate, pairs: Pairs) -> None:
    """Raise ``FormatError`` if samples of the first data set correspond to the same one of the second."""
    order = np.argsort(pairs.second)
    begin, end = pairs.second[order], (pairs.second + pairs.count)[order]
    if (begin[1:] < end[:-1]).any():
        raise FormatError(
            "a value to merge on occurs twice in the first data set",
            field=first.name,
            expected="one sample for each value",
        )


def merge_indexes(first: Index, second: Index, pairs: Pairs, on: str) -> Index:
    """Return an index of the samples of the first data set with the fields of both.

    Raises
    ------
    FormatError : both have a field of one name, other than that of the coordinate.
    """
    added = [name for name in second.fields if name not in first.fields or name != on]
    same = [name for name in added if name in first.fields]
    if same:
        raise FormatError(
            "both data sets have a field of this name",
            field=same[0],
            expected="different names",
            remedy="select the fields of each with inputs= and targets=",
        )
    second = second.select(added)
    fields = {**first.fields, **second.fields}
    files = DerivedFiles(first.files, partial(_merged, second, pairs, first.first_row))
    static, facts = {**second.static, **first.static}, {**second.facts, **first.facts}
    return Index(fields, files, static, facts, Merged(first, second, pairs))


@dataclass(frozen=True, eq=False)
class Merged(Derivation):
    """Samples of an index, with the fields of their counterparts in another one.

    Parameters
    ----------
    first, second : the indexes.
    pairs : samples that correspond.
    """

    first: Index
    second: Index
    pairs: Pairs

    @property
    def bases(self) -> tuple[Index, ...]:  # type: ignore[override]
        return self.first, self.second

    def on(self, bases: Sequence[Index]) -> Merged:
        return Merged(bases[0], bases[1], self.pairs)

    def plan(self, wanted: Wanted, read: Read, epoch: int) -> Finish | None:
        own = {name: array for name, array in wanted.arrays.items() if name in self.first.fields}
        others = {name: array for name, array in wanted.arrays.items() if name not in own}
        finishes = [read(0, replace(wanted, arrays=own))] if own else []
        if others:
            samples = self.pairs.counterparts(wanted.runs.numbers(np.arange(wanted.runs.total)))
            order = np.argsort(samples, kind="stable")
            finishes.append(read(1, Wanted(compress(samples[order]), wanted.destination[order], others)))
        return all_of(finishes)


def _merged(second: Index, pairs: Pairs, first_row: Integers, number: int, file: FileIndex) -> FileIndex:
    """Return the index of a file of the first data set with the fields of the second."""
    of_file = pairs.of_rows(int(first_row[number]), int(first_row[number + 1]))
    layouts = {name: CounterpartRows(file.rows, (), index=second, pairs=of_file, name=name) for name in second.fields}
    return replace(file, layouts={**file.layouts, **layouts})


@dataclass(frozen=True, eq=False)
class CounterpartRows(Made):
    """Counterparts in the second data set of the rows of one file of the first; see `Made`.

    Parameters
    ----------
    index : of the second data set.
    pairs : rows of the file, and samples of the second data set.
    name : of the field.
    """

    index: Index = field(kw_only=True)
    pairs: Pairs = field(kw_only=True)
    name: str = field(kw_only=True)

    @cached_property
    def _files(self) -> Integers:
        """Numbers of the files of the second data set that have rows of this one."""
        last = self.index.file_of(self.pairs.second + self.pairs.count - 1)
        first = self.index.file_of(self.pairs.second)
        found: Integers = np.unique(ranges(first, last - first + 1))
        return found

    @cached_property
    def _borders(self) -> Integers | None:
        """First row of each block of the field in the second data set; None: each row can be read alone."""
        borders, has_blocks = [EMPTY], False
        for number in self._files.tolist():
            layout, begin = self.index.files[number].layouts[self.name], int(self.index.first_row[number])
            of_file = layout.borders()
            has_blocks |= layout.block_rows > 1 or of_file is not None
            borders.append(begin + (np.arange(0, layout.rows, layout.block_rows) if of_file is None else of_file))
        if not has_blocks:
            return None
        every, pairs = np.concatenate(borders), self.pairs
        low, high = (np.searchsorted(every, edge) for edge in (pairs.second, pairs.second + pairs.count))
        shift = np.repeat(pairs.first - pairs.second, high - low)
        found: Integers = np.unique(np.concatenate([[0], pairs.first, every[ranges(low, high - low)] + shift]))
        return found

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return 1 if self._borders is None else int(np.diff(self._borders, append=self.rows).max(initial=1))

    def borders(self) -> Integers | None:
        return self._borders

    def stored_bytes(self) -> int:
        return sum(self.index.files[number].layouts[self.name].stored_bytes() for number in self._files.tolist())

    def end(self) -> int:
        entries = (self.index.files[number] for number in self._files[:1].tolist())
        return max((entry.layouts[self.name].end() for entry in entries), default=0)

    def inner_bytes(self) -> int:
        return int(self.index.inner_bytes(self.name) * self.rows)


def merge_ties(first: Ties, second: Ties, pairs: Pairs, samples: int) -> Ties:
    """Return the ties of merged samples, which have those of both data sets.

    Parameters
    ----------
    first, second : ties of the samples of each data set.
    pairs : samples that correspond.
    samples : number of samples of the first data set, merged or not.

    Raises
    ------
    PartitionError : objects of events of the second data set have another order in the first.
    """
    if not second.overlap and second.events is None:
        return first
    ascending = bool((np.diff(pairs.second) > 0).all())
    borders = _sections(second, pairs) if ascending else np.zeros(1, np.int64)
    if first.overlap and second.overlap:
        borders = np.union1d([0], np.intersect1d(borders, np.zeros(1) if first.sections is None else first.sections))
    elif first.overlap:
        return Ties(first.overlap, first.sections, _events(first, second, pairs, samples, ascending))
    overlap = max(first.overlap, _overlap(second.overlap, pairs))
    return Ties(overlap, borders.astype(np.int64), _events(first, second, pairs, samples, ascending))


def _sections(second: Ties, pairs: Pairs) -> Integers:
    """Return the first merged sample of each series of the second data set."""
    begins = np.zeros(1, np.int64) if second.sections is None else second.sections
    run = np.searchsorted(pairs.second + pairs.count, begins, side="right")
    run, begins = run[run < len(pairs.count)], begins[run < len(pairs.count)]
    numbers = pairs.first[run] + np.maximum(0, begins - pairs.second[run])
    found: Integers = np.union1d(np.zeros(1, np.int64), numbers)
    return found


def _overlap(overlap: int, pairs: Pairs) -> int:
    """Return how far apart samples of the first data set are, at most, whose counterparts share rows."""
    order = np.argsort(pairs.second)
    first, second, count = pairs.first[order], pairs.second[order], pairs.count[order]
    farthest = min(overlap, int(count.max(initial=1)) - 1)
    for ahead in range(1, min(overlap, len(count) - 1) + 1):
        gap = second[ahead:] - (second + count)[:-ahead] + 1
        near = gap <= overlap
        if not near.any():
            break
        between = (first[ahead:] - (first + count)[:-ahead] + 1)[near]
        farthest = max(farthest, int(np.maximum(between + overlap - gap[near], -between).max()))
    return farthest


def _events(first: Ties, second: Ties, pairs: Pairs, samples: int, ascending: bool) -> Chosen | None:
    """Return the merged samples that begin an event of both data sets."""
    if second.events is None:
        return first.events
    if not ascending:
        raise PartitionError(
            "the second data set has objects of events (flatten=), and another order than the first",
            expected="the same order, so that a split can keep the objects of an event in one set",
            remedy="merge the other way around",
        )
    low, high = (second.events.rank(edge) for edge in (pairs.second, pairs.second + pairs.count))
    begins = np.ones(samples, bool)
    begins[ranges(pairs.first, pairs.count)] = False
    begins[second.events.numbers(ranges(low, high - low)) + np.repeat(pairs.first - pairs.second, high - low)] = True
    event = second.events.rank(pairs.second + 1)  # of the first sample of each run
    begins[pairs.first[:1]] = True
    last = second.events.rank(pairs.second + pairs.count)
    begins[pairs.first[1:]] |= event[1:] > last[:-1]
    if first.events is not None:
        own = np.zeros(samples, bool)
        own[first.events.numbers(np.arange(first.events.total))] = True
        begins &= own
    return Chosen.of(begins)


def merge_names(first: Any, second: Any) -> Any:
    """Return the names of two sides of an element as one: a name, a list of names, or None."""
    both = [name for names in (first, second) for name in ([names] if isinstance(names, str) else names or [])]
    if second is None or first is None:
        return first if second is None else second
    return list(dict.fromkeys(both))
