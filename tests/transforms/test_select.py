"""Samples that all ranks have selected, each of its own block, as bits that they share."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from matex_data.index.runs import compress
from matex_data.sampling.schedule import rank_range
from matex_data.transforms import select


class Ranks:
    """Ranks in one process, which exchange objects."""

    def __init__(self, size: int) -> None:
        self.size, self._barrier, self._values = size, threading.Barrier(size), [None] * size

    def comm(self, rank: int) -> Any:
        """Return the communicator of a rank."""
        return SimpleNamespace(rank=rank, size=self.size, allgather=lambda value: self._allgather(rank, value))

    def _allgather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found


@given(st.integers(1, 60), st.integers(1, 7), st.integers(0, 2**32 - 1), st.sampled_from([0.02, 0.3, 1.0]))
def test_every_rank_has_the_samples_that_any_has_selected(total: int, size: int, seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    given_samples, selected = rng.random(total) < rng.random(), rng.random(total) < share
    samples, ranks = compress(np.flatnonzero(given_samples)), Ranks(size)
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        source: Any = SimpleNamespace(comm=ranks.comm(rank), index=range(total))
        own = samples.numbers(np.arange(*rank_range(samples.total, rank, size)))
        chosen = select.samples_of_mask(source, samples, selected[own])
        found[rank] = chosen.numbers(np.arange(chosen.total)).tolist()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [np.flatnonzero(given_samples & selected).tolist()] * size
