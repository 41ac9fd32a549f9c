"""A thread that does MPI operations in a fixed order, whatever the order in which they are handed over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from matex_data.training.comm.collectives import Collectives

Job = Callable[[Collectives], Any]


class CommunicationThreads:
    """Several couriers that share the jobs 0, 1, 2, ... among them. Making one is *collective*."""

    def __init__(self, line: Collectives, number: int) -> None:
        self._couriers = [
            CommunicationThread(Collectives(line.comm, line.liveness, line.oversubscribed)) for _ in range(number)
        ]
        self._results: dict[int, Future[Any]] = {}

    def hand_over(self, number: int, job: Job) -> None:
        """Do the job when its turn comes. Never blocks."""
        turn, courier = divmod(number, len(self._couriers))
        self._results[number] = self._couriers[courier].hand_over(turn, job)

    def result(self, number: int) -> Any:
        """What the job returned or raised; waits for it."""
        return self._results.pop(number).result()

    def close(self) -> None:
        """End the threads and free the communicators. *Collective*."""
        for courier in self._couriers:
            courier.close()


class CommunicationThread:
    """Does the jobs numbered 0, 1, 2, ... one after the other, on a communicator of its own.

    Job 1 waits for job 0 even if it is handed over first: all ranks do the same order then, and no
    thread of the caller ever blocks before all jobs are handed over.
    """

    def __init__(self, line: Collectives) -> None:
        self._line = line
        self._jobs: dict[int, tuple[Job, Future[Any]]] = {}
        self._next = 0
        self._open = True
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="matex-courier", daemon=True)
        self._thread.start()

    def hand_over(self, number: int, job: Job) -> Future[Any]:
        """Do the job when its turn comes. Never blocks."""
        future: Future[Any] = Future()
        with self._changed:
            self._jobs[number] = (job, future)
            self._changed.notify()
        return future

    def close(self) -> None:
        """End the thread and free the communicator. *Collective*."""
        with self._changed:
            self._open = False
            self._changed.notify()
        self._thread.join(timeout=10)
        self._line.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next in self._jobs or not self._open)
                if not self._open:
                    return
                job, future = self._jobs.pop(self._next)
                self._next += 1
            try:
                future.set_result(job(self._line))
            except Exception as error:  # whatever it is, it belongs to the one who waits for the result
                future.set_exception(error)
