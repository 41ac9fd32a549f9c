"""Whether this program has made data of which each rank has its own part.

Until then training loops of the user's own see all data on every rank, and have nothing to average.
"""

from __future__ import annotations

from collections.abc import Callable

exist = False
listeners: list[Callable[[], None]] = []


def note() -> None:
    """Note that there is such data, and tell the listeners the first time."""
    global exist
    if not exist:
        exist = True
        for listener in listeners:
            listener()
