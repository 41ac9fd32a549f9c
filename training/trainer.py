"""``fit``: Keras's own, on all ranks at once."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from matex_data.errors import PartitionError
from matex_data.mpi.library import MPI
from matex_data.training import keras_api
from matex_data.training.callbacks import rank_callbacks
from matex_data.training.comm.channel import Channel, open_channel
from matex_data.training.comm.errors import unwrapped_errors
from matex_data.training.restart.resume import TrainingRun
from matex_data.training.sharding.batch_weights import keras_iteration
from matex_data.training.sharding.rows import batch_size
from matex_data.training.steps.distributed_model import DistributedModel


def fit(
    model: Any,
    dataset: Any,
    *,
    validation_data: Any = None,
    epochs: int = 1,
    callbacks: Any = None,
    checkpoint: str | os.PathLike[str] | None = None,
    save_every: int | None = None,
    comm: MPI.Intracomm | None = None,
    sync_batch_norm: bool = False,
    **keras_fit_options: Any,
) -> Any:
    """Train a compiled Keras model on all ranks together, and return its history. *Collective*.

    Parameters
    ----------
    dataset : this rank's share of every global batch, with the same number of steps on every rank;
        ``Dataset.tf_dataset`` gives it. Or a ``Dataset`` itself, with its options ``batch_size`` (the global
        one), ``shuffle``, ``seed`` and ``remainder`` among those of ``fit``.
    validation_data : this rank's share; ranks may have different numbers of batches.
    callbacks : see the same logs on every rank; those that write files run on rank 0 alone.
    checkpoint : folder for one checkpoint, replaced after every epoch. If there is one, the run goes on from it,
        with the very next global batch, on any number of ranks: in mid-epoch, too, for a ``Dataset``, or a
        ``tf.data.Dataset`` of which every pass has the same order.
    save_every : steps after which a checkpoint is written within an epoch.
    sync_batch_norm : normalize by the statistics of the global batch, as one process would. Otherwise each
        rank normalizes by its own part, and moving statistics are averaged after each epoch.
    keras_fit_options : any other option of ``keras.Model.fit``.

    Raises
    ------
    PartitionError : on all ranks, if they have different numbers of steps.
    """
    channel = open_channel(comm)
    keras_api.check(channel.rank)
    training_run = TrainingRun(channel, None if checkpoint is None else Path(checkpoint))
    data = training_run.resumed_dataset(dataset, keras_fit_options)
    check_steps(channel, data, keras_fit_options.get("steps_per_epoch"))
    with (
        DistributedModel(model, channel, sync_batch_norm) as distributed,
        without_keras_warnings(),
        unwrapped_errors(),
        keras_iteration(),
    ):
        user_callbacks = keras.tree.flatten(callbacks) if callbacks is not None else []
        options = {"initial_epoch": training_run.start.epoch, **keras_fit_options, "shuffle": False}
        options["epochs"] = training_run.epochs(user_callbacks, epochs)
        options["callbacks"] = training_run.leading_callbacks() + rank_callbacks(
            distributed, user_callbacks, data.element_spec, training_run.trailing_callbacks(user_callbacks, save_every)
        )
        if channel.rank > 0:
            options["verbose"] = 0
        if channel.size > 1 and validation_data is not None:
            validation_data = distributed.test.pad_batches(validation_data)
        if channel.size == 1 or not distributed.test.lockstep:
            validation_data = drop_empty_batches(validation_data)
        return model.fit(data, validation_data=validation_data, **options)


def check_steps(channel: Channel, dataset: tf.data.Dataset, steps_per_epoch: int | None) -> None:
    """Make sure that no rank has more steps than another. *Collective*.

    Raises
    ------
    PartitionError : on all ranks, if one has.
    """
    steps = steps_per_epoch or int(dataset.cardinality())
    counts = channel.host.allgather_object(steps)
    if len(set(counts)) > 1 or (steps == tf.data.UNKNOWN_CARDINALITY and channel.size > 1):
        raise PartitionError(
            "the ranks do not have the same number of training steps, or TensorFlow does not know it",
            expected="one number of steps on all ranks",
            found=f"{counts} on ranks 0 to {channel.size - 1} ({tf.data.UNKNOWN_CARDINALITY} means unknown)",
            remedy="give steps_per_epoch, or share the samples out evenly, as Dataset.tf_dataset does",
        )


@contextlib.contextmanager
def without_keras_warnings() -> Iterator[None]:
    """Keras warns of data sets that end earlier than they said, which those of a rank may do."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")
        yield


def drop_empty_batches(dataset: Any) -> Any:
    """The dataset without batches that hold no sample: their mean loss would be 0/0."""
    if not isinstance(dataset, tf.data.Dataset):
        return dataset
    sizes = [spec.shape[0] for spec in tf.nest.flatten(dataset.element_spec) if spec.shape.rank]
    if not sizes or sizes[0] is not None:
        return dataset

    def holds_samples(*data: Any) -> Any:
        return batch_size(data[0] if len(data) == 1 else data) > 0

    return dataset.filter(holds_samples)
