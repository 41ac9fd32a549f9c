"""Tasks on many files: one after the other, or made ahead by threads where the storage keeps a rank waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import TypeVar

from matex_data.machine import Waiting, reading_threads

A = TypeVar("A")
T = TypeVar("T")

FIRST = 16  # tasks that tell how long the storage keeps a rank waiting
AHEAD = 4  # tasks for each thread: results that wait to be taken are bounded


def made_ahead(task: Callable[[A], T], items: Sequence[A]) -> Generator[Callable[[], T], None, None]:
    """Yield for each item, in order, a function that returns the result of its task or raises its error.

    Threads make the tasks ahead if the first ones have waited for the storage. With files in memory they would take
    twice as long, since each waits for Python's lock after each file.

    Parameters
    ----------
    task : function of an item that several threads may run.
    items : one or more.

    Examples
    --------
    >>> [result() for result in made_ahead(str.upper, ["a", "b"])]
    ['A', 'B']
    """
    waiting = Waiting()
    for item in items[:FIRST]:
        yield partial(waiting.measured, task, item)
    rest = items[FIRST:]
    if not waiting.is_long(FIRST):
        yield from (partial(task, item) for item in rest)
        return
    futures: deque[Future[T]] = deque()
    count = reading_threads()
    with ThreadPoolExecutor(count, thread_name_prefix="matex-index") as pool:
        try:
            for item in rest:
                futures.append(pool.submit(copy_context().run, task, item))  # warns as this thread does
                if len(futures) >= AHEAD * count:
                    yield futures.popleft().result
            while futures:
                yield futures.popleft().result
        finally:
            for future in futures:
                future.cancel()
