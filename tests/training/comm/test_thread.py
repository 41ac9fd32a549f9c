"""Communication threads: order of the operations, and futures that end with their thread."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from typing import Any

import pytest

from matex_data.training.comm.channel import CommunicationPool


class _Collectives:
    """Stand-in without MPI, which counts how often its communicators are freed."""

    def __init__(self) -> None:
        self.freed = 0

    def duplicate(self) -> _Collectives:
        return self

    def close(self) -> None:
        self.freed += 1


def test_operations_of_a_thread_run_in_order() -> None:
    done: list[int] = []
    collectives: Any = _Collectives()
    pool = CommunicationPool(collectives, 1)
    for number in range(4):
        pool.submit(number, lambda _, number=number: done.append(number))  # type: ignore[misc]
    for number in (3, 1, 2, 0):
        pool.result(number)
    pool.close()
    assert done == [0, 1, 2, 3] and collectives.freed == 1


def test_closing_ends_what_runs_and_cancels_what_waits() -> None:
    collectives: Any = _Collectives()
    pool = CommunicationPool(collectives, 2)
    begun = threading.Event()
    pool.submit(0, lambda _: (begun.set(), threading.Event().wait(0.05)))
    pool.submit(2, lambda _: None)  # waits for operation 0
    assert begun.wait(10)
    pool.close()
    pool.result(0)
    with pytest.raises(CancelledError):
        pool.result(2)
    assert collectives.freed == 2
