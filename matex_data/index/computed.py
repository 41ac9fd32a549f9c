"""Fields that functions compute of others, once the rows of a window are read.

An index has a list of computations. The engine reads the fields that a window needs of them once, and then runs the
functions in order, each on the whole window. A field that is computed anew, such as one whose missing values are
replaced, is another *variable*; the variables before it stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import DataError, FunctionError
from matex_data.fields import Field, Schema
from matex_data.index.cache import ChunkCache
from matex_data.index.columns import compact
from matex_data.index.files import DerivedFiles, Facts, FileIndex, LayoutFacts
from matex_data.index.layout import Composed, Layout, ReadRequest
from matex_data.index.model import Finish, FromOne, Index, Read, Wanted
from matex_data.index.ragged import RaggedArray, RaggedOutput, empty_output, scatter_lists
from matex_data.index.runs import RowSelection, ranges
from matex_data.index.scatter import scatter
from matex_data.locks import cached_property

RAW = "\0{}"  # variable of a field of the base as its ``Index.raw`` has it
Views = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Callable that gets the arrays of results, and returns by argument the views of them into which rows may be read."""


@dataclass(frozen=True, eq=False)
class Call:
    """Samples of a window, as a function gets them.

    Parameters
    ----------
    inputs : array [samples, ...] of each argument, which the function does not change; of a ragged one an object array
        or a `RaggedOutput`.
    outs : array [samples, ...] of each result that is wanted, to be filled.
    placed : arguments whose rows lie in the results already, where `Computation.place` wants them.
    numbers : returns int64[samples], numbers of the samples: few functions need these 8 bytes of each.
    fields : of the arguments.
    variables : of the arguments.
    joined : lists of variables that are joined already.
    """

    inputs: Mapping[str, Any]
    outs: Mapping[str, Any]
    placed: frozenset[str]
    numbers: Callable[[], Integers]
    epoch: int
    fields: Schema
    variables: Mapping[str, str]
    joined: dict[str, RaggedArray]

    def lists(self, name: str) -> RaggedArray:
        """Return the samples of a ragged argument, one after the other."""
        variable = self.variables[name]
        if variable not in self.joined:
            self.joined[variable] = join_lists(self.inputs[name], self.fields[name])
        return self.joined[variable]

    def fill(self, name: str, values: Array, offsets: Integers | None = None) -> None:
        """Fill the array of a result, if it is wanted; with lists, if it is given where they begin."""
        if name not in self.outs:
            return
        out = self.outs[name]
        if offsets is not None:
            scatter_lists(out, slice(0, len(out)), offsets, values)
        else:
            out[...] = values


def join_lists(samples: Any, field: Field) -> RaggedArray:
    """Return the elements of all samples of a ragged field of lists, one sample after the other.

    Parameters
    ----------
    samples : object[samples], arrays of the elements, which may have axes of fixed size; or a `RaggedOutput`.
    """
    if isinstance(samples, RaggedOutput):
        return samples.joined()
    lengths = np.fromiter(map(len, samples), np.int64, len(samples))
    none = np.empty((0, *field.element_shape), field.dtype)
    values = np.concatenate([none, *samples], dtype=field.dtype, casting="unsafe")
    return RaggedArray(values, np.concatenate([[0], np.cumsum(lengths)]))


@dataclass(frozen=True, eq=False)
class Computation:
    """Function that computes fields of other fields of the same samples.

    Parameters
    ----------
    function : fills the wanted results. What it computes of a sample depends on this sample alone.
    inputs : the variable of each argument, by name.
    results : the variable of each result, by name.
    fields : of the results, by name.
    views : see `Views`; None: arguments are read to arrays of their own.
    fills : it replaces missing values: text that identifies by what. "": it does not.
    draws : the function draws numbers by the epoch and the number of a sample.
    """

    function: Callable[[Call], None]
    inputs: Mapping[str, str]
    results: Mapping[str, str]
    fields: Schema
    views: Views | None = None
    fills: str = ""
    draws: bool = False


class ComputedFields(NamedTuple):
    """Fields that a function computes, new ones or in place of others.

    Parameters
    ----------
    function, views, fills, draws : see `Computation`. The function can be pickled.
    given : names of the fields that the function gets.
    fields : those that it computes, by name.
    raw_of : by name of a result, the field whose values ``Index.raw`` has in its place: another result, or a field
        before this computation, such as the one that the result replaces. That of a result without one is itself.
    raw_given : those of ``given`` that the function gets as ``Index.raw`` has them.
    """

    function: Callable[[Call], None]
    given: Sequence[str]
    fields: Schema
    views: Views | None = None
    fills: str = ""
    draws: bool = False
    raw_of: Mapping[str, str] = MappingProxyType({})
    raw_given: Collection[str] = ()


def compute_all(index: Index, steps: Iterable[ComputedFields]) -> Index:
    """Return the index with the fields of computations, one after the other, in time linear in their number.

    Examples
    --------
    >>> from matex_data.abc import MemoryRows
    >>> layout = MemoryRows(np.array([1.0, 2.0]))
    >>> index = Index({"t": Field("t", (), np.dtype("f8"))}, [FileIndex("a", 2, {"t": layout})])
    >>> def double(call):
    ...     call.fill("twice", 2 * call.inputs["t"])
    >>> twice = ComputedFields(double, ["t"], {"twice": Field("twice", (), np.dtype("f8"))})
    >>> list(compute_all(index, [twice]).fields)
    ['t', 'twice']
    """
    steps = list(steps)
    if not steps:
        return index
    known = index.made
    if not isinstance(known, Computed):
        known = Computed(index, (), {name: name for name in index.fields}, {})
    computations, delivered, fields = list(known.steps), dict(known.delivered), dict(index.fields)
    raw_variables = dict(known.raw_variables)

    def raw(name: str) -> str:
        return known.raw_leaf(raw_variables.get(delivered[name], delivered[name]))

    for step in steps:
        inputs = {name: raw(name) if name in step.raw_given else delivered[name] for name in step.given}
        results = {name: f"{name}\0{len(computations)}" for name in step.fields}
        computations.append(
            Computation(step.function, inputs, results, step.fields, step.views, step.fills, step.draws)
        )
        for name, other in step.raw_of.items():
            raw_variables[results[name]] = results[other] if other in results and other != name else raw(other)
        delivered |= results
        fields |= step.fields
    return Computed(known.base, tuple(computations), delivered, raw_variables).index(fields, index)


@dataclass(frozen=True, eq=False)
class Computed(FromOne):
    """Samples of another index with fields that are computed of its own.

    Parameters
    ----------
    steps : computations, each of variables of the index or of those before it.
    delivered : the variable of each field.
    raw_variables : by variable, the one that ``Index.raw`` has in its place, if it is another one.
    """

    steps: tuple[Computation, ...]
    delivered: Mapping[str, str]
    raw_variables: Mapping[str, str]

    @property
    def draws(self) -> bool:
        return self.base.draws or any(step.draws for step in self.steps)

    @property
    def raw(self) -> Schema:
        return {name: replace(self.variables[of], name=name) for name, of in self._raw_delivered.items()}

    @cached_property
    def _raw_delivered(self) -> Mapping[str, str]:
        """The variable of each field of ``Index.raw``."""
        return {name: self.raw_leaf(self.raw_variables.get(of, of)) for name, of in self.delivered.items()}

    @cached_property
    def _raw_leaves(self) -> Mapping[str, str]:
        """Names of the fields of the base by their variables of ``Index.raw``, where these are others."""
        return {} if self.base.made is None else {RAW.format(name): name for name in self.base.fields}

    def raw_leaf(self, variable: str) -> str:
        """Return a variable; of a field of the base, that of ``Index.raw``."""
        return RAW.format(variable) if RAW.format(variable) in self._raw_leaves else variable

    @cached_property
    def variables(self) -> Schema:
        """Fields of all variables."""
        raw = {variable: self.base.raw.fields[name] for variable, name in self._raw_leaves.items()}
        computed = {step.results[name]: one for step in self.steps for name, one in step.fields.items()}
        return {**self.base.fields, **raw, **computed}

    @cached_property
    def leaves(self) -> Mapping[str, tuple[str, ...]]:
        """Fields of the base that each variable is made of."""
        of_variables: dict[str, tuple[str, ...]] = {name: (name,) for name in self.base.fields}
        of_variables |= {variable: (name,) for variable, name in self._raw_leaves.items()}
        for step in self.steps:
            of_step = tuple(dict.fromkeys(leaf for variable in step.inputs.values() for leaf in of_variables[variable]))
            of_variables.update(dict.fromkeys(step.results.values(), of_step))
        return of_variables

    def index(self, fields: Schema, like: Index) -> Index:
        """Return the index of these fields, with the static arrays and facts of another one."""
        files = self.base.files
        made_of = {name: (self.delivered[name], self.leaves[self.delivered[name]]) for name in fields}
        facts = self._facts(fields, files.facts) if files.has_facts and len(files) else None
        derived = DerivedFiles(files, partial(_computed, made_of, self._list_of(fields)), facts=facts)
        return Index(fields, derived, like.static, like.facts, self)

    def _list_of(self, fields: Schema) -> Mapping[str, tuple[str, float]]:
        """Return for each computed ragged field a field of lists that it is made of, and the size of its elements."""
        by_field: dict[str, tuple[str, float]] = {}
        for name, one in fields.items():
            lists = [leaf for leaf in self.leaves[self.delivered[name]] if self.base.fields[leaf].ragged]
            if one.ragged and lists and self.delivered[name] not in self.base.fields:
                by_field[name] = lists[0], one.dtype.itemsize / self.base.fields[lists[0]].dtype.itemsize
        return by_field

    def _facts(self, fields: Schema, facts: Facts) -> Facts:
        lists = self._list_of(fields)
        of_fields: dict[str, LayoutFacts] = {}
        for name in fields:
            variable = self.delivered[name]
            if variable in facts:
                of_fields[name] = facts[variable]
                continue
            combined = _combined([facts[leaf] for leaf in self.leaves[variable]], len(self.base.files))
            if name in lists:
                leaf, ratio = lists[name]
                combined = replace(combined, inner_bytes=compact((facts[leaf].inner_bytes * ratio).astype(np.int64)))
            of_fields[name] = combined
        return of_fields

    def plan(self, wanted: Wanted, read: Read, epoch: int) -> Finish | None:
        if not len(wanted.destination):  # no function is asked to compute nothing
            return None
        delivered = self._raw_delivered if wanted.raw else self.delivered
        window = _Window(self, self._needed([delivered[name] for name in wanted.arrays]), delivered, wanted, epoch)
        finishes = []
        plain = {name: array for name, array in window.memory.items() if name in self.base.fields}
        raw = {self._raw_leaves[of]: array for of, array in window.memory.items() if of in self._raw_leaves}
        for arrays, is_raw in ((plain, False), (raw, True)):
            if arrays:
                finishes.append(read(0, replace(wanted, destination=window.rows, arrays=arrays, raw=is_raw)))
        return partial(window.compute, finishes)

    def _needed(self, variables: Sequence[str]) -> list[Computation]:
        """Return the computations of these variables, in order."""
        live, chosen = set(variables), []
        for step in reversed(self.steps):
            if not live.isdisjoint(step.results.values()):
                chosen.append(step)
                live.update(step.inputs.values())
        return chosen[::-1]


class _Window:
    """Arrays of the variables of one window.

    Rows are those of the output arrays, if the window fills consecutive rows of them; else the samples in order.

    Parameters
    ----------
    steps : those that the window needs, in order.
    delivered : the variable of each field.
    """

    def __init__(
        self, made: Computed, steps: Sequence[Computation], delivered: Mapping[str, str], wanted: Wanted, epoch: int
    ) -> None:
        self._made, self._steps, self._wanted, self._epoch = made, steps, wanted, epoch
        count = len(wanted.destination)
        low = int(wanted.destination.min()) if count else 0
        self._views = bool(not count or int(wanted.destination.max()) - low + 1 == count)
        self.rows = np.arange(count) if not self._views else wanted.destination - low if low else wanted.destination
        self.memory: dict[str, Any] = {}
        self._copies: list[tuple[Any, str]] = []
        for name, out in wanted.arrays.items():
            rows = out[low : low + count] if self._views else out
            if self._views and delivered[name] not in self.memory:
                self.memory[delivered[name]] = rows
            else:
                self._copies.append((rows, delivered[name]))
        self._placed = self._allocate(count)

    def _allocate(self, count: int) -> list[frozenset[str]]:
        """Make the arrays of all variables; return the arguments of each step that lie in those of its results."""
        used = set(self.memory) | {variable for _, variable in self._copies}
        placed: list[frozenset[str]] = []
        for variable in used - set(self.memory):
            self.memory[variable] = self._empty(variable, count)
        for step in reversed(self._steps):
            outs = {name: self.memory[v] for name, v in step.results.items() if v in self.memory}
            views = step.views(outs) if step.views is not None else {}
            of_step = [name for name, variable in step.inputs.items() if name in views and variable not in used]
            for name in of_step:  # in order: adjacent columns of a table are read as a matrix
                self.memory[step.inputs[name]] = views[name]
            placed.append(frozenset(of_step))
            for variable in step.inputs.values():
                used.add(variable)
                if variable not in self.memory:
                    self.memory[variable] = self._empty(variable, count)
        return placed[::-1]

    def _empty(self, variable: str, count: int) -> Any:
        own, base = self._made.variables[variable], self._made.base
        return empty_output(own, count, base.inner_bytes(variable) if variable in base.fields else 0)

    def compute(self, finishes: Sequence[Finish | None]) -> None:
        """Run the computations, once all fields of the files are read, and fill the output arrays."""
        for finish in finishes:
            if finish is not None:
                finish()
        variables = self._made.variables
        run_steps(self._steps, self._placed, self.memory, variables, self._numbers_of_set, self._epoch, self._located)
        for out, variable in self._copies:
            self._copy(out, variable)
        self.memory.clear()  # free, whatever still refers to this call

    def _numbers(self) -> Integers:
        """Return the number of the sample of each row."""
        runs = self._wanted.runs
        numbers = np.empty(len(self.rows), np.int64)
        numbers[self.rows] = ranges(runs.start, runs.count)
        return numbers

    def _numbers_of_set(self) -> Integers:
        return self._numbers() + self._wanted.first

    def _copy(self, out: Any, variable: str) -> None:
        values = self.memory[variable]
        rows: Any = slice(0, len(self.rows)) if self._views else self._wanted.destination
        if isinstance(values, RaggedOutput):
            joined = values.joined()
            scatter_lists(out, rows, joined.offsets, joined.values)
        else:
            scatter(out, rows, values)

    def _located(self, error: DataError) -> DataError:
        """Add the file and the row of its sample to the error of a function, and return it."""
        base, numbers = self._made.base, self._numbers()
        if not len(numbers):
            return error
        if isinstance(error, FunctionError):
            ends = np.array([numbers.min(), numbers.max()])
            first, last = base.file_of(ends).tolist()
            rows = (ends - base.first_row[[first, last]]).tolist()
            located = error.of_rows(rows[0], rows[1], None if first == last else base.files.paths[last])
            return located.at(base.files.paths[first], error.field)
        if error.row is None or error.file is not None:
            return error
        path, row = base.located(int(numbers[error.row]))
        return error.at_row(row).at(path, error.field)


def run_steps(
    steps: Sequence[Computation],
    placed: Sequence[frozenset[str]],
    memory: Mapping[str, Any],
    fields: Schema,
    numbers: Callable[[], Integers],
    epoch: int,
    located: Callable[[DataError], DataError] = lambda error: error,
) -> None:
    """Run computations in order.

    Parameters
    ----------
    placed : of each, see `Call`.
    memory : the array of each variable.
    fields : the field of each variable.
    numbers, epoch : see `Call`.
    located : adds the file and the row of a sample to an error.

    Raises
    ------
    DataError : a function fails.
    """
    joined: dict[str, RaggedArray] = {}
    for step, of_step in zip(steps, placed, strict=True):
        inputs = {name: memory[variable] for name, variable in step.inputs.items()}
        outs = {name: memory[variable] for name, variable in step.results.items() if variable in memory}
        given = {name: fields[variable] for name, variable in step.inputs.items()}
        try:
            step.function(Call(inputs, outs, of_step, numbers, epoch, given, step.inputs, joined))
        except DataError as error:
            located(error)
            raise


def _combined(facts: Sequence[LayoutFacts], files: int) -> LayoutFacts:
    """Return the facts of fields that are made of others: the blocks are those of the field with the longest ones."""
    none = np.zeros(files, bool)
    if not facts:
        return LayoutFacts(np.ones(files, np.uint8), np.zeros(files, np.uint8), none, none)
    if len(facts) == 1:
        return replace(facts[0], inner_bytes=np.zeros(files, np.uint8))
    depths = np.stack([one.block_rows for one in facts])
    deepest = np.argmax(depths, axis=0)
    uneven = np.stack([one.uneven for one in facts])[deepest, np.arange(files)]
    separate = np.logical_or.reduce([one.separate for one in facts])
    return LayoutFacts(compact(depths.max(axis=0)), np.zeros(files, np.uint8), compact(uneven), compact(separate))


def _computed(
    made_of: Mapping[str, tuple[str, tuple[str, ...]]],
    lists: Mapping[str, tuple[str, float]],
    _: int,
    file: FileIndex,
) -> FileIndex:
    layouts: dict[str, Layout] = {}
    for name, (variable, leaves) in made_of.items():
        if variable in file.layouts:
            layouts[name] = file.layouts[variable]
            continue
        leaf, ratio = lists.get(name, (None, 0.0))
        inner = int(file.layouts[leaf].inner_bytes() * ratio) if leaf is not None else 0
        layouts[name] = Made(file.rows, tuple(file.layouts[leaf] for leaf in leaves), inner)
    return replace(file, layouts=layouts)


@dataclass(frozen=True, eq=False)
class Made(Composed, Layout):
    """Rows that an index makes of those of layouts: their blocks, for the schedule of an epoch. The index reads them.

    Parameters
    ----------
    layouts : of the rows that they are made of.
    inner : see ``inner_bytes``.
    """

    rows: int
    layouts: tuple[Layout, ...]
    inner: int = 0

    @property
    def origins(self) -> tuple[Layout, ...]:
        return self.layouts

    def inner_bytes(self) -> int:
        return self.inner

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        raise AssertionError("the index of a computed field plans its reads")


NUMBER = "#number"
"""Name of the field with the number of each sample, while samples wait in memory for functions that draw."""


@dataclass(frozen=True)
class Drawing:
    """Computations that are made anew in each epoch, of samples that are kept in memory.

    Parameters
    ----------
    index : of what is kept: its fields are variables, and the number of each sample.
    variables : the field of each variable.
    delivered : the variable of each field of the result.
    fields : of the result.
    """

    index: Index
    steps: tuple[Computation, ...]
    variables: Schema
    delivered: Mapping[str, str]
    fields: Schema

    def apply(self, arrays: Mapping[str, Any], numbers: Integers, epoch: int) -> dict[str, Any]:
        """Return the fields that are computed anew, by name.

        Parameters
        ----------
        arrays : of the fields of ``index``.
        numbers : int64[samples], numbers of the samples.

        Raises
        ------
        DataError : a function fails.
        """
        memory = dict(arrays)
        for step in self.steps:
            memory |= {variable: step.fields[name].empty(len(numbers)) for name, variable in step.results.items()}
        run_steps(self.steps, [frozenset()] * len(self.steps), memory, self.variables, lambda: numbers, epoch)
        return {name: memory[variable] for name, variable in self.delivered.items() if variable not in arrays}


def drawing(index: Index) -> Drawing | None:
    """Return what is kept of samples whose functions draw anew in each epoch, and the functions; None: none draws."""
    made = index.made
    if not isinstance(made, Computed) or not made.draws:
        return None
    late: list[Computation] = []
    drawn: set[str] = set()
    for step in made.steps:
        if step.draws or not drawn.isdisjoint(step.inputs.values()):
            late.append(step)
            drawn.update(step.results.values())
    delivered = {name: made.delivered[name] for name in index.fields}
    needed = [variable for step in late for variable in step.inputs.values()]
    kept = {variable: variable for variable in (*delivered.values(), *needed) if variable not in drawn}
    early = Computed(made.base, tuple(step for step in made.steps if step not in late), kept, {})
    inner = early.index({of: replace(made.variables[of], name=of) for of in kept}, index)
    number = {NUMBER: Field(NUMBER, (), np.dtype(np.int64))}
    numbered = compute_all(inner, [ComputedFields(_number, [], number)])
    return Drawing(numbered, tuple(late), made.variables, delivered, index.fields)


def _number(call: Call) -> None:
    call.fill(NUMBER, call.numbers())
