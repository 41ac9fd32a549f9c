"""Ragged samples as lists, compared with arrays for each sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from matex_data.fields import Field
from matex_data.index import ragged
from matex_data.index.ragged import RaggedArray, RaggedOutput, empty_output, scatter_lists

MUONS = Field("Muon_pt", (), np.dtype("f4"), ragged=True)
lists_of_numbers = st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=12)


def _samples(array: Any) -> list[list[float]]:
    return [sample.tolist() for sample in (array.samples() if isinstance(array, RaggedArray) else array)]


@given(lists_of_numbers, st.randoms(use_true_random=False), st.integers(0, 12), st.booleans(), st.integers(0, 12))
def test_lists_and_samples_in_any_order(
    numbers: list[list[int]], random: Any, cut: int, long: bool, inner_bytes: int
) -> None:
    """Some samples are scattered as lists in two calls, in any order, and the others are assigned as arrays.

    The memory that is allocated at first is enough for none of the elements, for some, or for all.
    """
    out = empty_output(MUONS, len(numbers), inner_bytes)
    order = list(range(len(numbers)))
    random.shuffle(order)
    cut = min(cut, len(order))
    for rows in (order[: cut // 2], order[cut // 2 : cut]):
        offsets = np.cumsum([0] + [len(numbers[i]) for i in rows])
        scatter_lists(out, np.array(rows, np.int64), offsets, np.array([x for i in rows for x in numbers[i]], "f4"))
    for i in order[cut:]:
        out[i] = np.array(numbers[i], "f4")
        assert out[i].tolist() == numbers[i]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged, "LONG_LIST", 0 if long else 256)
        patch.setattr(ragged, "TILE", 5)
        found = out.joined()
        part = out[len(numbers) // 3 : -1].joined()
    assert _samples(found) == numbers
    assert _samples(part) == numbers[len(numbers) // 3 : -1]


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
    for out in (np.empty(4, object), RaggedOutput.empty(5, np.dtype("f4"))[1:]):
        content = np.array([0, 1, 2, 3], ">f4")
        scatter_lists(out, np.array([2, 1]), np.array([1, 2, 4]), content)
        content[:] = 9
        out[0:4:3] = [np.array([4], "i2"), np.array([], "f4")]
        assert [out[i].tolist() for i in range(4)] == [[4.0], [2.0, 3.0], [1.0], []]
        assert out[1].dtype == np.dtype("f4")
        out[2:][...] = [np.array([5]), np.array([6, 7])]
        assert [out[i].tolist() for i in (2, 3)] == [[5], [6, 7]]


def test_a_sample_that_is_not_written() -> None:
    out = RaggedOutput.empty(3, np.dtype("f4"))
    scatter_lists(out, np.array([2, 0]), np.array([0, 1, 2]), np.array([1, 2], "f4"))
    with pytest.raises(ValueError, match="sample 1 of an output array is not written"):
        out.joined()


def test_strings_and_images_stay_object_arrays() -> None:
    image = Field("image", (), np.dtype("u1"), ragged=True, inner=(None, None))
    text = Field("names", (), np.dtype(object), ragged=True)
    assert not any(isinstance(empty_output(field, 3), RaggedOutput) for field in (image, text))
