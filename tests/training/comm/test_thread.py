"""Communication threads: order of the operations, and futures that end with their thread."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from typing import Any

import pytest

from matex_data.training.comm import channel
from matex_data.training.comm.channel import CommunicationPool, CommunicationThread


class _Collectives:
    """Stand-in without MPI, which counts how often its communicators are freed."""

    def __init__(self) -> None:
        self.freed = 0

    def duplicate(self) -> _Collectives:
        return self

    def close(self) -> None:
        self.freed += 1


def test_operations_run_in_the_order_of_their_numbers() -> None:
    done: list[int] = []
    collectives: Any = _Collectives()
    pool = CommunicationPool(collectives, 1)
    for number in (3, 1, 2, 0):
        pool.submit(number, lambda _, number=number: done.append(number))
    for number in range(4):
        pool.result(number)
    pool.close()
    assert done == [0, 1, 2, 3] and collectives.freed == 1


def test_closing_cancels_what_waits_and_what_comes_later() -> None:
    collectives: Any = _Collectives()
    of_pool = CommunicationPool(collectives, 2)
    of_pool.submit(2, lambda _: None)  # waits for operation 0, which nobody submits
    of_pool.close()
    of_pool.submit(0, lambda _: None)
    for number in (2, 0):
        with pytest.raises(CancelledError):
            of_pool.result(number)
    assert collectives.freed == 2


def test_a_communicator_in_use_is_not_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "CLOSE_SECONDS", 0.05)
    collectives: Any = _Collectives()
    begun, end = threading.Event(), threading.Event()

    def wait(_: Any) -> bool:
        begun.set()
        return end.wait(10)

    busy = CommunicationThread(collectives)
    future = busy.submit(0, wait)
    assert begun.wait(10)
    busy.close()
    assert collectives.freed == 0
    end.set()
    assert future.result(10)
