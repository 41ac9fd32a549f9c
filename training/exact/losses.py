"""Losses that are no means over the samples, made exact over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from matex_data.training.comm.channel import Channel
from matex_data.training.exact.state import step_state
from matex_data.training.keras_api import apply_mask, get_keras_mask
from matex_data.training.reduction.ops import Reducer
from matex_data.training.replacements import replaced


class DistributedLoss:
    """Loss whose gradients, averaged by samples, give the gradient of the loss of the global batch.

    Most losses are means over samples and need no change. A sum, and a mean over a mask or over sample weights, are
    rescaled to this rank's fraction of the global divisor.

    Attributes
    ----------
    scalar : the loss is a function that returns one number for a batch, so its divisor is unknown.
    sums : take such a number as a sum over the batch; None: not known, it is taken as a mean.
    given : arguments of the latest eager call, while it is not known whether such a number is a sum.
    """

    def __init__(self, loss: Any, reducer: Reducer) -> None:
        self.loss = loss
        self.scalar = False
        self.sums: bool | None = None
        self.given: tuple[Any, Any] | None = None
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loss, name)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Return the loss. *Collective* in a training step, if it depends on a mask or on sample weights."""
        if self.scalar and self.sums is None and tf.executing_eagerly():
            self.given = y_true, y_pred
        reduction = getattr(self.loss, "reduction", None)
        state = step_state(self._reducer.channel)
        if not state.running or reduction in (None, "none"):  # a plain function, or see ``SummedLoss``
            return self.loss(y_true, y_pred, sample_weight)
        value, mask = self._with_mask(y_true, y_pred, sample_weight)
        weight = state.weight
        if reduction == "sum" or (self.sums and self.scalar):
            return tf.math.divide_no_nan(value, tf.cast(weight, value.dtype))
        divisor = None if self.scalar else _divisor(reduction, mask, sample_weight)  # one number counts by its rows
        if divisor is None:
            return value
        divisor *= tf.cast(weight > 0, divisor.dtype)  # a stand-in row has no elements
        (total,) = self._reducer([divisor])
        fraction = tf.math.divide_no_nan(divisor, total)
        return value * tf.cast(tf.math.divide_no_nan(fraction, tf.cast(weight, tf.float64)), value.dtype)

    def _with_mask(self, y_true: Any, y_pred: Any, sample_weight: Any) -> tuple[Any, Any]:
        """Return the loss and its mask, which combines the mask of the prediction and that of ``ignore_class``."""
        masks = [get_keras_mask(y_pred)]
        call = self.loss.call

        def recording(y_true: Any, y_pred: Any) -> Any:
            losses = call(y_true, y_pred)
            self.scalar = losses.shape.rank == 0
            masks.append(get_keras_mask(losses))
            return losses

        with replaced(self.loss, call=recording):
            value = self.loss(y_true, y_pred, sample_weight)
        known = [tf.cast(mask, tf.bool) for mask in masks if mask is not None]
        return value, (known[0] & known[-1]) if known else None


def distributed_losses(model: Any, reducer: Any) -> list[Any]:
    """Return the losses that a model is compiled with, flat, each a ``DistributedLoss``; none if it has none."""
    entries = getattr(model._compile_loss, "_flat_losses", None) or []
    return [entry._replace(loss=DistributedLoss(entry.loss, reducer)) for entry in entries]


def unknown_losses(model: Any) -> list[DistributedLoss]:
    """Return the losses of a model, as its latest step was traced, of which is not known whether they are sums."""
    entries = getattr(model._compile_loss, "_flat_losses", None) or []
    losses = [entry.loss for entry in entries if isinstance(entry.loss, DistributedLoss)]
    return [loss for loss in losses if loss.scalar and loss.sums is None]


def is_unreduced(loss: Any) -> bool:
    """Return whether a loss returns one value for each row, since it has no reduction."""
    return getattr(loss, "reduction", "sum") in (None, "none")


class SummedLoss:
    """``compute_loss`` of a model whose loss has one value for each row: TensorFlow takes the gradient of their sum.

    Averaged by the rows of the ranks, gradients of sums are divided by these once too often. The values stay.
    """

    def __init__(self, compute_loss: Callable[..., Any], channel: Channel) -> None:
        self.wrapped = compute_loss
        self._state = step_state(channel)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the losses, whose gradients are divided by the weight of this rank."""
        loss = self.wrapped(*args, **kwargs)
        if not self._state.running or loss.shape.rank == 0:
            return loss
        weight = tf.cast(self._state.weight, loss.dtype)

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def summed(values: Any) -> Any:
            return tf.identity(values), lambda gradient: tf.math.divide_no_nan(gradient, weight)

        return summed(loss)


def _divisor(reduction: str, mask: Any, sample_weight: Any) -> Any:
    """Return the divisor of the loss; None if it is the number of elements, which is proportional to the samples."""
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        weights = apply_mask(tf.cast(sample_weight, tf.float64), mask, "float64", reduction)
        return tf.reduce_sum(weights)
    return None if mask is None else tf.reduce_sum(tf.cast(mask, tf.float64))
