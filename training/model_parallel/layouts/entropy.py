"""Cross entropy of logits that are cut over ranks: no rank has those of the whole vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import keras
import tensorflow as tf

from matex_data.locks import setting
from matex_data.training.exact.listed import own_method
from matex_data.training.model_parallel.layouts.ranks import ModelRanks
from matex_data.training.replacements import Replacements, replaced

cut_logits: ContextVar[bool] = ContextVar("cut_logits", default=False)
"""True in steps whose loss takes cut logits, and which use the output of the model for nothing else."""


def takes_cut_logits(model: Any) -> bool:
    """Return whether the loss of a compiled model can be computed from cut logits, and no metric needs whole ones."""
    loss = model.loss
    kinds = (keras.losses.SparseCategoricalCrossentropy, keras.losses.CategoricalCrossentropy)
    own = any(own_method(model, name) is not None for name in ("compute_loss", "compute_metrics"))
    if type(loss) not in kinds or len(model.metrics) > 1 or own:  # the mean loss is one metric
        return False
    options = loss.get_config()
    plain = not options.get("label_smoothing") and options.get("ignore_class") is None and options.get("axis", -1) == -1
    return bool(options["from_logits"]) and plain


class CutEntropy:
    """Loss of a model whose steps leave its logits cut. *Collective* among the ranks that hold them.

    Parameters
    ----------
    model : compiled Keras model, whose output is that of a layer of which each rank computes its units.
    """

    def __init__(self, model: Any, ranks: ModelRanks) -> None:
        self._model, self._loss, self._ranks = model, model.loss, ranks
        self._whole = self._loss.call

    def installed(self) -> Replacements:
        """Let the steps of the model leave its logits cut, and its loss take them; return how to undo it."""
        replacements = replaced(self._loss, call=self._entropy)
        for name in ("train_step", "test_step"):
            replacements.set(self._model, name, self._leaving_cut(getattr(self._model, name)))
        return replacements

    def _leaving_cut(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def leaving_cut(data: Any) -> Any:
            same = self._model.loss is self._loss and takes_cut_logits(self._model)  # compiled as then
            with setting(cut_logits, same):
                return step(data)

        return leaving_cut

    def _entropy(self, y_true: Any, y_pred: Any) -> Any:
        """Return the loss of each sample, from whole or cut logits."""
        if not cut_logits.get():
            return self._whole(y_true, y_pred)
        return tf.autograph.experimental.do_not_convert(self._of_cut)(y_true, y_pred)

    def _of_cut(self, y_true: Any, y_pred: Any) -> Any:
        highest = self._ranks.total(tf.stop_gradient(tf.reduce_max(y_pred, -1)), "max")
        sums = self._ranks.summed(tf.reduce_sum(tf.exp(y_pred - highest[..., None]), -1))
        logarithm = highest + tf.math.log(sums)  # of the sum of all exponentials
        if isinstance(self._loss, keras.losses.SparseCategoricalCrossentropy):
            return logarithm - self._ranks.summed(self._of_labels(y_true, y_pred))
        own = self._ranks.section(y_true)
        return logarithm * tf.reduce_sum(y_true, -1) - self._ranks.summed(tf.reduce_sum(own * y_pred, -1))

    def _of_labels(self, y_true: Any, y_pred: Any) -> Any:
        """Return the logits of the labels; 0 where another rank has them."""
        labels = tf.cast(y_true, tf.int64)
        if labels.shape.rank == y_pred.shape.rank:
            labels = tf.squeeze(labels, -1)
        position, here = self._ranks.own_positions(labels, y_pred.shape[-1])
        found = tf.gather(y_pred, position, batch_dims=position.shape.rank)
        return tf.where(here, found, tf.zeros_like(found))
