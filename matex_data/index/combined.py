"""Layouts made of other layouts: in another form, one after the other, or a sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from matex_data._types import Array, Integers
from matex_data.declared import declared
from matex_data.errors import DecodeError
from matex_data.fields import Field
from matex_data.index.blocks import apart, by_part
from matex_data.index.cache import ChunkCache
from matex_data.index.layout import EMPTY, Composed, Layout, Limits, ReadRequest, call_after_last
from matex_data.index.ragged import RaggedOutput, empty_output, scatter_lists
from matex_data.index.runs import RowSelection
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
    """Missing values of a field that a file lacks; nothing is read."""

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
        for array in blank:  # of no elements, but where the number of rows of a file is known
            array[...] = missing_value(field.dtype)
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
        requests = self.layout.requests(apart(rows), read, cache)
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
        kind = "a value that all files may have, of which others have missing values or fractions"
        if isinstance(read, RaggedOutput):
            lists = read.joined()
            content = exact(lists.values, self.field, kind, _row_of_element(rows.numbers.item, lists.offsets[1:]))
            scatter_lists(out, rows.destination, lists.offsets, content)
        elif self.field.ragged:
            samples = read if self.stored.shape or self.stored.ragged else read.reshape(len(read), 1)  # one is a list
            out[rows.destination] = _exact_samples(samples, self.field, kind, rows.numbers.item)
        else:
            scatter(out, rows.destination, exact(read, self.field, kind, rows.numbers.item))


RowOf = Callable[[int], int]
"""Callable that returns the number of the row that has the value of a position."""


def in_row(row: int) -> RowOf:
    """Return the row of values that are all of one."""
    return lambda at: row


def _row_of_element(row_of: RowOf, ends: Integers) -> RowOf:
    """Return the rows of elements, given those of the samples, and the end of each sample among the elements."""
    return lambda at: row_of(int(np.searchsorted(ends, at, side="right")))


def exact(values: Array, field: Field, expected: str, row_of: RowOf | None = None) -> Array:
    """Return values in the dtype of a field.

    Parameters
    ----------
    expected : what the values are to be, for the error.
    row_of : returns the number of the row of a value; None: it is not known here.

    Raises
    ------
    DecodeError : an integer is not exact in this dtype.
    """
    converted = values.astype(field.dtype, copy=False)
    if field.dtype.kind in "fc" and values.dtype.kind in "iu" and values.dtype.itemsize > 4:
        with np.errstate(invalid="ignore"):  # what is rounded to 2**63 or 2**64 is no such integer
            inexact = converted.real.astype(values.dtype) != values
        inexact |= converted.real >= float(np.iinfo(values.dtype).max)
        if inexact.any():
            at = int(np.argwhere(inexact)[0, 0])
            raise DecodeError(
                f"an integer is not exact as {field.dtype}",
                field=field.name,
                row=None if row_of is None else row_of(at),
                expected=expected,
                found=values[inexact][0],
                remedy="leave the field out, or write it as text",
            )
    return converted


def _exact_samples(samples: Array, field: Field, expected: str, row_of: RowOf) -> Array:
    """Return ragged samples, which may be arrays of arrays, in the dtype of a field; see `exact`."""
    ends = np.cumsum([sample.size for sample in samples], dtype=np.int64)
    content = np.concatenate([sample.ravel() for sample in samples if sample.size] or [np.empty(0, field.dtype)])
    is_nested, row = content.dtype == object and field.dtype != object, _row_of_element(row_of, ends)
    content = _exact_samples(content, field, expected, row) if is_nested else exact(content, field, expected, row)
    cast = np.empty(len(samples), object)
    for i, (sample, end) in enumerate(zip(samples, ends.tolist(), strict=True)):
        cast[i] = content[end - sample.size : end].reshape(sample.shape)
    return cast


PLAIN_BLOCK = 1024  # rows of a block where a layout without blocks follows one with blocks


@declared
@dataclass(frozen=True, eq=False)
class Concatenated(Composed, Layout):
    """Rows of several layouts of one file, one layout after the other.

    Parameters
    ----------
    parts : of one field; none: there are no rows.
    first : int64[n], first row of every block, where blocks are shared with other fields; None: those of the parts.

    Examples
    --------
    >>> from matex_data.index.library import Constant
    >>> layout = Concatenated((Constant(2, 1.5), Constant(3, 2.5)))
    >>> out = np.zeros(3)
    >>> rows = RowSelection(np.array([1]), np.array([4]), np.array([0, 1, 2]))
    >>> for request in layout.requests(rows, out, ChunkCache(0)):
    ...     request.on_complete(np.empty(0, np.uint8))
    >>> out.tolist()
    [1.5, 2.5, 2.5]
    """

    parts: tuple[Layout, ...]
    first: Integers | None = None

    @property
    def origins(self) -> tuple[Layout, ...]:
        return self.parts

    @property
    def rows(self) -> int:  # type: ignore[override]
        return sum(part.rows for part in self.parts)

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return super().block_rows if self.first is None else self.longest(self.first)

    def borders(self) -> Integers | None:
        if self.first is not None or self.block_rows == 1:
            return self.first
        firsts, begin = [EMPTY], 0
        for part in self.parts:
            step = part.block_rows if part.block_rows > 1 else PLAIN_BLOCK
            borders = part.borders()
            firsts.append(begin + (np.arange(0, part.rows, step) if borders is None else borders))
            begin += part.rows
        return np.concatenate(firsts)

    def inner_bytes(self) -> int:
        return sum(part.inner_bytes() for part in self.parts)

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        first_row = np.cumsum([0, *(part.rows for part in self.parts)])
        for number, of_part in by_part(rows, first_row):
            yield from self.parts[number].requests(of_part, out, cache)


def with_shared_blocks(layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Return concatenated layouts of several fields with the blocks of the one whose blocks are largest.

    Rows of a block are read together, so that no chunk is decoded for two blocks.
    """
    deepest = max(layouts.values(), key=lambda layout: layout.block_rows, default=None)
    if not isinstance(deepest, Concatenated) or deepest.block_rows == 1:
        return dict(layouts)
    first = deepest.borders()
    return {
        name: replace(layout, first=first) if isinstance(layout, Concatenated) else layout
        for name, layout in layouts.items()
    }


@declared
@dataclass(frozen=True, eq=False)
class Sum(Composed, Layout):
    """Sums of the rows of two layouts of equal length and shape.

    Parameters
    ----------
    first, second : the terms.
    dtype : of ``second``, as its rows are delivered.
    """

    first: Layout
    second: Layout
    dtype: np.dtype[Any]

    @property
    def origins(self) -> tuple[Layout, Layout]:
        return self.first, self.second

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.first.rows

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        added = np.empty((len(rows.destination), *out.shape[1:]), self.dtype)
        requests = chain(self.first.requests(rows, out, cache), self.second.requests(apart(rows), added, cache))
        yield from call_after_last(requests, partial(_add, out, rows.destination, added))


def _add(out: Array, destination: Integers, added: Array) -> None:
    out[destination] += added
