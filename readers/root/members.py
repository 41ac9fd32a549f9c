"""Fields of a branch: what its awkward form becomes as NumPy arrays.

A form is a tree of lists, records and numbers. Each path from its root to a number or a string is one field: records
give the name, lists the shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import awkward as ak
import numpy as np

from matex_data.declared import declared
from matex_data.fields import Field
from matex_data.readers.catalogue import Unreadable

VARIABLE = -1  # as a dimension: lists of any length
Dimensions = tuple[int, ...]
EntryKind = Literal["flat", "jagged", "text", "nested"]


@declared
@dataclass(frozen=True)
class BranchField:
    """Field of a branch.

    Parameters
    ----------
    path : names of the nested records that lead to it; empty: the branch itself.
    kind : "flat": numbers of fixed shape. "jagged": a list of these in each entry. "text": one string in each entry.
        "nested": deeper lists, or lists of strings; a sample is a 1-D object array.
    """

    path: tuple[str, ...]
    field: Field
    kind: EntryKind


def members(form: ak.forms.Form, name: str, attributes: Mapping[str, Any]) -> dict[str, BranchField]:
    """Return the fields of a branch, by name: the branch itself, or ``<name>.<member>`` for each member of a record.

    Raises
    ------
    Unreadable : the type has no equivalent as NumPy arrays.
    """
    found = {}
    for path, dimensions, dtype in _leaves(form, (), ()):
        full = ".".join((name, *path))
        found[full] = _member(full, path, dimensions, dtype, attributes)
    if not found:
        raise Unreadable("there is no number or string in it")
    return found


def whole_record(form: ak.forms.Form, name: str, attributes: Mapping[str, Any]) -> BranchField | None:
    """Return a record of numbers as one field of a structured dtype; None: the branch is none, or not that simple."""
    dimensions: Dimensions = ()
    while isinstance(form, ak.forms.ListOffsetForm | ak.forms.RegularForm) and not _is_text(form):
        dimensions += (form.size if isinstance(form, ak.forms.RegularForm) else VARIABLE,)
        form = form.content
    dtype = _record_dtype(form)
    if dtype is None or dtype.names is None:
        return None
    member = _member(name, (), dimensions, dtype, attributes)
    return None if member.kind == "nested" else member


def _record_dtype(form: ak.forms.Form) -> np.dtype[Any] | None:
    if isinstance(form, ak.forms.NumpyForm):
        return np.dtype((ak.types.numpytype.primitive_to_dtype(form.primitive), form.inner_shape))
    if isinstance(form, ak.forms.RegularForm) and not _is_text(form):
        inner = _record_dtype(form.content)
        return None if inner is None else np.dtype((inner, (form.size,)))
    if not isinstance(form, ak.forms.RecordForm) or not form.fields:
        return None
    dtypes = [_record_dtype(content) for content in form.contents]
    named = [(field, dtype) for field, dtype in zip(form.fields, dtypes, strict=True) if dtype is not None]
    return np.dtype(named) if len(named) == len(dtypes) else None


def _leaves(
    form: ak.forms.Form, path: tuple[str, ...], dimensions: Dimensions
) -> Iterator[tuple[tuple[str, ...], Dimensions, np.dtype[Any]]]:
    """Yield path, dimensions and dtype of each number; the dtype of a string is object."""
    if _is_text(form):
        yield path, dimensions, np.dtype(object)
    elif isinstance(form, ak.forms.NumpyForm):
        yield path, dimensions + form.inner_shape, ak.types.numpytype.primitive_to_dtype(form.primitive)
    elif isinstance(form, ak.forms.ListOffsetForm):
        yield from _leaves(form.content, path, (*dimensions, VARIABLE))
    elif isinstance(form, ak.forms.RegularForm):
        yield from _leaves(form.content, path, (*dimensions, form.size))
    elif isinstance(form, ak.forms.RecordForm):
        for field, content in zip(form.fields, form.contents, strict=True):
            yield from _leaves(content, (*path, field), dimensions)
    else:
        raise Unreadable(_reason(form))


def _is_text(form: ak.forms.Form) -> bool:
    return form.parameter("__array__") in ("string", "bytestring")


def _reason(form: ak.forms.Form) -> str:
    if isinstance(form, ak.forms.UnionForm):
        return "its values are of several types"
    if form.is_option:
        return "its values may be missing"
    return f"it is read as {form.type}"


def _member(
    name: str, path: tuple[str, ...], dimensions: Dimensions, dtype: np.dtype[Any], attributes: Mapping[str, Any]
) -> BranchField:
    text = dtype.kind == "O"
    if VARIABLE not in dimensions:
        if text and not dimensions:
            return BranchField(path, Field(name, (), dtype, attributes=attributes), "text")
        if not text:
            base, inner = dtype.subdtype or (dtype, ())
            return BranchField(path, Field(name, dimensions + inner, base, attributes=attributes), "flat")
    if dimensions[0] == VARIABLE and VARIABLE not in dimensions[1:] and not text:
        base, shape = dtype.subdtype or (dtype, ())
        inner = (None, *dimensions[1:], *shape)
        return BranchField(path, Field(name, (), base, ragged=True, attributes=attributes, inner=inner), "jagged")
    deep = {"nested": True} if len(dimensions) > 1 or not text else {}
    return BranchField(
        path, Field(name, (), np.dtype(object), ragged=True, attributes={**attributes, **deep}), "nested"
    )
