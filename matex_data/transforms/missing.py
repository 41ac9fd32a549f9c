"""Missing numbers: readers deliver them as not-a-number, and here is decided what the user gets instead.

Replaced or marked, once all rows of a window are in their places; or the samples that have any are left out, which
takes one pass over the data when it is opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from numbers import Real
from typing import Any

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import FormatError
from matex_data.fields import Field
from matex_data.index.cache import ChunkCache
from matex_data.index.model import Index, Layout, ReadRequest, RowSelection
from matex_data.index.runs import Runs, compress, merge
from matex_data.pipeline.source import Source
from matex_data.sampling.schedule import rank_range

WAYS = ("nan", "mask", "drop")
MASK = "{}_mask"  # name of the field that is True where a field's number is missing
TOGETHER = 1 << 18  # numbers that are looked at together
Missing = str | float


def check(missing: Missing) -> None:
    """Raises ``FormatError`` if this is no way to treat missing numbers."""
    number = isinstance(missing, Real) and not isinstance(missing, bool)
    if not number and missing not in WAYS:
        raise FormatError(
            "there is no such way to treat missing values",
            expected=f"missing= one of {WAYS}, or a number to put in their places",
            found=repr(missing),
        )


def read_names(names: Sequence[str] | None, missing: Missing, *more: str) -> list[str] | None:
    """The fields that have to be read for the named ones: a mask comes with the field that it belongs to.

    Parameters
    ----------
    more : names of fields that are made of others, and may have masks, too.
    """
    if names is None or missing != "mask":
        return None if names is None else list(names)
    masks = {MASK.format(name) for name in (*names, *more)}
    return [name for name in names if name not in masks]


def treated(index: Index, missing: Missing, names: Sequence[str] | None) -> Index:
    """The index of data whose missing numbers are replaced by a number or, with "mask", by 0 and marked.

    Parameters
    ----------
    names : of the fields that are wanted, masks among them; None: all.

    Raises
    ------
    FormatError : the data has a field of the name that a mask is to get.
    """
    if isinstance(missing, str) and missing != "mask":
        return index
    floats = [field for field in index.fields.values() if field.dtype.kind == "f" and not field.ragged]
    marked = [f for f in floats if missing == "mask" and (names is None or MASK.format(f.name) in names)]
    masks = {MASK.format(field.name): field for field in marked}
    for name in masks:
        if name in index.fields:
            raise FormatError("the data has a field of the name of a mask", field=name, remedy="name the fields wanted")
    fields = {**index.fields, **{name: Field(name, field.shape, np.dtype(bool)) for name, field in masks.items()}}
    files = [
        replace(file, layouts={**file.layouts, **{name: _Mask(file.layouts[f.name]) for name, f in masks.items()}})
        for file in index.files
    ]
    number = 0.0 if isinstance(missing, str) else float(missing)
    after = partial(_replace, tuple(field.name for field in floats), number)
    return Index(fields, files, index.static, post_process=after)


@dataclass(frozen=True)
class _Mask(Layout):
    """Where numbers of another part are missing: nothing is read for it."""

    part: Layout

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.part.rows

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return self.part.block_rows

    def borders(self) -> Integers | None:
        return self.part.borders()

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        return iter(())


def _replace(names: Sequence[str], number: float, arrays: Mapping[str, Array], destination: Integers) -> None:
    for name in names:
        if name in arrays:
            _replace_in(arrays[name], arrays.get(MASK.format(name)), number, destination)


def _replace_in(array: Array, mask: Array | None, number: float, destination: Integers) -> None:
    step = max(1, TOGETHER // max(1, prod(array.shape[1:])))
    low, high = (int(destination.min()), int(destination.max()) + 1) if len(destination) else (0, 0)
    whole = high - low == len(destination)
    for i in range(0, len(destination), step):
        some: Any = slice(low + i, min(low + i + step, high)) if whole else destination[i : i + step]
        rows = array[some]
        lost = np.isnan(rows)
        if mask is not None:
            mask[some] = lost
        if lost.any():
            rows[lost] = number
            array[some] = rows


def complete_samples(source: Source) -> Runs:
    """The samples without any missing number, the same on every rank. *Collective*: each rank reads its own share.

    Raises
    ------
    DataError : of any rank, on every rank.
    """
    total, comm = len(source.index), source.comm
    names = [field.name for field in source.index.fields.values() if field.dtype.kind == "f" and not field.ragged]
    if not names:
        return Runs(np.array([0]), np.array([total]))
    done, _ = rank_range(total, comm.rank, comm.size)
    kept: list[Integers] = [np.empty(0, np.int64)]
    for arrays in source.pieces(Runs(np.array([0]), np.array([total])), names):
        rows = len(arrays[names[0]])
        kept.append(done + np.flatnonzero(_complete(arrays, rows)))
        done += rows
    own = compress(np.concatenate(kept))
    parts = comm.allgather(own)
    return merge(Runs(np.concatenate([p.start for p in parts]), np.concatenate([p.count for p in parts])))


def _complete(arrays: Mapping[str, Array], rows: int) -> Array:
    """bool[rows], whether a sample has all its numbers."""
    complete = np.ones(rows, bool)
    for array in arrays.values():
        complete &= ~np.isnan(array).any(axis=tuple(range(1, array.ndim)))
    return complete
