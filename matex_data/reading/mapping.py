"""Fields that functions compute of others while a window is decoded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.errors import FunctionError
from matex_data.fields import MASK, Field, Schema
from matex_data.index.cache import ChunkCache
from matex_data.index.files import DerivedFiles, Facts, FileIndex, LayoutFacts
from matex_data.index.model import EMPTY, Index, Layout, PostProcess, ReadRequest, RowSelection, call_after_last
from matex_data.index.table import Column, Outputs, Table
from matex_data.index.table import plan_reads as plan_fields
from matex_data.reading.functions import SampleFunction

NUMBER = "#number"
"""Name of the field with the number of each sample, while samples wait in memory for functions that draw."""


@dataclass(frozen=True)
class Mapped:
    """Fields of samples, and functions that compute further ones, one after the other.

    Parameters
    ----------
    index : of the samples.
    functions : each gets fields of ``index``, or of the functions before it.
    names : fields of the result.
    """

    index: Index
    functions: tuple[SampleFunction, ...]
    names: tuple[str, ...]

    @property
    def fields(self) -> Schema:
        """Fields of the result, by name."""
        known = dict(self.index.fields)
        for function in self.functions:
            known |= function.fields
        return {name: known[name] for name in self.names}

    @property
    def draws(self) -> bool:
        """True if a function gets seeds."""
        return any(function.seeds_as is not None for function in self.functions)

    @property
    def read(self) -> list[str]:
        """Names of the fields of ``index`` that functions get, in its order, with their masks."""
        known: set[str] = set()
        needed: set[str] = set()
        for function in self.functions:
            needed |= set(function.given) - known
            known |= set(function.fields)
        return self._with_masks(needed | (set(self.computed) - known))

    def _with_masks(self, names: set[str]) -> list[str]:
        """Return names of fields in order; missing values are replaced in a field and its mask at once."""
        if self.index.post_process is not None:
            of_mask = {MASK.format(name): name for name in self.index.fields}
            names = names | {of_mask[name] for name in names if name in of_mask}
            names |= {MASK.format(name) for name in names}
        return [name for name in self.index.fields if name in names]

    @property
    def computed(self) -> list[str]:
        """Names of the fields of the result that functions return, and of the masks of what these replace."""
        returned = {name for function in self.functions for name in function.fields}
        if self.index.post_process is not None:
            returned |= {MASK.format(name) for name in returned}
        return [name for name in self.names if name in returned]

    def apply(self, arrays: Mapping[str, Array], numbers: Integers, epoch: int) -> dict[str, Any]:
        """Return the fields that functions have computed, by name.

        Parameters
        ----------
        arrays : of the fields ``read``.
        numbers : int64[samples], numbers of the samples in ``index``.
        epoch : number of the epoch.

        Raises
        ------
        FunctionError : a function fails.
        """
        known: dict[str, Any] = dict(arrays)
        for function in self.functions:
            known |= function({name: known[name] for name in function.given}, numbers, epoch)
        return {name: known[name] for name in self.computed}

    def result(self) -> Index:
        """Return the index of the result, whose functions run where their windows are decoded."""
        index, computed = self.index, self.computed
        kept = self._with_masks({name for name in self.names if name not in computed})
        kept = [name for name in kept if name not in computed]
        fields = {**{name: index.fields[name] for name in kept}, **self.fields}
        fields = {name: fields[name] for name in [*self.names, *(n for n in kept if n not in self.names)]}
        process = index.post_process and partial(_process_kept, index.post_process, tuple(kept))
        facts = _facts(index.files.facts, kept, self.read, computed) if index.files.has_facts else None
        files = DerivedFiles(index.files, partial(_mapped, self, index.first_row, tuple(kept)), facts=facts)
        return Index(fields, files, index.static, index.facts, process)

    def inputs(self) -> Index:
        """Return the index of what is kept in memory for functions that draw: their inputs, and numbers of samples."""
        names = self._with_masks({*self.read, *(name for name in self.names if name not in self.computed)})
        index = self.index.select(names)
        fields = {**index.fields, NUMBER: Field(NUMBER, (), np.dtype(np.int64))}
        files = DerivedFiles(index.files, partial(_numbered, index.first_row))
        return Index(fields, files, index.static, index.facts, index.post_process)


def _process_kept(
    process: PostProcess, kept: tuple[str, ...], arrays: Mapping[str, Array], destination: Integers
) -> None:
    """Call a function of windows on the fields that no function has computed."""
    process({name: arrays[name] for name in kept if name in arrays}, destination)


def _facts(facts: Facts, kept: Sequence[str], read: Sequence[str], computed: Sequence[str]) -> Facts:
    found = {name: facts[name] for name in kept}
    of_read = [facts[name] for name in read]
    if of_read:
        block_rows = np.maximum.reduce([one.block_rows for one in of_read])
        uneven = np.logical_or.reduce([one.uneven & (one.block_rows == block_rows) for one in of_read])
        separate = np.logical_or.reduce([one.separate for one in of_read])
        own = LayoutFacts(block_rows, np.zeros_like(of_read[0].inner_bytes), uneven, separate)
        found |= dict.fromkeys(computed, own)
    return found


def _mapped(mapped: Mapped, first_row: Integers, kept: tuple[str, ...], number: int, file: FileIndex) -> FileIndex:
    """Return the index of a file with the fields of the result."""
    layouts = {name: file.layouts[name] for name in mapped.read}
    table = MappedRows(mapped, layouts, file.rows, int(first_row[number]))
    columns: dict[str, Layout] = {name: Column(table, name) for name in mapped.computed}
    return replace(file, layouts={**{name: file.layouts[name] for name in kept}, **columns})


@dataclass(frozen=True, eq=False)
class MappedRows(Table):
    """Rows of one file that functions compute from other fields of the same rows.

    Parameters
    ----------
    mapped : the functions.
    layouts : of the fields that they get, by name.
    rows : number of rows of the file.
    first : number of its first sample.
    """

    mapped: Mapped
    layouts: Mapping[str, Layout]
    rows: int
    first: int

    @property
    def _largest(self) -> Layout | None:
        return max(self.layouts.values(), key=lambda layout: layout.block_rows, default=None)

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.mapped.computed)

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return 1 if self._largest is None else self._largest.block_rows

    def borders(self) -> Integers | None:
        return None if self._largest is None else self._largest.borders()

    def stored_bytes(self) -> int:
        return sum(layout.stored_bytes() for layout in self.layouts.values())

    def end(self) -> int:
        return max((layout.end() for layout in self.layouts.values()), default=0)

    def kept_bytes(self) -> int:
        return max((layout.kept_bytes() for layout in self.layouts.values()), default=0)

    def requests(self, rows: RowSelection, outs: Outputs, cache: ChunkCache) -> Iterator[ReadRequest]:
        count = len(rows.destination)
        arrays = {name: self.mapped.index.fields[name].empty(count) for name in self.layouts}
        here = RowSelection(rows.start, rows.stop, np.arange(count, dtype=np.int64))
        requests = [request for _, request in plan_fields(self.layouts, here, arrays, cache)]
        requests = requests or [ReadRequest(EMPTY, EMPTY)]
        yield from call_after_last(requests, partial(self._compute, rows, arrays, dict(outs), cache.epoch))

    def _compute(self, rows: RowSelection, arrays: dict[str, Array], outs: dict[str, Array], epoch: int) -> None:
        if self.mapped.index.post_process is not None:
            self.mapped.index.post_process(arrays, np.arange(len(rows.destination)))
        try:
            computed = self.mapped.apply(arrays, self.first + rows.numbers, epoch)
        except FunctionError as error:
            raise error.of_rows(int(rows.start[0]), int(rows.stop[-1]) - 1) from error.__cause__
        arrays.clear()  # their memory is free, whatever still refers to this call
        for name, out in outs.items():
            out[rows.destination] = computed[name]


def _numbered(first_row: Integers, number: int, file: FileIndex) -> FileIndex:
    return replace(file, layouts={**file.layouts, NUMBER: Numbers(file.rows, int(first_row[number]))})


@dataclass(frozen=True)
class Numbers(Layout):
    """Numbers of samples, which are stored nowhere.

    Parameters
    ----------
    rows : number of rows.
    first : number of the first one.
    """

    rows: int
    first: int
    block_rows: int = 1

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        yield ReadRequest(EMPTY, EMPTY, on_complete=partial(self._fill, rows, out))

    def _fill(self, rows: RowSelection, out: Array, _: Bytes) -> None:
        out[rows.destination] = self.first + rows.numbers
