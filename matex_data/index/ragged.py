"""Ragged samples as lists: the elements of many samples in one array, without an array for each of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Array, Integers
from matex_data.fields import Field
from matex_data.index.model import ranges
from matex_data.index.scatter import RowIndices, are_consecutive

LONG_LIST = 256  # elements on average from which one copy for each list is faster than an index for each element


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


class RaggedOutput(np.ndarray[Any, np.dtype[Any]]):
    """Output array of a ragged field: an object array, or lists of samples until they are ``joined``.

    Layouts assign samples to it, as to any object array, or pass lists to `scatter_lists`.
    """

    dtype_of_elements: np.dtype[Any]
    lists: list[tuple[RowIndices, Integers, Array]] | None = None  # of a view of the array: no lists

    @classmethod
    def empty(cls, rows: int, dtype: np.dtype[Any]) -> RaggedOutput:
        """Return an output array for ``rows`` samples with elements of ``dtype``."""
        out = np.empty(rows, object).view(cls)
        out.lists, out.dtype_of_elements = [], dtype
        return out

    @cached_property
    def joined(self) -> NDArray[Any] | RaggedArray:
        """Return all samples: as a `RaggedArray`, or as a plain object array if there are no lists."""
        if not self.lists:
            return self.view(np.ndarray)
        begin, length = np.zeros(len(self), np.int64), np.full(len(self), -1, np.int64)
        contents, stored = [], 0
        for destination, offsets, content in self.lists:
            begin[destination] = offsets[:-1] + stored
            length[destination] = np.diff(offsets)
            contents.append(content)
            stored += len(content)
        others = np.flatnonzero(length < 0)  # samples that were assigned as arrays, such as padding
        if len(others):
            samples = self.view(np.ndarray)[others]
            length[others] = [len(sample) for sample in samples]
            begin[others] = np.cumsum(length[others]) - length[others] + stored
            contents += [np.asarray(sample, self.dtype_of_elements) for sample in samples]
        self.lists = []
        return take_lists(np.concatenate(contents), begin, length)


def empty_output(field: Field, rows: int) -> Array:
    """Return an uninitialized output array for ``rows`` samples; of lists of numbers, a `RaggedOutput`."""
    lists = field.ragged and not field.shape and field.inner == (None,) and not field.dtype.hasobject
    return RaggedOutput.empty(rows, field.dtype) if lists else field.empty(rows)


def joined(samples: Array) -> Array | RaggedArray:
    """Return the samples of an output array once all rows of it are written."""
    return samples.joined if isinstance(samples, RaggedOutput) else samples


def scatter_lists(out: Array, destination: RowIndices, offsets: Integers, content: Array) -> None:
    """Assign ``out[destination[i]] = content[offsets[i] : offsets[i + 1]]`` for all i.

    Parameters
    ----------
    out : object[n], output array of a ragged field.
    destination : indices of ``out``.
    offsets : integers[k + 1], non-decreasing.
    content : elements, of the field's dtype, in memory that is not reused: samples may be views of it.
    """
    if isinstance(out, RaggedOutput) and out.lists is not None:
        out.lists.append((destination, offsets.astype(np.int64, copy=False), content))
        return
    if not isinstance(destination, slice) and are_consecutive(destination) and len(destination):
        destination = slice(int(destination[0]), int(destination[-1]) + 1)
    out[destination] = _views(content, offsets)


def take_lists(content: Array, begin: Integers, lengths: Integers) -> RaggedArray:
    """Copy the lists ``content[begin[i] : begin[i] + lengths[i]]``, in order."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    if offsets[-1] < LONG_LIST * len(lengths):
        return RaggedArray(content.take(ranges(begin, lengths), axis=0), offsets)
    values = np.empty((int(offsets[-1]), *content.shape[1:]), content.dtype)
    for (low, high), source in zip(pairwise(offsets.tolist()), begin.tolist(), strict=True):
        values[low:high] = content[source : source + high - low]
    return RaggedArray(values, offsets)


def _views(content: Array, offsets: Integers) -> NDArray[Any]:
    views = [content[low:high] for low, high in pairwise(offsets.tolist())]
    return np.fromiter(views, object, len(views))
