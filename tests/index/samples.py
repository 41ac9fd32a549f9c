"""Arrays, selections and one-file indexes for the tests of layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from matex_data.fields import Field
from matex_data.index.model import FileIndex, Index

DTYPES = st.sampled_from(["u1", "<i2", ">i2", "<f4", ">f8", "<c16", "S3", "?"])


def counting(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """Return an array of distinct values, as far as the dtype allows."""
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    return np.asarray(numbers.astype("S3") if dtype == "S3" else numbers.astype(dtype))


def one_file(path: Path, layout: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Index:
    field = Field("x", shape[1:], np.dtype(dtype).newbyteorder("="))
    return Index({"x": field}, [FileIndex(str(path), shape[0], {"x": layout})])


@st.composite
def selections(draw: st.DrawFn, rows: int) -> tuple[Any, Any]:
    """Draw ascending rows, and a permutation of their destinations."""
    selected = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    numbers = np.flatnonzero(selected).astype(np.int64)
    order = draw(st.permutations(range(len(numbers)))) if draw(st.booleans()) else range(len(numbers))
    return numbers, np.array(list(order), np.int64)


def scattered(data: np.ndarray[Any, Any], numbers: Any, destination: Any) -> np.ndarray[Any, Any]:
    expected = np.empty((len(numbers), *data.shape[1:]), data.dtype)
    expected[destination] = data[numbers]
    return expected
