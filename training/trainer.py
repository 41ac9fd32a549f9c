"""``fit``: Keras's own, on all ranks at once."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from mpi4py import MPI

from matex_data.errors import PartitionError
from matex_data.training.build import build, separate_seeds, state
from matex_data.training.callbacks import Agreement, BatchAgreement, Progress, for_rank, watches_batches
from matex_data.training.channel import Channel, channel
from matex_data.training.failures import end_job_on_error, readable_errors
from matex_data.training.metrics import combined_result
from matex_data.training.optimizer import distribute, is_distributed, release
from matex_data.training.ranks import communicator
from matex_data.training.reduction import Reducer
from matex_data.training.replicas import broadcast_in
from matex_data.training.step import SharedStep, batch_size

log = logging.getLogger("matex_data.training")


def fit(
    model: Any,
    dataset: tf.data.Dataset,
    *,
    validation_data: Any = None,
    epochs: int = 1,
    callbacks: Any = None,
    comm: MPI.Intracomm | None = None,
    **keras_fit_options: Any,
) -> Any:
    """Train a compiled Keras model on all ranks together, and return its history. *Collective*.

    Parameters
    ----------
    dataset : this rank's share of every global batch, with the same number of steps on every rank;
        ``Dataset.tf_dataset`` gives it.
    validation_data : this rank's share; ranks may have different numbers of batches.
    callbacks : see the same logs on every rank; those that write files run on rank 0 alone.
    keras_fit_options : any other option of ``keras.Model.fit``.

    Raises
    ------
    PartitionError : on all ranks, if they have different numbers of steps.
    """
    opened = channel(comm)
    end_job_on_error(communicator(comm))
    check_steps(opened, dataset, keras_fit_options.get("steps_per_epoch"))
    with shared(model, opened, dataset.element_spec) as seen:
        chosen = for_rank(callbacks, opened.rank)
        if opened.size > 1:
            each_batch = any(opened.host.objects(watches_batches(chosen)))
            chosen.append(BatchAgreement(opened) if each_batch else Agreement(opened))
        if opened.rank == 0:
            chosen.append(Progress(lambda: int(seen.numpy()) * opened.size))
        else:
            keras_fit_options["verbose"] = 0
        options = {"shuffle": False, **keras_fit_options, "epochs": epochs, "callbacks": chosen}
        with warnings.catch_warnings(), readable_errors():
            warnings.filterwarnings("ignore", "Your input ran out of data")
            return model.fit(dataset, validation_data=without_empty(validation_data), **options)


def check_steps(opened: Channel, dataset: tf.data.Dataset, steps_per_epoch: int | None) -> None:
    """Make sure that no rank has more steps than another. *Collective*.

    Raises
    ------
    PartitionError : on all ranks, if one has.
    """
    steps = steps_per_epoch or int(dataset.cardinality())
    everyone = opened.host.objects(steps)
    if len(set(everyone)) > 1 or (steps == tf.data.UNKNOWN_CARDINALITY and opened.size > 1):
        raise PartitionError(
            "the ranks do not have the same number of training steps, or TensorFlow does not know it",
            expected="one number of steps on all ranks",
            found=f"{everyone} on ranks 0 to {opened.size - 1} ({tf.data.UNKNOWN_CARDINALITY} means unknown)",
            remedy="give steps_per_epoch, or share the samples out evenly, as Dataset.tf_dataset does",
        )


@contextlib.contextmanager
def shared(model: Any, opened: Channel, element_spec: Any) -> Iterator[Any]:
    """Within this context the model trains on all ranks together; gives the count of this rank's samples.

    *Collective*. The model is built, and starts with the weights of rank 0.
    """
    seen = tf.Variable(0, trainable=False, dtype=tf.int64, name="matex_samples")
    released = opened.size > 1 and not is_distributed(model.optimizer)
    compiled = model.jit_compile
    if opened.size > 1:
        _without_xla(model, opened)
        if released:
            distribute(model.optimizer, opened.user)
        build(model, element_spec)
        broadcast_in(opened, state(model))
        separate_seeds(model, opened.rank)
    reducer = None if _equal_batches(opened, element_spec) else Reducer(opened)
    overridden: dict[str, Any] = {"train_step": SharedStep(model, reducer, seen)}
    if opened.size > 1:
        overridden["_get_metrics_result_or_logs"] = lambda logs: combined_result(model, opened, logs)
    try:
        with _overriding(model, overridden):
            yield seen
    finally:
        model._jit_compile = compiled
        if released:
            release(model.optimizer)


@contextlib.contextmanager
def _overriding(model: Any, methods: dict[str, Any]) -> Iterator[None]:
    """Replace methods of this one model, and forget the graphs that were made with other ones."""
    hidden = {name: vars(model)[name] for name in methods if name in vars(model)}
    for name, method in methods.items():
        object.__setattr__(model, name, method)
    object.__setattr__(model, "train_function", None)
    try:
        yield
    finally:
        for name in methods:
            object.__delattr__(model, name)
        for name, method in hidden.items():
            object.__setattr__(model, name, method)
        object.__setattr__(model, "train_function", None)


def _without_xla(model: Any, opened: Channel) -> None:
    if model.jit_compile:
        if opened.rank == 0:
            log.warning("XLA cannot compile communication: %s trains without jit_compile", model.name)
        model._jit_compile = False


def _equal_batches(opened: Channel, element_spec: Any) -> bool:
    """Whether the batches of all ranks have one size, which the element spec knows."""
    if opened.size == 1:
        return True
    leaves = [leaf for leaf in tf.nest.flatten(element_spec) if leaf is not None and hasattr(leaf, "shape")]
    size = leaves[0].shape[0] if leaves and leaves[0].shape.rank else None
    everyone = opened.host.objects(size)
    return everyone[0] is not None and len(set(everyone)) == 1


def without_empty(dataset: Any) -> Any:
    """The dataset without batches that hold no sample: their mean loss would be 0/0."""
    if not isinstance(dataset, tf.data.Dataset):
        return dataset
    sizes = [spec.shape[0] for spec in tf.nest.flatten(dataset.element_spec) if spec.shape.rank]
    if not sizes or sizes[0] is not None:
        return dataset

    def holds_samples(*data: Any) -> Any:
        return batch_size(data[0] if len(data) == 1 else data) > 0

    return dataset.filter(holds_samples)
