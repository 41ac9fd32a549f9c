"""The cache of decoded chunks: who completes a chunk, and what identifies it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from matex_data.codecs.pipeline import Pipeline
from matex_data.index.cache import ChunkCache
from matex_data.index.chunked import Chunked
from matex_data.index.model import RowSelection

ROUNDS, THREADS = 400, 8


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_window_fails_the_chunks_that_it_has_reserved_and_no_others() -> None:
    cache = ChunkCache(1)
    mine, other = cache.of_window(), cache.of_window()
    first, second = (mine.reserve(key, 10) for key in ("kept", "newer"))  # the second one evicts the first
    third = other.reserve("of another window", 10)
    mine.fail_pending(OSError("gone"))
    for chunk in (first, second):
        with pytest.raises(OSError, match="gone"):
            chunk.result(timeout=1)
    assert not third.done()
    assert mine.get("of another window") is third and other.get("newer") is None


def test_decoders_and_a_failed_read_complete_every_chunk_once(frequent_switches: None) -> None:
    """Windows reserve chunks in a cache of two; threads decode half of them while a failed read fails them all."""

    def decode(chunks: list[tuple[int, object]]) -> None:
        for number, chunk in chunks:
            chunk.set_result(number)  # type: ignore[attr-defined]

    cache, outcomes = ChunkCache(2), []
    with ThreadPoolExecutor(THREADS) as pool:
        for first in range(0, ROUNDS * THREADS, THREADS):
            window = cache.of_window()
            chunks = [(number, window.reserve(number, 1)) for number in range(first, first + THREADS)]
            tasks = [partial(decode, chunks[half::2]) for half in (0, 0, 1)]
            tasks[1:1] = [partial(window.fail_pending, OSError("gone"))] * 2
            for future in [pool.submit(task) for task in tasks[:: (-1) ** (first // THREADS)]]:
                future.result(timeout=30)
            outcomes += [(number, chunk.exception(timeout=0), chunk) for number, chunk in chunks]
    failed = [number for number, error, _ in outcomes if error is not None]
    assert all(chunk.result() == number for number, error, chunk in outcomes if error is None)
    assert 0 < len(failed) < len(outcomes), "the two sides never met"


def _chunked(value: int) -> Chunked:
    numbers = np.arange(1)
    return Chunked(
        shape=(4,),
        chunk_shape=(4,),
        dtype=np.dtype("u1"),
        pipeline=Pipeline((), 1, 4),
        number=numbers,
        offset=numbers,
        nbytes=numbers + 4,
        mask=numbers,
        fill=np.uint8(value),
    )


def test_a_layout_that_is_gone_is_not_taken_for_the_next_one() -> None:
    """Layouts follow one another at the same address in memory."""
    cache, rows = ChunkCache(1 << 20), RowSelection(np.array([1]), np.array([3]), np.arange(2))
    for value in range(20):
        layout, out = _chunked(value), np.zeros(2, np.uint8)
        for request in layout.requests(rows, out, cache):
            stored = np.full(4 if len(request.offset) else 0, value, np.uint8)
            assert request.on_complete is not None
            request.on_complete(stored)
        assert out.tolist() == [value, value]
        del layout, request
