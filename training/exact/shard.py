"""``shard``: this rank's rows of each batch of a dataset, for training loops that users write themselves."""

from __future__ import annotations

from typing import Any, Literal

import tensorflow as tf

from matex_data.mpi.library import MPI
from matex_data.training.comm.channel import open_channel
from matex_data.training.exact.batch_weights import patch_iteration
from matex_data.training.exact.determinism import FirstBatchCheck
from matex_data.training.exact.rows import (
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
    channel = open_channel(comm)
    _check(dataset, remainder)
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

    def select(*args: Any) -> Any:
        return rank_rows(dataset_element(dataset, args), rank, size, per_sample)

    def with_row_count(*args: Any) -> Any:
        element = dataset_element(dataset, args)
        return batch_size(element), rank_rows(element, rank, size, per_sample, stand_in=True)

    result = whole.map(select)
    result.matex_sharded = channel.communicator
    result.matex_equal_rows = remainder == "drop" or (rows is not None and rows % size == 0)
    result.matex_row_counts = whole.map(with_row_count)
    result.matex_compare = first_batch.compare
    channel.communicator.note_sharded_data()
    patch_iteration()
    return result


def _check(dataset: Any, remainder: str) -> None:
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            f"shard expects a tf.data.Dataset of batches, not {type(dataset).__name__}\n"
            "  remedy: tf.data.Dataset.from_tensor_slices(arrays).batch(n)"
        )
    if remainder not in ("keep", "drop"):
        raise ValueError(f'remainder must be "keep" or "drop", not {remainder!r}\n  remedy: leave it out')
    if is_sharded(dataset):
        raise ValueError("this dataset is sharded already\n  remedy: loop over it without shard")
    if not is_batched(dataset):
        raise ValueError(
            f"the elements of this dataset are not known to be batches: {dataset.element_spec}\n"
            "  remedy: call dataset.batch(n) before shard; for a generator of batches, give None as the first "
            "dimension of each output_signature"
        )
