"""Steps on this rank's rows of a global batch; ranks may have unequal numbers of rows, or none."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from matex_data.training.comm.channel import Channel
from matex_data.training.exact.batch_norm import global_moment_variables
from matex_data.training.exact.logs import LogReduction, reductions
from matex_data.training.exact.metrics import counting_once, gathered_variables, record_rows, weighted_means
from matex_data.training.exact.ownership import STAND_IN_GUARD, written_alike
from matex_data.training.exact.rows import (
    batch_count,
    batch_size,
    leaves_per_sample,
    rank_rows,
    static_counts,
    static_rows,
)
from matex_data.training.exact.state import step_state
from matex_data.training.exact.variables import separate_draws
from matex_data.training.keras_api import METRICS_OF_EPOCH, variables_read
from matex_data.training.reduction.graphs import eager_variable
from matex_data.training.reduction.ops import Reducer, gather_rows
from matex_data.training.replacements import replaced

log = logging.getLogger("matex_data.training")


class RankStep(ABC):
    """Replacement for a step of a model that weighs each rank by its samples.

    Attributes
    ----------
    wrapped : the model's own step.
    per_sample : for whole batches, of which the step selects this rank's rows: the result of ``leaves_per_sample``.
        None: batches are sharded already.
    whole : compute the whole batch on every rank.
    reductions : how the numbers among the latest logs that are no metrics combine over the ranks, by key.
    possible : for numbers that were checked: how those of shards gave that of their union, in all checks.
    """

    def __init__(self, model: Any, channel: Channel, name: str) -> None:
        self._model, self._channel, self._state = model, channel, step_state(channel)
        self.wrapped: Callable[[Any], Any] = getattr(model, name)
        self.per_sample: list[bool | None] | None = None
        self.whole = False
        self.reductions: dict[str, LogReduction | None] = {}
        self.possible: dict[str, set[LogReduction]] = {}
        self._counts: set[int] = set()  # of the latest rows

    def __call__(self, data: Any) -> Any:
        """Compute this rank's rows. *Collective*."""
        if self.whole:
            return self.on_whole_batch(data)
        with separate_draws(self._channel.rank):
            logs = self.on_rows(data)
        self.reductions = reductions(logs, self._counts)
        return logs

    @abstractmethod
    def on_rows(self, data: Any) -> Any:
        """Compute this rank's rows. *Collective* like the step."""

    @abstractmethod
    def on_whole_batch(self, data: Any) -> Any:
        """Compute the whole batch, as one process does. *Collective* if the ranks have their own rows of it."""

    def kinds(self) -> dict[str, tuple[LogReduction | None, set[LogReduction] | None]]:
        """Return for each number what its graph tells, and what is possible after checks; None: not checked."""
        keys = {**self.reductions, **self.possible}
        return {key: (self.reductions.get(key), self.possible.get(key)) for key in keys}

    def _own(self, data: Any) -> Any:
        """Return this rank's rows of a batch."""
        if self.per_sample is not None:
            data = rank_rows(data, self._channel.rank, self._channel.size, self.per_sample)
        self._counts = static_counts(data)
        return data

    def _guarded(self, data: Any, count: Any, weight: Any) -> Any:
        """Run the model's own step within ``StepState.step``, on a rank without samples on a stand-in row.

        The stand-in keeps this rank in all collectives of the step; it changes no variable of this rank. What does not
        depend on rows, such as a counter of steps or a moving average of weights, changes as on other ranks.

        Parameters
        ----------
        count : number of samples in ``data``, a scalar int64 tensor.
        weight : of this rank in the step, a scalar tensor.
        """
        model = self._model
        record_rows(model, count)
        metrics = [v for v in model.metrics_variables if v.dtype != "string"]
        excluded = {id(v) for v in (*model.metrics_variables, *global_moment_variables(model))}
        own = [v for v in model.non_trainable_variables if id(v) not in excluded and _depends_on_samples(v)]
        state = metrics + own
        before = [tf.identity(v.value) for v in state]
        with weighted_means(model, weight):
            logs = self.wrapped(tf.nest.map_structure(lambda leaf: with_stand_in(leaf, count), data))
        alike = {id(v) for v in gathered_variables(model)} | written_alike(data, own)
        changed = [(v, value) for v, value in zip(state, before, strict=True) if id(v) not in alike]
        # One for all: each costs ten operations.
        tf.cond(count > 0, lambda: False, lambda: _restore(changed), name=STAND_IN_GUARD)
        return logs


class DistributedStep(RankStep):
    """Replacement for ``train_step`` of a model.

    Attributes
    ----------
    reducer : sums the sample counts of the ranks; None if all ranks have batches of one size, which then weigh equally.
    samples_seen : variable with the number of samples of all ranks so far; where batches are sharded already, and the
        ranks have equal ones, this rank's times the number of ranks.
    traces : number of times that TensorFlow has traced the step, or that it ran eagerly.
    read : variables that the step has read in its latest trace.
    """

    def __init__(self, model: Any, patches: AbstractContextManager[Any], channel: Channel) -> None:
        super().__init__(model, channel, "train_step")
        self._patches = patches
        self.reducer: Reducer | None = None
        self.samples_seen = eager_variable(0, tf.int64)
        self.traces = 0
        self.read: list[Any] = []

    def __call__(self, data: Any) -> Any:
        self.traces += 1
        logs = super().__call__(data)
        self.read = variables_read()
        return logs

    def on_rows(self, data: Any) -> Any:
        total = None if self.per_sample is None else batch_size(data)
        data = self._own(data)
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
            return self._guarded(data, count, weight)

    def on_whole_batch(self, data: Any) -> Any:
        if self.per_sample is None:
            data = whole_batch(self._channel, data)
        count = batch_size(data)
        if count is not None:
            self.samples_seen.assign_add(count)
        with self._state.only_averages():  # the gradients of all ranks are equal
            return self.wrapped(data)


class DistributedTestStep(RankStep):
    """Replacement for ``test_step`` of a model.

    All ranks evaluate one global batch at a time, so that losses that are sums, or means over masks or sample weights,
    are those of the global batch.

    Parameters
    ----------
    prepare : called with the data before the model's own step is traced.

    Attributes
    ----------
    agrees : the ranks may have different numbers of batches, which are not known: before each execution they agree on
        whether any has another one.
    gathers : the ranks have their own rows of the batches, and gather them to evaluate the whole.
    running : an evaluation has begun, and its logs are not yet computed.
    begins : the next step is the first one of an evaluation.
    """

    def __init__(self, model: Any, reducer: Reducer, prepare: Callable[[Any], None]) -> None:
        super().__init__(model, reducer.channel, "test_step")
        self._reducer, self._prepare = reducer, prepare
        self._local_function: Any = None
        self._warned = False
        self.agrees = self.gathers = self.running = self.begins = False

    def on_rows(self, data: Any) -> Any:
        data = self._own(data)
        count = batch_size(data)
        if count is None:
            return self.wrapped(data)
        self._prepare(data)
        (total,) = self._reducer([tf.cast(count, tf.float64)])
        weight = tf.math.divide_no_nan(tf.cast(count, tf.float64), total)
        with self._state.step(weight):
            return self._guarded(data, count, weight)

    def on_whole_batch(self, data: Any) -> Any:
        if self.per_sample is None and self.gathers:
            data = whole_batch(self._channel, data)
        return self.wrapped(data)

    def pad_batches(self, dataset: Any) -> Any:
        """Append empty batches, so that this rank has as many batches as any other. *Collective*.

        If the number of batches of a rank is unknown, the ranks agree in each execution.
        """
        padded, known = pad_batches(self._channel, dataset)
        self.agrees = not known
        return padded if known else padded.take_while(lambda *data: True)  # Keras knows the number on no rank

    @contextlib.contextmanager
    def on_this_rank(self) -> Iterator[bool]:
        """Context manager: evaluate whole batches on this rank alone, as each rank does; see ``counting_once``."""
        model, distributed_function = self._model, self._model.test_function
        make = type(model).make_test_function.__get__(model)
        logs = getattr(type(model), METRICS_OF_EPOCH).__get__(model)
        replacements = replaced(model, test_step=self.wrapped, make_test_function=make, **{METRICS_OF_EPOCH: logs})
        with counting_once(model) as counted, replacements:
            object.__setattr__(model, "test_function", self._local_function)
            try:
                yield counted
            finally:
                self._local_function = model.test_function
                object.__setattr__(model, "test_function", distributed_function)

    def on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Run Keras's ``test_on_batch`` on the whole batch, on this rank alone."""
        with self.on_this_rank() as counted:
            if counted and self._channel.rank == 0 and not self._warned:
                self._warned = True
                log.warning(
                    "test_on_batch of %s within an epoch returns metrics of its own rows; in one process those of the "
                    "epoch so far are among them\n  remedy: model.evaluate, whose metrics begin anew",
                    self._model.name,
                )
            return type(self._model).test_on_batch(self._model, *args, **kwargs)


def pad_batches(ranks: Channel, dataset: tf.data.Dataset) -> tuple[tf.data.Dataset, bool]:
    """Return a dataset with as many batches as that of any rank, and whether that is known. *Collective*."""
    by_rank = ranks.host.allgather_object(batch_count(dataset))
    if min(by_rank) < 0:
        return dataset, set(by_rank) == {tf.data.INFINITE_CARDINALITY}
    missing = max(by_rank) - by_rank[ranks.rank]
    return append_empty_batches(dataset, missing) if missing else dataset, True


def append_empty_batches(dataset: tf.data.Dataset, count: int) -> tf.data.Dataset:
    """Return the dataset followed by ``count`` batches of no rows."""
    return dataset.concatenate(tf.data.Dataset.from_tensors(empty_batch(dataset.element_spec)).repeat(count))


def empty_batch(spec: Any) -> Any:
    """Return a batch of no rows, with zeros where a leaf has no row per sample."""
    leaves = zip(tf.nest.flatten(spec), leaves_per_sample(spec), strict=True)
    return tf.nest.pack_sequence_as(spec, [_without_rows(leaf, flag is False) for leaf, flag in leaves])


def _without_rows(spec: Any, whole: bool) -> Any:
    """Return an empty tensor of a spec, or zeros if it is whole; None for the spec of None."""
    shape = getattr(spec, "shape", None)
    if shape is None:
        return None
    sizes = [size or 0 for size in shape]
    sizes[:1] = sizes[:1] if whole else [0]
    if isinstance(spec, tf.RaggedTensorSpec):
        values = tf.zeros([0, *sizes[spec.ragged_rank + 1 :]], spec.dtype)
        lengths = [tf.zeros([0], spec.row_splits_dtype)] * spec.ragged_rank
        return tf.RaggedTensor.from_nested_row_lengths(values, lengths)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensor(tf.zeros([0, len(sizes)], tf.int64), tf.zeros([0], spec.dtype), sizes)
    return tf.zeros(sizes, spec.dtype)


class StandInPredictStep:
    """Replacement of ``model.predict_step`` that predicts a stand-in row where a batch has none, and drops the result.

    On batches without rows some layers fail: a convolution that TensorFlow fuses with its activation returns the shape
    of its input. With XLA they work, and stand-ins do not.
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


def _rows_before(end: Any, output: Any) -> Any:
    with_rows = isinstance(output, tf.Tensor | tf.RaggedTensor) and output.shape.rank != 0
    return output[:end] if with_rows else output


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
