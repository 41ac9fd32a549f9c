"""Update of the weights of a stage; what an optimizer decides by all gradients, the stages decide as one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data.training.comm.channel import Channel, Subset
from matex_data.training.reduction.ops import Reducer
from matex_data.training.stages.sums import GradientSums

updating: ContextVar[bool] = ContextVar("updating", default=False)
"""Whether a stage applies gradients, or traces how."""


class StageUpdate:
    """Update of the weights of this stage by the sums of their gradients. *Collective* among all ranks.

    Gradients are summed over the replicas, and those of a layer that stages share over these stages. The norm of all
    gradients, for ``global_clipnorm``, and whether all are finite, for loss scaling, are agreed on by the stages.

    Parameters
    ----------
    optimizer : Keras optimizer, built for the weights of this stage.
    sums : sums of the gradients of these weights over the micro-batches of a step.
    reducer : sums over the replicas of this stage.
    stages : channel of the stages of this replica.
    holders : stages that hold a variable, by id, for those that stages share.
    trained : stages that have weights to train; the others take no part in what these agree on.
    """

    def __init__(
        self,
        optimizer: Any,
        sums: GradientSums,
        reducer: Reducer,
        stages: Channel,
        holders: Mapping[int, Sequence[int]],
        trained: Sequence[int],
    ) -> None:
        self._stages = stages
        self._trained = Subset(stages, trained) if stages.rank in trained and len(trained) < stages.size else None
        self._optimizer, self._sums, self._reducer = optimizer, sums, reducer
        self._over_stages = Reducer(stages)
        self._shared = _shared_groups(stages, sums, holders)
        self._counted = {id(v) for v in sums.variables if holders.get(id(v), (stages.rank,))[0] == stages.rank}
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
        gradients = self._reducer.average([total.read_value() for total in totals], 1.0)
        with self._agreeing(), self._stages.among(self._trained) if self._trained else contextlib.nullcontext():
            self._optimizer.apply(gradients, list(variables))

    @contextlib.contextmanager
    def _agreeing(self) -> Iterator[None]:
        """Context manager: the optimizer, while TensorFlow traces it, decides by the gradients of all stages."""
        inner = getattr(self._optimizer, "inner_optimizer", self._optimizer)
        replaced: list[tuple[Any, str, Callable[..., Any]]] = []
        if self._over_stages.channel.size > 1 and inner.global_clipnorm:
            replaced.append((inner, "_clip_gradients", self._clip))
        if self._over_stages.channel.size > 1 and inner is not self._optimizer:
            replaced.append((self._optimizer, "check_finite", self._check_finite))
        for owner, name, method in replaced:
            object.__setattr__(owner, name, method)
        token = updating.set(True)
        try:
            yield
        finally:
            updating.reset(token)
            for owner, name, _ in replaced:
                object.__delattr__(owner, name)

    def _clip(self, gradients: Sequence[Any]) -> list[Any]:
        """Return gradients clipped by the norm of those of all stages, in Keras's formula. *Collective*."""
        inner = getattr(self._optimizer, "inner_optimizer", self._optimizer)
        pairs = zip(gradients, self._sums.reached(), strict=True)
        squares = [keras.ops.sum(keras.ops.square(g)) for g, (variable, _) in pairs if id(variable) in self._counted]
        own = keras.ops.sum(keras.ops.stack(squares)) if squares else tf.zeros((), gradients[0].dtype)
        norm = keras.ops.sqrt(self._over_stages([own])[0])
        limit = inner.global_clipnorm
        scale = limit * keras.ops.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        return [gradient * scale for gradient in gradients]

    def _check_finite(self, gradients: Sequence[Any]) -> Any:
        """Return whether the gradients of all stages are finite. *Collective*."""
        finite = [keras.ops.all(keras.ops.isfinite(gradient)) for gradient in gradients if gradient is not None]
        own = tf.cast(keras.ops.all(keras.ops.stack(finite)), tf.int32)
        return self._over_stages([own], op="min")[0] > 0


def _shared_groups(stages: Channel, sums: GradientSums, holders: Mapping[int, Sequence[int]]) -> list[Any]:
    """Return the stages that share variables of this one, and the sums of their gradients. *Collective*."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, variable in enumerate(sums.variables):
        if len(holders.get(id(variable), ())) > 1:
            groups.setdefault(tuple(holders[id(variable)]), []).append(i)
    # In one order on all stages, so that none waits for another group.
    return [(Subset(stages, ranks), [sums.total(i) for i in groups[ranks]]) for ranks in sorted(groups)]
