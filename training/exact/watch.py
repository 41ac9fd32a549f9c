"""Changes between two steps that may make a model train in another way: of variables it reads alone, of its graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from matex_data._types import Array
from matex_data.training.comm.channel import Channel

SMALL = 64
"""Elements of variables that are compared after every batch, where callbacks may set them; others after an epoch."""
ALWAYS = 4
"""Changes that each count; later ones do if their number is a power of two: some callbacks change a variable always."""


class Watch:
    """Variables that something other than the step may change, such as the weight of a term of the loss.

    Parameters
    ----------
    step : step of the model, which counts in ``traces`` how often TensorFlow has traced it.

    Attributes
    ----------
    due : something changed, on any rank, since the latest check.
    """

    def __init__(self, step: Any) -> None:
        self._step = step
        self._variables: list[Any] = []
        self._values: list[Array] = []
        self._traces = 0
        self._changes = 0
        self.due = False

    def begin(self, variables: Sequence[Any]) -> None:
        """Watch these variables of TensorFlow from their present values on."""
        self._variables = list(variables)
        self._values = [np.array(v.numpy()) for v in variables]
        self._traces = self._step.traces
        self.due = False

    def agree(self, channel: Channel) -> None:
        """Note a change of small variables, or of the graph, on any rank. *Collective*."""
        self.due |= bool(channel.communicator.maximum(self.changed(small=True))[0])

    def changed(self, small: bool = False) -> bool:
        """Return whether a change since the latest call, or ``begin``, calls for a check on this rank.

        Parameters
        ----------
        small : compare small variables alone.
        """
        retraced = self._step.traces > max(self._traces, 1)
        self._traces = max(self._traces, self._step.traces)
        switched, changes = False, 0
        for i, variable in enumerate(self._variables):
            old = self._values[i]
            if small and old.size > SMALL:
                continue
            new = np.array(variable.numpy())
            if not np.array_equal(old, new, equal_nan=old.dtype.kind == "f"):
                changes += 1
                switched |= not np.any(old)
                self._values[i] = new
        self._changes += bool(changes)
        counts = bool(changes) and (self._changes <= ALWAYS or self._changes & (self._changes - 1) == 0)
        return retraced or switched or counts
