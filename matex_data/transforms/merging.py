"""Fields of two data sets side by side, where the values of keys are equal.

The samples keep the numbers that they have in the first data set; those of the second are looked up. Each rank compares
the keys of its block; all ranks keep the runs of samples that correspond, not the keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import FormatError, PartitionError
from matex_data.fields import EXACT, MISSING_INTEGER, Field, Schema, field_of, is_category, is_mask, is_time
from matex_data.index.combined import assign_missing
from matex_data.index.computed import Call, ComputedFields, Made, compute_all
from matex_data.index.files import DerivedFiles
from matex_data.index.model import EMPTY, Derivation, FileIndex, Finish, Index, Read, Wanted, ranges
from matex_data.index.runs import Chosen, Runs, Samples, compress, merge, runs_where
from matex_data.index.united import nullable
from matex_data.locks import cached_property
from matex_data.readers.dimensions.cf import calendar_of, time_origin
from matex_data.reading.source import Source
from matex_data.sampling.schedule import rank_range
from matex_data.sampling.split import Ties
from matex_data.transforms.categories import CATEGORIES
from matex_data.transforms.joining import all_of
from matex_data.transforms.missing import is_missing, use_values, with_nan
from matex_data.transforms.names import field_of_values

ROWS = "rows"  # by position
RAW_NUMBERS = "raw {}"  # name of a field with the numbers before missing ones were replaced
TIME_DECIMALS = 3  # to which times in seconds are equal: files count them in different units, and round them


@dataclass(frozen=True, eq=False)
class Matches:
    """Samples of two data sets that correspond, as runs.

    Parameters
    ----------
    first, second, count : int64[runs], the first sample of each run in both data sets, and how many of the first data
        set the run has; ascending in ``first``.
    step : int64[runs], 1: the samples of the second data set follow one another, too; 0: all correspond to the same.
    """

    first: Integers
    second: Integers
    count: Integers
    step: Integers

    @classmethod
    def of(cls, first: Integers, second: Integers) -> Matches:
        """Return the runs of numbers that correspond, of which ``first`` ascends."""
        if not len(first):
            return cls(EMPTY, EMPTY, EMPTY, EMPTY)
        links = np.diff(second)
        links[(np.diff(first) != 1) | (links < 0) | (links > 1)] = -1
        before = np.append(-1, links[:-1])[: len(links)]
        begin, count = runs_where((links >= 0) & ((links == before) | (before < 0)))
        step = np.where(count > 1, np.append(links, 1)[begin], 1)
        return cls(first[begin], second[begin], count, step)

    @classmethod
    def joined(cls, parts: Sequence[Matches]) -> Matches:
        """Return pairs of consecutive samples, such as those of the ranks, in as few runs as those of one rank."""
        first, second, count, step = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("first", "second", "count", "step")
        )
        if not len(count):
            return cls(first, second, count, step)
        goes_on = (np.diff(first) == count[:-1]) & (second[1:] == (second + step * count)[:-1]) & (np.diff(step) == 0)
        begin, _ = runs_where(goes_on)
        return cls(first[begin], second[begin], np.add.reduceat(count, begin), step[begin])

    @property
    def samples(self) -> Runs:
        """Samples of the first data set that have a counterpart."""
        return merge(Runs(self.first, self.count))

    @property
    def stop(self) -> Integers:
        """Sample of the second data set behind each run, int64[runs]."""
        return self.second + np.where(self.step == 0, 1, self.count)

    def digest(self) -> str:
        """Return a text that identifies the pairs."""
        parts = (self.first, self.second, self.count, self.step)
        columns = b"".join(column.astype("<i8").tobytes() for column in parts)
        return hashlib.blake2b(columns, digest_size=16).hexdigest()

    def counterparts(self, samples: Integers) -> Integers:
        """Return the samples of the second data set that correspond to those of the first; -1: none does."""
        if not len(self.first):
            return np.full(len(samples), -1)
        run = np.maximum(np.searchsorted(self.first, samples, side="right") - 1, 0)
        ahead = samples - self.first[run]
        within = (ahead >= 0) & (ahead < self.count[run])
        return np.where(within, self.second[run] + self.step[run] * ahead, -1)

    def of_rows(self, begin: int, end: int) -> Matches:
        """Return the pairs of samples ``begin`` to ``end`` of the first data set, which are counted from ``begin``."""
        low, high = np.searchsorted(self.first + self.count, begin, side="right"), np.searchsorted(self.first, end)
        start = np.maximum(self.first[low:high], begin)
        shift, step = start - self.first[low:high], self.step[low:high]
        count = np.minimum((self.first + self.count)[low:high], end) - start
        return Matches(start - begin, self.second[low:high] + step * shift, count, step)


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

    @property
    def field(self) -> Field:
        """Field of the data set."""
        return field_of(self.source.index.raw.fields, self.name)

    def read(self, complete: bool) -> tuple[Integers, Array, Array]:
        """Return this rank's samples, their values (of windows those of the first row), and which lack one.

        *Collective*. Categories are the texts that they stand for.

        Parameters
        ----------
        complete : a missing value is an error.

        Returns
        -------
        numbers, values : of the samples.
        missing : bool[samples].

        Raises
        ------
        FieldNotFound : there is no such field.
        FormatError : a value is missing; the field has no value for each sample.
        """
        source, of_raw = self.source, self.source.index.raw.fields
        field = field_of_values(of_raw, self.name, "the field to merge on has no value for each sample", axes=(0, 1))
        begin, _ = rank_range(self.samples.total, source.comm.rank, source.comm.size)
        texts = None
        if is_category(field):
            texts = np.array([text.encode() for text in field.attributes[CATEGORIES]] or [b""], object)
        positions, missing = [EMPTY], [np.empty(0, bool)]
        values = [np.empty(0, field.dtype if texts is None else object)]

        def keep(part: Integers, of_part: Array) -> None:
            lacking = is_missing(of_part, field)
            column = of_part.copy() if texts is None else texts[np.maximum(of_part, 0)]
            if column.dtype.kind == "f":
                column[lacking] = 0  # NaN is not compared
            positions.append(part)
            values.append(column)
            missing.append(lacking)

        problem = "the field to merge on has a missing value" if complete else None
        use_values(source, self.samples, field, keep, problem, 'leave out such samples: missing="drop"')
        numbers = self.samples.numbers(begin + np.concatenate(positions))
        return numbers, np.concatenate(values), np.concatenate(missing)


def pair_samples(first: Sequence[Coordinate], second: Sequence[Coordinate], how: str) -> Matches:
    """Return the samples of two data sets with equal values of all keys. *Collective*.

    Parameters
    ----------
    first, second : keys of the data sets.
    how : "exact": all values are equal, in the same order. Else samples of the second data set have different values,
        and those of the first have a counterpart or not, those with a missing value none; each rank then has all values
        of the second one for a moment.

    Raises
    ------
    PartitionError : unknown ``how``, or nothing is equal.
    FormatError : values differ, or cannot be compared; a value occurs twice in the second data set.
    """
    comm = first[0].source.comm
    own, values, missing = _read(first, complete=how == "exact")
    other, others, _ = _read(second, complete=True)
    if how != "exact":
        other = np.concatenate(comm.allgather(other))
        others = [np.concatenate(comm.allgather(column)) for column in others]
    alike, error = list[tuple[Array, Array]](), None
    try:
        for mine, theirs, column, of_second in zip(first, second, values, others, strict=True):
            alike.append(_comparable(mine.field, theirs.field, column, of_second))
    except FormatError as problem:
        error = problem
    comm.agree(error)
    if how == "exact":
        comm.agree(_difference(first, second, own, other, alike))
        pairs = Matches.of(own, other)
    else:
        codes, of_second, known = _coded(alike)
        known &= ~missing
        order = np.argsort(of_second, kind="stable")
        comm.agree(_repeated(second, others, of_second, order))
        pairs = Matches.of(own[known], other[order][codes[known]])
    joined = Matches.joined(comm.allgather(pairs))
    if not len(joined.count):
        names = ", ".join(key.name for key in first)
        raise PartitionError(
            "no values of the data sets are equal",
            field=names,
            expected="equal values",
            remedy="look at both fields with head(): their units, spaces in texts, or the files may differ",
        )
    return joined


def pair_rows(first: Source, samples: Samples, others: Samples) -> Matches:
    """Return the samples of two data sets that have the same position. *Collective*.

    Parameters
    ----------
    first : opened files of the first data set.
    samples, others : of both data sets, ascending.

    Raises
    ------
    FormatError : the data sets differ in length.
    """
    if samples.total != others.total:
        raise FormatError(
            "the data sets differ in length",
            expected=f"{samples.total} samples, as in the first",
            found=f"{others.total} in the second",
            remedy="open the same samples of both, or merge them on= a field that both have",
        )
    at = np.arange(*rank_range(samples.total, first.comm.rank, first.comm.size))
    return Matches.joined(first.comm.allgather(Matches.of(samples.numbers(at), others.numbers(at))))


def _read(keys: Sequence[Coordinate], complete: bool) -> tuple[Integers, list[Array], Array]:
    """Return this rank's samples, their values of each key, and whether they lack one of them. *Collective*."""
    read = [key.read(complete) for key in keys]
    numbers, values, missing = zip(*read, strict=True)
    unread = [key.name for key, found in zip(keys, numbers, strict=True) if len(found) != len(numbers[0])]
    error = FormatError("samples of a field to merge on cannot be read", field=unread[0]) if unread else None
    keys[0].source.comm.agree(error)
    return numbers[0], list(values), np.logical_or.reduce(missing)


def _comparable(field: Field, other: Field, values: Array, others: Array) -> tuple[Array, Array]:
    """Return values of two data sets in one dtype and unit, in which they are equal if and only if they are; raise
    ``FormatError`` if there is none.
    """
    are_texts = [column.dtype.kind in "SUO" for column in (values, others)]
    if all(are_texts):
        return _as_bytes(values), _as_bytes(others)
    both = f"{values.dtype} in the first data set, {others.dtype} of {other.name!r} in the second"
    if any(are_texts):
        raise FormatError(
            "texts and numbers are never equal",
            field=field.name,
            expected="the same kind of values in both data sets",
            found=both,
            remedy="convert one of the fields, for example by map()",
        )
    values, others = _in_seconds(field, other, values, others)
    kinds = values.dtype.kind, others.dtype.kind
    if set(kinds) == {"i", "u"} and max(values.max(initial=0), others.max(initial=0)) < 2**63:
        return values.astype(np.int64), others.astype(np.int64)
    floats = [column.dtype for column in (values, others) if column.dtype.kind == "f"]
    bits = min((np.finfo(dtype).nmant + 1 for dtype in floats), default=EXACT.bit_length() - 1)
    of_one_kind = values.dtype == others.dtype if floats else len(set(kinds)) == 1
    most = max(abs(float(edge(column, initial=0))) for column in (values, others) for edge in (np.min, np.max))
    if not of_one_kind and most >= 2**bits:  # which may be a rounded 2**bits + 1
        raise FormatError(
            "values of two dtypes cannot be compared exactly",
            field=field.name,
            expected=f"one dtype in both data sets, or numbers below 2**{bits}",
            found=f"{most:.17g}; {both}",
            remedy="write both as integers, or as text",
        )
    return values, others


def _in_seconds(field: Field, other: Field, values: Array, others: Array) -> tuple[Array, Array]:
    """Return times of two data sets in seconds since one date, to a millisecond; else the values as they are.

    Units that one of the fields has hold for both. Integers of the same units are compared as they are.

    Raises
    ------
    FormatError : the fields have different units, of which one is of no fixed length, or different calendars.
    """
    attributes = [one.attributes for one in (field, other) if one.attributes.get("units")]
    kinds = [(str(known["units"]), calendar_of(known)) for known in attributes]
    origins = [time_origin(*kind) for kind in kinds]
    are_times = is_time(field) or is_time(other)
    if len(set(kinds)) == 1:
        are_times &= None not in origins and "f" in (values.dtype.kind, others.dtype.kind)
    if not are_times:
        return values, others
    origin, of_second = origins[0], origins[-1]
    if origin is not None and of_second is not None:
        times, other_times = origin.seconds(values), of_second.seconds(others)
        are_gregorian = origin.is_gregorian(times) and of_second.is_gregorian(other_times)
        if are_gregorian or origin.calendar == of_second.calendar:
            return np.round(times, TIME_DECIMALS), np.round(other_times, TIME_DECIMALS)
    raise FormatError(
        "times of the data sets cannot be compared",
        field=field.name,
        expected="one calendar, and units of a fixed length, in both data sets",
        found="; ".join(f"{units!r} of the calendar {calendar!r}" for units, calendar in kinds),
        remedy="convert one of the fields, for example by map()",
    )


def _as_bytes(values: Array) -> Array:
    """Return texts as UTF-8."""
    return np.char.encode(values, "utf-8").astype(object) if values.dtype.kind == "U" else values.astype(object)


def _coded(columns: Sequence[tuple[Array, Array]]) -> tuple[Integers, Integers, Array]:
    """Return a number for the keys of each sample: of the first data set, and of the second.

    Parameters
    ----------
    columns : values of the first and of the second data set, of each key.

    Returns
    -------
    first, second : int64[samples]; equal keys have equal numbers, which are those of the ascending keys of the second.
    known : bool[samples of the first], whether the second data set has the keys.
    """
    first, second = (np.zeros(len(column), np.int64) for column in columns[0])
    known = np.full(len(first), len(second) > 0)
    for values, others in columns if len(second) else ():
        mine, theirs, same = _positions(values, others)
        keys = int(theirs.max()) + 1
        first, second, both = _positions(first * keys + mine, second * keys + theirs)
        known &= same & both
    return first, second, known


def _positions(values: Array, others: Array) -> tuple[Integers, Integers, Array]:
    """Return the positions of values of two data sets among the different ones of the second, and which it has."""
    different, position = np.unique(others, return_inverse=True)
    at = np.minimum(np.searchsorted(different, values), len(different) - 1)
    return at, position, different[at] == values


def _difference(
    first: Sequence[Coordinate],
    second: Sequence[Coordinate],
    own: Integers,
    other: Integers,
    columns: Sequence[tuple[Array, Array]],
) -> FormatError | None:
    """Return the error of the first sample whose keys differ; None: none do."""
    remedy = 'give how="inner", or open the same samples of both'
    totals = first[0].samples.total, second[0].samples.total
    if totals[0] != totals[1]:
        return FormatError(
            "the data sets differ in length",
            field=first[0].name,
            expected=f"{totals[0]} samples, as in the first",
            found=f"{totals[1]} in the second",
            remedy=remedy,
        )
    if len(own) != len(other):  # samples that cannot be read
        return FormatError("samples of one data set cannot be read", field=first[0].name, remedy=remedy)
    for key, (values, others) in zip(first, columns, strict=True):
        differ = np.flatnonzero(values != others)
        if len(differ):
            at = int(differ[0])
            path, row = second[0].source.index.located(int(other[at]))
            return FormatError(
                "the data sets differ in the field to merge on",
                file=path,
                field=key.name,
                row=row,
                expected=f"{values[at]!s}, as in the first data set",
                found=f"{others[at]!s}",
                remedy=remedy,
            )
    return None


def _repeated(
    keys: Sequence[Coordinate], columns: Sequence[Array], codes: Integers, order: Integers
) -> FormatError | None:
    """Return the error of keys that occur twice; None: all are different. ``codes``, ``order``: number of the keys of
    each sample, and the order in which they ascend.
    """
    twice = np.flatnonzero(np.diff(codes[order]) == 0)
    if not len(twice):
        return None
    return FormatError(
        "a value to merge on occurs twice in the second data set",
        field=", ".join(key.name for key in keys),
        expected="one sample for each value",
        found=", ".join(f"{column[order[twice[0]]]!s}" for column in columns),
        remedy="merge the other way around, if the values of the first data set are different",
    )


def merge_indexes(first: Index, second: Index, pairs: Matches, shared: Sequence[str], samples: Samples) -> Index:
    """Return an index of the samples of the first data set with the fields of both.

    Parameters
    ----------
    pairs : samples that correspond.
    shared : keys that have one name in both.
    samples : of the first data set that are wanted; those without a counterpart have missing values.

    Raises
    ------
    FormatError : both have a field of one name, other than a shared key; a field cannot be missing.
    """
    added = [name for name in second.fields if name not in first.fields or name not in shared]
    same = [name for name in added if name in first.fields]
    if same:
        raise FormatError(
            "both data sets have a field of this name",
            field=same[0],
            expected="different names",
            remedy="select the fields of each with inputs= and targets=",
        )
    second = second.select(added)
    if pairs.samples.total < samples.total:
        second = _with_missing(second)
    fields = {**first.fields, **second.fields}
    files = DerivedFiles(first.files, partial(_merged, second, pairs, first.first_row))
    static, facts = {**second.static, **first.static}, {**second.facts, **first.facts}
    return Index(fields, files, static, facts, Merged(first, second, pairs))


def _with_missing(index: Index) -> Index:
    """Return the index with fields whose values may be missing: integers are float64; masks are False there."""
    steps: list[ComputedFields] = []
    for name, one in index.fields.items():
        field = one if is_mask(name, index.fields) else nullable(one)
        if field is None:
            raise FormatError(
                "a field of the second data set cannot be missing",
                field=name,
                expected='a counterpart of each sample, or how="inner"',
                found=one.description,
                remedy='give how="inner", or open the second data set without this field',
            )
        if field.dtype == one.dtype:
            continue
        known = {key: value for key, value in one.attributes.items() if key != MISSING_INTEGER}
        field, raw = replace(field, attributes=known), name
        if not index.raw.fields[name].ragged:  # lists have no missing numbers
            raw = RAW_NUMBERS.format(name)
            made = {raw: replace(field, name=raw)}
            steps.append(ComputedFields(partial(_as_float, field, raw), [name], made, raw_given=[name]))
        steps.append(ComputedFields(partial(_as_float, field, name), [name], {name: field}, raw_of={name: raw}))
    return compute_all(index, steps).select(list(index.fields))


def _as_float(field: Field, result: str, call: Call) -> None:
    """Convert a field of integers, all of which float64 has, but for missing ones."""
    values = call.inputs[field.name]
    call.fill(result, with_nan(field, values, is_missing(values, call.fields[field.name])))


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
    pairs: Matches

    @property
    def bases(self) -> tuple[Index, ...]:  # type: ignore[override]
        return self.first, self.second

    @property
    def raw(self) -> Schema:
        return {**self.first.raw.fields, **self.second.raw.fields}

    def plan(self, wanted: Wanted, read: Read, epoch: int) -> Finish | None:
        own = {name: array for name, array in wanted.arrays.items() if name in self.first.fields}
        others = {name: array for name, array in wanted.arrays.items() if name not in own}
        finishes = [read(0, replace(wanted, arrays=own))] if own else []
        if others:
            samples = self.pairs.counterparts(wanted.runs.numbers(np.arange(wanted.runs.total)))
            order = np.argsort(samples, kind="stable")
            absent, order = np.split(order, [np.count_nonzero(samples < 0)])
            for name, array in others.items() if len(absent) else ():  # else fields need no value for missing
                field, rows = wanted.fields(self.second)[name], wanted.destination[absent]
                if field.dtype == bool:  # a mask
                    array[rows] = False
                else:
                    assign_missing(field, array, rows)
            of_second = replace(wanted, destination=wanted.destination[order], arrays=others, first=0)
            finishes.append(self._read(read, samples[order], of_second))
        return all_of(finishes)

    def _read(self, read: Read, samples: Integers, wanted: Wanted) -> Finish | None:
        """Read samples of the second index, ascending, each once, to their destinations."""
        first = np.flatnonzero(np.diff(samples, prepend=-1))
        runs = compress(samples[first])
        if len(first) == len(samples):
            return read(1, replace(wanted, runs=runs))
        once = {name: wanted.fields(self.second)[name].empty(len(first)) for name in wanted.arrays}
        finish = read(1, replace(wanted, runs=runs, destination=np.arange(len(first)), arrays=once))
        position = np.repeat(np.arange(len(first)), np.diff(first, append=len(samples)))
        return all_of([finish, partial(_spread, once, position, wanted.destination, wanted.arrays)])


def _spread(once: dict[str, Array], position: Integers, destination: Integers, arrays: Mapping[str, Array]) -> None:
    """Copy rows to all samples that they correspond to."""
    for name, out in arrays.items():
        out[destination] = once[name][position]
    once.clear()


def _merged(second: Index, pairs: Matches, first_row: Integers, number: int, file: FileIndex) -> FileIndex:
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
    pairs: Matches = field(kw_only=True)
    name: str = field(kw_only=True)

    @cached_property
    def _files(self) -> Integers:
        """Numbers of the files of the second data set that have rows of this one."""
        last = self.index.file_of(self.pairs.stop - 1)
        first = self.index.file_of(self.pairs.second)
        return np.unique(ranges(first, last - first + 1))

    @cached_property
    def _borders(self) -> Integers | None:
        """First row of each block of the field in the second data set; None: each row can be read alone."""
        borders, has_blocks = [EMPTY], False
        for number in self._files.tolist():
            layout, begin = self.index.files[number].layouts[self.name], int(self.index.first_row[number])
            has_blocks |= layout.block_rows > 1 or layout.borders() is not None
            borders.append(begin + layout.first_rows())
        if not has_blocks:
            return None
        every, pairs = np.concatenate(borders), self.pairs
        low, high = (np.searchsorted(every, edge) for edge in (pairs.second, pairs.stop))
        shift = np.repeat(pairs.first - pairs.second, high - low)
        inner = every[ranges(low, high - low)] + shift
        ends = pairs.first + pairs.count  # where samples without a counterpart may begin
        return np.unique(np.concatenate([[0], pairs.first, inner, ends[ends < self.rows]]))

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return 1 if self._borders is None else self.longest(self._borders)

    def borders(self) -> Integers | None:
        return self._borders

    def stored_bytes(self) -> int:
        return sum(self.index.files[number].layouts[self.name].stored_bytes() for number in self._files.tolist())

    def end(self) -> int:
        entries = (self.index.files[number] for number in self._files[:1].tolist())
        return max((entry.layouts[self.name].end() for entry in entries), default=0)

    def inner_bytes(self) -> int:
        return int(self.index.inner_bytes(self.name) * self.rows)


def merge_ties(first: Ties, second: Ties, pairs: Matches, samples: int) -> Ties:
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
    slid = first.slid or second.slid
    if not second.overlap and second.events is None:
        return replace(first, slid=slid)
    if (pairs.step == 0).any():
        raise PartitionError(
            "samples of the first data set correspond to the same windows or objects of the second",
            expected="different values of the keys in the first data set",
            remedy="merge first, and then make windows or objects",
        )
    ascending = bool((np.diff(pairs.second) > 0).all())
    borders = _sections(second, pairs) if ascending else np.zeros(1, np.int64)
    if first.overlap and second.overlap:
        borders = np.union1d([0], np.intersect1d(borders, np.zeros(1) if first.sections is None else first.sections))
    elif first.overlap:
        return Ties(first.overlap, first.sections, _events(first, second, pairs, samples, ascending), slid)
    overlap = max(first.overlap, _overlap(second.overlap, pairs))
    return Ties(overlap, borders.astype(np.int64), _events(first, second, pairs, samples, ascending), slid)


def _sections(second: Ties, pairs: Matches) -> Integers:
    """Return the first merged sample of each series of the second data set."""
    begins = np.zeros(1, np.int64) if second.sections is None else second.sections
    run = np.searchsorted(pairs.second + pairs.count, begins, side="right")
    run, begins = run[run < len(pairs.count)], begins[run < len(pairs.count)]
    numbers = pairs.first[run] + np.maximum(0, begins - pairs.second[run])
    return np.union1d(np.zeros(1, np.int64), numbers)


def _overlap(overlap: int, pairs: Matches) -> int:
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


def _events(first: Ties, second: Ties, pairs: Matches, samples: int, ascending: bool) -> Chosen | None:
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
