"""Losses that divide by something else than the number of samples, made exact over all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from keras.src.losses.loss import apply_mask

from matex_data.training.optimizer import batch_weight, in_step
from matex_data.training.reduction import Reducer


class SharedLoss:
    """A loss whose gradients, averaged by samples, give the gradient of the loss of the global batch.

    Most losses are means over samples and need nothing. A sum, and a mean over mask or sample weights,
    are brought to the share that this rank has in the whole.
    """

    def __init__(self, loss: Any, reducer: Reducer) -> None:
        self.loss = loss
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loss, name)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """The loss. *Collective* within a training step, where it depends on a mask or on sample weights."""
        value = self.loss(y_true, y_pred, sample_weight)
        reduction = getattr(self.loss, "reduction", None)
        if not in_step() or reduction in (None, "none"):
            return value
        weight = batch_weight(self._reducer.channel.size)
        if reduction == "sum":
            return tf.math.divide_no_nan(value, tf.cast(weight, value.dtype))
        mine = _divisor(reduction, y_pred, sample_weight)
        if mine is None:
            return value
        (total,) = self._reducer([mine])
        part = tf.math.divide_no_nan(tf.cast(mine, tf.float64), tf.cast(total, tf.float64))
        return value * tf.cast(tf.math.divide_no_nan(part, tf.cast(weight, tf.float64)), value.dtype)


def _divisor(reduction: str, y_pred: Any, sample_weight: Any) -> Any:
    """What the loss divides by; None: the number of its elements, which is as good as that of the samples."""
    mask = getattr(y_pred, "_keras_mask", None)
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        weights = apply_mask(tf.cast(sample_weight, tf.float32), mask, "float32", reduction)
        return tf.reduce_sum(weights)
    return None if mask is None else tf.reduce_sum(tf.cast(mask, tf.float32))
