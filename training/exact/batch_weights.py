"""``shard``: this rank's rows of each batch, for loops that users write, and its weight in each of their steps.

The gradient of a rank counts by its rows in the global batch. A loop does not show which batch a step uses. So the
iterators record the batches that were taken since the last step; if these have different weights, the step fails
with an error instead of a guess.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from matex_data.epochs.tfdata import marked_as_sharded, sharded_source, sharding_ranks
from matex_data.errors import PartitionError
from matex_data.mpi.communicator import Communicator
from matex_data.mpi.library import MPI
from matex_data.training.arguments import open_checked
from matex_data.training.exact.determinism import FirstBatchCheck
from matex_data.training.exact.rows import (
    batch_size,
    dataset_element,
    deterministic,
    is_batched,
    is_sharded,
    leaves_per_sample,
    rank_row_counts,
    rank_rows,
    shard_rows,
    static_rows,
)
from matex_data.training.keras_api import DatasetIterator
from matex_data.training.reduction.graphs import SequenceCounter
from matex_data.training.replacements import Replacements, patch, replaced

log = logging.getLogger("matex_data.training")

Counts = tuple[int, ...] | None
"""Rows of each rank in a batch; None: equal numbers."""
UNKNOWN: Counts = ()
"""Unequal numbers of rows, in a batch that a loop of Keras's takes."""

_weights: WeakKeyDictionary[Communicator, BatchWeights] = WeakKeyDictionary()


def batch_weights(ranks: Communicator) -> BatchWeights:
    """Return the batches recorded for these ranks."""
    return _weights.setdefault(ranks, BatchWeights(ranks))


def left_to_keras() -> bool:
    """Return whether Keras's own loops iterate over the data of any ranks."""
    return any(weights.by_keras for weights in _weights.values())


class BatchWeights:
    """Row counts of the batches taken since the last step, by iterator.

    Attributes
    ----------
    by_keras : Keras's own loops iterate over the data; their steps weigh their batches themselves.
    """

    def __init__(self, ranks: Communicator) -> None:
        self.by_keras = False
        self._rank, self._size = ranks.rank, ranks.size
        self._sequence = SequenceCounter()
        self._taken: WeakKeyDictionary[Any, set[Counts]] = WeakKeyDictionary()  # a loop left early forgets its batches
        self._used: WeakKeyDictionary[Any, set[Counts]] = WeakKeyDictionary()
        self._left: set[Counts] = set()  # at the end of a loop

    def left_to_keras(self) -> Replacements:
        """Return a context manager: ``by_keras`` is set; iterators of this block record nothing."""
        return replaced(self, by_keras=True)

    def record(self, iterator: Any, counts: Counts) -> None:
        """Record a batch that an iterator has returned."""
        self._left = set()
        equal_rows = counts is None or len(set(counts)) == 1
        self._taken.setdefault(iterator, set()).add(None if equal_rows else counts)

    def forget(self, iterator: Any) -> None:
        """Forget an exhausted iterator, but for batches before the next step, if no other one has any for it."""
        self._left |= self._taken.pop(iterator, set())
        self._used.pop(iterator, None)

    def next_step_weight(self) -> Any:
        """Return the weight of this rank in the next step, a scalar float64 tensor.

        Raises
        ------
        PartitionError : the batches since the last step have different row counts; in a graph, when it runs.
        """
        weight = self._weight()  # also when a step is traced, where errors are raised as they are
        if tf.executing_eagerly() or self._size == 1:
            return tf.constant(weight, tf.float64)
        with self._sequence.advance() as cursor:
            cursor.number, weight = tf.numpy_function(
                lambda number: (number, self._weight()), [cursor.number], [tf.int64, tf.float64]
            )
        weight.set_shape(())
        return weight

    def _weight(self) -> np.float64:
        if self._taken:
            self._used, self._taken = self._taken, WeakKeyDictionary()
        of_loops = set[Counts]().union(*self._used.values())
        known = of_loops or self._left  # a loop that ended within another one was of validation
        if UNKNOWN in known:
            raise PartitionError(
                "model.fit trains on batches with unequal row counts per rank, which it does not weigh",
                expected="batches with equal row counts on all ranks",
                remedy="matex_data.training.fit, which weighs each rank by its rows, or drop unequal batches: "
                'shard(dataset, remainder="drop"), or tf_dataset(remainder="drop")',
            )
        if len(known) > 1:
            raise PartitionError(
                "batches with different row counts per rank were taken since the last training step",
                expected="one batch for each step, or batches with equal row counts on all ranks",
                found=f"batches with {_describe(known)} rows on ranks 0 to {self._size - 1}",
                remedy='drop unequal batches: shard(dataset, remainder="drop"), or tf_dataset(remainder="drop")',
            )
        counts = next(iter(known), None)
        return np.float64(1 / self._size if counts is None else counts[self._rank] / sum(counts))


def _describe(known: set[Counts]) -> str:
    return " and ".join(sorted("equal" if counts is None else "+".join(map(str, counts)) for counts in known))


class ShardedIterator(DatasetIterator):  # type: ignore[misc]  # TensorFlow has no types
    """Python iterator over sharded batches that records the row counts of each batch."""

    def configure(
        self, ranks: Communicator, with_row_counts: bool, equal_rows: bool, compare: Callable[[], None]
    ) -> None:
        """Set the options of an iterator that TensorFlow has created.

        Parameters
        ----------
        with_row_counts : elements are pairs of the rows of the global batch and this rank's batch.
        equal_rows : all ranks have equal numbers of rows in every batch.
        compare : called after each batch in eager code; see ``FirstBatchCheck.compare``.
        """
        self._matex = (ranks, with_row_counts, equal_rows, compare)

    def __next__(self) -> Any:
        ranks, with_row_counts, equal_rows, compare = self._matex
        if not equal_rows and not tf.executing_eagerly():
            raise _graph_error()
        try:
            element = super().__next__()
        except StopIteration:
            batch_weights(ranks).forget(self)
            raise
        counts: Counts = None
        if with_row_counts:
            rows, element = element
            counts = rank_row_counts(int(rows), ranks.size)
            if not counts[-1] and ranks.rank == 0:
                _warn_of_stand_ins(int(rows), ranks.size)
        elif not equal_rows and (own_rows := batch_size(element)) is not None:
            counts = tuple(ranks.allgather(int(own_rows)))
        if tf.executing_eagerly():
            compare()
            batch_weights(ranks).record(self, counts)
        return element

    def get_next(self) -> Any:
        """Return the next element, or raise ``OutOfRangeError``."""
        try:
            return self.__next__()
        except StopIteration as end:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence") from end

    @property
    def _type_spec(self) -> Any:
        """Return the type for arguments of a ``tf.function``, or raise an error for unequal batches."""
        if not self._matex[2]:
            raise _graph_error()
        return super()._type_spec


@functools.cache
def _warn_of_stand_ins(rows: int, size: int) -> None:
    log.warning(
        "a batch of %d rows is split over %d ranks: ranks without a row repeat the first one; a training step ignores "
        "it, but sums in your own code count it\n"
        '  remedy: shard(dataset, remainder="drop"), or evaluate with model.evaluate',
        rows,
        size,
    )


def _graph_error() -> PartitionError:
    return PartitionError(
        "a tf.function iterates over batches with unequal row counts per rank, which it cannot record",
        expected="a Python loop over the batches, or batches with equal row counts on all ranks",
        remedy="loop outside of the tf.function, or drop unequal batches: "
        'shard(dataset, remainder="drop"), or tf_dataset(remainder="drop"); with on_error="skip" remainder="pad"',
    )


def patch_iteration() -> None:
    """Patch ``tf.data.Dataset`` once: loops over sharded datasets record the row counts of their batches."""
    original = tf.data.Dataset.__iter__
    if hasattr(original, "matex_original"):
        return

    def iterate(dataset: Any) -> Any:
        ranks = sharding_ranks(dataset)
        by_keras = str(sys._getframe(1).f_globals.get("__name__")).startswith("keras.")
        if ranks is None or batch_weights(ranks).by_keras:
            return original(dataset)
        equal_rows = _has_equal_rows(dataset)
        if by_keras:
            iterator = original(dataset)
            if not equal_rows and _is_called_by_fit(sys._getframe(2)):
                batch_weights(ranks).record(iterator, UNKNOWN)
            return iterator
        with_row_counts = getattr(dataset, "matex_row_counts", None)
        if not equal_rows and not tf.executing_eagerly():
            raise _graph_error()
        iterator = original(dataset if with_row_counts is None or equal_rows else with_row_counts)
        if type(iterator) is DatasetIterator:
            iterator.__class__ = ShardedIterator
            compare = getattr(dataset, "matex_compare", lambda: None)
            iterator.configure(ranks, with_row_counts is not None and not equal_rows, equal_rows, compare)
        return iterator

    iterate.matex_original = original  # type: ignore[attr-defined]
    tf.data.Dataset.__iter__ = iterate
    _patch_reduce()


def _is_called_by_fit(frame: FrameType | None) -> bool:
    """Return whether Keras's ``fit`` advances the epoch iterator whose method a frame runs, not ``evaluate`` in it."""
    return frame is not None and frame.f_back is not None and frame.f_back.f_code.co_name == "fit"


def _patch_reduce() -> None:
    """Patch ``Dataset.reduce``, which runs the loops of AutoGraph: refuse unequal batches in graphs."""

    def reduce(original: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        source = None if tf.executing_eagerly() else sharded_source(dataset)
        if source is not None and not batch_weights(sharding_ranks(source)).by_keras and not _has_equal_rows(source):
            raise _graph_error()
        return original(dataset, *args, **kwargs)

    patch(tf.data.Dataset, reduce, "reduce")


def _has_equal_rows(dataset: tf.data.Dataset) -> bool:
    """Return whether all ranks are known to have equal numbers of rows in every batch."""
    one_rank = sharding_ranks(dataset).size == 1
    return bool(one_rank or getattr(dataset, "matex_equal_rows", False) or _has_static_size(dataset))


def _has_static_size(dataset: tf.data.Dataset) -> bool:
    """Return whether the element spec has the batch size, which then is the same on all ranks."""
    sizes = [spec.shape[0] for spec in tf.nest.flatten(dataset.element_spec) if getattr(spec, "shape", None)]
    return bool(sizes) and None not in sizes


def shard(
    dataset: tf.data.Dataset, *, remainder: Literal["keep", "drop"] = "keep", comm: MPI.Intracomm | None = None
) -> tf.data.Dataset:
    """Shard the dataset for a training loop of your own: keep this rank's rows of each batch. *Collective*.

    All ranks have to get the same batches in the same order, and the loss of a step has to be a mean over its rows:
    the average of the ranks' gradients is then the gradient of the global batch. Under ``matex run``,
    ``GradientTape.gradient`` returns this average; otherwise an optimizer returned by ``distribute`` computes it. If
    the ranks have unequal numbers of rows, each rank counts by its rows; this is exact if each step uses one batch.
    Losses and metrics are those of this rank; ``allreduce`` combines them.

    Parameters
    ----------
    dataset : batches. All leaves share the first axis; a leaf with another number of rows stays whole.
    remainder : "keep": the first ranks get one more row of a batch that does not split equally. If a batch has fewer
        rows than there are ranks, the ranks without rows get its first row with weight 0. "drop": leave out batches
        that do not split equally.
    comm : communicator; None: all ranks of the job.

    Returns
    -------
    dataset : batches with this rank's rows; on one rank the dataset itself.

    Raises
    ------
    TypeError : ``dataset`` is no ``tf.data.Dataset``.
    ValueError : elements are single samples, the dataset is sharded already, or "drop" would leave no batch.
    PartitionError : in the loop: batches with different row counts were taken for one step, or a ``tf.function``
        iterates over batches with unequal row counts.

    Examples
    --------
    >>> import tensorflow as tf, matex_data as md
    >>> batches = tf.data.Dataset.range(10).batch(4)
    >>> [x.numpy().tolist() for x in md.training.shard(batches)]  # on one rank: all rows
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """
    channel = open_checked("training.shard", shard, locals(), functools.partial(_check, dataset))
    if channel.size == 1:
        return dataset
    rank, size = channel.rank, channel.size
    per_sample = leaves_per_sample(dataset.element_spec)
    rows = static_rows(dataset.element_spec, per_sample)
    if remainder == "drop" and rows is not None and rows % size:
        raise ValueError(
            f"batches of {rows} rows cannot be split equally over {size} ranks, so all would be dropped\n"
            f"  remedy: choose a batch size that is a multiple of {size}, or remainder='keep'"
        )
    first_batch = FirstBatchCheck(channel)
    whole = deterministic(first_batch.recording(dataset))
    if remainder == "drop":
        whole = whole.filter(lambda *args: batch_size(dataset_element(dataset, args)) % size == 0)

    def with_row_count(*args: Any) -> Any:
        element = dataset_element(dataset, args)
        return batch_size(element), rank_rows(element, rank, size, per_sample, stand_in=True)

    result = marked_as_sharded(shard_rows(whole, rank, size), channel.communicator)
    result.matex_equal_rows = remainder == "drop" or (rows is not None and rows % size == 0)
    result.matex_row_counts = whole.map(with_row_count)
    result.matex_compare = first_batch.compare
    channel.communicator.note_sharded_data()
    patch_iteration()
    return result


def _check(dataset: Any) -> None:
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            f"shard expects a tf.data.Dataset of batches, not {type(dataset).__name__}\n"
            "  remedy: tf.data.Dataset.from_tensor_slices(arrays).batch(n)"
        )
    if is_sharded(dataset):
        raise ValueError("this dataset is sharded already\n  remedy: loop over it without shard")
    if not is_batched(dataset):
        raise ValueError(
            f"the elements of this dataset are not known to be batches: {dataset.element_spec}\n"
            "  remedy: call dataset.batch(n) before shard; for a generator of batches, give None as the first "
            "dimension of each output_signature"
        )
