"""State of the step that the ranks of a channel run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

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
        self.running = False
        self.averaged = False
        self.returned = False

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
