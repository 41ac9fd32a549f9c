"""Sums of gradients over micro-batches, and the update of the weights of a stage by them.

What an optimizer decides by all gradients, the stages decide as one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import tensorflow as tf

from matex_data.locks import setting
from matex_data.training.comm.channel import Channel
from matex_data.training.exact.state import StepState
from matex_data.training.reduction.graphs import eager_variable
from matex_data.training.reduction.ops import Reducer


class GradientSums:
    """Sum of the gradients of each variable, dense, in its dtype.

    Memory is taken when the first gradient of a variable comes; variables that no gradient reaches have none.

    Attributes
    ----------
    of_slices : some gradients were sparse, as those of an embedding.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self.variables = list(variables)
        self._sums: list[Any] = [None] * len(self.variables)
        self.of_slices = False

    def add(self, gradients: Sequence[Any]) -> None:
        """Add the gradients of all variables, in graphs and in eager code; None adds nothing."""
        for i, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices):
                self.of_slices = True
                self.total(i).scatter_add(gradient)
            elif gradient is not None:
                self.total(i).assign_add(gradient, read_value=False)

    def total(self, position: int) -> Any:
        """Return the variable of TensorFlow that has the sum for the variable at a position."""
        if self._sums[position] is None:
            variable = self.variables[position].value
            self._sums[position] = eager_variable(
                np.zeros(variable.shape, variable.dtype.as_numpy_dtype), variable.dtype
            )
        return self._sums[position]

    def reached(self) -> list[tuple[Any, Any]]:
        """Return the variables that gradients have reached, each with the variable of its sum."""
        return [(v, total) for v, total in zip(self.variables, self._sums, strict=True) if total is not None]

    def clear(self) -> None:
        """Set all sums to zero."""
        for _, total in self.reached():
            total.assign(tf.zeros(total.shape, total.dtype), read_value=False)


updating: ContextVar[bool] = ContextVar("updating", default=False)
"""Whether a stage applies gradients, or traces how."""


class StageUpdate:
    """Update of the weights of this stage by the sums of their gradients. *Collective* among all ranks.

    Gradients are summed over the replicas, and those of a layer that stages share over these stages. The norm of all
    gradients, for ``global_clipnorm``, and whether all are finite, for loss scaling, are agreed on by the stages.

    Parameters
    ----------
    optimizer : Keras optimizer, built for the weights of this stage, or for what this rank updates of them.
    sums : sums of the gradients of these weights over the micro-batches of a step.
    reducer : sums over the replicas of this stage; None: the optimizer sums them itself.
    holders : stages that hold a variable, by id, for those that stages share.
    trained : stages that have weights to train; the others take no part in what these agree on.
    """

    def __init__(
        self,
        optimizer: Any,
        sums: GradientSums,
        reducer: Reducer | None,
        state: StepState,
        stages: Channel,
        holders: Mapping[int, Sequence[int]],
        trained: Sequence[int],
    ) -> None:
        self._stages = stages
        is_among = stages.rank in trained and 1 < len(trained) < stages.size
        self._trained = stages.subset(trained) if is_among else None
        self._optimizer, self._sums, self._reducer, self._state = optimizer, sums, reducer, state
        self._shared = _shared_groups(stages, sums, holders)
        self._apply = tf.function(self._apply_sums, autograph=False)

    def __call__(self) -> None:
        """Update the weights, and set the sums to zero. *Collective*."""
        for subset, totals in self._shared:
            for total in totals:
                value = np.array(total.numpy())
                subset.host.reduce(value.reshape(-1))
                total.assign(value, read_value=False)
        if self._sums.reached():
            self._apply()
            self._sums.clear()  # here one after the other: the function would hold all zeros beside the gradients
        else:  # nothing is trained here; the learning rate follows the steps all the same
            self._optimizer.iterations.assign_add(1)

    def _apply_sums(self) -> None:
        variables, totals = zip(*self._sums.reached(), strict=True)
        gradients = [total.read_value() for total in totals]
        if self._reducer is not None:
            gradients = self._reducer.average(gradients, 1.0)
        among = self._stages.among(self._trained) if self._trained else contextlib.nullcontext()
        with among, setting(updating, True), self._state.step(1.0):  # the sums are weighted by rows already
            self._optimizer.apply(gradients, list(variables))


def _shared_groups(stages: Channel, sums: GradientSums, holders: Mapping[int, Sequence[int]]) -> list[Any]:
    """Return the stages that share variables of this one, and the sums of their gradients. *Collective*."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, variable in enumerate(sums.variables):
        if len(holders.get(id(variable), ())) > 1:
            groups.setdefault(tuple(holders[id(variable)]), []).append(i)
    # In one order on all stages, so that none waits for another group.
    return [(stages.subset(ranks), [sums.total(i) for i in groups[ranks]]) for ranks in sorted(groups)]
