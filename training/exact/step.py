"""Training step on this rank's rows of a global batch; ranks may have unequal numbers of rows, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from matex_data.training.comm.channel import Channel
from matex_data.training.exact.batch_norm import global_moment_variables
from matex_data.training.exact.logs import Reduction, reductions
from matex_data.training.exact.metrics import gathered_variables, record_rows, weighted_means
from matex_data.training.exact.rows import batch_size, leaves_per_sample, rank_rows, static_rows
from matex_data.training.exact.state import step_state
from matex_data.training.reduction.graphs import eager_variable
from matex_data.training.reduction.ops import Reducer, gather_rows

STAND_IN_GUARD = "matex_stand_in_guard"
"""Name of the condition by which a rank without rows puts back what its stand-in row has changed."""


class DistributedStep:
    """Replacement for a model's ``train_step`` that weighs each rank by its samples.

    Parameters
    ----------
    model : compiled Keras model.
    patches : context manager around the model's own step.
    channel : ranks that train the model.

    Attributes
    ----------
    wrapped : the model's own step.
    reducer : sums the sample counts of the ranks; None if all ranks have batches of one size, which then weigh equally.
    per_sample : for whole batches, of which the step selects this rank's rows: the result of ``leaves_per_sample``.
        None: batches are sharded already.
    whole : train on the whole batch on every rank, without averaging.
    samples_seen : variable with the number of samples of all ranks so far; where batches are sharded already, and the
        ranks have equal ones, this rank's times the number of ranks.
    traces : number of times that TensorFlow has traced the step, or that it ran eagerly.
    reductions : how the numbers among the latest logs that are no metrics combine over the ranks, by key.
    possible : for numbers that were checked: how those of shards gave that of their union, in all checks.
    """

    def __init__(self, model: Any, patches: AbstractContextManager[Any], channel: Channel) -> None:
        self._model = model
        self._patches = patches
        self._channel = channel
        self._state = step_state(channel)
        self.wrapped: Callable[[Any], Any] = model.train_step
        self.reducer: Reducer | None = None
        self.per_sample: list[bool | None] | None = None
        self.whole = False
        self.samples_seen = eager_variable(0, tf.int64)
        self.traces = 0
        self.reductions: dict[str, Reduction | None] = {}
        self.possible: dict[str, set[Reduction]] = {}

    def __call__(self, data: Any) -> Any:
        """Train on this rank's rows. *Collective*."""
        self.traces += 1
        if self.whole:
            return self.on_whole_batch(data)
        logs = self.on_rows(data)
        self.reductions = reductions(logs)
        return logs

    def on_rows(self, data: Any) -> Any:
        """Train on this rank's rows. *Collective*."""
        total = None if self.per_sample is None else batch_size(data)
        if self.per_sample is not None:
            data = rank_rows(data, self._channel.rank, self._channel.size, self.per_sample)
        count = batch_size(data)
        if count is None or self.reducer is None:
            if count is not None:
                self.samples_seen.assign_add(count * self._channel.size)
            with self._state.step(), self._patches, weighted_means(self._model, self._state.weight):
                return self.wrapped(data)
        if total is None:
            (total,) = self.reducer([tf.cast(count, tf.float64)])
        self.samples_seen.assign_add(tf.cast(total, tf.int64))
        weight = tf.math.divide_no_nan(tf.cast(count, tf.float64), tf.cast(total, tf.float64))
        with self._state.step(weight), self._patches:
            return run_guarded(self._model, self.wrapped, data, count, weight)

    def on_whole_batch(self, data: Any) -> Any:
        """Train on the whole batch, as one process does. *Collective* if the ranks have their own rows of it."""
        if self.per_sample is None:
            data = whole_batch(self._channel, data)
        count = batch_size(data)
        if count is not None:
            self.samples_seen.assign_add(count)
        with self._state.only_averages():  # the gradients of all ranks are equal
            return self.wrapped(data)


def whole_batch(channel: Channel, data: Any) -> Any:
    """Return the rows of all ranks, in the order of ranks, of a batch of which each rank has its own. *Collective*."""
    flags = leaves_per_sample(data)
    leaves = tf.nest.flatten(data)
    own = [part for leaf, flag in zip(leaves, flags, strict=True) if flag is not False for part in _parts(leaf)]
    parts = iter(gather_rows(channel, own))
    known = None if tf.executing_eagerly() else static_rows(data, flags)
    whole = []
    for leaf, flag in zip(leaves, flags, strict=True):
        whole.append(leaf if flag is False else _joined(leaf, parts))
        if known is not None and flag and isinstance(leaf, tf.Tensor):
            whole[-1].set_shape([known * channel.size, *leaf.shape[1:]])
    return tf.nest.pack_sequence_as(data, whole)


def _parts(leaf: Any) -> list[Any]:
    """Return the tensors whose rows follow one another if those of a leaf do; of None there are none."""
    if leaf is None:
        return []
    if isinstance(leaf, tf.RaggedTensor):
        return [*_parts(leaf.values), leaf.row_lengths()]
    if isinstance(leaf, tf.SparseTensor):
        count = tf.shape(leaf.values, tf.int64)[0]
        return [leaf.indices, leaf.values, tf.stack([leaf.dense_shape[0], count])[None]]
    return [leaf]


def _joined(leaf: Any, parts: Iterator[Any]) -> Any:
    """Return what `_parts` has taken apart, of the rows of all ranks."""
    if leaf is None:
        return None
    if isinstance(leaf, tf.RaggedTensor):
        values = _joined(leaf.values, parts)
        return tf.RaggedTensor.from_row_lengths(values, next(parts), validate=False)
    if isinstance(leaf, tf.SparseTensor):
        indices, values, sizes = next(parts), next(parts), next(parts)
        first = tf.repeat(tf.cumsum(sizes[:, 0], exclusive=True), sizes[:, 1])
        row, others = indices[:, :1] + first[:, None], indices[:, 1:]
        shape = tf.concat([tf.reduce_sum(sizes[:, 0], keepdims=True), leaf.dense_shape[1:]], 0)
        return tf.SparseTensor(tf.concat([row, others], 1), values, shape)
    return next(parts)


def run_guarded(model: Any, run: Callable[[Any], Any], data: Any, count: Any, weight: Any) -> Any:
    """Run a step within ``StepState.step``, on a rank without samples on a stand-in row.

    The stand-in keeps this rank in all collectives of the step; it changes no variable of this rank.

    Parameters
    ----------
    run : the model's own step.
    count : number of samples in ``data``, a scalar int64 tensor.
    weight : of this rank in the step, a scalar tensor.
    """
    record_rows(model, count)
    metrics = [v for v in model.metrics_variables if v.dtype != "string"]
    excluded = {id(v) for v in (*model.metrics_variables, *global_moment_variables(model))}
    state = metrics + [v for v in model.non_trainable_variables if id(v) not in excluded and _depends_on_samples(v)]
    before = [tf.identity(v.value) for v in state]
    with weighted_means(model, weight):
        logs = run(tf.nest.map_structure(lambda leaf: with_stand_in(leaf, count), data))
    whole = {id(v) for v in gathered_variables(model)}
    changed = [(v, value) for v, value in zip(state, before, strict=True) if id(v) not in whole]
    # One for all: each costs ten operations.
    tf.cond(count > 0, lambda: False, lambda: _restore(changed), name=STAND_IN_GUARD)
    return logs


def _restore(variables: Sequence[tuple[Any, Any]]) -> bool:
    for variable, value in variables:
        variable.assign(value)
    return True


def with_stand_in(leaf: Any, count: Any) -> Any:
    """Return the tensor, or one row of zeros if it has no rows."""
    if not isinstance(leaf, tf.Tensor) or leaf.shape.rank in (None, 0) or leaf.shape[0]:
        return leaf
    one = tf.concat([[1], tf.shape(leaf)[1:]], 0)
    out = tf.cond(count > 0, lambda: leaf, lambda: tf.zeros(one, leaf.dtype))
    out.set_shape([None, *leaf.shape[1:]])
    return out


def _depends_on_samples(variable: Any) -> bool:
    """Return whether samples change the variable; seeds and step counters change equally on all ranks."""
    return "seed_generator" not in variable.path and keras.backend.is_float_dtype(variable.dtype)
