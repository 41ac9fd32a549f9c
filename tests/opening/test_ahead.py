"""Tasks that wait for the storage are made ahead by threads; others are not, and all keep their order."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import pytest

from matex_data.machine import reading_threads
from matex_data.opening.ahead import AHEAD, FIRST, made_ahead

ITEMS = range(400)


class _Task:
    """Task that waits as a read of a remote storage does, and remembers who ran it."""

    def __init__(self, seconds: float, failing: int | None = None) -> None:
        self._seconds, self._failing = seconds, failing
        self.threads: set[int] = set()
        self.calls = 0

    def __call__(self, item: int) -> int:
        self.threads.add(threading.get_ident())
        self.calls += 1
        if self._seconds:
            time.sleep(self._seconds)
        if item == self._failing:
            raise ValueError(item)
        return 2 * item


def test_waiting_tasks_overlap() -> None:
    task = _Task(0.005)
    results = [result() for result in made_ahead(task, ITEMS)]
    assert results == [2 * item for item in ITEMS]
    assert len(task.threads) > reading_threads() // 2


def test_short_tasks_stay_on_their_thread() -> None:
    task = _Task(0)
    assert [result() for result in made_ahead(task, ITEMS)] == [2 * item for item in ITEMS]
    assert task.threads == {threading.get_ident()}


@pytest.mark.parametrize("failing", [3, 200])
def test_error_is_that_of_its_item(failing: int) -> None:
    task = _Task(0.002, failing)
    done: list[int] = []
    with closing(made_ahead(task, ITEMS)) as results, pytest.raises(ValueError, match=str(failing)):
        for result in results:
            done.append(result())
    assert done == [2 * item for item in range(failing)]
    assert task.calls <= max(FIRST, failing + 1 + AHEAD * reading_threads())  # not those of a million files
