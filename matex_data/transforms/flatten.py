"""Inner objects as samples: the elements of ragged fields, with the other fields of their event repeated."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import FormatError
from matex_data.fields import Schema
from matex_data.index.cache import ChunkCache
from matex_data.index.chosen import Chosen, Samples
from matex_data.index.files import DerivedFiles
from matex_data.index.model import FileIndex, Index, Layout, ReadRequest, RowSelection
from matex_data.index.runs import compress
from matex_data.index.scatter import scatter
from matex_data.index.table import Column, Outputs, Table
from matex_data.locks import cached_property
from matex_data.reading.source import Source
from matex_data.transforms.names import ragged_fields
from matex_data.transforms.ragged import empty_samples, join_samples, read_fields

RAGGED_BYTES = 1024  # least estimate for a ragged sample in memory: not every layout has one


@dataclass(frozen=True)
class Flat:
    """Index of the objects of events.

    Parameters
    ----------
    index : whose samples are the objects.
    digest : of their distribution.
    events : objects with which an event begins.
    reshape : turns an index of further fields of the events, which are not ragged, into one of their objects.
    """

    index: Index
    digest: str
    events: Chosen
    reshape: Callable[[Index], Index]


def flatten_fields(source: Source, events: Samples, flatten: Sequence[str]) -> Flat:
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
    counted = min(flattened, key=lambda name: index.fields[name].dtype.itemsize)
    counts = count_objects(source, events, counted)
    fields = {
        name: replace(field, ragged=False) if name in flattened else field for name, field in index.fields.items()
    }
    before = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    begins = np.zeros(before[-1], bool)
    begins[before[:-1][counts > 0]] = True
    rows = np.diff(before[index.first_row])
    files = _flattened_files(flattened, counted, counts, rows, index)
    digest = hashlib.blake2b(counts.astype("<i8").tobytes(), digest_size=16).hexdigest()
    flat = Index(fields, files, index.static, index.facts)
    return Flat(flat, digest, Chosen.of(begins), partial(_reshape, counts, rows))


def _reshape(counts: Integers, rows: Integers, index: Index) -> Index:
    """Return the index of objects with the fields of their event, given the number of objects of each event."""
    for name, field in index.fields.items():
        if field.ragged:
            raise FormatError("a field with samples of varying length has no value for each object", field=name)
    return Index(index.fields, _flattened_files([], next(iter(index.fields)), counts, rows, index))


def _flattened_files(
    flattened: Sequence[str], counted: str, counts: Integers, rows: Integers, index: Index
) -> DerivedFiles:
    flatten_file = partial(_flatten_file, index.fields, flattened, counted, counts, index.first_row)
    return DerivedFiles(index.files, flatten_file, rows)


def count_objects(source: Source, events: Samples, name: str) -> Integers:
    """Return the number of elements of a ragged field in every event, int64[events of the files]. *Collective*.

    Parameters
    ----------
    source : opened files.
    events : selected events; the others count 0.
    name : the field. Each rank reads its block of the events.
    """
    row_bytes = max(RAGGED_BYTES, source.index.row_bytes(name))
    own = np.zeros(source.block(events).total, np.int64)
    for positions, arrays in source.blocks(events, [name], row_bytes):
        own[positions] = np.fromiter(map(len, arrays[name]), np.int64, len(positions))
    by_rank = source.comm.allgather(own.astype(np.min_scalar_type(own.max(initial=0))))
    counts = np.zeros(len(source.index), np.int64)
    counts[events.numbers(np.arange(events.total))] = np.concatenate(by_rank)
    return counts


def _flatten_file(
    fields: Schema,
    flattened: Sequence[str],
    counted: str,
    counts: Integers,
    first_row: Integers,
    number: int,
    file: FileIndex,
) -> FileIndex:
    """Return the index of a file whose rows are objects, given the number of objects of each event of all files."""
    of_file = counts[first_row[number] : first_row[number + 1]]
    first_object = np.concatenate([[0], np.cumsum(of_file)]).astype(np.int64)
    table = Flattened(file.path, file.layouts, fields, frozenset(flattened), counted, first_object)
    layouts: dict[str, Layout] = {name: Column(table, name) for name in fields}
    return replace(file, rows=table.rows, layouts=layouts)


@dataclass(frozen=True, eq=False)
class Flattened(Table):
    """Objects of the events of one file. Every event is read once, however many of its objects are selected.

    Parameters
    ----------
    path : of the file.
    layouts : of the fields of an event.
    fields : fields of an event.
    flattened : names of the ragged fields whose elements are the objects.
    counted : the one of them whose lengths ``first_object`` adds up.
    first_object : int64[events + 1], the first object of each event, and the number of objects.
    """

    path: str
    layouts: Mapping[str, Layout]
    fields: Schema
    flattened: frozenset[str]
    counted: str
    first_object: Integers

    @property
    def rows(self) -> int:  # type: ignore[override]
        return int(self.first_object[-1])

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.layouts)

    @cached_property
    def _borders(self) -> Integers | None:
        """First object of each block of events; None if every event can be read alone."""
        uneven = (layout.borders() for layout in self.layouts.values())
        first_events = next((borders for borders in uneven if borders is not None), None)
        if first_events is None:
            block = max(layout.block_rows for layout in self.layouts.values())
            if block == 1:
                return None
            first_events = np.arange(0, len(self.first_object) - 1, block)
        borders = np.unique(self.first_object[first_events])
        return borders[borders < self.rows]

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        if self._borders is None or not len(self._borders):
            return 1
        return int(np.diff(self._borders, append=self.rows).max())

    def borders(self) -> Integers | None:
        return self._borders

    def stored_bytes(self) -> int:
        return sum(layout.stored_bytes() for layout in self.layouts.values())

    def end(self) -> int:
        return max(layout.end() for layout in self.layouts.values())

    def requests(self, rows: RowSelection, outs: Outputs, cache: ChunkCache) -> Iterator[ReadRequest]:
        objects = rows.numbers
        event = np.searchsorted(self.first_object, objects, side="right") - 1
        begins = np.diff(event, prepend=-1) > 0
        runs = compress(event[begins])
        number = np.cumsum(begins) - 1  # of the event of each object, among those that are read
        samples = {
            name: empty_samples(self.fields[name], runs.total, self.layouts[name])
            if name in self.flattened
            else self.fields[name].empty(runs.total)
            for name, _ in outs
        }
        selection = RowSelection(runs.start, runs.start + runs.count, np.arange(runs.total))
        spread = partial(self._spread, samples, event[begins], number, objects, rows.destination, outs)
        yield from read_fields(self.layouts, selection, samples, cache, self.path, spread)

    def _spread(
        self,
        samples: Mapping[str, Array],
        events: Integers,
        number: Integers,
        objects: Integers,
        destination: Integers,
        outs: Outputs,
    ) -> None:
        """Write each object, and the fields of its event, to row ``destination`` of the arrays."""
        counts = self.first_object[events + 1] - self.first_object[events]
        first = np.cumsum(counts) - counts  # of the objects of each event, among those that are read
        at = first[number] + objects - self.first_object[events[number]]
        for name, out in outs:
            if name in self.flattened:
                content, lengths = join_samples(samples[name], self.fields[name])
                self._check_lengths(name, lengths, counts, events)
                scatter(out, destination, content[at])
            else:
                scatter(out, destination, samples[name][number])

    def _check_lengths(self, name: str, lengths: Integers, counts: Integers, events: Integers) -> None:
        differ = np.flatnonzero(lengths != counts)
        if not len(differ):
            return
        i = int(differ[0])
        problem = f"the flattened fields {self.counted!r} and {name!r} differ in length"
        raise FormatError(
            problem if name != self.counted else "the file has changed since it was opened",
            file=self.path,
            field=name,
            row=int(events[i]),
            expected=f"{counts[i]} elements, as in {self.counted!r}",
            found=f"{lengths[i]} elements in {name!r}",
            remedy="flatten= only fields of the same objects, or open the files again",
        )
