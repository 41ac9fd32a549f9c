"""Strided rows, against plain indexing of the array that was written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from matex_data.index.strided import Strided
from tests.index.samples import DTYPES, counting, one_file, scattered, selections
from tests.support.serial import every_row, read_rows


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
    layout = Strided(shape[0], offset, spaced.shape[1], dtype, shape[1:])
    assert layout.end() == path.stat().st_size - gap
    found = one_file(path, layout, shape, dtype)
    numbers, destination = data.draw(selections(shape[0]))
    assert np.array_equal(read_rows(found, "x", numbers, destination), scattered(array, numbers, destination))


def test_row_numbers_beyond_32_bits(tmp_path: Path) -> None:
    rows, row_bytes = 2**33 + 7, 3
    path = tmp_path / "a.bin"
    with path.open("wb") as file:
        file.truncate(rows * row_bytes)
        file.seek((rows - 1) * row_bytes)
        file.write(b"end")
    layout = Strided(rows, 0, row_bytes, np.dtype("u1"), (3,))
    found = one_file(path, layout, (rows, 3), np.dtype("u1"))
    numbers = np.array([0, 2**31, 2**32 + 1, rows - 1], np.int64)
    read = read_rows(found, "x", numbers, np.array([3, 2, 1, 0], np.int64))
    assert read.tolist() == [list(b"end"), [0] * 3, [0] * 3, [0] * 3]
    assert layout.end() == rows * row_bytes


def test_no_rows_read_nothing(tmp_path: Path) -> None:
    layout = Strided(0, 4096, 12, np.dtype("f4"), (3,))
    assert every_row(one_file(tmp_path / "none", layout, (0, 3), np.dtype("f4")), "x").shape == (0, 3)
    assert layout.end() == 0
