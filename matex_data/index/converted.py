"""Layouts whose rows are those of another layout, in another form, or are missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from matex_data._types import Array, Integers
from matex_data.declared import declared
from matex_data.errors import DecodeError
from matex_data.fields import Field
from matex_data.index.cache import ChunkCache
from matex_data.index.model import EMPTY, Composed, Layout, Limits, ReadRequest, RowSelection, call_after_last
from matex_data.index.ragged import empty_output
from matex_data.index.scatter import scatter


@dataclass(frozen=True, eq=False)
class Converted(Composed, Layout):
    """Rows of another layout, which are converted once they are read, or while they are, by ``requests``.

    Parameters
    ----------
    layout : of the rows that are read.
    """

    layout: Layout

    @property
    def origins(self) -> tuple[Layout]:
        return (self.layout,)

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.layout.rows


@declared
@dataclass(frozen=True, eq=False)
class MissingRows(Layout):
    """Missing values of a field that a file lacks; nothing is read.

    Parameters
    ----------
    rows : number of rows.
    field : the field.
    """

    rows: int
    field: Field
    block_rows: int = 1

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        yield ReadRequest(EMPTY, EMPTY, on_complete=lambda _: assign_missing(self.field, out, rows.destination))


def assign_missing(field: Field, out: Any, destination: Integers) -> None:
    """Assign what stands for missing values of a field to rows of an array."""
    if field.ragged:
        blank = field.empty(len(destination))
        field.blank(blank)
        out[destination] = blank
    else:
        out[destination] = missing_value(field.dtype)


def missing_value(dtype: np.dtype[Any]) -> Any:
    """Return the value of a dtype that stands for a missing one.

    >>> missing_value(np.dtype(object)), missing_value(np.dtype("f4"))
    (b'', nan)
    """
    return {"O": b"", "S": b"", "U": "", "i": -1}.get(dtype.kind, float("nan"))


@declared
@dataclass(frozen=True, eq=False)
class UnitedRows(Converted):
    """Rows of a file whose dtype the field of all files does not have.

    Parameters
    ----------
    stored : the field as the file has it.
    field : as all files have it.
    """

    stored: Field
    field: Field

    def inner_bytes(self) -> int:
        if not self.field.ragged:
            return 0
        elements = self.layout.rows * self.stored.row_bytes if not self.stored.ragged else self.layout.inner_bytes()
        return elements * self.field.dtype.itemsize // max(1, self.stored.dtype.itemsize)

    def limits(self) -> Limits | None:
        return self.layout.limits() if {self.stored.dtype.kind, self.field.dtype.kind} <= set("biuf") else None

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        read = self.empty(len(rows.destination))
        local = replace(rows, destination=np.arange(len(rows.destination)))
        requests = list(self.layout.requests(local, read, cache))
        yield from call_after_last(requests, partial(self.convert, rows, read, out))

    def empty(self, rows: int) -> Any:
        """Return memory for rows as the file has them."""
        return empty_output(self.stored, rows)

    def convert(self, rows: RowSelection, read: Any, out: Any) -> None:
        """Assign rows as the file has them, in order, to their destinations.

        Raises
        ------
        DecodeError : an integer is not exact in the dtype of the field.
        """
        if self.field.ragged:
            samples = np.empty(len(read), object)
            for i in range(len(read)):
                samples[i] = _cast(read[i], self.field.dtype)
            out[rows.destination] = samples
        else:
            kind = "a value that all files may have, of which others have missing values or fractions"
            scatter(out, rows.destination, exact(read, self.field, kind, rows.numbers))


def exact(values: Array, field: Field, expected: str, rows: Integers | None = None) -> Array:
    """Return values in the dtype of a field.

    Parameters
    ----------
    expected : what the values are to be, for the error.
    rows : int64[samples], their numbers; None: they are not known here.

    Raises
    ------
    DecodeError : an integer is not exact in this dtype.
    """
    converted = values.astype(field.dtype)
    if field.dtype.kind == "f" and values.dtype.kind in "iu" and values.dtype.itemsize > 4:
        inexact = (converted.astype(values.dtype) != values).reshape(len(values), -1)
        if inexact.any():
            at = int(inexact.any(axis=1).argmax())
            raise DecodeError(
                f"an integer is not exact as {field.dtype}",
                field=field.name,
                row=None if rows is None else int(rows[at]),
                expected=expected,
                found=values.reshape(len(values), -1)[inexact][0],
                remedy="leave the field out, or write it as text",
            )
    return converted


def _cast(sample: Array, dtype: np.dtype[Any]) -> Array:
    if sample.dtype.kind != "O" or dtype.kind == "O":
        return sample.astype(dtype)
    cast = np.empty(len(sample), object)
    for i, one in enumerate(sample):
        cast[i] = _cast(one, dtype)
    return cast
