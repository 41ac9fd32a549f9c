"""Samples chosen by bits, against NumPy's indices of a mask."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from matex_data import index
from matex_data.index.runs import TILE, Chosen, Runs
from matex_data.transforms import select


def _mask(seed: int, samples: int, fraction: float, gap: bool) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    rng = np.random.default_rng(seed)
    mask: np.ndarray[tuple[int], np.dtype[np.bool_]] = rng.random(samples) < fraction
    if gap:
        mask[samples // 4 : 3 * samples // 4] = False
    return mask


@given(
    st.integers(0, 2**32), st.integers(0, 3 * TILE), st.sampled_from([0.0, 0.01, 0.5, 1.0]), st.booleans(), st.data()
)
def test_slices_numbers_and_ranks(seed: int, samples: int, fraction: float, gap: bool, data: st.DataObject) -> None:
    mask = _mask(seed, samples, fraction, gap)
    chosen, numbers = Chosen.of(mask), np.flatnonzero(mask)
    if data.draw(st.booleans()):  # of a subset
        edges = np.sort(np.array(data.draw(st.lists(st.integers(0, len(numbers)), min_size=4, max_size=4))))
        subset = Runs(edges[::2], edges[1::2] - edges[::2])
        chosen = chosen.at(subset)
        numbers = np.concatenate([numbers[edges[0] : edges[1]], numbers[edges[2] : edges[3]]])
    assert chosen.total == len(numbers)
    edges = np.sort(np.array(data.draw(st.lists(st.integers(0, len(numbers)), min_size=6, max_size=6))))
    start, stop = edges[::2], edges[1::2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index.runs, "_STEP", data.draw(st.sampled_from([1, 2, 256])))
        runs = chosen.slice(start, stop - start)
    assert (runs.start[1:] > runs.stop[:-1]).all()  # as few as possible
    found = [n for b, c in zip(runs.start.tolist(), runs.count.tolist(), strict=True) for n in range(b, b + c)]
    assert found == [n for b, e in zip(start, stop, strict=True) for n in numbers[b:e].tolist()]
    at = np.array(data.draw(st.lists(st.integers(0, max(0, len(numbers) - 1)), max_size=5)), np.int64)[: len(numbers)]
    assert chosen.numbers(at).tolist() == numbers[at].tolist()
    queries = np.array(data.draw(st.lists(st.integers(0, samples), max_size=9)), np.int64)
    assert chosen.rank(queries).tolist() == np.searchsorted(numbers, queries).tolist()
    tiles = list(chosen.tiles())
    assert [
        n for r in tiles for b, c in zip(r.start, r.count, strict=True) for n in range(b, b + c)
    ] == numbers.tolist()


@given(st.lists(st.booleans(), max_size=70))
def test_few_runs_are_kept_as_runs(mask: list[bool]) -> None:
    runs = select.as_samples(np.packbits(np.array(mask, bool)))
    assert isinstance(runs, Runs)
    numbers = np.flatnonzero(mask)
    found = [n for b, c in zip(runs.start.tolist(), runs.count.tolist(), strict=True) for n in range(b, b + c)]
    assert found == numbers.tolist()
    assert len(runs.start) == (np.diff(numbers, prepend=-2) > 1).sum()


def test_many_runs_are_kept_as_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "MOST_RUNS", 3)
    assert isinstance(select.as_samples(np.packbits([1, 0, 1, 0, 0, 0, 0, 0, 1])), Runs)
    chosen = select.as_samples(np.packbits([1, 0, 1, 0, 1, 0, 0, 0, 1]))
    assert isinstance(chosen, Chosen) and chosen.total == 4


def test_memory_of_a_slice_of_many_is_that_of_its_runs() -> None:
    chosen = Chosen.of(np.repeat(_mask(0, 4 << 10, 0.9, gap=False), 1 << 10))
    tracemalloc.start()
    try:
        runs = chosen.part(0, chosen.total)
        assert tracemalloc.get_traced_memory()[1] < 10 * chosen.total  # the number of each, and more, would be 25
    finally:
        tracemalloc.stop()
    assert runs.total == chosen.total
