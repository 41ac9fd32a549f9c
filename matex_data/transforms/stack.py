"""Fields of equal shape, stacked into one field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from matex_data._types import Array
from matex_data.errors import FormatError
from matex_data.fields import MISSING_INTEGER, Field
from matex_data.index.combined import exact
from matex_data.index.computed import Call, ComputedFields, compute_all
from matex_data.index.model import Index

AXES = {"last": -1, "first": 1}
"""Axis of an array of rows along which ``stack=`` puts the fields."""
RAW_STACK = "raw {}"  # name of a stack with the numbers of its fields before missing ones were replaced
IN_STACK = "integers that the floats of a stack hold"
Stack = bool | str


def check_stack(stack: Stack) -> None:
    """Raise ``FormatError`` if ``stack`` is no valid value of ``stack=``."""
    if not isinstance(stack, bool | np.bool_) and stack not in AXES:
        raise FormatError("unknown stack", expected='stack= True, "last" or "first"', found=repr(stack))


def stack_fields(index: Index, names: Sequence[str], name: str, kept: Sequence[str], stack: Stack) -> Index:
    """Return an index with the fields ``names`` stacked into the field ``name``, beside the fields ``kept``.

    The fields lie along the last axis of a stacked sample, or along its first one, in the order of ``names``. A field
    with one more axis in front, such as pressure levels, gives one entry for each of its own.

    Parameters
    ----------
    index : index of the data set.
    names : numeric fields of one shape, or of several of these.
    name : name of the new field, of shape (*field shape, fields), or (fields, *field shape).
    kept : other fields of the result.
    stack : True or "last": the fields are the last axis, as Keras's channels; "first": the first one.

    Raises
    ------
    FormatError : there is nothing to stack; the fields differ in shape, or are not numeric; ``kept`` has a field
        called ``name``.
    """
    if not names:
        raise FormatError("there is nothing to stack", expected="a list of fields", remedy="name them with inputs=")
    unknown = next((n for n in names if n not in index.fields), None)
    if unknown is not None:
        raise FormatError(
            "the field cannot be stacked",
            field=unknown,
            expected="fields of the files",
            remedy=f"leave it out; the mask of the stack is the field {name + '_mask'!r}, which targets= may name",
        )
    fields = [index.fields[n] for n in names]
    shape = min((field.shape for field in fields), key=len)
    odd = next((f for f in fields if not _fits(f, shape)), None)
    if odd is not None:
        raise FormatError(
            "the field does not fit into a matrix with the others",
            field=odd.name,
            expected=f"numbers of shape {shape}, or of several of these",
            found=f"{odd.dtype} of shape {odd.shape}",
            remedy="stack numeric fields of one shape, or leave out stack=True",
        )
    if name in kept:
        raise FormatError(
            f"another field already has the name of the stack, {name!r}",
            field=name,
            remedy="read it without stack=, or write it by another name",
        )
    counts = tuple(None if field.shape == shape else field.shape[0] for field in fields)
    columns = [column for field, count in zip(fields, counts, strict=True) for column in _columns(field, count)]
    axis = AXES["last" if isinstance(stack, bool | np.bool_) else stack]
    dtype = np.result_type(*(f.dtype for f in fields))
    whole = (*shape, len(columns)) if axis == -1 else (len(columns), *shape)
    field = Field(name, whole, dtype, attributes={"columns": columns})
    same = tuple(n for n, own in zip(names, fields, strict=True) if own.dtype == dtype)
    raw = RAW_STACK.format(name)
    raw_given = [one.name for one in fields if one == index.raw.fields[one.name]]
    steps: list[ComputedFields] = []
    for result, raw_of, given in ((raw, {}, raw_given), (name, {name: raw}, [])):
        views = partial(_views, result, tuple(names), axis, counts)
        read = partial(_read_views, views, same)
        made = {result: replace(field, name=result)}
        steps.append(ComputedFields(partial(_fill, views), names, made, read, raw_of=raw_of, raw_given=given))
    return compute_all(index, steps).select([name, *kept])


def _views(
    name: str, names: Sequence[str], axis: int, counts: Sequence[int | None], outs: Mapping[str, Array]
) -> dict[str, Array]:
    """Return the view of each field in the rows of a stack."""
    found: dict[str, Array] = {}
    out, begin = outs[name], 0
    for field, count in zip(names, counts, strict=True):
        columns = slice(begin, begin + (count or 1))
        view = out[:, columns] if axis == 1 else np.moveaxis(out[..., columns], -1, 1)
        found[field] = view[:, 0] if count is None else view
        begin += count or 1
    return found


def _read_views(
    views: Callable[[Mapping[str, Array]], dict[str, Array]], names: Sequence[str], outs: Mapping[str, Array]
) -> dict[str, Array]:
    """Return the views of the fields that have the dtype of the stack."""
    every = views(outs)
    return {name: every[name] for name in names}


def _fill(views: Callable[[Mapping[str, Array]], dict[str, Array]], call: Call) -> None:
    """Copy the fields that were not read to the stack itself."""
    for field, view in views(call.outs).items():
        if field not in call.placed:
            view[...] = exact(call.inputs[field], replace(call.fields[field], dtype=view.dtype), IN_STACK, int)


def _fits(field: Field, shape: tuple[int, ...]) -> bool:
    whole = not field.ragged and MISSING_INTEGER not in field.attributes
    return whole and field.dtype.kind in "biuf" and shape in (field.shape, field.shape[1:])


def _columns(field: Field, count: int | None) -> list[str]:
    if count is None:
        return [field.name]
    categories = field.attributes.get("categories")
    if isinstance(categories, list) and len(categories) == count:  # one-hot
        return [f"{field.name}[{category}]" for category in categories]
    return [f"{field.name}[{number}]" for number in range(count)]
