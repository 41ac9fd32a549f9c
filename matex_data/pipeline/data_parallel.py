"""Process-wide flag: this program trains data-parallel, on data of which each rank has its own shard.

Until it is set, custom training loops see all data on every rank, and there is nothing to average.
"""

from __future__ import annotations

from collections.abc import Callable

_enabled = False
_callbacks: list[Callable[[], None]] = []


def enabled() -> bool:
    """Return whether this program has made sharded data, or an optimizer that averages over the ranks."""
    return _enabled


def enable() -> None:
    """Set the flag, and run the callbacks of ``on_enable`` the first time."""
    global _enabled
    if not _enabled:
        _enabled = True
        for callback in _callbacks:
            callback()


def on_enable(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the flag is set for the first time."""
    _callbacks.append(callback)
