"""Where the time goes, added up by several threads."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from threading import local
from types import SimpleNamespace
from typing import Any

import pytest

from matex_data.io import counters
from matex_data.io.counters import Profile, timed

THREADS, TIMES = 4, 10


class Slow(Profile):
    """Whoever reads the seconds takes a while to write them back."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "planning":
            time.sleep(0.001)
        return value


def test_no_thread_overwrites_what_another_has_added(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(local):
        """A second for each pair of looks at it."""

        def __init__(self) -> None:
            self.seconds = cycle([0.0, 1.0])

    clock, slow = Clock(), Slow()
    monkeypatch.setattr(counters, "time", SimpleNamespace(perf_counter=lambda: next(clock.seconds)))

    def add(_: int) -> None:
        for _ in range(TIMES):
            with timed(slow, "planning"):
                pass

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(add, range(THREADS)))
    assert slow.planning == THREADS * TIMES
