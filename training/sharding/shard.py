"""``shard``: this rank's rows of the batches of a data set, for loops of the user's own."""

from __future__ import annotations

from typing import Any, Literal

import tensorflow as tf

from matex_data.mpi.library import MPI
from matex_data.pipeline import data_parallel
from matex_data.training.comm.channel import open_channel
from matex_data.training.sharding.batch_weights import patch_iteration
from matex_data.training.sharding.determinism import FirstBatchCheck
from matex_data.training.sharding.rows import (
    batch_size,
    dataset_element,
    deterministic,
    is_batched,
    is_sharded,
    leaves_per_sample,
    rank_rows,
    static_rows,
)


def shard(
    dataset: tf.data.Dataset, *, remainder: Literal["keep", "drop"] = "keep", comm: MPI.Intracomm | None = None
) -> tf.data.Dataset:
    """Return the data set with this rank's rows of every batch, for a training loop of your own. *Collective*.

    All ranks have to get the same batches in the same order. What a step computes of its rows has to be a mean over
    them: the average over the ranks of such gradients is the gradient of the whole batch. Under ``matex run`` gradients
    are averaged where ``GradientTape.gradient`` gives them; otherwise by an optimizer that was given to
    ``distribute``. Where ranks have unequal parts of a batch, each counts by its rows: exact as long as each batch is
    one step. Losses and metrics are those of the rank; ``allreduce`` makes them global.

    Parameters
    ----------
    dataset : batches, on a first axis that all leaves share; leaves with another number of rows stay whole.
    remainder : "keep": the first ranks have one row more of a batch that the ranks cannot share equally. Where a batch
        has fewer rows than there are ranks, those without any repeat one, which counts nothing in the step. "drop":
        leave such batches out.
    comm : ranks that share the batches; None: all of the job.

    Raises
    ------
    TypeError : not a ``tf.data.Dataset``.
    ValueError : elements are single samples, or a rank's part already; "drop" would leave nothing.
    PartitionError : while iterating: several batches of unequal parts were taken for one step; batches of unequal
        parts within a ``tf.function``.

    Examples
    --------
    >>> import tensorflow as tf, matex_data as md
    >>> batches = tf.data.Dataset.range(10).batch(4)
    >>> [x.numpy().tolist() for x in md.training.shard(batches)]  # on one rank: all rows
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """
    channel = open_channel(comm)
    _check(dataset, remainder)
    if channel.size == 1:
        return dataset
    rank, size = channel.rank, channel.size
    per_sample = leaves_per_sample(dataset.element_spec)
    rows = static_rows(dataset.element_spec, per_sample)
    if remainder == "drop" and rows is not None and rows % size:
        raise ValueError(
            f"batches of {rows} rows cannot be shared equally by {size} ranks, and would all be dropped\n"
            f"  remedy: a batch size that {size} divides, or remainder='keep'"
        )
    check = FirstBatchCheck(channel)
    whole = deterministic(check.recording(dataset))
    if remainder == "drop":
        whole = whole.filter(lambda *args: batch_size(dataset_element(dataset, args)) % size == 0)

    def select(*args: Any) -> Any:
        return rank_rows(dataset_element(dataset, args), rank, size, per_sample)

    def with_row_count(*args: Any) -> Any:
        element = dataset_element(dataset, args)
        return batch_size(element), rank_rows(element, rank, size, per_sample, stand_in=True)

    result = whole.map(select)
    result.matex_sharded = channel.communicator
    result.matex_equal_rows = remainder == "drop" or (rows is not None and rows % size == 0)
    result.matex_row_counts = whole.map(with_row_count)
    result.matex_check = check.compare
    data_parallel.enable()
    patch_iteration()
    return result


def _check(dataset: Any, remainder: str) -> None:
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            f"shard takes a tf.data.Dataset of batches, not {type(dataset).__name__}\n"
            "  remedy: tf.data.Dataset.from_tensor_slices(arrays).batch(n)"
        )
    if remainder not in ("keep", "drop"):
        raise ValueError(f'remainder is "keep" or "drop", not {remainder!r}\n  remedy: leave it out')
    if is_sharded(dataset):
        raise ValueError(
            "this data set is the part of this rank already\n  remedy: loop over it as it is, without shard"
        )
    if not is_batched(dataset):
        raise ValueError(
            f"elements are not known to be batches: {dataset.element_spec}\n"
            "  remedy: dataset.batch(n) before shard; for a generator of batches, None as the first dimension of "
            "each output_signature"
        )
