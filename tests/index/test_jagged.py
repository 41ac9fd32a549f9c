"""Jagged rows over every layout of the content, against plain slicing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from matex_data.codecs.pipeline import Pipeline
from matex_data.fields import Field
from matex_data.index.cache import ChunkCache
from matex_data.index.chunked import Chunked
from matex_data.index.descriptors import OF_JOB
from matex_data.index.jagged import Content, Jagged, compact, jagged_columns
from matex_data.index.model import FileIndex, Index, RowSelection
from matex_data.index.stored import from_bytes, to_bytes
from matex_data.index.strided import Strided
from tests.index.samples import selections
from tests.support.serial import every_row, read_rows

DEPTH = 4


def _layouts(total: int, data: np.ndarray[Any, Any], path: Path) -> dict[str, Any]:
    """Write the content twice, and return a strided and a chunked layout of it."""
    chunks = -(-total // DEPTH)
    padded = np.zeros(chunks * DEPTH, data.dtype)
    padded[:total] = data
    path.write_bytes(data.tobytes() + padded.tobytes())
    numbers = np.arange(chunks, dtype=np.int64)
    nbytes = DEPTH * data.itemsize
    pipeline = Pipeline((), data.itemsize, nbytes)
    offset, sizes, masks = total * data.itemsize + numbers * nbytes, np.full(chunks, nbytes), np.zeros(chunks, np.int64)
    fill = data.dtype.type(0)
    chunked = Chunked((total,), (DEPTH,), data.dtype, pipeline, numbers, offset, sizes, masks, fill)
    return {"strided": Strided(total, 0, data.itemsize, data.dtype, ()), "chunked": chunked}


@given(st.data(), st.lists(st.integers(0, 9), min_size=1, max_size=20))
def test_jagged_rows(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, counts: list[int]) -> None:
    path = tmp_path_factory.getbasetemp() / "jagged.bin"
    offsets = np.append(0, np.cumsum(counts)).astype(np.int64)
    values = np.arange(offsets[-1], dtype=data.draw(st.sampled_from([">f4", "<i8"])))
    native = values.dtype.newbyteorder("=")
    contents = {name: Content(layout, native) for name, layout in _layouts(len(values), values, path).items()}
    layouts = jagged_columns(offsets, contents)
    fields = {name: Field(name, (), native, ragged=True) for name in layouts}
    index = Index(fields, [FileIndex(str(path), len(counts), layouts)])
    numbers, destination = data.draw(selections(len(counts)))
    for name in layouts:
        found = read_rows(index, name, numbers, destination, cache_bytes=data.draw(st.sampled_from([0, 1 << 20])))
        for number, to in zip(numbers.tolist(), destination.tolist(), strict=True):
            assert found[to].dtype == native
            assert np.array_equal(found[to], values[offsets[number] : offsets[number + 1]])


def test_blocks_follow_the_chunks_of_the_content(tmp_path: Path) -> None:
    counts = np.array([3, 3, 0, 0, 9, 1, 1])
    offsets = np.append(0, np.cumsum(counts))
    layouts = _layouts(17, np.arange(17.0), tmp_path / "a.bin")
    native = np.dtype("f8")
    borders = Jagged(compact(offsets), {"x": Content(layouts["chunked"], native)}).borders()
    assert borders is not None
    assert borders.tolist() == [0, 2, 5, 6]  # first elements 0, 6, 15, 16 in chunks 0, 1, 3, 4 of 4 elements
    assert Jagged(compact(offsets), {"x": Content(layouts["strided"], native)}).borders() is None
    both = {name: Content(layout, native) for name, layout in layouts.items()}
    assert Jagged(compact(offsets), both).borders() is not None


def test_neighbouring_samples_are_one_range(tmp_path: Path) -> None:
    counts = np.array([2, 0, 3, 4, 0, 1])
    layout = _layouts(10, np.arange(10.0), tmp_path / "a.bin")["strided"]
    jagged = Jagged(compact(np.append(0, np.cumsum(counts))), {"x": Content(layout, np.dtype("f8"))})
    rows = RowSelection(np.array([0, 4]), np.array([3, 6]), np.arange(5))
    (request,) = jagged.requests(rows, [("x", np.empty(5, object))], ChunkCache(0))
    assert (request.offset.tolist(), request.nbytes.tolist()) == ([0, 72], [40, 8])


def test_offsets_take_the_smallest_type() -> None:
    for last, dtype in ((255, "u1"), (256, "u2"), (1 << 16, "u4"), (1 << 32, "i8")):
        assert compact(np.array([0, last])).dtype == np.dtype(dtype)


def test_equal_offsets_are_one_number(tmp_path: Path) -> None:
    """Lists without elements: their offsets are a view of one number, to which nobody can write."""
    offsets = compact(np.full(1001, 7))
    assert offsets.strides == (0,) and offsets.base.nbytes == 8 and not offsets.flags.writeable
    assert offsets.tolist() == [7] * 1001
    native = np.dtype("f8")
    for layout in _layouts(9, np.arange(9.0), tmp_path / "a.bin").values():
        columns = jagged_columns(offsets, {"x": Content(layout, native)})
        index = Index({"x": Field("x", (), native, ragged=True)}, [FileIndex(str(tmp_path / "a.bin"), 1000, columns)])
        restored = from_bytes(to_bytes(index, "key"), OF_JOB)[1]
        for read in (index, restored):
            assert [len(values) for values in every_row(read, "x")] == [0] * 1000


def test_the_bytes_of_the_elements_count() -> None:
    layout = Strided(1000, 0, 8, np.dtype("f8"), ())
    columns = jagged_columns(np.array([0, 400, 1000]), {"x": Content(layout, np.dtype("f8"))})
    index = Index({"x": Field("x", (), np.dtype("f8"), ragged=True)}, [FileIndex("a", 2, columns)])
    assert index.row_bytes("x") == 8 + 4000


def test_no_samples(tmp_path: Path) -> None:
    for layout in _layouts(0, np.empty(0), tmp_path / "a.bin").values():
        columns = jagged_columns(np.array([0]), {"x": Content(layout, np.dtype("f8"))})
        index = Index({"x": Field("x", (), np.dtype("f8"), ragged=True)}, [FileIndex(str(tmp_path), 0, columns)])
        assert every_row(index, "x").shape == (0,)
        assert columns["x"].block_rows >= 1
