"""The hook into Keras: the outermost ``apply`` of an optimizer averages the gradients first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from matex_data.mpi.library import MPI
from matex_data.pipeline import data_parallel
from matex_data.training.comm.channel import open_channel
from matex_data.training.reduction.buckets import BUCKET_BYTES
from matex_data.training.reduction.ops import Reducer, Strategy
from matex_data.training.reduction.tape import average_untagged
from matex_data.training.sharding.batch_weights import batch_weights, patch_iteration

_averaged: ContextVar[bool] = ContextVar("averaged", default=False)
_step: ContextVar[tuple[Any] | None] = ContextVar("step", default=None)


def distribute(
    optimizer: Any,
    comm: MPI.Intracomm | None = None,
    *,
    strategy: Strategy = "chained",
    bucket_bytes: int = BUCKET_BYTES,
    dense_share: float | None = None,
) -> Any:
    """The same optimizer, which from now on averages the gradients over all ranks. *Collective*.

    The average comes before everything else that the optimizer does: the finite check of loss scaling,
    clipping, accumulation, moving averages. Class, configuration and saved file stay what they are.

    Parameters
    ----------
    optimizer : a Keras optimizer. Of one that wraps another (``LossScaleOptimizer``), give the outer one.
    strategy : how the average is embedded in the graph: "chained", "funneled" or "concurrent".
    bucket_bytes : gradients are packed together up to so many bytes.
    dense_share : sparse gradients keep all slices of all ranks, which is what one process would see;
        those with at least this share of the rows of their variable are summed row by row instead.
    """
    data_parallel.enable()
    patch_iteration()
    attach_reducer(optimizer, Reducer(open_channel(comm), strategy, bucket_bytes, dense_share))
    return optimizer


def attach_reducer(optimizer: Any, reducer: Reducer) -> None:
    """Have an optimizer average the gradients that it is given. *Collective* from then on."""
    detach_reducer(optimizer)
    detach_reducer(getattr(optimizer, "inner_optimizer", None))  # else a rank whose check fails would not take part
    object.__setattr__(optimizer, "apply", _Averaging(optimizer.apply, reducer))


def detach_reducer(optimizer: Any) -> None:
    """Undo ``distribute``."""
    if is_distributed(optimizer):
        object.__delattr__(optimizer, "apply")


def is_distributed(optimizer: Any) -> bool:
    """Whether the optimizer averages over ranks."""
    return isinstance(getattr(optimizer, "__dict__", {}).get("apply"), _Averaging)


@contextlib.contextmanager
def training_step(weight: Any = None) -> Iterator[None]:
    """Within this context, a training step, gradients of this rank count with ``weight``; None: as all others.

    The weights of all ranks sum to one.
    """
    token = _step.set((weight,))
    try:
        yield
    finally:
        _step.reset(token)


def in_training_step() -> bool:
    """Whether this is a training step of a shared model."""
    return _step.get() is not None


def batch_weight(size: int) -> Any:
    """The weight of this rank's part of the global batch: a number, or a scalar tensor."""
    found = _step.get()
    return 1 / size if found is None or found[0] is None else found[0]


@contextlib.contextmanager
def averaged_gradients() -> Iterator[None]:
    """Within this context gradients have been averaged: optimizers that others wrap do not do it again."""
    token = _averaged.set(True)
    try:
        yield
    finally:
        _averaged.reset(token)


def gradients_averaged() -> bool:
    """Whether gradients have been averaged by an outer optimizer."""
    return _averaged.get()


class _Averaging:
    """An optimizer's ``apply`` with the average before it."""

    def __init__(self, apply: Callable[..., Any], reducer: Reducer) -> None:
        self._apply = apply
        self._reducer = reducer

    def __call__(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        if gradients_averaged():
            return self._apply(grads, trainable_variables)
        with averaged_gradients():
            return self._apply(average_untagged(list(grads), self._average), trainable_variables)

    def _average(self, gradients: list[Any]) -> list[Any]:
        channel = self._reducer.channel
        weight = (
            batch_weight(channel.size) if in_training_step() else batch_weights(channel.communicator).next_step_weight()
        )
        return self._reducer(gradients, weight)
