"""Rows at even distances and in chunks, against plain indexing of the array that was written."""

from __future__ import annotations

import zlib
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from matex_data._types import Array
from matex_data.codecs.pipeline import DEFLATE, SHUFFLE, Filter, Pipeline
from matex_data.errors import DecodeError
from matex_data.fields import Field
from matex_data.index.cache import ChunkCache
from matex_data.index.chunked import Chunked
from matex_data.index.model import FileIndex, Index, RowSelection
from matex_data.index.scatter import scatter
from matex_data.index.strided import Strided
from tests.support.serial import every_row, read_rows

DTYPES = st.sampled_from(["u1", "<i2", ">i2", "<f4", ">f8", "<c16", "S3", "?"])
RECORD = np.dtype([("a", "<i4"), ("b", "S3"), ("c", "<f8", (2,))])


def counting(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """Different values in every destination, as far as the dtype allows."""
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    return np.asarray(numbers.astype("S3") if dtype == "S3" else numbers.astype(dtype))


def one_file(path: Path, part: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Index:
    field = Field("x", shape[1:], np.dtype(dtype).newbyteorder("="))
    return Index({"x": field}, [FileIndex(str(path), shape[0], {"x": part})])


@st.composite
def selections(draw: st.DrawFn, rows: int) -> tuple[Any, Any]:
    """Some rows in ascending order, and a permutation of their places."""
    chosen = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    numbers = np.flatnonzero(chosen).astype(np.int64)
    order = draw(st.permutations(range(len(numbers)))) if draw(st.booleans()) else range(len(numbers))
    return numbers, np.array(list(order), np.int64)


def placed(data: np.ndarray[Any, Any], numbers: Any, destination: Any) -> np.ndarray[Any, Any]:
    expected = np.empty((len(numbers), *data.shape[1:]), data.dtype)
    expected[destination] = data[numbers]
    return expected


@given(st.data())
def test_strided_rows(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "strided.bin"
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=3, max_side=12))
    dtype = np.dtype(data.draw(DTYPES))
    gap, offset = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    array = counting(shape, dtype.str if dtype.kind != "S" else "S3")
    rows = array.reshape(shape[0], -1).view(np.uint8).reshape(shape[0], -1)
    spaced = np.pad(rows, ((0, 0), (0, gap)), constant_values=0xEE)
    path.write_bytes(bytes(offset) + spaced.tobytes())
    part = Strided(shape[0], offset, spaced.shape[1], dtype, shape[1:])
    assert part.end() == path.stat().st_size - gap
    found = one_file(path, part, shape, dtype)
    numbers, destination = data.draw(selections(shape[0]))
    assert np.array_equal(read_rows(found, "x", numbers, destination), placed(array, numbers, destination))


def write_chunks(path: Path, array: np.ndarray[Any, Any], chunk_shape: tuple[int, ...], missing: Any) -> Chunked:
    """The array in chunks, each shuffled and deflated, those that are missing left out."""
    grid = [-(-n // c) for n, c in zip(array.shape, chunk_shape, strict=True)]
    padded = np.zeros([g * c for g, c in zip(grid, chunk_shape, strict=True)], array.dtype)
    padded[tuple(slice(0, n) for n in array.shape)] = array
    content, columns = bytearray(b"head"), []
    for number, cell in enumerate(np.ndindex(*grid)):
        if missing(number):
            continue
        chunk = padded[tuple(slice(i * c, (i + 1) * c) for i, c in zip(cell, chunk_shape, strict=True))]
        planes = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).reshape(-1, array.itemsize).T
        mask = number % 2  # every second one is not shuffled
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
    lost = data.draw(st.sets(st.integers(0, 50), max_size=3))
    part = write_chunks(path, array, chunk_shape, lost.__contains__)
    grid = [-(-n // c) for n, c in zip(shape, chunk_shape, strict=True)]
    for number, cell in enumerate(np.ndindex(*grid)):
        if number in lost:
            array[tuple(slice(i * c, (i + 1) * c) for i, c in zip(cell, chunk_shape, strict=True))] = 0
    found = one_file(path, part, shape, np.dtype(dtype))
    numbers, destination = data.draw(selections(shape[0]))
    for cache_bytes in (0, 1 << 20):
        assert np.array_equal(
            read_rows(found, "x", numbers, destination, cache_bytes), placed(array, numbers, destination)
        )
    assert part.stored_bytes() == int(part.nbytes.sum())
    assert part.end() == (path.stat().st_size if len(part.number) else 0)


def test_a_chunk_that_is_wanted_twice_is_decoded_once(tmp_path: Path) -> None:
    array = counting((12, 3), "<f4")
    part = write_chunks(tmp_path / "a.bin", array, (6, 3), lambda number: False)
    cache, out = ChunkCache(1 << 20), np.empty((3, 3), "f4")
    rows = [RowSelection(np.array([first]), np.array([first + 3]), np.arange(3)) for first in (0, 3)]
    first, second = (list(part.requests(want, out, cache)) for want in rows)
    assert [len(request.offset) for request in (*first, *second)] == [1, 0]
    assert isinstance(cache.get((id(part), 0)), Future)


def test_a_broken_chunk_tells_all_who_wait_for_it(tmp_path: Path) -> None:
    array = counting((12, 3), "<f4")
    part = write_chunks(tmp_path / "a.bin", array, (6, 3), lambda number: False)
    cache, out = ChunkCache(1 << 20), np.empty((3, 3), "f4")
    wants = [RowSelection(np.array([first]), np.array([first + 3]), np.arange(3)) for first in (6, 9)]
    (first,), (second,) = (list(part.requests(want, out, cache)) for want in wants)
    for request, stored in ((first, np.zeros(int(first.nbytes[0]), np.uint8)), (second, np.empty(0, np.uint8))):
        assert request.on_complete is not None
        with pytest.raises(DecodeError) as caught:
            request.on_complete(stored)
        assert (caught.value.row, caught.value.byte) == (6, int(part.offset[1]))


@given(st.data())
def test_scatter_is_plain_assignment(data: st.DataObject) -> None:
    dtype = np.dtype(data.draw(st.one_of(DTYPES, st.just(RECORD))))
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=3, max_side=8))
    rows: Array = np.frombuffer(data.draw(st.binary(min_size=1)) * np.prod(shape, dtype=int) * dtype.itemsize, np.uint8)
    stored = rows[: np.prod(shape, dtype=int) * dtype.itemsize].copy()
    rows = (stored & 1 if dtype.kind == "b" else stored).view(dtype).reshape(shape)
    destination = np.array(data.draw(st.permutations(range(shape[0]))), np.int64)
    native = dtype.newbyteorder("=") if dtype.names is None else dtype
    out, expected = np.zeros((shape[0] + 1, *shape[1:]), native), np.zeros((shape[0] + 1, *shape[1:]), native)
    if data.draw(st.booleans()):
        rows = np.asfortranarray(rows)
    expected[destination] = rows
    scatter(out, destination, rows)
    assert out.tobytes() == expected.tobytes()


def test_counts_beyond_32_bits_need_no_memory(tmp_path: Path) -> None:
    rows, row_bytes = 2**33 + 7, 3
    path = tmp_path / "a.bin"
    with path.open("wb") as file:
        file.truncate(rows * row_bytes)
        file.seek((rows - 1) * row_bytes)
        file.write(b"end")
    part = Strided(rows, 0, row_bytes, np.dtype("u1"), (3,))
    found = one_file(path, part, (rows, 3), np.dtype("u1"))
    numbers = np.array([0, 2**31, 2**32 + 1, rows - 1], np.int64)
    read = read_rows(found, "x", numbers, np.array([3, 2, 1, 0], np.int64))
    assert read.tolist() == [list(b"end"), [0] * 3, [0] * 3, [0] * 3]
    assert part.end() == rows * row_bytes


def test_no_rows_read_nothing(tmp_path: Path) -> None:
    part = Strided(0, 4096, 12, np.dtype("f4"), (3,))
    assert every_row(one_file(tmp_path / "none", part, (0, 3), np.dtype("f4")), "x").shape == (0, 3)
    assert part.end() == 0


def test_who_waits_for_a_chunk_hears_that_it_could_not_be_read() -> None:
    cache = ChunkCache(1)
    first, second = (cache.reserve(key, 10) for key in ("kept", "newer"))  # the first one has no room any more
    cache.fail_pending(OSError("gone"))
    for chunk in (first, second):
        with pytest.raises(OSError, match="gone"):
            chunk.result(timeout=1)
