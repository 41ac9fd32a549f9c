"""Predict steps of ranks that have no row of a batch."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from matex_data.training.exact.rows import batch_size
from matex_data.training.exact.step import with_stand_in


class StandInPredictStep:
    """Replacement of ``model.predict_step`` that predicts a stand-in row where a batch has none, and drops the result.

    On batches without rows some layers fail: a convolution that TensorFlow fuses with its activation returns the shape
    of its input. With XLA they work, and stand-ins do not.

    Attributes
    ----------
    wrapped : the model's own step.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.wrapped = model.predict_step

    def __call__(self, data: Any) -> Any:
        """Return the outputs for a batch, of no rows if it has none."""
        count = batch_size(data)
        if count is None or self._model.jit_compile:
            return self.wrapped(data)
        outputs = self.wrapped(tf.nest.map_structure(lambda leaf: with_stand_in(leaf, count), data))
        end = tf.where(count > 0, tf.constant(tf.int64.max, tf.int64), 0)
        return keras.tree.map_structure(lambda output: _rows_before(end, output), outputs)


def predict_stand_ins(model: Any) -> None:
    """Replace the predict step of a model, unless that is done."""
    if not isinstance(vars(model).get("predict_step"), StandInPredictStep):
        object.__setattr__(model, "predict_step", StandInPredictStep(model))
        object.__setattr__(model, "predict_function", None)


def _rows_before(end: Any, output: Any) -> Any:
    with_rows = isinstance(output, tf.Tensor | tf.RaggedTensor) and output.shape.rank != 0
    return output[:end] if with_rows else output
