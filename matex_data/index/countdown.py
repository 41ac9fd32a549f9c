"""What is to be done when all of some requests are finished, in whatever order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

from matex_data.index.model import ReadRequest


def after_last(requests: Sequence[ReadRequest], action: Callable[[], None]) -> list[ReadRequest]:
    """The same requests; the one that is finished last calls ``action``."""
    last = _Last(len(requests), action)
    return [replace(request, on_complete=partial(last.finish, request.on_complete)) for request in requests]


class _Last:
    """Counts what has been finished, on whatever threads that is."""

    def __init__(self, count: int, action: Callable[[], None]) -> None:
        self._left = count
        self._action = action
        self._lock = Lock()

    def finish(self, finish: Callable[[Any], None] | None, data: Any) -> None:
        if finish is not None:
            finish(data)
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._action()
