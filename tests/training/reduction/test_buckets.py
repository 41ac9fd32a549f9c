"""Assignment of tensors to buckets, and their layout."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from matex_data.training.reduction.buckets import plan_buckets, scaled, sum_dtype

DTYPES = [np.dtype(name) for name in ("float16", "float32", "float64", "int32")]
tensors = st.lists(st.tuples(st.integers(0, 500), st.sampled_from(DTYPES)), max_size=30)


@given(tensors, st.integers(1, 4000))
def test_every_tensor_is_in_one_bucket_of_its_dtype(sizes: list[tuple[int, Any]], limit: int) -> None:
    buckets = plan_buckets([size for size, _ in sizes], [dtype for _, dtype in sizes], limit)
    positions = [position for bucket in buckets for position in bucket.positions]
    assert sorted(positions) == list(range(len(sizes)))
    for bucket in buckets:
        nbytes = [sizes[position][0] * bucket.dtype.itemsize for position in bucket.positions]
        assert {sum_dtype(sizes[position][1]) for position in bucket.positions} == {bucket.dtype}
        assert list(bucket.positions) == sorted(bucket.positions, reverse=True)
        assert sum(nbytes[:-1]) < limit  # open until its last tensor


@given(tensors, st.integers(1, 4000))
def test_large_tensors_have_buckets_of_their_own(sizes: list[tuple[int, Any]], alone: int) -> None:
    buckets = plan_buckets([size for size, _ in sizes], [dtype for _, dtype in sizes], alone_bytes=alone)
    for bucket in buckets:
        nbytes = [sizes[position][0] * bucket.dtype.itemsize for position in bucket.positions]
        assert len(nbytes) == 1 or max(nbytes) < alone


@given(st.integers(0, 50), st.sampled_from([None, 0.0, 1.0, 0.25, 1 / 3]))
def test_scaled_copies(size: int, weight: float | None) -> None:
    array, out = np.random.default_rng(0).normal(size=size).astype(np.float16), np.empty(size, np.float32)
    scaled(array, weight, out)
    np.testing.assert_allclose(out, array.astype("f4") * (1 if weight is None else weight), rtol=1e-6)


def test_weight_zero_gives_zeros_for_anything() -> None:
    out = np.empty(3, np.float32)
    scaled(np.array([np.nan, np.inf, 1], np.float32), 0.0, out)
    np.testing.assert_array_equal(out, 0)
