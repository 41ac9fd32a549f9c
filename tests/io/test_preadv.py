"""Reads of many stretches to many places: against Python's own slices."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from matex_data.io import preadv

FILE = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8)


@pytest.fixture(scope="module")
def descriptor() -> Iterator[int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bytes"
        FILE.tofile(path)
        number = os.open(path, os.O_RDONLY)
        yield number
        os.close(number)


@pytest.fixture(autouse=True, params=[0, preadv.FEW], ids=["all in one call", "few one by one"])
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preadv, "FEW", request.param)


def _read(descriptor: int, runs: list[tuple[int, list[int]]]) -> tuple[int, list[bytes]]:
    """The places of every run (offset, lengths), filled; with a byte between any two that must stay 0."""
    nbytes = np.array([n for _, lengths in runs for n in lengths], np.int64)
    at = np.cumsum(nbytes + 1) - nbytes - 1
    memory = np.zeros(int((nbytes + 1).sum()), np.uint8)
    first = np.cumsum([0, *(len(lengths) for _, lengths in runs)])[:-1]
    offset = np.array([begin for begin, _ in runs], np.int64)
    found = preadv.read(descriptor, offset, first.astype(np.int64), memory.ctypes.data + at, nbytes)
    assert not memory[at + nbytes].any()
    return found, [memory[a : a + n].tobytes() for a, n in zip(at, nbytes, strict=True)]


def _expected(runs: list[tuple[int, list[int]]]) -> tuple[int, list[bytes]]:
    places = []
    for begin, lengths in runs:
        for n in lengths:
            places.append(FILE[begin : begin + n].tobytes())
            begin += n
    return sum(map(len, places)), places


lengths = st.lists(st.integers(0, 300), min_size=1, max_size=5)


@pytest.mark.parametrize("works", [True, False], ids=["io_submit", "preadv alone"])
@given(runs=st.lists(st.tuples(st.integers(0, 90_000), lengths), min_size=1, max_size=150))
def test_every_place_gets_its_bytes(descriptor: int, works: bool, runs: list[tuple[int, list[int]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MATEX_IO_SUBMIT", str(int(works)))
        assert _read(descriptor, runs) == _expected(runs)


def test_more_places_than_one_call_of_the_system_takes(descriptor: int) -> None:
    runs = [(7, [3] * (3 * preadv.MOST_VECTORS + 5)), (50_000, [1])]
    assert _read(descriptor, runs) == _expected(runs)


def test_the_end_of_the_file_ends_the_read(descriptor: int) -> None:
    found, places = _read(descriptor, [(10, [20]), (len(FILE) - 30, [20, 20, 20])])
    assert found == 20 + 30
    assert places[2] == FILE[-10:].tobytes() + bytes(10) and places[3] == bytes(20)


def test_what_cannot_be_read_raises() -> None:
    number = os.open(os.devnull, os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="descriptor"):
            _read(number, [(0, [10])])
    finally:
        os.close(number)
