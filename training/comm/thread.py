"""Threads that run numbered MPI operations in the order of their numbers, in whatever order they are submitted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from matex_data.training.comm.collectives import Collectives

Operation = Callable[[Collectives], Any]
CLOSE_SECONDS = 10.0


class CommunicationPool:
    """Communication threads that run the operations 0, 1, 2, ... in round-robin order. *Collective*.

    Parameters
    ----------
    collectives : each thread duplicates its communicator.
    size : number of threads.
    """

    def __init__(self, collectives: Collectives, size: int) -> None:
        self._threads = [CommunicationThread(collectives.duplicate()) for _ in range(size)]
        self._futures: dict[int, Future[Any]] = {}

    def submit(self, number: int, operation: Operation) -> None:
        """Queue an operation for its thread; never block."""
        index, thread = divmod(number, len(self._threads))
        self._futures[number] = self._threads[thread].submit(index, operation)

    def result(self, number: int) -> Any:
        """Wait for an operation; return its result or raise its error."""
        return self._futures.pop(number).result()

    def close(self) -> None:
        """End the threads and free their communicators. *Collective*."""
        for thread in self._threads:
            thread.close()


class CommunicationThread:
    """Thread that runs the operations 0, 1, 2, ... one after the other on its own communicator.

    Operation 1 waits for operation 0, even if it is submitted first. So all ranks run the operations in one order, and
    no thread of the caller blocks before all operations are submitted.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._pending: dict[int, tuple[Operation, Future[Any]]] = {}
        self._next = 0
        self._open = True
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="matex-communication", daemon=True)
        self._thread.start()

    def submit(self, number: int, operation: Operation) -> Future[Any]:
        """Queue an operation; never block. After ``close`` it is cancelled."""
        future: Future[Any] = Future()
        with self._changed:
            if self._open:
                self._pending[number] = (operation, future)
                self._changed.notify()
            else:
                future.cancel()
        return future

    def close(self) -> None:
        """End the thread and free its communicator. *Collective*.

        A communicator whose operation is still under way after ``CLOSE_SECONDS`` is left to the end of the process.
        """
        with self._changed:
            self._open = False
            self._changed.notify()
        self._thread.join(timeout=CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._collectives.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next in self._pending or not self._open)
                if not self._open:
                    for _, left in self._pending.values():  # by an operation before them that was never submitted
                        left.cancel()
                    return
                operation, future = self._pending.pop(self._next)
                self._next += 1
            try:
                future.set_result(operation(self._collectives))
            except Exception as error:  # raised again by ``future.result()``
                future.set_exception(error)
