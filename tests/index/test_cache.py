"""The cache of decoded chunks: who completes a chunk, and what identifies it."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from matex_data.codecs.pipeline import Pipeline
from matex_data.index.cache import Chunk, ChunkCache, GivenUp
from matex_data.index.chunked import Chunked
from matex_data.index.model import RowSelection

ROUNDS, THREADS = 400, 8


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_window_gives_up_the_chunks_that_it_has_reserved_and_no_others() -> None:
    cache = ChunkCache(1)
    mine, other = cache.of_window(), cache.of_window()
    first, second = (mine.reserve(key, 10) for key in ("kept", "newer"))  # the second one evicts the first
    third = other.reserve("of another window", 10)
    mine.give_up()
    for chunk in (first, second):
        with pytest.raises(GivenUp):
            _ = chunk.value
    assert not third.done
    assert mine.get("of another window") is third and other.get("newer") is None


def test_decoders_and_a_failed_read_complete_every_chunk_once(frequent_switches: None) -> None:
    """Windows reserve chunks in a cache of two; threads decode half of them while a failed read fails them all."""

    def decode(chunks: list[tuple[int, Chunk]]) -> None:
        for number, chunk in chunks:
            chunk.complete(number)

    cache, outcomes, calls = ChunkCache(2), list[Chunk](), Counter[int]()
    with ThreadPoolExecutor(THREADS) as pool:
        for first in range(0, ROUNDS * THREADS, THREADS):
            window = cache.of_window()
            chunks = [(number, window.reserve(number, 1)) for number in range(first, first + THREADS)]
            for number, chunk in chunks:
                chunk.when_done(partial(calls.update, [number]))
            tasks = [partial(decode, chunks[half::2]) for half in (0, 0, 1)]
            tasks[1:1] = [window.give_up] * 2
            for future in [pool.submit(task) for task in tasks[:: (-1) ** (first // THREADS)]]:
                future.result(timeout=30)
            outcomes += [chunk for _, chunk in chunks]
    failed = [chunk for chunk in outcomes if chunk.failed]
    assert all(chunk.value == number for number, chunk in enumerate(outcomes) if not chunk.failed)
    assert 0 < len(failed) < len(outcomes), "the two sides never met"
    assert set(calls) == set(range(len(outcomes))) and set(calls.values()) == {1}, "each is continued once"


def test_a_window_that_is_gone_gives_up_its_chunks() -> None:
    cache, continued = ChunkCache(100), threading.Event()
    window = cache.of_window()
    chunk = window.reserve("x", 10)
    chunk.when_done(continued.set)
    del window
    assert continued.wait(10) and chunk.failed and cache.get("x") is None


def test_a_chunk_that_fails_is_not_in_the_cache() -> None:
    cache = ChunkCache(100)
    cache.reserve("x", 10).fail(OSError("gone"))
    assert cache.get("x") is None
    cache.reserve("x", 10).complete("decoded")
    again = cache.get("x")
    assert again is not None and again.value == "decoded"


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
