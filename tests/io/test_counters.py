"""Counters of several threads."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from threading import local
from types import SimpleNamespace
from typing import Any

import pytest

from matex_data.io import counters
from matex_data.io.counters import Profile

THREADS, TIMES = 4, 10


class Slow(Profile):
    """Profile with a pause between reading a counter and writing it back."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "planning":
            time.sleep(0.001)
        return value


def test_threads_lose_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(local):
        """Clock that advances by one second between the two calls of each pair."""

        def __init__(self) -> None:
            self.seconds = cycle([0.0, 1.0])

    clock, slow = Clock(), Slow()
    monkeypatch.setattr(counters, "time", SimpleNamespace(perf_counter=lambda: next(clock.seconds)))

    def add(_: int) -> None:
        for _ in range(TIMES):
            with slow.timed("planning"):
                pass

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(add, range(THREADS)))
    assert slow.planning == THREADS * TIMES
