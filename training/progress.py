"""Progress of ``fit`` and of its checkpoints: bars in a terminal, and plain lines in the log of a batch job."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import keras
import numpy as np

from matex_data._types import Array
from matex_data.io.counters import process_profile
from matex_data.words import nbytes_text

LINE_SECONDS = 60.0  # between two lines of an epoch, or of a checkpoint, in a log
LONG_SECONDS = 10.0  # that a checkpoint takes if its end has a line in a log
BAR_SECONDS = 1.0  # that a checkpoint takes before a terminal shows it


class ThroughputBar(keras.callbacks.ProgbarLogger):  # type: ignore[misc]  # Keras has no types
    """Keras's progress bar with the samples per second of all ranks, and the time that rank 0 waits for data.

    With ``verbose="auto"`` and an output that is no terminal, such as the log of a batch job, it is a line at the end
    of each epoch, and one a minute before that.

    Parameters
    ----------
    samples_seen : function that returns the samples of all ranks since training began.
    """

    async_safe = True

    def __init__(self, samples_seen: Callable[[], int]) -> None:
        super().__init__()
        self._samples_seen = samples_seen
        self._first = 0
        self._start = self._paused = self._waited = self._waiting_fraction = self._printed = 0.0

    def set_params(self, params: dict[str, Any]) -> None:
        """Choose between a bar and lines."""
        lines = params["verbose"] == "auto" and not _shows_bars()
        super().set_params({**params, "verbose": 2} if lines else params)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start the clock."""
        super().on_epoch_begin(epoch, logs)
        self._first, self._start, self._paused = self._samples_seen(), time.monotonic(), 0.0
        self._printed = self._start
        self._waited = process_profile().waiting

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Update the bar, or print a line."""
        super().on_train_batch_end(batch, logs)
        now = time.monotonic()
        if self.verbose == 2 and now - self._printed >= LINE_SECONDS:
            self._printed = now
            print(self._line(batch + 1, now - self._start), flush=True)

    def on_test_begin(self, logs: Any = None) -> None:
        """Stop the clock during validation."""
        super().on_test_begin(logs)
        self._paused = self._paused or time.monotonic()

    def _speed(self) -> dict[str, Any]:
        """Return the logs of this epoch so far, without validation: samples per second, and percent of time waiting."""
        now = self._paused or time.monotonic()
        seconds = max(now - self._start, 1e-9)
        if not self._paused:
            self._waiting_fraction = (process_profile().waiting - self._waited) / seconds
        rate = (self._samples_seen() - self._first) / seconds
        return {"samples/s": np.round(rate), "waiting for data %": np.round(100 * self._waiting_fraction)}

    def _update_progbar(self, batch: int, logs: Any = None) -> None:
        super()._update_progbar(batch, {**(logs or {}), **self._speed()} if self.verbose else logs)

    def _finalize_progbar(self, logs: Any) -> None:
        super()._finalize_progbar({**(logs or {}), **self._speed()})

    def _line(self, steps: int, seconds: float) -> str:
        """Return a line about an epoch of which so many steps have been done in so many seconds."""
        values = ", ".join(f"{name}: {value:,.0f}" for name, value in self._speed().items())
        if not self.target:
            return f"step {steps}, {values}"
        return f"step {steps}/{self.target}, {values}, {seconds / steps * (self.target - steps):,.0f} s left"


class CheckpointProgress:
    """Context manager: progress of a checkpoint that is written or read, if that takes long.

    A terminal shows a line that is overwritten, a log has one a minute and one at the end.

    Parameters
    ----------
    action : what is done, such as "writing".
    total : bytes of the file; None: unknown.
    verbose : as of ``fit``; 0 shows nothing, and 2 prints lines in a terminal, too.
    """

    def __init__(self, action: str, path: Path, total: int | None = None, verbose: str | int = "auto") -> None:
        self._title, self._total, self._verbose = f"{action} {path.name}", total, verbose
        self._in_place = verbose != 2 and sys.stdout.isatty()
        self._done = 0
        self._bar = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Start the clock."""
        self._start = self._shown = time.monotonic()
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Remove the line from a terminal, or print the last one."""
        self._bar.close()
        seconds = time.monotonic() - self._start
        if self._verbose and not self._in_place and seconds >= LONG_SECONDS and error is None:
            print(f"{self._title}: {nbytes_text(self._done)} in {seconds:,.0f} s", flush=True)

    def add(self, nbytes: int) -> None:
        """Count bytes that are done."""
        self._done += nbytes
        now = time.monotonic()
        if not self._verbose or now - self._shown < (BAR_SECONDS if self._in_place else LINE_SECONDS):
            return
        if self._in_place:
            self._shown = float("inf")
            self._show_bar()
        else:
            self._shown = now
            total = "" if self._total is None else f" of {nbytes_text(self._total)}"
            print(f"{self._title}: {nbytes_text(self._done)}{total}, {now - self._start:,.0f} s", flush=True)

    def counted(self, arrays: Iterable[tuple[str, Array]]) -> Iterator[tuple[str, Array]]:
        """Yield named arrays, and count each once the next one is asked for."""
        for name, array in arrays:
            yield name, array
            self.add(array.nbytes)

    def _show_bar(self) -> None:
        from rich.console import Console

        from matex_data.progress import shown

        sys.stdout.write("\r")  # Keras's bar, which it draws again
        self._bar.enter_context(shown(Console(file=sys.stdout), self._title, lambda: self._done, self._total))


def _shows_bars() -> bool:
    """Return whether the output is a terminal or a notebook, which overwrite a bar."""
    return sys.stdout.isatty() or "ipykernel" in sys.modules
