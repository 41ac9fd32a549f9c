"""Scatter reads, compared with slices of the content."""

from __future__ import annotations

import os
import tempfile
import tracemalloc
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


def _read(descriptor: int, runs: list[tuple[int, list[int]]]) -> tuple[int, list[bytes]]:
    """Return the number of bytes read, and the content of each destination.

    Runs are offsets and lengths. A byte between neighbouring destinations has to stay 0.
    """
    nbytes = np.array([n for _, lengths in runs for n in lengths], np.int64)
    begin = np.cumsum(nbytes + 1) - nbytes - 1
    memory = np.zeros(int((nbytes + 1).sum()), np.uint8)
    first = np.cumsum([0, *(len(lengths) for _, lengths in runs)])[:-1]
    offset = np.array([start for start, _ in runs], np.int64)
    count = preadv.read(descriptor, offset, first, memory.ctypes.data + begin, nbytes)
    assert not memory[begin + nbytes].any()
    return count, [memory[i : i + n].tobytes() for i, n in zip(begin, nbytes, strict=True)]


def _expected(runs: list[tuple[int, list[int]]]) -> tuple[int, list[bytes]]:
    content = []
    for begin, lengths in runs:
        for n in lengths:
            content.append(FILE[begin : begin + n].tobytes())
            begin += n
    return sum(map(len, content)), content


lengths = st.lists(st.integers(0, 300), min_size=1, max_size=5)


@given(runs=st.lists(st.tuples(st.integers(0, 90_000), lengths), min_size=1, max_size=150))
def test_every_destination_receives_its_bytes(descriptor: int, runs: list[tuple[int, list[int]]]) -> None:
    assert _read(descriptor, runs) == _expected(runs)


@given(
    gaps=st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(0, 5), min_size=1, max_size=3)), min_size=20),
    far=st.sampled_from([0, preadv.GAP_BYTES + 1]),
    begin=st.sampled_from([0, len(FILE) - 200]),
)
def test_short_runs_near_one_another(descriptor: int, gaps: list[tuple[int, list[int]]], far: int, begin: int) -> None:
    runs = []
    for number, (gap, lengths) in enumerate(gaps):
        begin += gap + far * (number == len(gaps) // 2)
        runs.append((begin, lengths))
        begin += sum(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preadv, "SPAN_BYTES", 50)
        found = _read(descriptor, runs)
    count, content = _expected(runs)
    padded = [one + bytes(n - len(one)) for one, n in zip(content, (n for _, of in runs for n in of), strict=True)]
    assert found == (count, padded)


def test_a_run_of_a_byte_is_no_call_and_no_buffer(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda *given: calls.append(given[2]) or original(*given))
    runs, out = np.arange(0, len(FILE), 2), np.zeros(len(FILE) // 2, np.uint8)
    numbers = np.arange(len(runs))
    tracemalloc.start()
    try:
        assert preadv.read(descriptor, runs, numbers, out.ctypes.data + numbers, np.ones_like(runs)) == len(runs)
        assert tracemalloc.get_traced_memory()[1] < 150 * len(runs)  # a ctypes buffer for each would be 300 bytes
    finally:
        tracemalloc.stop()
    assert len(calls) == 1 and out.tobytes() == FILE[::2].tobytes()


def test_more_destinations_than_one_system_call_takes(descriptor: int) -> None:
    runs = [(7, [3] * (3 * preadv.MOST_BUFFERS + 5)), (50_000, [1])]
    assert _read(descriptor, runs) == _expected(runs)


@given(counts=st.lists(st.integers(1, 7), min_size=1))
def test_system_calls_that_read_less_than_requested(descriptor: int, counts: list[int]) -> None:
    runs = [(10, [3, 0, 5, 1, 8]), (40, [9])]
    original, remaining = os.preadv, list(counts)

    def short(descriptor: int, buffers: list[bytearray], offset: int) -> int:
        limit = remaining.pop() if remaining else 1 << 20
        memory = bytearray(min(limit, sum(map(len, buffers))))
        count, begin = original(descriptor, [memory], offset), 0
        for view in (memoryview(buffer).cast("B") for buffer in buffers):
            part = memory[begin : begin + len(view)]
            view[: len(part)] = part
            begin += len(part)
        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", short)
        assert _read(descriptor, runs) == _expected(runs)


def test_the_end_of_the_file_ends_the_read(descriptor: int) -> None:
    count, content = _read(descriptor, [(10, [20]), (len(FILE) - 30, [20, 20, 20])])
    assert count == 20 + 30
    assert content[2] == FILE[-10:].tobytes() + bytes(10) and content[3] == bytes(20)


def test_an_unreadable_file_raises() -> None:
    number = os.open(os.devnull, os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="descriptor"):
            _read(number, [(0, [10])])
    finally:
        os.close(number)


def test_bytes_in_the_page_cache_are_found(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(1 << 20))
    with path.open("rb") as file:
        number = file.fileno()
        os.pread(number, 1 << 20, 0)
        if not preadv.is_cached(number, np.array([0])):
            pytest.skip("this file system does not tell what is in the page cache")
        assert preadv.is_cached(number, np.arange(0, 1 << 20, 1000))
        assert not preadv.is_cached(number, np.array([0, 2 << 20])), "there are no bytes after the end"
        assert not preadv.is_cached(number, np.empty(0, np.int64))


def test_a_byte_that_would_have_to_wait_is_not_cached(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's answer is simulated: advice to drop pages may be ignored, and a fast disk reads them at once."""

    def preadv_of_a_slow_disk(descriptor: int, buffers: list[bytearray], offset: int, flags: int) -> int:
        if offset == 50_000:
            raise BlockingIOError
        return 1

    monkeypatch.setattr(os, "preadv", preadv_of_a_slow_disk)
    assert preadv.is_cached(descriptor, np.array([0, 99_999]))
    assert not preadv.is_cached(descriptor, np.array([0, 50_000, 99_999]))
