"""Arrays that belong to no sample, such as an orography, as fields of every sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from matex_data._types import Array
from matex_data.errors import FormatError
from matex_data.fields import Field
from matex_data.index.constant import Constant
from matex_data.index.files import DerivedFiles, FileIndex, LayoutFacts
from matex_data.index.model import Index


def add_static_fields(index: Index, names: Sequence[str] | None) -> Index:
    """Return the index with static arrays as fields, of which each sample has the whole array.

    Parameters
    ----------
    index : of the files; its arrays are those of the first file.
    names : of the fields that are wanted; None: the static arrays with two or more axes.

    Raises
    ------
    FormatError : an array has neither numbers nor texts.
    """
    arrays = {
        name: array
        for name, array in index.static.items()
        if name not in index.fields and (array.ndim > 1 if names is None else name in names)
    }
    if not arrays:
        return index
    odd = next((name for name, array in arrays.items() if array.dtype.kind not in "biufSO"), None)
    if odd is not None:
        raise FormatError("the array is no field", field=odd, expected="numbers or texts", found=arrays[odd].dtype)
    fields = {name: Field(name, array.shape, array.dtype) for name, array in arrays.items()}
    files = index.files
    facts = {**files.facts, **dict.fromkeys(arrays, constant_facts(len(files)))} if files.has_facts else None
    derived = DerivedFiles(files, partial(_with_arrays, arrays), facts=facts if len(files) else None)
    return Index({**index.fields, **fields}, derived, index.static, index.facts)


def _with_arrays(arrays: Mapping[str, Array], _: int, file: FileIndex) -> FileIndex:
    constants = {name: Constant(file.rows, array) for name, array in arrays.items()}
    return replace(file, layouts={**file.layouts, **constants})


def constant_facts(files: int) -> LayoutFacts:
    """Return the facts of layouts of one value for all rows."""
    no = np.zeros(files, bool)
    return LayoutFacts(np.ones(files, np.uint8), np.zeros(files, np.uint8), no, no)
