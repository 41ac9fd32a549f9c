"""One training step on this rank's part of a global batch, which may be smaller than the others', or empty."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from matex_data.training.comm.channel import Channel
from matex_data.training.optimizer import averaged_gradients, batch_weight, training_step
from matex_data.training.reduction.ops import Reducer
from matex_data.training.sharding.rows import batch_size, rank_rows
from matex_data.training.steps.batch_norm import global_moment_variables
from matex_data.training.steps.metrics import gathered_variables, record_rows, weighted_means


class DistributedStep:
    """A model's ``train_step`` that counts samples, over all ranks.

    Parameters
    ----------
    patches : context in which the model's own step runs.

    Attributes
    ----------
    reducer : None while all ranks have batches of the same size, so that gradients weigh the same.
    cut : which leaves of a batch have one row a sample, of batches of which each rank takes its rows; None: batches
        are a rank's part already.
    whole : every rank trains on the whole batch, and nothing is averaged.
    seen : variable that counts the samples of this rank.
    """

    def __init__(self, model: Any, patches: AbstractContextManager[Any], channel: Channel) -> None:
        self._model = model
        self._patches = patches
        self._channel = channel
        self._train_step: Callable[[Any], Any] = model.train_step
        self.reducer: Reducer | None = None
        self.per_sample: list[bool | None] | None = None
        self.whole = False
        self.samples_seen = tf.Variable(0, trainable=False, dtype=tf.int64, name="matex_samples")

    def __call__(self, data: Any) -> Any:
        """Train on this rank's rows. *Collective*."""
        if self.whole:
            return self.train_on_whole_batch(data)
        total = None if self.per_sample is None else batch_size(data)
        if self.per_sample is not None:
            data = rank_rows(data, self._channel.rank, self._channel.size, self.per_sample)
        count = batch_size(data)
        if count is not None:
            self.samples_seen.assign_add(count)
        if count is None or self.reducer is None:
            with training_step(), self._patches:
                return self._train_step(data)
        if total is None:
            (total,) = self.reducer([tf.cast(count, tf.float64)])
        weight = tf.math.divide_no_nan(tf.cast(count, tf.float64), tf.cast(total, tf.float64))
        with training_step(weight), self._patches:
            return self._guarded(data, count)

    def train_on_whole_batch(self, data: Any) -> Any:
        """Train on the whole batch, as one process does."""
        count = batch_size(data)
        if count is not None:  # the progress bar counts the samples of all ranks
            self.samples_seen.assign_add(count // self._channel.size)
        with averaged_gradients():  # all ranks have the same gradients
            return self._train_step(data)

    def _guarded(self, data: Any, count: Any) -> Any:
        return run_guarded(self._model, self._train_step, data, count)


def run_guarded(model: Any, run: Callable[[Any], Any], data: Any, count: Any) -> Any:
    """Run a step within ``optimizer.step``; where this rank has no sample, on a stand-in that leaves nothing behind.

    Parameters
    ----------
    run : the model's own step.
    count : samples in ``data``, a scalar int64 tensor.
    """
    record_rows(model, count)
    metrics = [v for v in model.metrics_variables if v.dtype != "string"]
    global_ids = {id(v) for v in (*model.metrics_variables, *global_moment_variables(model))}
    state = metrics + [v for v in model.non_trainable_variables if id(v) not in global_ids and _is_state(v)]
    before = [tf.identity(v.value) for v in state]
    with weighted_means(model, batch_weight(1)):
        logs = run(tf.nest.map_structure(lambda leaf: _never_empty(leaf, count), data))
    whole = {id(v) for v in gathered_variables(model)}
    for variable, value in zip(state, before, strict=True):
        if id(variable) not in whole:
            variable.assign(tf.cond(count > 0, lambda v=variable: tf.identity(v.value), lambda x=value: x))
    return logs


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
