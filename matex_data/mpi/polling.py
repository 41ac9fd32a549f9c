"""Waits that sleep between looks, so that a waiting thread yields its core."""

from __future__ import annotations

import time
from collections.abc import Callable

SHORTEST_SLEEP, LONGEST_SLEEP = 2e-5, 5e-4
"""Seconds between two looks: at first, and after 0.5 ms; in waits above 0.5 s, a thousandth of the wait so far."""


def poll(happened: Callable[[], bool], seconds: float = float("inf")) -> bool:
    """Return whether ``happened()`` becomes true within a time. Sleep between the calls, longer and longer."""
    begin, sleep = time.monotonic(), SHORTEST_SLEEP
    while not happened():
        waited = time.monotonic() - begin
        if waited >= seconds:
            return False
        time.sleep(sleep)
        sleep = min(2 * sleep, max(LONGEST_SLEEP, waited / 1000))
    return True
