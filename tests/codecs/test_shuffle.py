"""The shuffle filter, against a transposition by NumPy."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from matex_data.codecs.pipeline import DEFLATE, FLETCHER32, SHUFFLE, Filter, Pipeline
from matex_data.codecs.shuffle import WIDTHS, unshuffle, unshuffle_rows
from tests.support.launch import ROOT

DTYPES = ["<i2", "<u2", "<f2", "<i4", "<f4", "<i8", "<f8", "<c8", ">f4"]


def planes_of(array: np.ndarray) -> np.ndarray:
    """Apply the shuffle filter."""
    return np.ascontiguousarray(array.reshape(-1).view(np.uint8).reshape(-1, array.itemsize).T).reshape(-1)


@given(st.data())
def test_unshuffle_rows(data: st.DataObject) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=3, max_side=9))
    dtype = data.draw(st.sampled_from(DTYPES))
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    rows = np.frombuffer(data.draw(st.binary(min_size=nbytes, max_size=nbytes)), dtype).reshape(shape)
    destination = np.array(data.draw(st.permutations(range(shape[0] + 3))), np.int64)[
        : data.draw(st.integers(0, shape[0]))
    ]
    found = np.zeros((shape[0] + 3, *shape[1:]), dtype)
    expected = found.copy()
    expected[destination] = rows[: len(destination)]
    unshuffle_rows(planes_of(rows), found, destination)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("width", [*WIDTHS, 3, 12, 16])
@pytest.mark.parametrize("more", [0, 1])
def test_bytes_after_the_last_element_are_copied(width: int, more: int) -> None:
    elements = np.random.default_rng(width).integers(0, 256, (1000, width), np.uint8)
    rest = np.arange(more * (width - 1), dtype=np.uint8)
    found = np.empty(elements.size + rest.size, np.uint8)
    unshuffle(np.concatenate([elements.T.reshape(-1), rest]), width, found)
    assert found.tobytes() == elements.tobytes() + rest.tobytes()


def test_large_rows_of_every_width() -> None:
    """Check rows that are long enough for the vectorized loop."""
    for width in WIDTHS:
        rows = np.random.default_rng(0).integers(0, 1 << 15, (5, 12_347)).astype(f"i{width}")
        destination, found = np.array([6, 0, 3, 1, 5]), np.zeros((7, 12_347), f"i{width}")
        unshuffle_rows(planes_of(rows), found, destination)
        assert np.array_equal(found[destination], rows)
        assert not found[[2, 4]].any()


@pytest.mark.parametrize(
    ("filters", "itemsize", "expected"),
    [
        ([Filter(SHUFFLE, (4,)), Filter(DEFLATE, (1,))], 4, [DEFLATE]),
        ([Filter(SHUFFLE), Filter(DEFLATE, (1,)), Filter(FLETCHER32)], 8, [DEFLATE, FLETCHER32]),
        ([Filter(SHUFFLE, (2,))], 2, []),
        ([Filter(SHUFFLE, (12,)), Filter(DEFLATE, (1,))], 12, None),
        ([Filter(SHUFFLE, (2,)), Filter(DEFLATE, (1,))], 4, None),
        ([Filter(DEFLATE, (1,)), Filter(SHUFFLE, (4,))], 4, None),
        ([], 4, None),
    ],
)
def test_pipelines_without_shuffle(filters: list[Filter], itemsize: int, expected: list[int] | None) -> None:
    before = Pipeline(tuple(filters), itemsize, 96).without_shuffle
    assert (None if before is None else [step.number for step in before.filters]) == expected


def test_no_folder_for_compiled_code() -> None:
    # The nodes of a cluster may have neither a home nor a package folder that is writable.
    script = (
        "import numpy as np\n"
        "from matex_data.codecs.shuffle import unshuffle\n"
        "out = np.empty(8, np.uint8)\n"
        "unshuffle(np.array([1, 2, 3, 4, 5, 6, 7, 8], np.uint8), 2, out)\n"
        "print(out.tolist())\n"
    )
    nowhere = {**os.environ, "NUMBA_CACHE_LOCATOR_CLASSES": "IPythonCacheLocator"}  # finds no cache folder for a module
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=nowhere)
    assert done.stdout.strip() == "[1, 5, 2, 6, 3, 7, 4, 8]", done.stderr
