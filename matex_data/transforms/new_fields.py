"""Fields that the files do not have: those of the names of files, and those that are made of other fields."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from matex_data.errors import FieldNotFound, near_matches
from matex_data.fields import Field, Schema, is_category, is_pattern, name_taken
from matex_data.index.computed import Call, ComputedFields, compute_all
from matex_data.index.model import Index
from matex_data.index.ragged import RAGGED_BYTES
from matex_data.transforms.evaluation import Values, delivered_dtype, evaluate
from matex_data.transforms.expressions import Expression, in_order, parse
from matex_data.transforms.file_fields import FileFields, add_file_fields
from matex_data.transforms.missing import Sentinels, mark_missing

Expressions = Mapping[str, Expression]


def add_expressions(index: Index, expressions: Expressions) -> Index:
    """Return the index with a field for each expression, in the order in which they depend on one another.

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
        raise name_taken(taken, "derive=", next(iter(index.files.paths), None))
    depth: dict[str, int] = {}
    for name in in_order(expressions, expressions):
        depth[name] = 1 + max((depth.get(other, 0) for other in expressions[name].fields), default=0)
    for level in range(1, max(depth.values()) + 1):
        names = [name for name in depth if depth[name] == level]
        index = compute_all(index, [_computation(index, name, expressions[name]) for name in names])
    return index.select([*(name for name in index.fields if name not in depth), *depth])


def _computation(index: Index, name: str, expression: Expression) -> ComputedFields:
    """Return the computation of a field by an expression of those of an index; texts are compared with classes."""
    raw, texts = index.raw.fields, set(expression.fields).difference(expression.numbers)
    classes = {other: raw[other] for other in texts if other in raw and is_category(raw[other])}
    field = _field(name, expression, {**index.fields, **classes})
    field = replace(field, scratch_bytes=_scratch_bytes(index, expression.fields))
    function = partial(_evaluate, field, expression)
    return ComputedFields(function, expression.fields, {name: field}, raw_given=classes)


def _evaluate(field: Field, expression: Expression, call: Call) -> None:
    """Compute a field by an expression."""
    values = evaluate(expression, {other: _values(call, other) for other in expression.fields})
    offsets = None if values.lengths is None else np.concatenate([[0], np.cumsum(values.lengths)])
    call.fill(field.name, values.content.astype(field.dtype, copy=False), offsets)


def _values(call: Call, name: str) -> Values:
    if not call.fields[name].ragged:
        return Values(call.inputs[name], field=call.fields[name])
    lists = call.lists(name)
    return Values(lists.values, lists.lengths, call.fields[name])


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
        none[other] = Values(empty, np.empty(0, np.int64) if field.ragged else None, field)
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
        remedy="correct the name, or select the field with inputs=; a name that is no Python identifier stands in "
        "backticks: `jets/pt` > 30",
    )


def _scratch_bytes(index: Index, sources: Sequence[str]) -> int:
    """Return the memory that the fields take of which a sample is made, in bytes."""
    ragged = (max(RAGGED_BYTES, index.row_bytes(name)) for name in sources if index.fields[name].ragged)
    return sum(ragged) + sum(index.row_bytes(name) for name in sources if not index.fields[name].ragged)


Derive = Mapping[str, str]
"""Expression of each derived field, by name."""


@dataclass(frozen=True)
class NewFields:
    """Fields that ``open_dataset`` adds to those of the files.

    Parameters
    ----------
    file_fields : value ``file_fields=``.
    expressions : of derived fields, by name.
    sentinels : value ``missing_values=``: numbers of the files that stand for missing ones.
    """

    file_fields: FileFields
    expressions: Mapping[str, Expression]
    sentinels: Sentinels | None = None

    @classmethod
    def of(cls, file_fields: FileFields | None, derive: Derive | None, sentinels: Sentinels | None = None) -> NewFields:
        """Return the new fields of these options.

        Raises
        ------
        FormatError : the fields of ``derive`` are made of one another.
        """
        expressions = {name: parse(text, "derive=") for name, text in (derive or {}).items()}
        in_order(expressions, expressions)
        return cls(file_fields or {}, expressions, sentinels)

    def with_paths(self, is_field: Callable[[str], bool]) -> NewFields:
        """Return the new fields with names that have slashes, of these fields or new ones, quoted in expressions."""
        known = cache(lambda name: name in self or is_field(name))
        quoted = {name: one.quoted(known) for name, one in self.expressions.items()}
        return replace(self, expressions=quoted)

    def __contains__(self, name: str) -> bool:
        return name in self.file_fields or name in self.expressions

    def to_read(self, names: Sequence[str] | None) -> list[str] | None:
        """Return the fields of the files to read: those of the names, and those of which new fields are made.

        Parameters
        ----------
        names : of fields; None: all fields of the files, which the result is then, too.
        """
        if names is None:
            return None
        derived = [field for name in in_order(self.expressions, names) for field in self.expressions[name].fields]
        return [name for name in dict.fromkeys([*names, *derived]) if name not in self] or None

    def _sentinels_of(self, names: Sequence[str] | None) -> Sentinels | None:
        """Return the sentinels, of which those of other fields are left out."""
        if names is None or not isinstance(self.sentinels, Mapping):
            return self.sentinels
        used = set(self.to_read(names) or ())
        return {rule: numbers for rule, numbers in self.sentinels.items() if is_pattern(rule) or rule in used}

    def add(
        self, index: Index, names: Sequence[str] | None = None, encode: Callable[[Index], Index] | None = None
    ) -> Index:
        """Return the index with the new fields.

        Parameters
        ----------
        index : of the files.
        names : of the fields that are wanted; None: all.
        encode : called with the index of all fields that are not derived, makes categories of texts; None: nothing.

        Raises
        ------
        FieldNotFound, FormatError, PartitionError : see `add_file_fields` and `add_expressions`.
        """
        ordered = in_order(self.expressions, self.expressions if names is None else names)
        used = {*(names or ()), *(field for name in ordered for field in self.expressions[name].fields)}
        of_files = {name: values for name, values in self.file_fields.items() if names is None or name in used}
        index = mark_missing(add_file_fields(index, of_files), self._sentinels_of(names), index.fields)
        index = index if encode is None else encode(index)
        return add_expressions(index, {name: self.expressions[name] for name in ordered})


def named_by(expression: Expression) -> str | None:
    """Return the field that an expression consists of; None: it is made of fields and operators.

    Examples
    --------
    >>> named_by(parse("genWeight")), named_by(parse("`jets/weight`")), named_by(parse("genWeight * xsec"))
    ('genWeight', 'jets/weight', None)
    """
    return expression.tree.id if isinstance(expression.tree, ast.Name) else None
