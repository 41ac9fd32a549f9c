"""Arithmetic of offsets: every reading divides the content as plain Python does, and no two readings are mixed up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from matex_data.readers.hdf5.offsets import KINDS, as_integers, offsets_of, offsets_of_ranges, readings

COUNTS = st.lists(st.integers(0, 5), max_size=12)


def stored(counts: list[int], kind: str) -> np.ndarray:
    """Return what a file holds for samples of these lengths."""
    offsets = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return np.array({"offsets": offsets, "starts": offsets[:-1], "ends": offsets[1:], "counts": counts}[kind], np.int64)


@given(COUNTS, st.sampled_from(list(KINDS)))
def test_each_kind_gives_the_offsets(counts: list[int], kind: str) -> None:
    found = offsets_of(stored(counts, kind), kind, sum(counts))
    assert found is not None and np.diff(found).tolist() == counts


@given(COUNTS, st.sampled_from(["offsets", "ends", "counts"]))
def test_the_kind_is_found_out_or_left_open(counts: list[int], kind: str) -> None:
    """With the number of samples known, the true reading is always among those found; a single one is true."""
    found = readings(stored(counts, kind), sum(counts), len(counts))
    assert any(np.diff(offsets).tolist() == counts for offsets in found.values())


@given(COUNTS, st.sampled_from(["offsets", "counts"]))
def test_offsets_and_counts_are_told_apart(counts: list[int], kind: str) -> None:
    found = readings(stored(counts, kind), sum(counts))
    assert any(np.diff(offsets).tolist() == counts for offsets in found.values())


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(0, 20), st.sampled_from(list(KINDS)))
def test_numbers_that_do_not_fit_are_refused(numbers: list[int], length: int, kind: str) -> None:
    offsets = offsets_of(np.array(numbers, np.int64), kind, length)
    if offsets is not None:
        counts = np.diff(offsets).tolist()
        assert offsets[0] == 0 and sum(counts) == length and min(counts, default=0) >= 0
        assert stored(counts, kind).tolist() == numbers


@given(COUNTS, st.integers(0, 3), st.integers(0, 3), st.data())
def test_ranges(counts: list[int], before: int, behind: int, data: st.DataObject) -> None:
    begin = np.array([before + sum(counts[:i]) for i in range(len(counts))], np.int64)
    for i, count in enumerate(counts):
        if count == 0:
            begin[i] = data.draw(st.integers(0, 50))
    length = before + sum(counts) + behind
    found = offsets_of_ranges(begin, np.array(counts, np.int64), length)
    assert isinstance(found, np.ndarray) and np.diff(found).tolist() == counts
    filled = np.flatnonzero(counts)
    if len(filled) > 1:
        wrong = int(data.draw(st.sampled_from(filled[1:].tolist())))
        begin[wrong] += 1
        assert offsets_of_ranges(begin, np.array(counts, np.int64), length + 1) == wrong
    if len(filled) and behind == 0:
        assert isinstance(offsets_of_ranges(begin, np.array(counts, np.int64), length - 1), int)


def test_hostile_numbers() -> None:
    huge = np.array([2**62 - 1] * 8, np.int64)
    assert all(offsets_of(huge, kind, 100) is None for kind in KINDS)
    assert offsets_of_ranges(huge, huge, 100) == 0
    assert as_integers(np.array([0.0, 4.0])).tolist() == [0, 4]  # type: ignore[union-attr]
    for values in ([0.5], [np.nan], [-1], [np.inf], [2.0**63]):
        assert as_integers(np.array(values)) is None
    assert as_integers(np.array([2**64 - 1], "u8")) is None
    assert as_integers(np.zeros((2, 2), int)) is None


@pytest.mark.parametrize(
    ("numbers", "length", "rows", "kinds"),
    [
        ([0, 3, 7, 10], 10, None, ["offsets"]),
        ([0, 3, 7, 10], 10, 4, ["ends"]),
        ([0, 3, 8], 10, None, []),
        ([3, 7, 10], 10, None, ["ends"]),
        ([3, 4, 3], 10, None, ["counts"]),
        ([0, 1, 2, 3], 6, None, ["counts"]),
        ([0, 0, 5], 5, None, ["offsets", "counts"]),
        ([0, 0, 5], 5, 2, ["offsets"]),
        ([0, 0, 0], 0, 3, ["ends"]),
        ([5], 5, None, ["ends"]),
        ([], 0, None, ["ends"]),
        ([1, 2], 9, None, []),
    ],
)
def test_readings(numbers: list[int], length: int, rows: int | None, kinds: list[str]) -> None:
    assert list(readings(np.array(numbers, np.int64), length, rows)) == kinds
