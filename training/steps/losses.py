"""Losses that divide by something else than the number of samples, made exact over all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from matex_data.training.keras_api import apply_mask, get_keras_mask
from matex_data.training.optimizer import batch_weight, in_training_step
from matex_data.training.reduction.ops import Reducer


class DistributedLoss:
    """A loss whose gradients, averaged by samples, give the gradient of the loss of the global batch.

    Most losses are means over samples and need nothing. A sum, and a mean over mask or sample weights,
    are brought to the share that this rank has in the whole.

    Attributes
    ----------
    scalar : whether the loss is a function that gives one number for a batch, of which nobody knows how it is made.
    sums : whether such a number is a sum over the batch.
    """

    def __init__(self, loss: Any, reducer: Reducer) -> None:
        self.loss = loss
        self.scalar = self.sums = False
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loss, name)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """The loss. *Collective* within a training step, where it depends on a mask or on sample weights."""
        reduction = getattr(self.loss, "reduction", None)
        if not in_training_step() or reduction in (None, "none"):
            return self.loss(y_true, y_pred, sample_weight)
        value, mask = self._with_mask(y_true, y_pred, sample_weight)
        weight = batch_weight(self._reducer.channel.size)
        if reduction == "sum" or self.sums:
            return tf.math.divide_no_nan(value, tf.cast(weight, value.dtype))
        divisor = _divisor(reduction, mask, sample_weight)
        if divisor is None:
            return value
        (total,) = self._reducer([divisor])
        fraction = tf.math.divide_no_nan(tf.cast(divisor, tf.float64), tf.cast(total, tf.float64))
        return value * tf.cast(tf.math.divide_no_nan(fraction, tf.cast(weight, tf.float64)), value.dtype)

    def _with_mask(self, y_true: Any, y_pred: Any, sample_weight: Any) -> tuple[Any, Any]:
        """The loss, and which of its elements count: by the mask of the prediction, and by ``ignore_class``."""
        masks = [get_keras_mask(y_pred)]
        call = self.loss.call

        def recording(y_true: Any, y_pred: Any) -> Any:
            losses = call(y_true, y_pred)
            self.scalar = losses.shape.rank == 0
            masks.append(get_keras_mask(losses))
            return losses

        own = vars(self.loss).get("call")
        self.loss.call = recording
        try:
            value = self.loss(y_true, y_pred, sample_weight)
        finally:
            del self.loss.call
            if own is not None:
                self.loss.call = own
        known = [tf.cast(mask, tf.bool) for mask in masks if mask is not None]
        return value, (known[0] & known[-1]) if known else None


def _divisor(reduction: str, mask: Any, sample_weight: Any) -> Any:
    """What the loss divides by; None: the number of its elements, which is as good as that of the samples."""
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        weights = apply_mask(tf.cast(sample_weight, tf.float32), mask, "float32", reduction)
        return tf.reduce_sum(weights)
    return None if mask is None else tf.reduce_sum(tf.cast(mask, tf.float32))
