"""Fields that are made of other fields of a sample by expressions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from matex_data.errors import FieldNotFound, near_matches
from matex_data.fields import Field, Schema, name_taken
from matex_data.index.computed import Call, compute
from matex_data.index.model import Index
from matex_data.index.ragged import RAGGED_BYTES
from matex_data.transforms.evaluation import Values, delivered_dtype, evaluate
from matex_data.transforms.expressions import Expression, in_order

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
    for name in in_order(expressions, expressions):
        bound = expressions[name].bound(index.fields)
        field = replace(_field(name, bound, index.fields), scratch_bytes=_scratch_bytes(index, bound.fields))
        index = compute(index, partial(_evaluate, name, bound), bound.fields, {name: field})
    return index


def _evaluate(name: str, expression: Expression, call: Call) -> None:
    """Compute a field by an expression."""
    values = evaluate(expression, {other: _values(call, other) for other in expression.fields})
    offsets = None if values.lengths is None else np.concatenate([[0], np.cumsum(values.lengths)])
    call.fill(name, values.content, offsets)


def _values(call: Call, name: str) -> Values:
    if not call.fields[name].ragged:
        return Values(call.inputs[name])
    lists = call.lists(name)
    return Values(lists.values, lists.lengths)


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
    """Return the memory that the fields take of which a sample is made, in bytes."""
    ragged = (max(RAGGED_BYTES, index.row_bytes(name)) for name in sources if index.fields[name].ragged)
    return sum(ragged) + sum(index.row_bytes(name) for name in sources if not index.fields[name].ragged)
