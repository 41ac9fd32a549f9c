"""A rank's share of the global batches, epoch after epoch, as NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from matex_data.agreement import patience
from matex_data.elements import Elements
from matex_data.errors import PartitionError
from matex_data.partition import Schedule
from matex_data.stream import Loaded, Stream, Supply


class Batches:
    """This rank's share of every global batch. Passing over it once is one epoch; the next pass is the next one.

    The arrays are views of memory that is used again only when no array looks at it any more. Passing over it is
    *Collective*: every rank has to begin, and all take the same number of batches.

    Parameters
    ----------
    supply : what to read with.
    schedule : who gets which sample when.
    elements : what a batch looks like.
    step : global batches to skip, counted from the first of epoch 0.
    """

    def __init__(self, supply: Supply, schedule: Schedule, elements: Elements, step: int = 0) -> None:
        self.supply = supply
        self.schedule = schedule
        self.elements = elements
        self._epoch, self._step = divmod(step, schedule.steps) if schedule.steps else (0, 0)
        self._stream: Stream | None = None

    def __len__(self) -> int:
        """Batches of the coming pass, the same on every rank."""
        return self.schedule.steps - self._step

    @property
    def resumed(self) -> bool:
        """Whether the coming pass begins in mid-epoch."""
        return self._step > 0

    def __iter__(self) -> Iterator[Any]:
        self._end_stream()
        epoch, step = self.schedule.epoch(self._epoch), self._step
        self._epoch, self._step = self._epoch + 1, 0
        first_window, skip = divmod(step, self.schedule.window_steps)
        self._stream = stream = Stream(self.supply, epoch, first_window)
        try:
            for window in stream:
                yield from self._cut(window, skip)
                skip = 0
        finally:
            stream.close()

    def _cut(self, window: Loaded, skip: int) -> Iterator[Any]:
        stops = np.cumsum(window.sizes).tolist()
        weighted = self.schedule.remainder == "pad"
        real = (stops[-1] if stops else 0) - window.padded
        for start, stop in zip([0, *stops[:-1]], stops, strict=True):
            if skip:
                skip -= 1
                continue
            values = {name: array[start:stop] for name, array in window.arrays.items()}
            weight = (np.arange(start, stop) < real).astype(np.float32) if weighted else None
            yield self.elements.assemble(values, weight)

    def _end_stream(self) -> None:
        """An earlier pass that was not finished ends here, on every rank alike."""
        if self._stream is None:
            return
        self._stream.close()
        if not self._stream.join(patience()):
            raise PartitionError(
                f"the pass before did not end within {patience():g} s: another rank is still in it",
                remedy="pass over the data on every rank alike, or set MATEX_TIMEOUT to more seconds",
            )
        self._stream = None
