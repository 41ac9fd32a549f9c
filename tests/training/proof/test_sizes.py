"""Algebra of sizes, and of reshaping, against NumPy."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from matex_data._types import Array
from matex_data.training.proof.axes import PerSample
from matex_data.training.proof.shapes import reshaped
from matex_data.training.proof.sizes import ONE, ROWS, Size, name_size, product

SIZES = st.sampled_from([1, 2, 3, 4, 6])


def test_quotients_are_exact_or_none() -> None:
    steps = name_size("steps")
    assert ROWS * steps * Size(6) / (steps * Size(2)) == ROWS * Size(3)
    assert ROWS / Size(2) is None  # an odd number of rows
    assert Size(6) / ROWS is None
    assert Size(6) / Size(4) is None
    assert Size(0) / Size(0) is None


def _value(size: Size, rows: int) -> int:
    return size.number * rows ** sum(power for _, power in size.powers)


@given(st.lists(SIZES, max_size=3), st.lists(SIZES, max_size=3), SIZES, SIZES, st.data())
def test_reshaping_keeps_the_samples_where_it_says(
    outer: list[int], inner: list[int], before: int, after: int, data: st.DataObject
) -> None:
    axis = Size(before) * ROWS * Size(after)
    shape = (*map(Size, outer), axis, *map(Size, inner))
    x = PerSample(len(outer), shape, Size(before), Size(after))
    left = data.draw(st.lists(SIZES, max_size=3), label="sizes to the left")
    right = data.draw(st.lists(SIZES, max_size=3), label="sizes to the right")
    whole = math.prod([*outer, before, after, *inner])
    times, rest = divmod(whole, math.prod([*left, *right]))
    assume(not rest)
    sizes: tuple[Size | None, ...] = (*map(Size, left), ROWS * Size(times), *map(Size, right))
    wildcard = data.draw(st.none() | st.integers(0, len(sizes) - 1), label="position of -1")
    out = reshaped(x, tuple(None if i == wildcard else size for i, size in enumerate(sizes)))
    found = None if out is None else (_value(out.before, 1), _value(out.after, 1))
    pairs = [(n, times // n) for n in range(1, times + 1) if not times % n]
    for rows in (2, 3, 5):
        owner = np.broadcast_to(np.arange(rows)[:, None], (*outer, before, rows, after * math.prod(inner)))
        moved = owner.reshape(math.prod(left), times * rows, -1).swapaxes(0, 1).reshape(times * rows, -1)
        pairs = [pair for pair in pairs if (moved == _pattern(rows, *pair)[:, None]).all()]
    assert found in (pairs or [None])
    assert out is None or out.shape == sizes


def _pattern(rows: int, before: int, after: int) -> Array:
    """Return the sample of each element of an axis of samples."""
    return np.tile(np.repeat(np.arange(rows), after), before)


def test_rows_that_are_folded_are_not_proven() -> None:
    x = PerSample(0, (ROWS, Size(8)))
    assert reshaped(x, (None, Size(16))) is None
    assert reshaped(x, (Size(4), None)) is None
    assert reshaped(x, (ROWS, ROWS)) is None
    assert product([]) == ONE
