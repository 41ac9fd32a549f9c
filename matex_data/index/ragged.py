"""Ragged samples as lists: the elements of many samples in one array, without an array for each of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from types import EllipsisType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Array, Integers
from matex_data.codecs.scratch import Memory, aligned_arrays, new_memory
from matex_data.fields import Field
from matex_data.index.runs import ranges
from matex_data.index.scatter import RowIndices, are_consecutive, scatter
from matex_data.locks import cached_property

RAGGED_BYTES = 1024  # least estimate for a ragged sample in memory: not every layout has one
LONG_LIST = 256  # elements on average from which one copy for each list is faster than an index for each element
TILE = 1 << 13  # lists that are copied in one go: the indices of short ones stay in the processor's cache
MARGIN = 1.03  # of the memory for elements over their mean number


@dataclass(frozen=True, eq=False)
class RaggedArray:
    """Samples of variable length, one after the other.

    Parameters
    ----------
    values : elements of all samples.
    offsets : int64[samples + 1]. Sample i has the elements ``offsets[i]`` to ``offsets[i + 1]``.

    Examples
    --------
    >>> array = RaggedArray(np.array([1.5, 2.5, 3.5]), np.array([0, 2, 2, 3]))
    >>> len(array), array.lengths.tolist(), array[1:].values.tolist()
    (3, [2, 0, 1], [3.5])
    >>> [sample.tolist() for sample in array.samples()]
    [[1.5, 2.5], [], [3.5]]
    """

    values: Array
    offsets: Integers

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, rows: slice | Integers) -> RaggedArray:
        """Return the samples of a slice, which share the memory, or of int64 indices or a mask, which are copied."""
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(self))
            offsets = self.offsets[start : max(start, stop) + 1]
            return RaggedArray(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])
        return take_lists(self.values, self.offsets[:-1][rows], self.lengths[rows])

    @property
    def lengths(self) -> Integers:
        """Number of elements of each sample, int64."""
        return np.diff(self.offsets)

    def samples(self) -> NDArray[Any]:
        """Return an object array of the samples, which are views."""
        return _views(self.values, self.offsets)


class RaggedOutput:
    """Output of a ragged field of numbers: where the elements of each sample lie in an array of all elements.

    Layouts assign 1-D arrays to it, as to an object array of samples, or pass lists to `scatter_lists`. Elements are
    copied, in the order in which they come. Thread-safe.

    Parameters
    ----------
    begin, length : int64[samples], first element and number of elements of each sample; length -1: not written yet.
    elements : elements of all samples.
    memory : allocates the memory of joined samples.
    """

    dtype = np.dtype(object)  # like an array of samples
    ndim = 1

    def __init__(self, begin: Integers, length: Integers, elements: _Elements, memory: Memory) -> None:
        self._begin, self._length, self._elements, self._memory = begin, length, elements, memory

    @classmethod
    def empty(cls, rows: int, dtype: np.dtype[Any], expected: float = 0, memory: Memory = new_memory) -> RaggedOutput:
        """Return an output for ``rows`` samples, with memory for ``expected`` elements of ``dtype``, or more."""
        of_rows = (rows,), np.dtype(np.int64)
        begin, length, values = aligned_arrays(memory, [of_rows, of_rows, ((int(expected),), dtype)])
        length[...] = -1
        return cls(begin, length, _Elements(values), memory)

    def __len__(self) -> int:
        return len(self._begin)

    def __getitem__(self, rows: int | slice) -> Any:
        """Return the elements of a sample as a view, or the output of some samples, which shares the memory."""
        if isinstance(rows, slice):
            return RaggedOutput(self._begin[rows], self._length[rows], self._elements, self._memory)
        return self._elements.view(int(self._begin[rows]), int(self._length[rows]))

    def __setitem__(self, rows: int | RowIndices | EllipsisType, samples: Any) -> None:
        """Copy the elements of one sample, or of several."""
        if isinstance(rows, int | np.integer):
            rows, samples = slice(rows, rows + 1), [samples]
        if isinstance(rows, EllipsisType):
            rows = slice(0, len(self))
        lengths = np.fromiter(map(len, samples), np.int64, len(samples))
        none = self._elements.values[:0]
        content = np.concatenate([*samples, none], dtype=none.dtype, casting="unsafe")
        self.scatter(rows, np.concatenate([[0], np.cumsum(lengths)]), content)

    @property
    def shape(self) -> tuple[int]:
        """Number of samples."""
        return (len(self),)

    @property
    def nbytes(self) -> int:
        """Size of the elements of all samples, in bytes."""
        return self._elements.stored * self._elements.values.itemsize

    def scatter(self, destination: RowIndices, offsets: Integers, content: Array) -> None:
        """Copy lists; see `scatter_lists`."""
        first, last = int(offsets[0]), int(offsets[-1])
        begin = self._elements.add(content[first:last])
        self._begin[destination] = offsets[:-1] + np.int64(begin - first)
        self._length[destination] = np.diff(offsets)

    def joined(self) -> RaggedArray:
        """Return the samples, joined in order, once all of them are written.

        Raises
        ------
        ValueError : the layout has left out a sample.
        """
        if self._length.min(initial=0) < 0:
            raise ValueError(f"sample {int(np.argmin(self._length))} of an output array is not written")
        return take_lists(self._elements.whole, self._begin, self._length, self._memory)


class _Elements:
    """Elements in the order in which they come: in the memory of ``values``, and beyond it in arrays of their own."""

    def __init__(self, values: Array) -> None:
        self.values = values
        self.stored = 0
        self._begins: list[int] = []
        self._beyond: list[Array] = []
        self._lock = Lock()

    def add(self, content: Array) -> int:
        """Copy elements, and return the number of the first one."""
        with self._lock:
            begin, end = self.stored, self.stored + len(content)
            self.stored = end
            fits = end <= len(self.values) and not self._beyond
            if not fits:
                self._begins.append(begin)
                self._beyond.append(content.astype(self.values.dtype))
        if fits:
            self.values[begin:end] = content
        return begin

    def view(self, begin: int, length: int) -> Array:
        """Return adjacent elements that were added together."""
        number = bisect_right(self._begins, begin) - 1
        source, first = (self.values, 0) if number < 0 else (self._beyond[number], self._begins[number])
        return source[begin - first : begin - first + length]

    @cached_property
    def whole(self) -> Array:
        """All elements as one array, once all are added."""
        return np.concatenate([self.values[: self._begins[0]], *self._beyond]) if self._beyond else self.values


def empty_output(field: Field, rows: int, inner_bytes: float = 0, memory: Memory = new_memory) -> Any:
    """Return an uninitialized output array for ``rows`` samples; of lists of numbers, a `RaggedOutput`.

    Parameters
    ----------
    inner_bytes : mean size of the elements of a sample, in bytes, if it is known.
    memory : allocates the memory of lists.
    """
    if not field.ragged or field.nested or field.shape or field.inner != (None,) or field.dtype.hasobject:
        return field.empty(rows)
    return RaggedOutput.empty(rows, field.dtype, MARGIN * rows * inner_bytes / field.dtype.itemsize, memory)


def scatter_lists(out: Any, destination: RowIndices, offsets: Integers, content: Array) -> None:
    """Assign ``out[destination[i]] = content[offsets[i] : offsets[i + 1]]`` for all i. The elements are copied.

    Parameters
    ----------
    out : output of a ragged field for n samples.
    destination : indices of ``out``.
    offsets : integers[k + 1], non-decreasing.
    content : elements, of the field's dtype in any byte order.

    Examples
    --------
    >>> out = np.empty(2, object)
    >>> scatter_lists(out, np.array([1, 0]), np.array([0, 2, 3]), np.array([1.5, 2.5, 3.5]))
    >>> [sample.tolist() for sample in out]
    [[3.5], [1.5, 2.5]]
    """
    if isinstance(out, RaggedOutput):
        out.scatter(destination, offsets, content)
        return
    if not isinstance(destination, slice) and are_consecutive(destination) and len(destination):
        destination = slice(int(destination[0]), int(destination[-1]) + 1)
    out[destination] = _views(content.astype(content.dtype.newbyteorder("=")), offsets)


def copy_rows(values: Any, rows: RowIndices, out: Array, destination: RowIndices) -> None:
    """Assign ``out[destination] = values[rows]``."""
    if isinstance(values, RaggedArray):
        selected = values[rows]
        scatter_lists(out, destination, selected.offsets, selected.values)
    else:
        scatter(out, destination, values[rows])


def nested(values: Array, lists: Sequence[Array]) -> Array:
    """Return an object array of the rows: arrays of values, or object arrays of these."""
    items: Array = values
    for offsets in reversed(lists):
        rows = np.empty(len(offsets) - 1, object)
        for i, (low, high) in enumerate(pairwise(offsets.tolist())):
            rows[i] = items[low:high]
        items = rows
    return items


def take_lists(content: Array, begin: Integers, lengths: Integers, memory: Memory = new_memory) -> RaggedArray:
    """Copy the lists ``content[begin[i] : begin[i] + lengths[i]]``, in order."""
    shape = (int(lengths.sum()), *content.shape[1:])
    offsets, values = aligned_arrays(memory, [((len(lengths) + 1,), np.dtype(np.int64)), (shape, content.dtype)])
    offsets[0] = 0
    np.cumsum(lengths, out=offsets[1:])
    for start in range(0, len(lengths), TILE):
        tile = slice(start, start + TILE)
        _copy(content, values, begin[tile], offsets[start : start + TILE + 1])
    return RaggedArray(values, offsets)


def _copy(content: Array, values: Array, begin: Integers, offsets: Integers) -> None:
    """Copy lists that begin in the content at ``begin``, and in the values at ``offsets``."""
    if offsets[-1] - offsets[0] < LONG_LIST * len(begin):
        elements = ranges(begin, np.diff(offsets))
        np.take(content, elements, axis=0, out=values[offsets[0] : offsets[-1]], mode="clip")  # "raise" copies twice
        return
    for (low, high), source in zip(pairwise(offsets.tolist()), begin.tolist(), strict=True):
        values[low:high] = content[source : source + high - low]


def _views(content: Array, offsets: Integers) -> NDArray[Any]:
    views = [content[low:high] for low, high in pairwise(offsets.tolist())]
    return np.fromiter(views, object, len(views))
