"""Ragged samples as one array of all their elements, and reads of several fields that one function completes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.errors import DataError
from matex_data.fields import Field
from matex_data.index.cache import ChunkCache
from matex_data.index.model import EMPTY, Layout, OnComplete, ReadRequest, RowSelection, call_after_last
from matex_data.index.ragged import RaggedOutput, empty_output
from matex_data.index.table import plan_reads


def empty_samples(field: Field, count: int, layout: Layout) -> Array:
    """Return an output array for ``count`` samples of a ragged field, to be passed to `join_samples`."""
    found: Array = empty_output(field, count, layout.inner_bytes() / max(1, layout.rows))
    return found


def join_samples(samples: Array, field: Field) -> tuple[Array, Integers]:
    """Return the elements of all samples, one sample after the other, and int64[samples], the length of each.

    Parameters
    ----------
    samples : object[samples], 1-D arrays; or the output array of `empty_samples`.
    field : the ragged field.
    """
    if isinstance(samples, RaggedOutput):
        joined = samples.joined()
        return joined.values, joined.lengths
    lengths = np.fromiter(map(len, samples), np.int64, len(samples))
    return np.concatenate([np.empty(0, field.dtype), *samples], dtype=field.dtype, casting="unsafe"), lengths


def read_fields(
    layouts: Mapping[str, Layout],
    rows: RowSelection,
    arrays: Mapping[str, Array],
    cache: ChunkCache,
    path: str,
    action: Callable[[], None],
) -> list[ReadRequest]:
    """Plan the reads of several fields, of which the last one to complete calls ``action``.

    Parameters
    ----------
    layouts : of the file's fields, by name.
    rows : rows to read.
    arrays : the output array of each field to read, by name.
    cache : decoded chunks.
    path : of the file; errors name it, and the field.
    action : called once all rows are in the arrays.
    """
    requests = [_located(request, path, name) for name, request in plan_reads(layouts, rows, arrays, cache)]
    return call_after_last(requests or [ReadRequest(EMPTY, EMPTY)], action)


def _located(request: ReadRequest, path: str, name: str | None) -> ReadRequest:
    """Return the request with a callback whose errors name the file and the field."""
    complete = request.on_complete
    return request if complete is None else replace(request, on_complete=partial(_complete, complete, path, name))


def _complete(complete: OnComplete, path: str, name: str | None, data: Bytes) -> None:
    try:
        complete(data)
    except DataError as error:
        raise error.at(path, name) from error
