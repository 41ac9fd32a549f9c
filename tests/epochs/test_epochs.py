"""Number of steps that are read at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from matex_data.epochs.strategies import LEAST_READS, read_ahead_steps


@given(steps=st.integers(0, 10_000), window_steps=st.integers(1, 500), most=st.integers(0, 10_000))
def test_a_read_has_whole_windows_within_the_limit(steps: int, window_steps: int, most: int) -> None:
    read_steps = read_ahead_steps(steps, window_steps, most)
    assert read_steps > 0
    assert read_steps % window_steps == 0
    assert read_steps <= max(most, window_steps)


@given(windows=st.integers(1, 1000), window_steps=st.integers(1, 50), fit=st.integers(1, 100))
def test_there_are_few_reads_but_not_too_few(windows: int, window_steps: int, fit: int) -> None:
    read_steps = read_ahead_steps(windows * window_steps, window_steps, fit * window_steps) // window_steps
    reads = -(-windows // read_steps)
    assert reads >= min(windows, LEAST_READS)
    assert reads == min(-(-windows // n) for n in range(1, min(fit, max(1, windows // LEAST_READS)) + 1))


@pytest.mark.parametrize(
    ("most", "reads"),
    [(42, [42, 42, 42, 42, 42, 40]), (28, [28] * 8 + [26])],
)
def test_reads_are_of_about_equal_length(most: int, reads: list[int]) -> None:
    read_steps = read_ahead_steps(250, 7, most)
    assert [min(read_steps, 250 - begin) for begin in range(0, 250, read_steps)] == reads
