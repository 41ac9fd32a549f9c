"""One training step on this rank's part of a global batch, which may be smaller than the others', or empty."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from matex_data.training.metrics import note_rows, weighted_scalars, whole_variables
from matex_data.training.normalization import global_statistics
from matex_data.training.optimizer import batch_weight, step
from matex_data.training.reduction import Reducer


class SharedStep:
    """A model's ``train_step`` that counts samples, over all ranks.

    Parameters
    ----------
    patches : context in which the model's own step runs.

    Attributes
    ----------
    reducer : None while all ranks have batches of the same size, so that gradients weigh the same.
    seen : variable that counts the samples of this rank.
    """

    def __init__(self, model: Any, patches: AbstractContextManager[Any]) -> None:
        self._model = model
        self._patches = patches
        self._train_step: Callable[[Any], Any] = model.train_step
        self.reducer: Reducer | None = None
        self.seen = tf.Variable(0, trainable=False, dtype=tf.int64, name="matex_samples")

    def __call__(self, data: Any) -> Any:
        count = batch_size(data)
        if count is not None:
            self.seen.assign_add(count)
        if count is None or self.reducer is None:
            with step(), self._patches:
                return self._train_step(data)
        (total,) = self.reducer([tf.cast(count, tf.float64)])
        with step(tf.math.divide_no_nan(tf.cast(count, tf.float64), total)), self._patches:
            return self._guarded(data, count)

    def _guarded(self, data: Any, count: Any) -> Any:
        return guarded(self._model, self._train_step, data, count)


def guarded(model: Any, run: Callable[[Any], Any], data: Any, count: Any) -> Any:
    """Run a step within ``optimizer.step``; where this rank has no sample, on a stand-in that leaves nothing behind.

    Parameters
    ----------
    run : the model's own step.
    count : samples in ``data``, a scalar int64 tensor.
    """
    note_rows(model, count)
    metrics = [v for v in model.metrics_variables if v.dtype != "string"]
    alike = {id(v) for v in (*model.metrics_variables, *global_statistics(model))}
    state = metrics + [v for v in model.non_trainable_variables if id(v) not in alike and _is_state(v)]
    before = [tf.identity(v.value) for v in state]
    with weighted_scalars(model, batch_weight(1)):
        logs = run(tf.nest.map_structure(lambda leaf: _never_empty(leaf, count), data))
    whole = {id(v) for v in whole_variables(model)}
    for variable, value in zip(state, before, strict=True):
        if id(variable) not in whole:
            variable.assign(tf.cond(count > 0, lambda v=variable: tf.identity(v.value), lambda x=value: x))
    return logs


def batch_size(data: Any) -> Any:
    """Number of samples in a batch, a scalar int64 tensor; None where the data has no sample axis."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    leaves = [leaf for leaf in tf.nest.flatten(x) if leaf is not None]
    if not leaves or leaves[0].shape.rank == 0:
        return None
    first = leaves[0]
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int64)
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    return tf.shape(first, tf.int64)[0]


def _never_empty(leaf: Any, count: Any) -> Any:
    """The tensor, or one row of zeros instead of no row."""
    if not isinstance(leaf, tf.Tensor) or leaf.shape.rank in (None, 0) or leaf.shape[0]:
        return leaf
    one = tf.concat([[1], tf.shape(leaf)[1:]], 0)
    out = tf.cond(count > 0, lambda: leaf, lambda: tf.zeros(one, leaf.dtype))
    out.set_shape([None, *leaf.shape[1:]])
    return out


def _is_state(variable: Any) -> bool:
    """Return whether the samples of a batch change it: seeds and counts of steps change alike on all ranks."""
    return "seed_generator" not in variable.path and keras.backend.is_float_dtype(variable.dtype)
