"""``distribute``: an optimizer that averages gradients over the ranks before its own ``apply``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from matex_data.mpi.library import MPI
from matex_data.pipeline import data_parallel
from matex_data.training.comm.channel import Channel, open_channel
from matex_data.training.comm.devices import warn_of_shared_gpu
from matex_data.training.reduction.buckets import BUCKET_BYTES
from matex_data.training.reduction.ops import Reducer, Strategy
from matex_data.training.reduction.rounding import WireDtype
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
    wire_dtype: WireDtype | None = None,
) -> Any:
    """Make an optimizer average gradients over all ranks, and return it. *Collective*.

    The average precedes everything else that the optimizer does: the finite check of loss scaling, clipping,
    accumulation and moving averages. The class, the configuration and the saved state of the optimizer do not change.
    ``fit`` and ``matex run`` do not need this function, and have options of their own; training loops without the
    launcher do.

    Parameters
    ----------
    optimizer : Keras optimizer; of nested optimizers (``LossScaleOptimizer``), the outer one.
    comm : communicator; None: all ranks of the job.
    strategy : how the graph communicates. "chained": its own threads, one bucket after the other. "funneled": one
        communication thread. "concurrent": four of them, each with a communicator of its own.
    bucket_bytes : gradients are packed into buckets of about this size, in bytes.
    dense_share : fraction of the rows of a variable from which sparse gradients (``tf.IndexedSlices``) are summed row
        by row. None: keep the slices of all ranks, as one process would.
    wire_dtype : dtype in which gradients are sent, for slow networks: "float16" or "bfloat16". Each rank's gradient,
        times its weight, and the average are rounded to it; sums are computed in float32, and are the same on all
        ranks. Gradients in float64 and sparse gradients are sent as they are. None: send all of them as they are.

    Returns
    -------
    optimizer : the same object.

    Raises
    ------
    ValueError : ``strategy`` is none of the three, or ``wire_dtype`` none of the two.

    Examples
    --------
    >>> import keras, matex_data as md
    >>> optimizer = md.training.distribute(keras.optimizers.SGD(0.5))
    >>> weight = keras.Variable(1.0)
    >>> optimizer.apply([keras.ops.array(0.5)], [weight])  # on several ranks: the average of the ranks' gradients
    >>> float(weight.numpy())
    0.75
    """
    data_parallel.enable()
    patch_iteration()
    channel = open_channel(comm)
    warn_of_shared_gpu(channel.rank)
    attach_reducer(optimizer, Reducer(channel, strategy, bucket_bytes, dense_share, wire_dtype))
    return optimizer


def attach_reducer(optimizer: Any, reducer: Reducer) -> None:
    """Make ``optimizer.apply`` average its gradients first; ``apply`` is *collective* from then on."""
    detach_reducer(optimizer)
    # An inner optimizer applies nothing on a rank whose gradients overflow, and would leave the others waiting.
    detach_reducer(getattr(optimizer, "inner_optimizer", None))
    object.__setattr__(optimizer, "apply", _AveragingApply(optimizer.apply, reducer))


def detach_reducer(optimizer: Any) -> None:
    """Undo ``attach_reducer``."""
    if is_distributed(optimizer):
        object.__delattr__(optimizer, "apply")


def is_distributed(optimizer: Any) -> bool:
    """Return whether the optimizer averages gradients over the ranks."""
    return isinstance(getattr(optimizer, "__dict__", {}).get("apply"), _AveragingApply)


@contextlib.contextmanager
def training_step(weight: Any = None) -> Iterator[None]:
    """Context manager: gradients of this rank count with ``weight`` in this block.

    Parameters
    ----------
    weight : number or scalar tensor; the weights of all ranks sum to one. None: one over the number of ranks.
    """
    token = _step.set((weight,))
    try:
        yield
    finally:
        _step.reset(token)


def in_training_step() -> bool:
    """Return whether this code runs inside ``training_step``."""
    return _step.get() is not None


def batch_weight(size: int) -> Any:
    """Return the weight of this rank in the current step: a number, or a scalar tensor.

    Parameters
    ----------
    size : number of ranks; its inverse is the weight if the step sets none.
    """
    step = _step.get()
    return 1 / size if step is None or step[0] is None else step[0]


@contextlib.contextmanager
def averaged_gradients() -> Iterator[None]:
    """Context manager: gradients are averages already, so that inner optimizers do not average them again."""
    token = _averaged.set(True)
    try:
        yield
    finally:
        _averaged.reset(token)


def gradients_averaged() -> bool:
    """Return whether this code runs inside ``averaged_gradients``."""
    return _averaged.get()


class _AveragingApply:
    """``apply`` of an optimizer, preceded by the average over the ranks."""

    def __init__(self, apply: Callable[..., Any], reducer: Reducer) -> None:
        self._apply = apply
        self._reducer = reducer

    def __call__(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        # AutoGraph would take a second to convert this package's code.
        return tf.autograph.experimental.do_not_convert(self._apply_averages)(grads, trainable_variables)

    def _apply_averages(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None) -> Any:
        if gradients_averaged():
            return self._apply(grads, trainable_variables)
        with averaged_gradients():
            return self._apply(average_untagged(list(grads), self._average), trainable_variables)

    def _average(self, gradients: list[Any]) -> list[Any]:
        return self._reducer.average(gradients, gradient_weight(self._reducer.channel))


def gradient_weight(channel: Channel) -> Any:
    """Return the weight of this rank's gradients: of the training step, or of the batch that a loop has taken."""
    if in_training_step():
        return batch_weight(channel.size)
    return batch_weights(channel.communicator).next_step_weight()
