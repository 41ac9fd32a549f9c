"""Epochs of one ``fit`` as passes: the fit runs in a thread of its own, and each pass lets it go on for an epoch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from benchmarks.readers.ceiling import Pass

PATIENCE = 120.0  # seconds that an epoch may take


def passes(fit: Callable[..., Any], samples: int) -> Pass:
    """Return a pass that runs the next epoch.

    Parameters
    ----------
    fit : called with ``epochs`` and ``callbacks``.
    samples : of an epoch, which each pass returns.
    """
    import keras

    begin, end = threading.Semaphore(0), threading.Semaphore(0)

    class Gate(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            begin.acquire()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            end.release()

    threading.Thread(target=fit, kwargs={"epochs": 1 << 30, "callbacks": [Gate()]}, daemon=True).start()

    def run() -> int:
        begin.release()
        if not end.acquire(timeout=PATIENCE):
            raise RuntimeError("an epoch did not end")
        return samples

    return run
