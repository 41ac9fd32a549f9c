"""How many steps of an epoch come together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from matex_data.pipeline.epochs import LEAST_PARTS, read_ahead_steps


@given(steps=st.integers(0, 10_000), window_steps=st.integers(1, 500), most=st.integers(0, 10_000))
def test_parts_are_whole_windows_of_which_no_more_come_together_than_may(
    steps: int, window_steps: int, most: int
) -> None:
    together = read_ahead_steps(steps, window_steps, most)
    assert together > 0
    assert together % window_steps == 0
    assert together <= max(most, window_steps)


@given(windows=st.integers(1, 1000), window_steps=st.integers(1, 50), fit=st.integers(1, 100))
def test_there_are_as_few_parts_as_can_be_but_not_too_few(windows: int, window_steps: int, fit: int) -> None:
    together = read_ahead_steps(windows * window_steps, window_steps, fit * window_steps) // window_steps
    parts = -(-windows // together)
    assert parts >= min(windows, LEAST_PARTS)
    assert parts == min(-(-windows // n) for n in range(1, min(fit, max(1, windows // LEAST_PARTS)) + 1))


@pytest.mark.parametrize(
    ("most", "parts"),
    [(42, [42, 42, 42, 42, 42, 40]), (28, [28] * 8 + [26])],
)
def test_no_small_part_is_left_where_the_others_can_take_it(most: int, parts: list[int]) -> None:
    together = read_ahead_steps(250, 7, most)
    assert [min(together, 250 - begin) for begin in range(0, 250, together)] == parts
