"""Layouts made of other layouts, against the same rows in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from matex_data.fields import Field
from matex_data.index.combined import Concatenated, Sum, with_shared_blocks
from matex_data.index.library import Constant, MemoryRows
from matex_data.index.model import FileIndex, Index, Layout
from matex_data.index.strided import Strided
from matex_data.index.whole import Rows, whole
from tests.support.serial import every_row, random_rows


def _index(path: Path, layout: Layout, dtype: Any = float, shape: tuple[int, ...] = (), ragged: bool = False) -> Index:
    field = Field("x", shape, np.dtype(dtype), ragged)
    return Index({"x": field}, [FileIndex(str(path), layout.rows, {"x": layout})])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.arange(100.0).tofile(tmp_path / "numbers")
    return tmp_path / "numbers"


def _strided(first: int, rows: int) -> Strided:
    return Strided(rows, 8 * first, 8, np.dtype("f8"), ())


def test_concatenated(path: Path) -> None:
    memory = MemoryRows(np.array([-1.0, -2.0]))
    parts = (_strided(10, 7), Constant(3, 5.5), Constant(0, 1.0), memory, _strided(50, 50))
    wanted = np.concatenate([np.arange(10.0, 17), [5.5] * 3, memory.values, np.arange(50.0, 100)])
    index = _index(path, Concatenated(parts))
    np.testing.assert_array_equal(every_row(index, "x"), wanted)
    for seed in range(50):
        rows, numbers = random_rows(index, "x", np.random.default_rng(seed))
        np.testing.assert_array_equal(rows, wanted[numbers])
    layout = Concatenated(parts)
    assert (layout.rows, layout.block_rows, layout.borders(), layout.end()) == (62, 1, None, 800)
    assert layout.stored_bytes() == 8 * 59
    assert Concatenated(()).rows == 0


def test_blocks_of_concatenated_fields() -> None:
    plain = Concatenated((_strided(0, 1500), _strided(0, 40)))
    blocks = Concatenated((_strided(0, 1500), MemoryRows(np.zeros(40), block_rows=16)))
    assert blocks.borders() is not None
    assert blocks.borders().tolist() == [0, 1024, 1500, 1516, 1532]  # type: ignore[union-attr]
    shared = with_shared_blocks({"a": plain, "b": blocks, "c": MemoryRows(np.zeros(1540))})
    assert shared["a"].borders().tolist() == blocks.borders().tolist()  # type: ignore[union-attr]
    assert shared["a"].block_rows == 1024
    assert with_shared_blocks({"a": plain})["a"] is plain


def test_wholes(path: Path) -> None:
    parts = (_strided(0, 3), _strided(40, 0), Constant(2, 1.5), _strided(90, 10))
    wanted = [np.arange(3.0), np.empty(0), np.array([1.5, 1.5]), np.arange(90.0, 100)]
    layout = Concatenated(tuple(whole(Rows(part, (), np.dtype(float))) for part in parts))
    index = _index(path, layout, ragged=True)
    for found, expected in zip(every_row(index, "x"), wanted, strict=True):
        np.testing.assert_array_equal(found, expected)
    for seed in range(20):
        rows, numbers = random_rows(index, "x", np.random.default_rng(seed))
        assert all(np.array_equal(row, wanted[number]) for row, number in zip(rows, numbers.tolist(), strict=True))
    assert layout.inner_bytes() == 8 * 15
    dense = Concatenated(tuple(whole(Rows(part, (), np.dtype(float))) for part in (_strided(4, 5), Constant(5, 2.0))))
    found = every_row(_index(path, dense, shape=(5,)), "x")
    np.testing.assert_array_equal(found, [np.arange(4.0, 9), [2.0] * 5])


def test_sums(path: Path) -> None:
    layout = Sum(_strided(10, 30), Concatenated((Constant(10, 0.5), _strided(0, 20))), np.dtype(float))
    wanted = np.arange(10.0, 40) + np.concatenate([[0.5] * 10, np.arange(20.0)])
    index = _index(path, layout)
    np.testing.assert_array_equal(every_row(index, "x"), wanted)
    for seed in range(20):
        rows, numbers = random_rows(index, "x", np.random.default_rng(seed))
        np.testing.assert_array_equal(rows, wanted[numbers])
