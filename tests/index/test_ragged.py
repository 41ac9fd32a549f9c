"""Ragged samples as lists, compared with arrays for each sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from matex_data.fields import Field
from matex_data.index import ragged
from matex_data.index.ragged import RaggedArray, RaggedOutput, empty_output, joined, scatter_lists
from matex_data.pipeline.pool import run_all

MUONS = Field("Muon_pt", (), np.dtype("f4"), ragged=True)
lists_of_numbers = st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=12)


def _samples(array: Any) -> list[list[float]]:
    return [sample.tolist() for sample in (array.samples() if isinstance(array, RaggedArray) else array)]


@given(lists_of_numbers, st.randoms(use_true_random=False), st.integers(0, 12), st.booleans())
def test_lists_and_samples_in_any_order(numbers: list[list[int]], random: Any, cut: int, long: bool) -> None:
    """Some samples are scattered as lists in two calls, in any order, and the others are assigned as arrays."""
    out = empty_output(MUONS, len(numbers))
    order = list(range(len(numbers)))
    random.shuffle(order)
    cut = min(cut, len(order))
    for rows in (order[: cut // 2], order[cut // 2 : cut]):
        offsets = np.cumsum([0] + [len(numbers[i]) for i in rows])
        scatter_lists(out, np.array(rows, np.int64), offsets, np.array([x for i in rows for x in numbers[i]], "f4"))
    for i in order[cut:]:
        out[i] = np.array(numbers[i], "f4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged, "LONG_LIST", 0 if long else 256)
        found = joined(out)
    assert _samples(found) == numbers
    assert found is joined(out)


@given(lists_of_numbers, st.data())
def test_selections(numbers: list[list[int]], data: st.DataObject) -> None:
    offsets = np.cumsum([0] + [len(sample) for sample in numbers])
    array = RaggedArray(np.array([x for sample in numbers for x in sample], "f4"), offsets)
    begin = data.draw(st.integers(0, len(numbers)))
    end = data.draw(st.integers(begin, len(numbers)))
    assert _samples(array[begin:end]) == numbers[begin:end]
    assert _samples(array[begin:][: end - begin]) == numbers[begin:end]
    rows = data.draw(st.lists(st.integers(0, len(numbers) - 1), max_size=5))
    assert _samples(array[np.array(rows, np.int64)]) == [numbers[i] for i in rows]
    assert array.lengths.tolist() == [len(sample) for sample in numbers]


def test_views_and_plain_arrays_take_samples() -> None:
    for out in (np.empty(4, object), RaggedOutput.empty(4, np.dtype("f4"))[:]):
        scatter_lists(out, np.array([2, 1]), np.array([0, 1, 3]), np.array([1, 2, 3], "f4"))
        assert [out[2].tolist(), out[1].tolist()] == [[1.0], [2.0, 3.0]]
    assert not isinstance(joined(MUONS.empty(3)), RaggedArray)


def test_strings_and_images_stay_object_arrays() -> None:
    image = Field("image", (), np.dtype("u1"), ragged=True, inner=(None, None))
    text = Field("names", (), np.dtype(object), ragged=True)
    assert not any(isinstance(empty_output(field, 3), RaggedOutput) for field in (image, text))


@given(lists_of_numbers, st.integers(0, 3), st.booleans())
def test_branches_of_one_counter_and_another_are_joined_together(
    numbers: list[list[int]], others: int, pieces: bool
) -> None:
    """Two outputs have lists of equal lengths; the third has longer ones. Samples may be assigned as arrays, too."""
    outs = [empty_output(MUONS, len(numbers)) for _ in range(3)]
    expected = [numbers, [[x + 100 for x in sample] for sample in numbers], [[*sample, 7] for sample in numbers]]
    for out, of_out in zip(outs, expected, strict=True):
        last = len(numbers) - min(others, len(numbers))
        for low, high in ((0, last // 2), (last // 2, last)):
            offsets = np.cumsum([0] + [len(sample) for sample in of_out[low:high]])
            content = np.array([x for sample in of_out[low:high] for x in sample], "f4")
            scatter_lists(out, np.arange(low, high), offsets, content)
        for row in range(last, len(numbers)):
            out[row] = np.array(of_out[row], "f4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged, "PIECE", 2 if pieces else 1 << 13)
        ragged.join(outs, run=run_all)
    assert [_samples(joined(out)) for out in outs] == expected
