"""Chunked rows, against plain indexing of the array that was written."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from matex_data.codecs.pipeline import DEFLATE, SHUFFLE, Filter, Pipeline
from matex_data.errors import DecodeError
from matex_data.index.cache import Chunk, ChunkCache
from matex_data.index.chunked import Chunked
from matex_data.index.model import RowSelection
from tests.index.samples import counting, one_file, scattered, selections
from tests.support.serial import read_rows


def write_chunks(path: Path, array: np.ndarray[Any, Any], chunk_shape: tuple[int, ...], is_missing: Any) -> Chunked:
    """Write the array in shuffled and deflated chunks, without the missing ones."""
    grid = [-(-n // c) for n, c in zip(array.shape, chunk_shape, strict=True)]
    padded = np.zeros([g * c for g, c in zip(grid, chunk_shape, strict=True)], array.dtype)
    padded[tuple(slice(0, n) for n in array.shape)] = array
    content, columns = bytearray(b"head"), []
    for number, cell in enumerate(np.ndindex(*grid)):
        if is_missing(number):
            continue
        chunk = padded[tuple(slice(i * c, (i + 1) * c) for i, c in zip(cell, chunk_shape, strict=True))]
        planes = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).reshape(-1, array.itemsize).T
        mask = number % 2  # odd chunks are not shuffled
        plain = np.ascontiguousarray(chunk).tobytes() if mask else planes.tobytes()
        stored = zlib.compress(plain)
        columns.append((number, len(content), len(stored), mask))
        content += stored
    path.write_bytes(content)
    numbers, offset, nbytes, masks = np.array(columns, np.int64).reshape(-1, 4).T.copy()
    nbytes_decoded = int(np.prod(chunk_shape)) * array.itemsize
    pipeline = Pipeline((Filter(SHUFFLE, (array.itemsize,)), Filter(DEFLATE, (6,))), array.itemsize, nbytes_decoded)
    return Chunked(
        array.shape, chunk_shape, array.dtype, pipeline, numbers, offset, nbytes, masks, np.zeros((), "u1")[()]
    )


@given(st.data())
def test_chunked_rows(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "chunked.bin"
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=3, max_side=9))
    chunk_shape = tuple(data.draw(st.integers(1, n + 2)) for n in shape)
    dtype = data.draw(st.sampled_from(["u1", "<i2", ">f4", "<f8"]))
    array = counting(shape, dtype)
    missing = data.draw(st.sets(st.integers(0, 50), max_size=3))
    layout = write_chunks(path, array, chunk_shape, missing.__contains__)
    grid = [-(-n // c) for n, c in zip(shape, chunk_shape, strict=True)]
    for number, cell in enumerate(np.ndindex(*grid)):
        if number in missing:
            array[tuple(slice(i * c, (i + 1) * c) for i, c in zip(cell, chunk_shape, strict=True))] = 0
    found = one_file(path, layout, shape, np.dtype(dtype))
    numbers, destination = data.draw(selections(shape[0]))
    for cache_bytes in (0, 1 << 20):
        assert np.array_equal(
            read_rows(found, "x", numbers, destination, cache_bytes), scattered(array, numbers, destination)
        )
    assert layout.stored_bytes() == int(layout.nbytes.sum())
    assert layout.end() == (path.stat().st_size if len(layout.number) else 0)


def test_chunk_of_two_windows_is_decoded_once(tmp_path: Path) -> None:
    array = counting((12, 3), "<f4")
    layout = write_chunks(tmp_path / "a.bin", array, (6, 3), lambda number: False)
    cache, out = ChunkCache(1 << 20), np.empty((3, 3), "f4")
    rows = [RowSelection(np.array([first]), np.array([first + 3]), np.arange(3)) for first in (0, 3)]
    first, second = (list(layout.requests(selection, out, cache)) for selection in rows)
    assert [len(request.offset) for request in (*first, *second)] == [1, 0]
    assert second[0].after is cache.get((layout, 0)) and isinstance(second[0].after, Chunk)


def test_corrupt_chunk_fails_every_pending_read(tmp_path: Path) -> None:
    array = counting((12, 3), "<f4")
    layout = write_chunks(tmp_path / "a.bin", array, (6, 3), lambda number: False)
    cache, out = ChunkCache(1 << 20), np.empty((3, 3), "f4")
    windows = [RowSelection(np.array([first]), np.array([first + 3]), np.arange(3)) for first in (6, 9)]
    (first,), (second,) = (list(layout.requests(selection, out, cache)) for selection in windows)
    for request, stored in ((first, np.zeros(int(first.nbytes[0]), np.uint8)), (second, np.empty(0, np.uint8))):
        assert request.on_complete is not None
        with pytest.raises(DecodeError) as caught:
            request.on_complete(stored)
        assert (caught.value.row, caught.value.byte) == (6, int(layout.offset[1]))
