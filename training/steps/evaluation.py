"""One step of evaluation on this rank's part of a global batch, which may be empty, together with the other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from matex_data.training.optimizer import training_step
from matex_data.training.reduction.ops import Reducer
from matex_data.training.sharding.rows import batch_size
from matex_data.training.steps.step import run_guarded


class DistributedTestStep:
    """A model's ``test_step`` that counts samples over all ranks, as ``SharedStep`` does in training.

    All ranks take one batch at a time. So losses that sum, or that divide by masks or by sample weights, and means
    of what a batch gives, are those of the global batch.

    Parameters
    ----------
    prepare : called with the data when a step is traced, before the model's own step.

    Attributes
    ----------
    together : the ranks have the same number of batches. Otherwise each rank takes its batches for itself, and only
        the metrics' states are combined, at the end.
    whole : every rank evaluates the whole batches.
    """

    def __init__(self, model: Any, reducer: Reducer, prepare: Callable[[Any], None]) -> None:
        self._model = model
        self._reducer = reducer
        self._prepare = prepare
        self._test_step: Callable[[Any], Any] = model.test_step
        self._function: Any = None
        self.lockstep = True
        self.whole = False

    def __call__(self, data: Any) -> Any:
        """Evaluate this rank's rows. *Collective* where the ranks have the same number of batches."""
        count = batch_size(data)
        if count is None or self.whole or not self.lockstep:
            return self._test_step(data)
        self._prepare(data)
        (total,) = self._reducer([tf.cast(count, tf.float64)])
        with training_step(tf.math.divide_no_nan(tf.cast(count, tf.float64), total)):
            return run_guarded(self._model, self._test_step, data, count)

    def set_lockstep(self, lockstep: bool) -> None:
        """Say how the next evaluation runs."""
        if lockstep is not self.lockstep:
            self.lockstep = lockstep
            self._model.test_function = None

    def pad_batches(self, dataset: Any) -> Any:
        """Return a data set of this rank's with as many batches as the other ranks have. *Collective*."""
        known = isinstance(dataset, tf.data.Dataset)
        everyone = self._reducer.channel.host.allgather_object(int(dataset.cardinality()) if known else -1)
        self.set_lockstep(min(everyone) >= 0)
        if not self.lockstep:
            return dataset
        empty_batch = tf.nest.map_structure(
            lambda leaf: tf.zeros([0, *leaf.shape[1:]], leaf.dtype), dataset.element_spec
        )
        missing = max(everyone) - everyone[self._reducer.channel.rank]
        return dataset.concatenate(tf.data.Dataset.from_tensors(empty_batch).repeat(missing)) if missing else dataset

    @contextlib.contextmanager
    def on_this_rank(self) -> Iterator[None]:
        """Context in which this rank evaluates whole batches for itself."""
        model, distributed_function = self._model, self._model.test_function
        object.__setattr__(model, "test_step", self._test_step)
        object.__setattr__(model, "test_function", self._function)
        try:
            yield
        finally:
            self._function = model.test_function
            object.__setattr__(model, "test_step", self)
            object.__setattr__(model, "test_function", distributed_function)

    def on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Run Keras's ``test_on_batch`` on the whole batch, on this rank alone."""
        with self.on_this_rank():
            return type(self._model).test_on_batch(self._model, *args, **kwargs)
