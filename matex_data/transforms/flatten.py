"""Inner objects as samples: the elements of ragged fields, with the other fields of their event repeated."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import FieldNotFound, FormatError
from matex_data.fields import Schema
from matex_data.index.computed import Made, join_lists
from matex_data.index.files import DerivedFiles
from matex_data.index.model import FileIndex, Finish, FromOne, Index, Read, Wanted
from matex_data.index.ragged import RAGGED_BYTES, empty_output
from matex_data.index.runs import Chosen, Samples, compress
from matex_data.index.scatter import scatter
from matex_data.locks import cached_property
from matex_data.mpi.shared import gathered
from matex_data.reading.plan import Arrays
from matex_data.reading.source import Source
from matex_data.sampling.schedule import rank_range
from matex_data.sampling.split import Ties
from matex_data.transforms.joining import all_of
from matex_data.transforms.names import ragged_fields
from matex_data.transforms.remade import Remade
from matex_data.transforms.select import set_bits

EVENTS = 1 << 20  # looked at together


def flatten_fields(source: Source, events: Samples, flatten: Sequence[str]) -> Remade:
    """Return an index whose samples are the objects of the events. *Collective*.

    Parameters
    ----------
    source : opened files, whose samples are events. Each rank reads the lengths of its block.
    events : selected events, ascending.
    flatten : names and patterns of the ragged fields whose elements are the objects.

    Raises
    ------
    FieldNotFound : a name is no ragged field.
    DataError : the first error of any rank, on every rank.
    """
    index = source.index
    flattened = list(ragged_fields(index.fields, flatten, "flatten"))
    if not flattened:
        raise FieldNotFound("flatten names no field", expected="names of ragged fields", found=list(flatten))
    counted = min(flattened, key=lambda name: index.fields[name].dtype.itemsize)
    first_object = first_objects(source, events, counted)
    fields = {name: replace(one, ragged=False) if name in flattened else one for name, one in index.fields.items()}
    flat = Objects(index, frozenset(flattened), counted, first_object)
    bits, digest = np.zeros(-(-int(first_object[-1]) // 8), np.uint8), hashlib.blake2b(digest_size=16)
    for low in range(0, len(index), EVENTS):
        first = first_object[low : low + EVENTS + 1]
        counts = np.diff(first)
        set_bits(bits, first[:-1][counts > 0])
        digest.update(counts.astype("<i8").tobytes())
    return Remade(flat.index(fields), Ties(events=Chosen.of_bits(bits)), partial(_reshape, flat), digest.hexdigest())


def _reshape(flat: Objects, index: Index) -> Index:
    """Return the index of objects with fields of their events."""
    for name, one in index.fields.items():
        if one.ragged:
            raise FormatError(
                "a field with samples of varying length has no value for each object",
                field=name,
                remedy="leave it out with inputs= and targets=, or name it in flatten= if it is as long as the others",
            )
    return replace(flat, base=index, flattened=frozenset()).index(index.fields)


def first_objects(source: Source, events: Samples, name: str) -> Integers:
    """Return the first object of each event of the files, and the number of objects. *Collective*.

    Parameters
    ----------
    source : opened files.
    events : selected events; the others have no objects.
    name : of a ragged field, whose elements are the objects. Each rank reads its block of the events.

    Returns
    -------
    int64[events of the files + 1], which the ranks of a machine have in memory once.
    """
    row_bytes = max(RAGGED_BYTES, source.index.row_bytes(name))
    own = np.zeros(source.block(events).total, np.int64)

    def count(positions: Integers, arrays: Arrays) -> None:
        own[positions] = np.fromiter(map(len, arrays[name]), np.int64, len(positions))

    source.use_block(events, [name], count, row_bytes)
    comm, total = source.comm, len(source.index)
    numbers = events.numbers(np.arange(*rank_range(events.total, comm.rank, comm.size)))
    firsts = np.array(comm.allgather(int(numbers[0]) if len(numbers) else total), np.int64)
    edges = np.append(np.minimum.accumulate(firsts[::-1])[::-1], total)  # of the ranks' events
    edges[0] = 0
    low = int(edges[comm.rank])
    counts = np.zeros(int(edges[comm.rank + 1]) - low, np.int64)
    counts[numbers - low] = own
    ends = comm.sum_of_lower(counts.sum(keepdims=True)) + np.cumsum(counts)
    return gathered(comm, ends if comm.rank else np.concatenate([[0], ends]))


@dataclass(frozen=True, eq=False)
class Objects(FromOne):
    """Objects of the events of an index. Every event is read once, however many of its objects are selected.

    Parameters
    ----------
    flattened : names of the ragged fields whose elements are the objects.
    counted : the one of them whose lengths ``first_object`` adds up.
    first_object : int64[events + 1], the first object of each event, and the number of objects.
    """

    flattened: frozenset[str]
    counted: str
    first_object: Integers

    @property
    def raw(self) -> Schema:
        return {
            n: replace(one, ragged=one.ragged and n not in self.flattened) for n, one in self.base.raw.fields.items()
        }

    def index(self, fields: Schema) -> Index:
        """Return the index of objects with these fields."""
        base = self.base
        flatten = partial(_flatten_file, tuple(fields), self.first_object, base.first_row)
        files = DerivedFiles(base.files, flatten, np.diff(self.first_object[base.first_row]))
        return Index(fields, files, base.static, base.facts, self)

    def plan(self, wanted: Wanted, read: Read, epoch: int) -> Finish | None:
        objects = wanted.runs.numbers(np.arange(wanted.runs.total))
        event = np.searchsorted(self.first_object, objects, side="right") - 1
        begins = np.diff(event, prepend=-1) > 0
        events, number = event[begins], np.cumsum(begins) - 1
        fields, inner = wanted.fields(self.base), self.base.inner_bytes
        arrays = {name: fields[name].empty(len(events)) for name in wanted.arrays if name not in self.flattened}
        for name in self.flattened.intersection(wanted.arrays):
            arrays[name] = empty_output(fields[name], len(events), inner(name))
        finish = read(0, Wanted(compress(events), np.arange(len(events)), arrays, raw=wanted.raw))
        return all_of([finish, partial(self._spread, arrays, events, number, objects, wanted)])

    def _spread(
        self, arrays: dict[str, Array], events: Integers, number: Integers, objects: Integers, wanted: Wanted
    ) -> None:
        """Copy each object, and the fields of its event, to its place.

        Parameters
        ----------
        arrays : of the events.
        events : int64[events], their numbers.
        number : int64[objects], the event of each object, among those that are read.
        objects : int64[objects], their numbers.
        wanted : the objects.
        """
        counts = self.first_object[events + 1] - self.first_object[events]
        first = np.cumsum(counts) - counts
        at = first[number] + objects - self.first_object[events[number]]
        for name, samples in arrays.items():
            if name in self.flattened:
                lists = join_lists(samples, self.base.fields[name])
                self._check_lengths(name, lists.lengths, counts, events)
                samples, rows = lists.values, at
            else:
                rows = number
            scatter(wanted.arrays[name], wanted.destination, samples[rows])
        arrays.clear()

    def _check_lengths(self, name: str, lengths: Integers, counts: Integers, events: Integers) -> None:
        differ = np.flatnonzero(lengths != counts)
        if not len(differ):
            return
        i = int(differ[0])
        path, row = self.base.located(int(events[i]))
        problem = f"the flattened fields {self.counted!r} and {name!r} differ in length"
        raise FormatError(
            problem if name != self.counted else "the file has changed since it was opened",
            file=path,
            field=name,
            row=row,
            expected=f"{counts[i]} elements, as in {self.counted!r}",
            found=f"{lengths[i]} elements in {name!r}",
            remedy="flatten= only fields of the same objects, or open the files again",
        )


def _flatten_file(
    names: Sequence[str], first_object: Integers, first_row: Integers, number: int, file: FileIndex
) -> FileIndex:
    """Return the index of a file whose rows are objects, given the first object of each event of all files."""
    of_file = first_object[first_row[number] : first_row[number + 1] + 1]
    of_file = of_file - of_file[0]
    rows = ObjectRows(int(of_file[-1]), tuple(file.layouts.values()), first_object=of_file)
    return replace(file, rows=rows.rows, layouts=dict.fromkeys(names, rows))


@dataclass(frozen=True, eq=False)
class ObjectRows(Made):
    """Objects of the events of one file; see `Made`. The layouts are those of the events.

    Parameters
    ----------
    first_object : int64[events + 1], the first object of each event, and the number of objects.
    """

    first_object: Integers = field(kw_only=True)

    @cached_property
    def _borders(self) -> Integers | None:
        """First object of each block of events; None if every event can be read alone."""
        uneven = (layout.borders() for layout in self.layouts)
        first_events = next((borders for borders in uneven if borders is not None), None)
        if first_events is None:
            block = max(layout.block_rows for layout in self.layouts)
            if block == 1:
                return None
            first_events = np.arange(0, len(self.first_object) - 1, block)
        borders = np.unique(self.first_object[first_events])
        return borders[borders < self.rows]

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return 1 if self._borders is None else self.longest(self._borders)

    def borders(self) -> Integers | None:
        return self._borders

    def stored_bytes(self) -> int:
        return super().stored_bytes() // max(1, len(self.layouts))
