"""Samples by their positions, as of a sequence: read by this process alone, whatever the other ranks do."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from matex_data._types import Array, Integers
from matex_data.fields import ElementSpec
from matex_data.index.cache import ChunkCache, GivenUp
from matex_data.index.runs import Samples, compress
from matex_data.locks import shielded
from matex_data.reading.context import ReadContext
from matex_data.reading.execute import run
from matex_data.reading.plan import Arrays, plan_reads
from matex_data.reading.pool import is_worker
from matex_data.reading.source import Source, rows_at_once

KEPT_BYTES = 128 << 20  # of decoded chunks in the memory of a process, for all data sets

_chunks = [ChunkCache(KEPT_BYTES)]


def _forget() -> None:
    """Begin anew in a forked process, where nobody decodes the chunks that were pending."""
    _chunks[:] = [ChunkCache(KEPT_BYTES)]


os.register_at_fork(after_in_child=_forget)


class SampleReader:
    """Reader of samples in any order. Files stay open, and decoded chunks in memory, for the next call.

    Parameters
    ----------
    source : the opened files of the ranks.
    samples : the samples of the data set, ascending.
    """

    def __init__(self, source: Source, samples: Samples) -> None:
        self._source = source.alone()
        self._samples = samples
        self._process = -1

    def take(self, positions: Integers) -> Arrays:
        """Read samples to new arrays, by field name.

        Parameters
        ----------
        positions : int64[n], each from 0 to the number of samples, in any order.

        Raises
        ------
        DataError : a sample cannot be read.
        """
        return shielded(self._take, positions)

    def _take(self, positions: Integers) -> Arrays:
        different, inverse = np.unique(positions, return_inverse=True)
        source, arrays = self._source, self._empty(len(different))
        context, chunks = self._opened()
        if is_worker():  # it must not need what other windows decode
            chunks = ChunkCache(context.cache_bytes)
        numbers = self._samples.numbers(different)
        step = rows_at_once(source.row_bytes)
        for low in range(0, len(numbers), step):
            part = numbers[low : low + step]
            rows = np.arange(low, low + len(part))
            error: Exception | None = GivenUp("no read yet")
            while isinstance(error, GivenUp):
                plan = plan_reads(source.index, compress(part), rows, arrays, chunks, source.scratch)
                error = run(plan, context.session.files)
            source.comm.agree(error)
        ascending = len(different) == len(positions) and bool((np.diff(inverse) > 0).all())
        return arrays if ascending else {name: array[inverse] for name, array in arrays.items()}

    def windows(self) -> Iterator[Arrays]:
        """Return all samples in order, some megabytes at a time; with ``on_error="skip"``, those that can be read.

        Raises
        ------
        DataError : a sample cannot be read.
        """
        return self._source.windows(self._samples)

    def _empty(self, count: int) -> Arrays:
        fields = self._source.index.fields.items()
        return self._source.comm.agreed(lambda: {name: field.empty(count) for name, field in fields})

    def _opened(self) -> tuple[ReadContext, ChunkCache]:
        """Return the open files of this process, which a forked one does not take over, and its decoded chunks."""
        if self._process != os.getpid():
            context = self._source.read_context()
            self._source.comm.agree(context.changed_file())
            self._context, self._process = context, os.getpid()
        return self._context, _chunks[0]

    def __getstate__(self) -> dict[str, Any]:
        return {"_source": self._source, "_samples": self._samples, "_process": -1}


def sample_of(elements: ElementSpec, arrays: Arrays, row: int) -> Any:
    """Return one sample as an element without the sample axis, its arrays copied."""
    values = {name: array[row].copy() if array.ndim > 1 else array[row] for name, array in arrays.items()}
    return elements.assemble(values, None if elements.weights is None else np.float32(values[elements.weights]))


def batch_of(elements: ElementSpec, arrays: Arrays) -> Any:
    """Return samples as an element."""
    return elements.assemble(arrays, None if elements.weights is None else arrays[elements.weights].astype(np.float32))


def positions_of(key: Any, total: int) -> tuple[Integers, bool]:
    """Return the positions that a subscript of a sequence selects, and whether it is one number.

    Parameters
    ----------
    key : int, slice, sequence of int, or of bool with one for each sample; negative numbers count from the end.

    Raises
    ------
    IndexError : a position is out of range.
    TypeError : the subscript is of another type.

    Examples
    --------
    >>> [positions_of(key, 10)[0].tolist() for key in (-1, slice(7, None), [3, -3])]
    [[9], [7, 8, 9], [3, 7]]
    """
    if isinstance(key, slice):
        return np.arange(*key.indices(total), dtype=np.int64), False
    try:
        return _in_range(np.array([operator.index(key)]), total), True
    except TypeError:
        pass  # no single number
    listed: Array = np.array(list(key)) if _listed(key) else np.empty((0, 0))
    if listed.ndim == 1 and listed.dtype == bool:
        if len(listed) != total:
            raise IndexError(f"the mask has {len(listed)} numbers, the data set {total} samples")
        return np.flatnonzero(listed), False
    if listed.ndim != 1 or (listed.size and listed.dtype.kind not in "iu"):
        raise TypeError(f"samples are selected by an int, a slice, or a sequence of int, not by {key!r}")
    return _in_range(listed, total), False


def _listed(key: Any) -> bool:
    return hasattr(key, "__iter__") and not isinstance(key, str | bytes | dict | tuple)


def _in_range(positions: Integers, total: int) -> Integers:
    outside = positions[(positions < -total) | (positions >= total)]  # before a cast, which would wrap uint64
    if len(outside):
        raise IndexError(f"sample {outside[0]} is out of range: the data set has {total} samples")
    positions = positions.astype(np.int64)
    return np.where(positions < 0, positions + total, positions)
