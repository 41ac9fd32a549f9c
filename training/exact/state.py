"""State of the step that the ranks of a channel run, and changes between steps that may let it train otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from matex_data._types import Array
from matex_data.training.comm.channel import Channel
from matex_data.training.replacements import Replacements, replaced


class StepState:
    """Weight of this rank in the running step, and what is averaged over the ranks already.

    Attributes
    ----------
    running : a step runs or is traced, whose weight this object has; otherwise the weight is that of the batches that a
        loop has taken.
    averaged : optimizers get averages only: in a step on whole batches, and within another optimizer.
    returned : an average was returned to code of the user, which may compute other gradients from it.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._weight: Any = None
        self._averages: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by id, as long as the tensors live
        self.running = self.averaged = self.returned = False

    def step(self, weight: Any = None) -> Replacements:
        """Return a context manager: gradients and losses of this rank count with ``weight`` in this block.

        Parameters
        ----------
        weight : number or scalar tensor; the weights of all ranks sum to one. None: one over the number of ranks.
        """
        return replaced(self, running=True, _weight=weight, returned=False)

    def only_averages(self) -> Replacements:
        """Return a context manager: gradients that optimizers get in this block are not averaged."""
        return replaced(self, averaged=True)

    @property
    def weight(self) -> Any:
        """Return the weight of this rank in the running step: a number, or a scalar tensor."""
        return 1 / self._size if self._weight is None else self._weight

    def note(self, averages: Iterable[Any]) -> None:
        """Note that these tensors are averages over the ranks."""
        self._averages.update((id(tensor), tensor) for tensor in averages if tensor is not None)

    def is_average(self, tensor: Any) -> bool:
        """Return whether this very tensor was noted as an average."""
        return self._averages.get(id(tensor)) is tensor


_states: WeakKeyDictionary[Channel, StepState] = WeakKeyDictionary()


def step_state(channel: Channel) -> StepState:
    """Return the state of the step that the ranks of a channel run."""
    return _states.setdefault(channel, StepState(channel.size))


def in_step() -> bool:
    """Return whether the ranks of any channel run a step, which averages its gradients itself."""
    return any(state.running for state in _states.values())


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
        """Return whether a change since the latest call, or ``begin``, calls for a check on this rank."""
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
