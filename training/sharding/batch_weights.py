"""Weights of the batches that a loop takes from data which the ranks share, for the step that follows.

A rank's gradient counts by its rows in the global batch. A loop does not say which batch a step is for, so this
remembers the batches that were taken since the last step, and refuses to guess where their weights differ.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from matex_data.errors import PartitionError
from matex_data.mpi.communicator import Communicator
from matex_data.training.keras_api import DatasetIterator
from matex_data.training.reduction.sequence import SequenceCounter
from matex_data.training.sharding.rows import batch_size, is_sharded, rank_row_counts, sharded_source, sharding_ranks

log = logging.getLogger("matex_data.training")

Counts = tuple[int, ...] | None
"""Rows of each rank in a batch; None: all ranks have as many."""

keras_iterating: ContextVar[bool] = ContextVar("in_keras", default=False)
"""Whether Keras iterates over data sets, whose steps weigh their batches themselves."""

_weights: WeakKeyDictionary[Communicator, BatchWeights] = WeakKeyDictionary()


def batch_weights(ranks: Communicator) -> BatchWeights:
    """Return what is known of the batches of these ranks."""
    return _weights.setdefault(ranks, BatchWeights(ranks))


@contextlib.contextmanager
def keras_iteration() -> Iterator[None]:
    """Context in which Keras iterates over data sets."""
    token = keras_iterating.set(True)
    try:
        yield
    finally:
        keras_iterating.reset(token)


class BatchWeights:
    """Rows of the batches that were taken since the last step, of the iterators that are still in use."""

    def __init__(self, ranks: Communicator) -> None:
        self._rank, self._size = ranks.rank, ranks.size
        self._sequence = SequenceCounter()
        self._taken: dict[int, set[Counts]] = {}
        self._used: dict[int, set[Counts]] = {}

    def record(self, iterator: int, counts: Counts) -> None:
        """Note a batch."""
        equal_rows = counts is None or len(set(counts)) == 1
        self._taken.setdefault(iterator, set()).add(None if equal_rows else counts)

    def forget(self, iterator: int) -> None:
        """Forget an iterator that has come to its end, or that nobody has any more."""
        self._taken.pop(iterator, None)
        self._used.pop(iterator, None)

    def next_step_weight(self) -> Any:
        """Return the weight of this rank in the step that is about to be made: a scalar float64 tensor.

        Raises
        ------
        PartitionError : batches since the last step are shared in different ways; in a graph when it runs.
        """
        if tf.executing_eagerly() or self._size == 1:
            return tf.constant(self._weight(), tf.float64)
        with self._sequence.advance() as cursor:
            cursor.number, weight = tf.numpy_function(
                lambda number: (number, self._weight()), [cursor.number], [tf.int64, tf.float64]
            )
        weight.set_shape(())
        return weight

    def _weight(self) -> np.float64:
        if self._taken:
            self._used, self._taken = self._taken, {}
        known = set().union(*self._used.values())
        if len(known) > 1:
            raise PartitionError(
                "the ranks share the batches since the last training step unequally, each in another way",
                expected="one batch for each step, or batches of which all ranks have as many rows",
                found=f"batches with {_describe(known)} rows on ranks 0 to {self._size - 1}",
                remedy='leave such batches out: shard(dataset, remainder="drop"), or tf_dataset(remainder="drop")',
            )
        counts = next(iter(known), None)
        return np.float64(1 / self._size if counts is None else counts[self._rank] / sum(counts))


def _describe(known: set[Counts]) -> str:
    return " and ".join(sorted("equal" if counts is None else "+".join(map(str, counts)) for counts in known))


class ShardedIterator(DatasetIterator):  # type: ignore[misc]  # TensorFlow has no types
    """Iterator in Python over data of which each rank has a part, that notes the rows of each batch."""

    def configure(
        self, ranks: Communicator, with_row_counts: bool, equal_rows: bool, check: Callable[[], None]
    ) -> None:
        """Begin.

        Parameters
        ----------
        compare : called after each batch in Python.
        counted : elements are pairs: the rows of each rank, and the batch.
        even : all ranks have as many rows in every batch.
        """
        self._matex = (ranks, with_row_counts, equal_rows, check)

    def __del__(self) -> None:
        """A loop was left."""
        with contextlib.suppress(Exception):  # Python itself may be ending
            self._forget()

    def __next__(self) -> Any:
        ranks, with_row_counts, equal_rows, check = self._matex
        if not equal_rows and not tf.executing_eagerly():
            raise _graph_error()
        try:
            element = super().__next__()
        except StopIteration:
            self._forget()
            raise
        counts: Counts = None
        if with_row_counts:
            rows, element = element
            counts = rank_row_counts(int(rows), ranks.size)
            if not counts[-1] and ranks.rank == 0:
                _warn_of_stand_ins(int(rows), ranks.size)
        elif not equal_rows and (rows_here := batch_size(element)) is not None:
            counts = tuple(ranks.allgather(int(rows_here)))
        if tf.executing_eagerly():
            check()
            batch_weights(ranks).record(id(self), counts)
        return element

    def get_next(self) -> Any:
        """Return the next element, or raise ``OutOfRangeError``."""
        try:
            return self.__next__()
        except StopIteration as forget:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence") from forget

    @property
    def _type_spec(self) -> Any:
        """TensorFlow asks for it where the iterator is an argument of a ``tf.function``."""
        if not self._matex[2]:
            raise _graph_error()
        return super()._type_spec

    def _forget(self) -> None:
        batch_weights(self._matex[0]).forget(id(self))


@functools.cache
def _warn_of_stand_ins(rows: int, size: int) -> None:
    log.warning(
        "a batch of %d rows is shared by %d ranks: those without a row get the first one, which counts nothing in a "
        "training step, but would count in sums of your own\n"
        '  remedy: shard(dataset, remainder="drop"), or evaluate by model.evaluate',
        rows,
        size,
    )


def _graph_error() -> PartitionError:
    return PartitionError(
        "batches that the ranks share unequally are taken within a tf.function, where nobody sees their sizes",
        expected="a loop in Python over the batches, or batches of which all ranks have as many rows",
        remedy="loop outside of the tf.function, or leave such batches out: "
        'shard(dataset, remainder="drop"), or tf_dataset(remainder="drop")',
    )


def patch_iteration() -> None:
    """Have loops over data that the ranks share note their batches."""
    original = tf.data.Dataset.__iter__
    if hasattr(original, "matex_original"):
        return

    def iterate(dataset: Any) -> Any:
        by_keras = keras_iterating.get() or str(sys._getframe(1).f_globals.get("__name__")).startswith("keras.")
        if by_keras or not is_sharded(dataset):
            return original(dataset)
        ranks = sharding_ranks(dataset)
        with_row_counts = getattr(dataset, "matex_row_counts", None)
        equal_rows = _has_equal_rows(dataset)
        if not equal_rows and not tf.executing_eagerly():
            raise _graph_error()
        iterator = original(dataset if with_row_counts is None or equal_rows else with_row_counts)
        if type(iterator) is DatasetIterator:
            iterator.__class__ = ShardedIterator
            check = getattr(dataset, "matex_check", lambda: None)
            iterator.configure(ranks, with_row_counts is not None and not equal_rows, equal_rows, check)
        return iterator

    iterate.matex_original = original  # type: ignore[attr-defined]
    tf.data.Dataset.__iter__ = iterate
    _patch_reduce()


def _patch_reduce() -> None:
    """Have AutoGraph's loops, which reduce a data set, refuse batches of unequal parts."""
    original = tf.data.Dataset.reduce

    @functools.wraps(original)
    def reduce(dataset: Any, *args: Any, **kwargs: Any) -> Any:
        source = None if tf.executing_eagerly() or keras_iterating.get() else sharded_source(dataset)
        if source is not None and not _has_equal_rows(source):
            raise _graph_error()
        return original(dataset, *args, **kwargs)

    tf.data.Dataset.reduce = reduce


def _has_equal_rows(dataset: tf.data.Dataset) -> bool:
    """Tell whether all ranks are known to have as many rows in every batch."""
    return bool(
        sharding_ranks(dataset).size == 1 or getattr(dataset, "matex_equal_rows", False) or _has_static_size(dataset)
    )


def _has_static_size(dataset: tf.data.Dataset) -> bool:
    """Tell whether the element spec knows the size of the batches, which all ranks then have."""
    sizes = [spec.shape[0] for spec in tf.nest.flatten(dataset.element_spec) if getattr(spec, "shape", None)]
    return bool(sizes) and None not in sizes
