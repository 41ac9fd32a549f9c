"""Fields that are made of other fields of a sample by expressions, once the rows of a window are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import DataError, FieldNotFound, FormatError, near_matches
from matex_data.fields import Field, Schema
from matex_data.index.cache import ChunkCache
from matex_data.index.columns import compact
from matex_data.index.files import DerivedFiles, FileTable, LayoutFacts
from matex_data.index.model import FileIndex, Index, Layout, ReadRequest, RowSelection
from matex_data.index.ragged import scatter_lists
from matex_data.index.scatter import scatter
from matex_data.index.table import Column, Outputs, Table
from matex_data.transforms.evaluation import Values, delivered_dtype, evaluate
from matex_data.transforms.expressions import Expression, in_order
from matex_data.transforms.ragged import empty_samples, join_samples, read_fields

RAGGED_BYTES = 1024  # least estimate for a ragged sample in memory: not every layout has one
Expressions = Mapping[str, Expression]


def add_expressions(index: Index, expressions: Expressions) -> Index:
    """Return the index with a field for each expression, in the order in which they depend on one another.

    A field of the index of which one of them is made shares its reads.

    Parameters
    ----------
    index : index of the data set.
    expressions : by name of the new field.

    Raises
    ------
    FieldNotFound : an expression names no field.
    FormatError : an expression cannot be evaluated; the new fields are made of one another; the data already have a
        field of this name.
    """
    if not expressions:
        return index
    taken = next((name for name in expressions if name in index.fields), None)
    if taken is not None:
        raise FormatError(
            "the files have a field of this name already",
            file=index.files.paths[0] if len(index.files) else None,
            field=taken,
            remedy="give the field of derive= another name",
        )
    fields = dict(index.fields)
    bound: dict[str, Expression] = {}
    lists: dict[str, str] = {}  # of each ragged new field, the field that has as many elements
    for name in in_order(expressions, expressions):
        bound[name] = expressions[name].bound(fields)
        fields[name] = _field(name, bound[name], fields)
        if fields[name].ragged:
            lists[name] = next(other for other in bound[name].outside if fields[other].ragged)
    sources = [name for name in index.fields if any(name in expression.fields for expression in bound.values())]
    scratch = _scratch_bytes(index, sources)
    fields |= {name: replace(fields[name], scratch_bytes=scratch) for name in bound}
    derive = partial(_derive, bound, fields, lists, sources)
    facts = _facts(index.files, bound, fields, lists, sources) if index.files.has_facts and len(index.files) else None
    files = DerivedFiles(index.files, derive, facts=facts)
    return Index(fields, files, index.static, index.facts, index.post_process)


def _field(name: str, expression: Expression, fields: Schema) -> Field:
    """Return the field of an expression, which is evaluated without samples."""
    none: dict[str, Values] = {}
    for other in expression.fields:
        field = fields.get(other)
        if field is None:
            raise unknown_field(other, expression, fields)
        if field.ragged and (field.inner != (None,) or field.nested or field.shape):
            raise expression.error(field.description, field=other, expected="numbers, or lists of numbers")
        empty = np.empty(0, field.dtype) if field.ragged else field.empty(0)
        none[other] = Values(empty, np.empty(0, np.int64) if field.ragged else None)
    values = evaluate(expression, none)
    dtype = delivered_dtype(expression, values.content.dtype, fields)
    attributes = {"expression": expression.text}
    if values.lengths is not None:
        return Field(name, (), dtype, ragged=True, attributes=attributes)
    return Field(name, values.content.shape[1:], dtype, attributes=attributes)


def unknown_field(name: str, expression: Expression, available: Schema) -> FieldNotFound:
    """Return the error for a name in an expression that is no field."""
    return FieldNotFound(
        f"{expression.option} names a field that the data do not have",
        field=name,
        expected=f"one of {near_matches(name, available)}",
        found=repr(expression.text),
        remedy="correct the name; a name that is no Python identifier stands in backticks: `jets/pt` > 30",
    )


def _scratch_bytes(index: Index, sources: Sequence[str]) -> int:
    """Return the memory that the sources of a sample take, in bytes."""
    ragged = (max(RAGGED_BYTES, index.row_bytes(name)) for name in sources if index.fields[name].ragged)
    return sum(ragged) + sum(index.row_bytes(name) for name in sources if not index.fields[name].ragged)


def _facts(
    files: FileTable, bound: Expressions, fields: Schema, lists: Mapping[str, str], sources: Sequence[str]
) -> dict[str, LayoutFacts]:
    """Return the facts of all fields; those of new ones and their sources are of the table that reads these."""
    facts = dict(files.facts)
    block_rows = compact(np.max([facts[name].block_rows for name in sources], axis=0).astype(np.int64))
    uneven = np.any([facts[name].uneven for name in sources], axis=0)
    of_table = LayoutFacts(block_rows, np.zeros(len(files), np.uint8), uneven, np.zeros(len(files), bool))
    for name in (*sources, *bound):
        inner = facts[name].inner_bytes if name in facts else of_table.inner_bytes
        if name in lists:
            of_list = facts[lists[name]].inner_bytes.astype(np.int64) // fields[lists[name]].dtype.itemsize
            inner = compact(of_list * fields[name].dtype.itemsize)
        facts[name] = replace(of_table, inner_bytes=inner)
    return facts


def _derive(
    bound: Expressions, fields: Schema, lists: Mapping[str, str], sources: Sequence[str], _: int, file: FileIndex
) -> FileIndex:
    """Return the index of a file with derived fields."""
    table = Derived(file.path, {name: file.layouts[name] for name in sources}, fields, bound, lists)
    columns = {name: Column(table, name) for name in (*sources, *bound)}
    return replace(file, layouts={**file.layouts, **columns})


@dataclass(frozen=True, eq=False)
class Derived(Table):
    """Fields of one file, and those that are made of them. A window reads each field of the file once.

    Parameters
    ----------
    path : of the file.
    layouts : of the fields of the file.
    fields : all fields.
    expressions : by name of the derived field, each behind those that it is made of.
    lists : for each derived field of lists one that has as many elements.
    """

    path: str
    layouts: Mapping[str, Layout]
    fields: Schema
    expressions: Expressions
    lists: Mapping[str, str]

    @property
    def rows(self) -> int:  # type: ignore[override]
        return next(iter(self.layouts.values())).rows

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.layouts)

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return max(layout.block_rows for layout in self.layouts.values())

    def borders(self) -> Integers | None:
        every = (layout.borders() for layout in self.layouts.values())
        return next((borders for borders in every if borders is not None), None)

    def stored_bytes(self) -> int:
        return sum(layout.stored_bytes() for layout in self.layouts.values())

    def end(self) -> int:
        return max(layout.end() for layout in self.layouts.values())

    def inner_bytes(self, name: str) -> int:
        if name in self.layouts:
            return self.layouts[name].inner_bytes()
        if name not in self.lists:
            return 0
        other = self.lists[name]
        return self.inner_bytes(other) // self.fields[other].dtype.itemsize * self.fields[name].dtype.itemsize

    def requests(self, rows: RowSelection, outs: Outputs, cache: ChunkCache) -> Iterator[ReadRequest]:
        count = len(rows.destination)
        derived = in_order(self.expressions, [name for name, _ in outs])
        named = {name for name, _ in outs}.union(*(self.expressions[name].fields for name in derived))
        samples = {
            name: empty_samples(self.fields[name], count, layout)
            for name, layout in self.layouts.items()
            if name in named
        }
        selection = RowSelection(rows.start, rows.stop, np.arange(count))
        finish = partial(self._finish, samples, derived, rows, outs)
        yield from read_fields(self.layouts, selection, samples, cache, self.path, finish)

    def _finish(self, samples: Mapping[str, Array], derived: Sequence[str], rows: RowSelection, outs: Outputs) -> None:
        """Evaluate the expressions, and write the wanted fields to their arrays."""
        values = {name: self._values(name, array) for name, array in samples.items()}
        try:
            for name in derived:
                made = evaluate(self.expressions[name], values)
                values[name] = replace(made, content=made.content.astype(self.fields[name].dtype, copy=False))
        except DataError as error:
            if error.row is None:
                raise
            raise error.at_row(int(rows.numbers[error.row])) from error
        for name, out in outs:
            content, lengths = values[name].content, values[name].lengths
            if lengths is None:
                scatter(out, rows.destination, content)
            else:
                scatter_lists(out, rows.destination, np.concatenate([[0], np.cumsum(lengths)]), content)

    def _values(self, name: str, samples: Array) -> Values:
        """Return the values of a field of the file."""
        field = self.fields[name]
        simple = field.ragged and field.inner == (None,) and not field.nested and not field.shape
        return Values(*join_samples(samples, field)) if simple else Values(samples)
