"""The shuffle filter, against a transposition by NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from matex_data.codecs.pipeline import unshuffle

DTYPES = ["<i2", "<u2", "<f2", "<i4", "<f4", "<i8", "<f8", "<c8", ">f4"]


def planes_of(array: np.ndarray) -> np.ndarray:
    """Apply the shuffle filter."""
    return np.ascontiguousarray(array.reshape(-1).view(np.uint8).reshape(-1, array.itemsize).T).reshape(-1)


@given(st.data())
def test_planes_of_a_few_elements(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    elements = np.frombuffer(data.draw(st.binary(max_size=20 * np.dtype(dtype).itemsize)), np.uint8)
    elements = elements[: len(elements) // np.dtype(dtype).itemsize * np.dtype(dtype).itemsize].view(dtype)
    found = np.empty(elements.nbytes, np.uint8)
    unshuffle(planes_of(elements), elements.itemsize, found)
    assert found.tobytes() == elements.tobytes()


@pytest.mark.parametrize("width", [2, 3, 4, 8, 12, 16])
@pytest.mark.parametrize("more", [0, 1])
def test_bytes_after_the_last_element_are_copied(width: int, more: int) -> None:
    elements = np.random.default_rng(width).integers(0, 256, (1000, width), np.uint8)
    rest = np.arange(more * (width - 1), dtype=np.uint8)
    found = np.empty(elements.size + rest.size, np.uint8)
    unshuffle(np.concatenate([elements.T.reshape(-1), rest]), width, found)
    assert found.tobytes() == elements.tobytes() + rest.tobytes()
