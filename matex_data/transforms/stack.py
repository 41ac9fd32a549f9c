"""Fields of equal shape, stacked into one field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from matex_data.errors import FormatError
from matex_data.fields import Field
from matex_data.index.files import DerivedFiles
from matex_data.index.model import FileIndex, Index, Layout
from matex_data.index.table import Matrix


def stack_fields(index: Index, names: Sequence[str], name: str, kept: Sequence[str]) -> Index:
    """Return an index with the fields ``names`` stacked into the field ``name``, beside the fields ``kept``.

    Element i along the first axis of a stacked sample is the sample of ``names[i]``.

    Parameters
    ----------
    index : index of the data set.
    names : numeric fields of one shape.
    name : name of the new field, of shape (len(names), *field shape).
    kept : other fields of the result.

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
    odd = next((f for f in fields if f.shape != fields[0].shape or f.ragged or f.dtype.kind not in "biuf"), None)
    if odd is not None:
        raise FormatError(
            "the field does not fit into a matrix with the others",
            field=odd.name,
            expected=f"numbers of shape {fields[0].shape}, as in {fields[0].name!r}",
            found=f"{odd.dtype} of shape {odd.shape}",
            remedy="stack numeric fields of one shape, or leave out stack=True",
        )
    if name in kept:
        raise FormatError(f"another field already has the name of the stack, {name!r}", field=name)
    dtype = np.result_type(*(f.dtype for f in fields))
    stack = Field(name, (len(fields), *fields[0].shape), dtype, attributes={"columns": list(names)})
    schema = {name: stack, **{n: index.fields[n] for n in kept}}
    return Index(schema, DerivedFiles(index.files, partial(_stacked, tuple(names), name, tuple(kept))), index.static)


def _stacked(names: Sequence[str], name: str, kept: Sequence[str], _: int, file: FileIndex) -> FileIndex:
    """Return the index of a file with fields stacked."""
    layouts: dict[str, Layout] = {name: Matrix(tuple(file.layouts[n] for n in names))}
    return replace(file, layouts={**layouts, **{n: file.layouts[n] for n in kept}})
