"""Scattered rows, against plain assignment."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from matex_data._types import Array
from matex_data.index.scatter import scatter
from tests.index.samples import DTYPES

RECORD = np.dtype([("a", "<i4"), ("b", "S3"), ("c", "<f8", (2,))])


@given(st.data())
def test_scatter_equals_assignment(data: st.DataObject) -> None:
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
