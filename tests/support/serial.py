"""Reference reader: execute the read requests of an index serially, with ``os.pread`` alone."""

from __future__ import annotations

import os
from typing import Any

import h5py
import numpy as np

from matex_data._types import Array, Integers
from matex_data.index.cache import ChunkCache
from matex_data.index.model import FileIndex, Index, ReadRequest, RowSelection


def read_rows(index: Index, name: str, numbers: Integers, destination: Integers, cache_bytes: int = 1 << 20) -> Array:
    """Read rows of a one-file index: row ``numbers[i]`` (ascending) goes to ``destination[i]`` of the result."""
    (file,) = index.files
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    first = np.concatenate([[0], breaks]).astype(np.int64)[: len(numbers)]
    last = np.concatenate([breaks, [len(numbers)]]).astype(np.int64)[: len(numbers)] - 1
    rows = RowSelection(numbers[first], numbers[last] + 1, destination)
    out = index.fields[name].empty(len(numbers))
    if not out.dtype.hasobject and out.size:
        out.reshape(-1).view(np.uint8)[...] = 0xA5  # shows rows that were never written
    cache = ChunkCache(cache_bytes)
    for request in file.layouts[name].requests(rows, out, cache):
        _execute(file, request)
    return out


def every_row(index: Index, name: str) -> Array:
    """Read all rows of a one-file index, in order."""
    numbers = np.arange(len(index), dtype=np.int64)
    return read_rows(index, name, numbers, numbers)


def random_rows(index: Index, name: str, random: np.random.Generator) -> tuple[Array, Integers]:
    """Read randomly chosen rows of a one-file index in random order; return them and their numbers."""
    count = int(random.integers(1, len(index) + 1))
    numbers = np.sort(random.choice(len(index), count, replace=False)).astype(np.int64)
    destination = random.permutation(count).astype(np.int64)
    drawn = np.empty(count, np.int64)
    drawn[destination] = numbers
    return read_rows(index, name, numbers, destination, cache_bytes=int(random.choice([0, 1 << 20]))), drawn


def _execute(file: FileIndex, request: ReadRequest) -> None:
    if request.target is not None and request.at is not None:
        memory, at = request.target, request.at
    else:
        memory = np.empty(int(request.nbytes.sum()), np.uint8)
        at = np.cumsum(request.nbytes) - request.nbytes
    handle = os.open(file.path, os.O_RDONLY)
    try:
        for offset, nbytes, start in zip(request.offset.tolist(), request.nbytes.tolist(), at.tolist(), strict=True):
            stored = os.pread(handle, nbytes, offset)
            assert len(stored) == nbytes
            memory[start : start + nbytes] = np.frombuffer(stored, np.uint8)
    finally:
        os.close(handle)
    if request.fetch is not None:
        request.fetch()
    if request.on_complete is not None:
        request.on_complete(memory)


def same(found: Any, expected: Any, file: h5py.File | None = None) -> bool:
    """Return whether two arrays, nested ones included, hold the same values; NaN equals NaN.

    References into ``file`` are equal if they point to the same object.
    """
    if not isinstance(expected, np.ndarray) or expected.dtype.kind not in "OV":
        a, b = np.asarray(found), np.asarray(expected)
        return bool(a.shape == b.shape and np.array_equal(a, b, equal_nan=b.dtype.kind in "fcmM"))
    if found.shape != expected.shape:
        return False
    if expected.dtype.names is not None:
        return all(same(found[name], expected[name], file) for name in expected.dtype.names)
    if expected.dtype.kind == "V":
        return bool(found.dtype.itemsize == expected.dtype.itemsize and found.tobytes() == expected.tobytes())
    pairs = zip(found.reshape(-1), expected.reshape(-1), strict=True)
    return all(same(_target(a, file), _target(b, file), file) for a, b in pairs)


def _target(value: Any, file: h5py.File | None) -> Any:
    """Return the name of the object that a reference points to, and any other value unchanged."""
    if not isinstance(value, h5py.Reference | h5py.RegionReference) or file is None:
        return value
    return str(h5py.h5r.get_name(value, file.id)) if value else "nowhere"
