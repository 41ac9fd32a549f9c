"""A rank's share of the global batches, epoch after epoch, as NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Integers
from matex_data.fields import ElementSpec
from matex_data.mpi.communicator import Communicator
from matex_data.pipeline.epochs import Epochs
from matex_data.pipeline.execute import Arrays
from matex_data.pipeline.window import LoadedWindow
from matex_data.sampling.state import Fingerprint


@dataclass(frozen=True)
class Share:
    """A rank's share of some batches that follow one another.

    Parameters
    ----------
    arrays : field name -> samples of all of them.
    sizes : int64[batches], how many samples each has.
    weight : float32, of each sample; None where nothing is padded.
    """

    arrays: Arrays
    sizes: Integers
    weight: NDArray[np.float32] | None


class Batches:
    """This rank's share of every global batch. Passing over it once is one epoch; the next pass is the next one.

    The arrays are views of memory that is used again only when no array looks at it any more. Passing over it is
    *Collective*: every rank has to begin, and all take the same number of batches.

    Parameters
    ----------
    passes : where the samples come from, and in which order.
    elements : what a batch looks like.
    fingerprint : what their order follows from.
    step : global batches to skip, counted from the first of epoch 0.
    """

    def __init__(self, passes: Epochs, elements: ElementSpec, fingerprint: Fingerprint, step: int = 0) -> None:
        self.schedule = passes.schedule
        self.elements = elements
        self.fingerprint = fingerprint
        self.rows = self.schedule.batch_size // passes.size
        self._passes = passes
        self._epoch, self._step = divmod(step, self.schedule.steps) if self.schedule.steps else (0, 0)

    @property
    def comm(self) -> Communicator:
        """The ranks that share these batches."""
        return self._passes.source.comm

    def __len__(self) -> int:
        """Batches of the coming pass, the same on every rank."""
        return self.schedule.steps - self._step

    def state(self, step: int) -> dict[str, Any]:
        """Return where a run stands after ``step`` of these batches, counted from the first of epoch 0."""
        return self.fingerprint.state(step)

    @property
    def epoch(self) -> int:
        """The number of the coming pass, from 0 on."""
        return self._epoch

    def begin_at(self, epoch: int) -> None:
        """Let the coming pass be the one of that number, from its first batch on. The same on every rank."""
        self._epoch, self._step = epoch, 0

    @property
    def resumed(self) -> bool:
        """Whether the coming pass begins in mid-epoch."""
        return self._step > 0

    def __iter__(self) -> Iterator[Any]:
        for window in self.windows():
            stops = np.cumsum(window.sizes).tolist()
            for start, stop in zip([0, *stops[:-1]], stops, strict=True):
                values = {name: array[start:stop] for name, array in window.arrays.items()}
                weight = None if window.weight is None else window.weight[start:stop]
                yield self.elements.assemble(values, weight)

    def windows(self) -> Iterator[Share]:
        """The batches of one pass, several at a time. Counts as a pass."""
        epoch, step = self._epoch, self._step
        self._epoch, self._step = epoch + 1, 0
        skip = step % self._passes.together
        for window in self._passes.windows(epoch, step - skip):
            yield self._without(window, skip)
            skip = 0

    def _without(self, window: LoadedWindow, skip: int) -> Share:
        """The window less its first batches."""
        begin = int(window.sizes[:skip].sum())
        weight = None
        if self.schedule.remainder == "pad":
            real = window.sizes.sum() - window.padded
            weight = (np.arange(begin, window.sizes.sum()) < real).astype(np.float32)
        return Share({name: array[begin:] for name, array in window.arrays.items()}, window.sizes[skip:], weight)
