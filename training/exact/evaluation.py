"""Evaluation step on this rank's rows of a global batch, in lockstep with the other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from matex_data.errors import PartitionError
from matex_data.training.exact.logs import Reduction, reductions
from matex_data.training.exact.rows import batch_size, rank_rows
from matex_data.training.exact.state import step_state
from matex_data.training.exact.step import run_guarded, whole_batch
from matex_data.training.reduction.ops import Reducer
from matex_data.training.replacements import replaced


class DistributedTestStep:
    """Replacement for a model's ``test_step`` that weighs each rank by its samples, like ``DistributedStep``.

    In lockstep, all ranks evaluate one global batch at a time. Losses that are sums, or means over masks or sample
    weights, are then those of the global batch.

    Parameters
    ----------
    model : compiled Keras model.
    reducer : sums the sample counts of the ranks.
    prepare : called with the data before the model's own step is traced.

    Attributes
    ----------
    lockstep : all ranks have the same number of batches. Otherwise each rank evaluates its batches by itself, and the
        metric states are combined at the end.
    whole : evaluate the whole batches on every rank.
    gathers : the ranks have their own rows of the batches, and gather them to evaluate the whole.
    wrapped : the model's own step.
    alone : validation within ``fit`` runs on whole batches on every rank.
    running : an evaluation has begun, and its logs are not yet computed.
    begins : the next step is the first one of an evaluation.
    per_sample : see ``DistributedStep``.
    reductions : how the numbers among the logs that are no metrics combine over the ranks, by key.
    possible : see ``DistributedStep``.
    """

    def __init__(self, model: Any, reducer: Reducer, prepare: Callable[[Any], None]) -> None:
        self._model = model
        self._reducer = reducer
        self._prepare = prepare
        self.wrapped: Callable[[Any], Any] = model.test_step
        self._local_function: Any = None
        self.lockstep = True
        self.whole = self.gathers = self.alone = self.running = self.begins = False
        self.per_sample: list[bool | None] | None = None
        self.reductions: dict[str, Reduction | None] = {}
        self.possible: dict[str, set[Reduction]] = {}

    def __call__(self, data: Any) -> Any:
        """Evaluate this rank's rows. *Collective* in lockstep."""
        if self.whole:
            return self.on_whole_batch(data)
        logs = self.on_rows(data)
        self.reductions = reductions(logs)
        return logs

    def on_rows(self, data: Any) -> Any:
        """Evaluate this rank's rows. *Collective* in lockstep."""
        if self.per_sample is not None:
            channel = self._reducer.channel
            data = rank_rows(data, channel.rank, channel.size, self.per_sample)
        return self._of_rows(data, batch_size(data))

    def on_whole_batch(self, data: Any) -> Any:
        """Evaluate the whole batch, as one process does. *Collective* if the ranks have their own rows of it."""
        if self.per_sample is None and self.gathers:
            if not self.lockstep:
                raise PartitionError(
                    f"{self._model.name} evaluates whole batches, which the ranks gather, and the numbers of their "
                    "batches are not known",
                    expected="the same number of batches on all ranks",
                    remedy="dataset.apply(tf.data.experimental.assert_cardinality(n))",
                )
            data = whole_batch(self._reducer.channel, data)
        return self.wrapped(data)

    def _of_rows(self, data: Any, count: Any) -> Any:
        if count is None or not self.lockstep:
            return self.wrapped(data)
        self._prepare(data)
        (total,) = self._reducer([tf.cast(count, tf.float64)])
        weight = tf.math.divide_no_nan(tf.cast(count, tf.float64), total)
        with step_state(self._reducer.channel).step(weight):
            return run_guarded(self._model, self.wrapped, data, count, weight)

    def set_lockstep(self, lockstep: bool) -> None:
        """Choose whether the next evaluation runs in lockstep."""
        if lockstep is not self.lockstep:
            self.lockstep = lockstep
            self._model.test_function = None

    def pad_batches(self, dataset: Any) -> Any:
        """Append empty batches, so that this rank has as many batches as any other. *Collective*.

        If the number of batches of a rank is unknown, return the dataset as it is and leave lockstep.
        """
        known = isinstance(dataset, tf.data.Dataset)
        by_rank = self._reducer.channel.host.allgather_object(int(dataset.cardinality()) if known else -1)
        self.set_lockstep(min(by_rank) >= 0)
        if not self.lockstep:
            return dataset
        missing = max(by_rank) - by_rank[self._reducer.channel.rank]
        return append_empty_batches(dataset, missing) if missing else dataset

    @contextlib.contextmanager
    def on_this_rank(self) -> Iterator[None]:
        """Context manager: evaluate whole batches on this rank alone."""
        model, distributed_function = self._model, self._model.test_function
        make = type(model).make_test_function.__get__(model)
        with replaced(model, test_step=self.wrapped, make_test_function=make):
            object.__setattr__(model, "test_function", self._local_function)
            try:
                yield
            finally:
                self._local_function = model.test_function
                object.__setattr__(model, "test_function", distributed_function)

    def on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Run Keras's ``test_on_batch`` on the whole batch, on this rank alone."""
        with self.on_this_rank():
            return type(self._model).test_on_batch(self._model, *args, **kwargs)


def append_empty_batches(dataset: tf.data.Dataset, count: int) -> tf.data.Dataset:
    """Return the dataset followed by ``count`` batches of no rows."""
    spec = dataset.element_spec
    empty_batch = tf.nest.map_structure(lambda leaf: tf.zeros([0, *leaf.shape[1:]], leaf.dtype), spec)
    return dataset.concatenate(tf.data.Dataset.from_tensors(empty_batch).repeat(count))
