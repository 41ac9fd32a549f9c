"""Ragged samples as lists: the elements of many samples in one array, without an array for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Array, Integers
from matex_data.codecs.scratch import Memory, aligned_arrays, new_memory
from matex_data.fields import Field
from matex_data.index.model import ranges
from matex_data.index.scatter import RowIndices, are_consecutive

LONG_LIST = 256  # elements on average from which one copy for each list is faster than an index for each element
PIECE = 1 << 13  # lists that are copied in one go: the indices of short ones stay in the processor's cache

Run = Callable[[Sequence[Callable[[], None]]], None]
"""Callable that calls functions in any order, and returns after the last one; it raises the first error."""


def in_this_thread(functions: Sequence[Callable[[], None]]) -> None:
    """Call functions one after the other."""
    for function in functions:
        function()


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
        return take_lists([self.values], self.offsets[:-1][rows], self.lengths[rows])[0]

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
    result: NDArray[Any] | RaggedArray | None = None

    @classmethod
    def empty(cls, rows: int, dtype: np.dtype[Any]) -> RaggedOutput:
        """Return an output array for ``rows`` samples with elements of ``dtype``."""
        out = np.empty(rows, object).view(cls)
        out.lists, out.dtype_of_elements = [], dtype
        return out

    def contents(self) -> list[Array]:
        """Return the elements of all lists, and forget the lists."""
        lists, self.lists = self.lists or [], []
        return [content for _, _, content in lists]

    def has_lists_like(self, other: RaggedOutput) -> bool:
        """Return whether both have lists of the same samples and of equal lengths, as branches of one counter have."""
        pairs = list(zip(self.lists or [], other.lists or [], strict=False))
        return len(self.lists or []) == len(other.lists or []) == len(pairs) and all(
            _equal(one, another) and np.array_equal(offsets, others)
            for (one, offsets, _), (another, others, _) in pairs
        )


def _equal(one: RowIndices, other: RowIndices) -> bool:
    if isinstance(one, slice) or isinstance(other, slice):
        return isinstance(one, slice) and isinstance(other, slice) and one == other
    return np.array_equal(one, other)


def empty_output(field: Field, rows: int) -> Array:
    """Return an uninitialized output array for ``rows`` samples; of lists of numbers, a `RaggedOutput`."""
    lists = field.ragged and not field.shape and field.inner == (None,) and not field.dtype.hasobject
    return RaggedOutput.empty(rows, field.dtype) if lists else field.empty(rows)


def joined(samples: Array) -> Array | RaggedArray:
    """Return the samples of an output array once all rows of it are written."""
    if not isinstance(samples, RaggedOutput):
        return samples
    join([samples])
    assert samples.result is not None
    return samples.result


def join(outputs: Iterable[Array], memory: Memory = new_memory, run: Run = in_this_thread) -> None:
    """Join the lists of output arrays once all rows of them are written; `joined` returns them.

    Parameters
    ----------
    outputs : arrays; those that are no `RaggedOutput` stay as they are.
    memory : allocates the memory of the joined lists.
    run : calls functions, in threads.
    """
    groups: list[list[RaggedOutput]] = []
    for out in outputs:
        if not isinstance(out, RaggedOutput) or out.result is not None:
            continue
        if not out.lists:
            out.result = out.view(np.ndarray)
            continue
        group = next((group for group in groups if group[0].has_lists_like(out)), None)
        groups.append([out]) if group is None else group.append(out)
    for group in groups:
        _join_alike(group, memory, run)


def _join_alike(group: list[RaggedOutput], memory: Memory, run: Run) -> None:
    """Join outputs with lists of the same samples and of equal lengths."""
    first = group[0]
    begin, length = np.zeros(len(first), np.int64), np.full(len(first), -1, np.int64)
    stored = 0
    for destination, offsets, content in first.lists or []:
        begin[destination] = offsets[:-1] + stored
        length[destination] = np.diff(offsets)
        stored += len(content)
    others = np.flatnonzero(length < 0)  # samples that were assigned as arrays, such as padding
    if not len(others):
        contents = _concatenated([out.contents() for out in group], memory)
        arrays = take_lists(contents, begin, length, memory, run)
        for out, array in zip(group, arrays, strict=True):
            out.result = array
        return
    for out in group:
        samples = [np.asarray(sample, out.dtype_of_elements) for sample in out.view(np.ndarray)[others]]
        length[others] = [len(sample) for sample in samples]
        begin[others] = np.cumsum(length[others]) - length[others] + stored
        contents = _concatenated([[*out.contents(), *samples]], memory)
        (out.result,) = take_lists(contents, begin, length, memory, run)


def _concatenated(parts: list[list[Array]], memory: Memory) -> list[Array]:
    """Return the concatenation of the parts of each output."""
    if all(len(of_output) == 1 for of_output in parts):
        return [of_output[0] for of_output in parts]
    specs = [((sum(map(len, of_output)), *of_output[0].shape[1:]), of_output[0].dtype) for of_output in parts]
    whole = aligned_arrays(memory, specs)
    for of_output, out in zip(parts, whole, strict=True):
        np.concatenate(of_output, out=out)
    return whole


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


def take_lists(
    contents: Sequence[Array],
    begin: Integers,
    lengths: Integers,
    memory: Memory = new_memory,
    run: Run = in_this_thread,
) -> list[RaggedArray]:
    """Copy the lists ``content[begin[i] : begin[i] + lengths[i]]`` of each content, in order."""
    total, of_offsets = int(lengths.sum()), ((len(lengths) + 1,), np.dtype(np.int64))
    specs = [((total, *content.shape[1:]), content.dtype) for content in contents]
    offsets, *values = aligned_arrays(memory, [of_offsets, *specs])
    offsets[0] = 0
    np.cumsum(lengths, out=offsets[1:])
    pieces = [slice(start, start + PIECE) for start in range(0, len(lengths), PIECE)]
    run([partial(_copy, contents, values, begin[piece], offsets[piece.start : piece.stop + 1]) for piece in pieces])
    return [RaggedArray(array, offsets) for array in values]


def _copy(contents: Sequence[Array], values: Sequence[Array], begin: Integers, offsets: Integers) -> None:
    """Copy lists that begin in the contents at ``begin``, and in the values at ``offsets``."""
    if offsets[-1] - offsets[0] < LONG_LIST * len(begin):
        elements = ranges(begin, np.diff(offsets))
        for content, out in zip(contents, values, strict=True):
            np.take(content, elements, axis=0, out=out[offsets[0] : offsets[-1]], mode="clip")  # "raise" copies twice
        return
    for (low, high), source in zip(pairwise(offsets.tolist()), begin.tolist(), strict=True):
        for content, out in zip(contents, values, strict=True):
            out[low:high] = content[source : source + high - low]


def _views(content: Array, offsets: Integers) -> NDArray[Any]:
    views = [content[low:high] for low, high in pairwise(offsets.tolist())]
    return np.fromiter(views, object, len(views))
