"""A thread that does MPI operations in a fixed order, whatever the order in which they are handed over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from matex_data.training.comm.collectives import Collectives

Operation = Callable[[Collectives], Any]


class CommunicationPool:
    """Several couriers that share the jobs 0, 1, 2, ... among them. Making one is *collective*."""

    def __init__(self, collectives: Collectives, number: int) -> None:
        self._threads = [
            CommunicationThread(Collectives(collectives.comm, collectives.liveness, collectives.oversubscribed))
            for _ in range(number)
        ]
        self._futures: dict[int, Future[Any]] = {}

    def submit(self, number: int, operation: Operation) -> None:
        """Do the job when its turn comes. Never blocks."""
        index, thread = divmod(number, len(self._threads))
        self._futures[number] = self._threads[thread].submit(index, operation)

    def result(self, number: int) -> Any:
        """What the job returned or raised; waits for it."""
        return self._futures.pop(number).result()

    def close(self) -> None:
        """End the threads and free the communicators. *Collective*."""
        for thread in self._threads:
            thread.close()


class CommunicationThread:
    """Does the jobs numbered 0, 1, 2, ... one after the other, on a communicator of its own.

    Job 1 waits for job 0 even if it is handed over first: all ranks do the same order then, and no
    thread of the caller ever blocks before all jobs are handed over.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._pending: dict[int, tuple[Operation, Future[Any]]] = {}
        self._next = 0
        self._open = True
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="matex-courier", daemon=True)
        self._thread.start()

    def submit(self, number: int, operation: Operation) -> Future[Any]:
        """Do the job when its turn comes. Never blocks."""
        future: Future[Any] = Future()
        with self._changed:
            self._pending[number] = (operation, future)
            self._changed.notify()
        return future

    def close(self) -> None:
        """End the thread and free the communicator. *Collective*."""
        with self._changed:
            self._open = False
            self._changed.notify()
        self._thread.join(timeout=10)
        self._collectives.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next in self._pending or not self._open)
                if not self._open:
                    return
                operation, future = self._pending.pop(self._next)
                self._next += 1
            try:
                future.set_result(operation(self._collectives))
            except Exception as error:  # whatever it is, it belongs to the one who waits for the result
                future.set_exception(error)
