"""``fit``: Keras's ``Model.fit`` on all ranks."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from matex_data.errors import ArgumentError, PartitionError
from matex_data.mpi.communicator import Equal
from matex_data.mpi.library import MPI
from matex_data.training import keras_api
from matex_data.training.arguments import (
    check_dataset,
    check_keras_options,
    check_model,
    open_checked,
    warn_of_ignored,
)
from matex_data.training.checking.check import Mode
from matex_data.training.checking.fitting import begin_test_check, fit_check
from matex_data.training.comm.channel import Channel, open_channel
from matex_data.training.comm.runtime import Choice, runtime_of, warn_of_shared_gpu
from matex_data.training.distributed_model import DistributedModel, distributed_model, leave_launcher
from matex_data.training.exact.batch_weights import batch_weights
from matex_data.training.exact.determinism import FirstBatchCheck
from matex_data.training.exact.digests import check_same
from matex_data.training.exact.errors import unwrapped_errors
from matex_data.training.exact.preprocessing import check_preprocessing
from matex_data.training.exact.rows import batch_count, is_sharded, shard_rows
from matex_data.training.exact.variables import build, build_without_optimizer, check_equal_weights
from matex_data.training.model_parallel.deferred import initialize_absent
from matex_data.training.model_parallel.layouts.cut_model import cut_model
from matex_data.training.model_parallel.mesh import Mesh
from matex_data.training.model_parallel.stages.model import CUT, MicroBatches, StagedModel
from matex_data.training.reduction.ops import Reducer
from matex_data.training.reduction.rounding import WireDtype
from matex_data.training.replacements import replaced
from matex_data.training.restart.resume import TrainingRun
from matex_data.training.saving import save_by_renaming
from matex_data.training.session import Session
from matex_data.training.zero.optimizer import Totals

BATCH = 32
"""Samples of a batch, as in Keras; of a global batch, at least one for each rank."""


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
    mesh: Mesh | None = None,
    shard_optimizer: bool = False,
    sync_batch_norm: bool = False,
    wire_dtype: WireDtype | None = None,
    collectives: Choice = "auto",
    micro_batches: MicroBatches = None,
    recompute: bool = False,
    split_after: Sequence[str] | None = None,
    verify: Mode = "proven",
    **keras_fit_options: Any,
) -> Any:
    """Train a compiled Keras model data-parallel on all ranks. *Collective*.

    The weights, the logs and the metrics are those of one process that trains on the global batches.

    Parameters
    ----------
    model : compiled Keras model, the same on every rank; the weights of rank 0 are broadcast.
    dataset : ``tf.data.Dataset`` with this rank's rows of every global batch and the same number of steps on every
        rank, as ``Dataset.tf_dataset`` returns it. Or a ``matex_data.Dataset``; ``fit`` then takes its options
        ``batch_size`` (samples of the global batch), ``shuffle``, ``seed`` and ``remainder``, too.
    validation_data : like ``dataset``, but the number of batches may differ between ranks. Or arrays ``(x, y)`` or
        ``(x, y, sample_weight)``, the same on every rank, of which each evaluates its rows. ``validation_batch_size``
        counts the samples of the global batch; without it they are those of ``batch_size``, or 32.
    epochs : epoch with which to end, as in Keras.
    callbacks : Keras callbacks; they get the same logs on every rank. Callbacks that write files run on rank 0 alone.
    checkpoint : folder of one checkpoint, which is replaced after every epoch. If it holds one, training resumes there
        with the next global batch, on any number of ranks; within an epoch if ``dataset`` is a ``matex_data.Dataset``,
        or a ``tf.data.Dataset`` with the same order in every epoch. If a rank receives SIGUSR1, SIGUSR2 or SIGTERM, or
        the time limit of the job is near, all ranks save after the running step and exit with code 75, to be started
        again.
    save_every : write a checkpoint after this number of steps within an epoch, too.
    comm : communicator; None: all ranks of the job.
    shard_optimizer : let each rank keep the state of the optimizer for its section of every weight alone; the weights
        after each step stay those of ``shard_optimizer=False``. It needs an optimizer that updates each element by
        itself, such as SGD, Adam and AdamW. After ``fit`` all ranks have the whole state again.
    sync_batch_norm : let ``BatchNormalization`` use the statistics of the global batch, as one process does.
        Otherwise each rank uses its own rows, and moving statistics are averaged after each epoch and at each
        checkpoint.
    wire_dtype : dtype in which gradients are sent, "float16" or "bfloat16"; see ``distribute``. None: as they are.
    collectives : by which gradients are reduced: "mpi"; "tensorflow", on GPUs NCCL; or "auto": TensorFlow's, if ``matex
        run`` or ``MATEX_COLLECTIVES`` has started them. See [GPUs](training.md#gpus).
    mesh : ranks that hold parts of the model, and the replicas among which the data of ``comm=mesh.data`` is divided.
        Its layouts say which weights are cut over its ranks. If it has several stages, the layers are cut into
        consecutive stages, of which each rank has the gradients and the optimizer's state of one; after training, all
        ranks have all weights, unless the model is deferred.
    micro_batches : number of micro-batches into which a replica's rows of a batch are divided, which pass the stages
        one after the other; the gradients are those of the whole batch. None: as many as have 32 rows. "auto": that of
        the stages, doubled as long as the first steps get faster; without effect where layers such as
        ``BatchNormalization``, which normalizes each micro-batch, and ``Dropout`` let the weights depend on it.
    recompute : compute the results of each stage again when errors come back, instead of keeping them: less memory for
        some third more time.
    split_after : names of the layers, or nested models, after which the model is cut; None: by estimated cost.
    verify : which steps are checked, shards of a batch against their union, as by ``matex run --verify``: "always",
        those of all models; "proven", those of models that do not consist of Keras's own layers and losses; "first",
        the first ones of these; "never", none. If a check fails, all ranks train on the rows of the whole batch from
        then on: right, and no faster than one process. Models on a ``mesh`` are not checked.
    keras_fit_options : other options of ``keras.Model.fit``.

    Returns
    -------
    history : ``keras.callbacks.History``, the same on every rank.

    Raises
    ------
    ArgumentError : an argument is of another kind, or the model is not compiled.
    PartitionError : on all ranks, if the numbers of steps differ, if the checkpoint belongs to other data or to another
        model, if a layout does not fit the model, if all ranks give the same rows as a ``tf.data.Dataset`` of
        training or validation data, or if the ranks end with different weights.
    FormatError : on all ranks, if the checkpoint is damaged.

    Examples
    --------
    >>> import keras, numpy as np, tensorflow as tf, matex_data as md
    >>> x = np.linspace(-1, 1, 32, dtype="float32")[:, None]
    >>> data = tf.data.Dataset.from_tensor_slices((x, 2 * x)).batch(8, drop_remainder=True)
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile(keras.optimizers.SGD(0.5), "mse")
    >>> history = md.training.fit(model, data, epochs=20, verbose=0)
    >>> len(history.history["loss"])
    20
    >>> abs(float(model.layers[0].kernel.numpy()[0, 0]) - 2) < 0.01
    True
    """
    if comm is not None and mesh is not None:
        raise ValueError("give comm or mesh, not both: a mesh has the communicator of its replicas")

    def check() -> None:
        check_model("training.fit", model, compiled=True)
        check_dataset("training.fit", dataset)
        check_keras_options("training.fit", {**keras_fit_options, "callbacks": callbacks})
        if save_every is not None and save_every < 1:
            raise ArgumentError("save_every= is a number of steps", expected="1 or more", found=save_every)

    channel = open_checked("training.fit", fit, locals(), check)
    if mesh is not None:
        verify = "never"
    features = {keras_api.PARTS: mesh is not None, keras_api.CHECKPOINTS: checkpoint is not None}
    world = channel if mesh is None else open_channel(mesh.world)
    given = Equal({"collectives": collectives}, "the ranks choose different collectives", "give the same on all ranks")
    channel.communicator.agreed(lambda: runtime_of(channel, collectives, "chained"), given)
    keras_api.check(world.rank, world.size, keras_api.TRAINING, *(name for name, used in features.items() if used))
    warn_of_shared_gpu(channel.rank)
    world.communicator.on_root(lambda: warn_of_ignored("training.fit", dataset, keras_fit_options))
    if world.size > 1 and mesh is None:
        save_by_renaming(model)
    folder = None if checkpoint is None else Path(checkpoint)
    training_run = TrainingRun(world, folder, channel, keras_fit_options.get("verbose", "auto"), save_every)
    batch = keras_fit_options.pop("validation_batch_size", None) or keras_fit_options.get("batch_size") or BATCH
    data = training_run.resumed_dataset(dataset, keras_fit_options)
    check_steps(world, data, keras_fit_options.get("steps_per_epoch"))
    check_preprocessing(data, channel)
    options_of_stages = {"micro_batches": micro_batches, "recompute": recompute, "split_after": split_after}
    options_of_ranks = {
        "sync_batch_norm": sync_batch_norm,
        "wire_dtype": wire_dtype,
        "shard_optimizer": shard_optimizer,
    }
    options = {**keras_fit_options, "shuffle": False, "epochs": epochs, "callbacks": callbacks}
    leave_launcher(model)
    with (
        cut_over(model, mesh, data.element_spec, shard_optimizer) as totals,
        _distributed(model, channel, mesh, options_of_ranks, options_of_stages, collectives, verify) as distributed,
        distributed.owned_optimizer(totals)
        if shard_optimizer and isinstance(distributed, DistributedModel)
        else contextlib.nullcontext(),
        keras_loop(channel),
        _evaluating_in_callbacks(distributed, verify),
    ):
        session = Session(distributed, options, training_run, shard_optimizer)
        compared = FirstBatchCheck(channel, whole=False, of="training")
        if channel.size > 1 and not is_sharded(data):
            data = compared.recording(data)
        session.begin(data.element_spec)
        options["callbacks"].append(compared)
        if validation_data is not None:
            validation_data = validation_rows(channel, validation_data, batch, options["callbacks"])
            validation_data = evaluation_data(distributed, validation_data, verify)
        if isinstance(distributed, DistributedModel) and channel.size > 1 and verify != "never":
            options["callbacks"].append(fit_check(distributed, verify, data.element_spec))
        with session.running(), training_run.iterating(data):
            history = model.fit(data, validation_data=validation_data, **options)
        if isinstance(distributed, DistributedModel):
            check_equal_weights(model, channel)
        return history


def _distributed(
    model: Any,
    channel: Channel,
    mesh: Mesh | None,
    options: dict[str, Any],
    options_of_stages: dict[str, Any],
    collectives: Choice,
    verify: Mode,
) -> DistributedModel | StagedModel:
    """Return the context manager in which a model trains, in stages if the mesh has more than one.

    Raises
    ------
    PartitionError : options of stages are given without stages.
    """
    staged = mesh is not None and mesh.shape[1] > 1
    given = [name for name, value in options_of_stages.items() if value]
    if given and not staged:
        raise PartitionError(
            f"{given[0]} is an option of training in stages",
            expected="fit(mesh=Mesh(stages=2)), or more stages",
            found="one stage",
            remedy=f"give such a mesh, or leave out {', '.join(given)}",
        )
    if mesh is not None and staged:
        return StagedModel(model, mesh, **options_of_stages, **options)
    if mesh is None and not options["shard_optimizer"]:
        known = options["sync_batch_norm"], options["wire_dtype"], collectives, verify
        return distributed_model(model, channel, *known)
    world = channel if mesh is None else open_channel(mesh.world)
    reducer = Reducer(channel, wire_dtype=options["wire_dtype"], collectives=collectives)
    return DistributedModel(model, channel, options["sync_batch_norm"], reducer, world)


def validation_rows(channel: Channel, data: Any, batch: int, callbacks: list[Any]) -> tf.data.Dataset:
    """Return the batches of validation data with this rank's rows. *Collective*.

    Parameters
    ----------
    data : as of ``fit``.
    batch : samples of a global batch; of a ``matex_data.Dataset`` at least the next multiple of the number of ranks.
    callbacks : those of ``fit``; one is added that compares the first batches of the ranks.

    Raises
    ------
    PartitionError : on all ranks, if they give different arrays, or data of another type.
    """
    if hasattr(data, "tf_dataset"):
        return data.tf_dataset(channel.size * -(-batch // channel.size), remainder="keep")
    if isinstance(data, tf.data.Dataset):
        check_preprocessing(data, channel)
        if channel.size == 1 or is_sharded(data):
            return data
        compared = FirstBatchCheck(channel, whole=False)
        callbacks.append(compared)
        return compared.recording(data)
    if isinstance(data, tuple | list):
        data = keras.tree.lists_to_tuples(data[:-1] if data and data[-1] is None else data)  # TensorFlow stacks lists
    if not isinstance(data, tuple) or any(not hasattr(leaf, "shape") for leaf in tf.nest.flatten(data)):
        raise PartitionError(
            "fit() knows no rows of this rank in its validation data",
            field="validation_data",
            expected="a matex_data.Dataset, arrays (x, y), or a tf.data.Dataset with this rank's rows of every batch",
            found=type(data).__name__,
            remedy="md.training.shard(tf.data.Dataset.from_generator(...).batch(n))",
        )
    check_same(channel, "validation_data", data)
    lengths = {int((*leaf.shape, 1)[0]) for leaf in tf.nest.flatten(data)}
    if len(lengths) > 1:
        raise PartitionError(
            "the arrays have different numbers of samples",
            field="validation_data",
            expected="one number of rows",
            found=", ".join(map(str, sorted(lengths))),
            remedy="give x, y and the weights a value for each sample",
        )
    return shard_rows(tf.data.Dataset.from_tensor_slices(data).batch(batch), channel.rank, channel.size)


def evaluation_data(distributed: DistributedModel | StagedModel, dataset: Any, verify: Mode) -> Any:
    """Return validation data with the same number of batches on all ranks, as far as it is known. *Collective*.

    Evaluations are checked from now on.
    """
    if isinstance(distributed, StagedModel):
        return distributed.pad_batches(dataset)
    if distributed.channel.size == 1:
        return dataset
    distributed.test.gathers = True
    begin_test_check(distributed, verify)
    return distributed.test.pad_batches(dataset)


def _evaluating_in_callbacks(
    distributed: DistributedModel | StagedModel, verify: Mode
) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager: ``model.evaluate``, called by callbacks, has results as in one process.

    Sharded data are evaluated on all ranks, other data, which each rank has as a whole, on this rank alone.
    """
    if isinstance(distributed, StagedModel) or distributed.channel.size == 1:
        return contextlib.nullcontext()
    of_keras = distributed.model.evaluate

    def evaluate(x: Any = None, *args: Any, **kwargs: Any) -> Any:
        if keras_api.OF_FIT in kwargs:
            return of_keras(x, *args, **kwargs)
        with distributed.within_epoch() if is_sharded(x) else distributed.test.on_this_rank():
            if is_sharded(x) and isinstance(x, tf.data.Dataset):
                x = evaluation_data(distributed, x, verify)
            return of_keras(x, *args, **kwargs)

    return replaced(distributed.model, evaluate=evaluate)


@contextlib.contextmanager
def cut_over(model: Any, mesh: Mesh | None, element_spec: Any, shard_optimizer: bool) -> Iterator[Totals]:
    """Context manager: the layers of a model are cut over a mesh, if this has ``model > 1``. *Collective*.

    It gives the sums over the ranks that hold parts of the weights.
    """
    if mesh is not None and mesh.shape[1] > 1:
        yield []  # each rank initializes the weights of its stage
        return
    if CUT in vars(model):
        raise PartitionError(
            f"the deferred model {model.name} was trained in stages, whose ranks have its weights",
            expected="fit with the mesh of these stages",
            found="fit without stages",
            remedy="resume from its checkpoint with a new model, or write it with training.save and load that",
        )
    is_cut = mesh is not None and mesh.shape[2] > 1
    if is_cut or shard_optimizer:
        try:
            build_without_optimizer(model, element_spec)
        except NotImplementedError:  # no call(): its train_step alone makes its variables
            if is_cut:
                raise
            build(model, element_spec)
    if mesh is None or not is_cut:
        initialize_absent(model.variables)
        yield []
        return
    with cut_model(model, mesh, element_spec, owned=shard_optimizer and mesh.shape[0] > 1) as found:
        yield found.ranks.totals()


def check_steps(channel: Channel, dataset: tf.data.Dataset, steps_per_epoch: int | None) -> None:
    """Raise ``PartitionError`` on all ranks unless they have the same number of steps. *Collective*."""
    steps = steps_per_epoch or batch_count(dataset)
    by_rank = channel.host.allgather_object(steps)
    if len(set(by_rank)) > 1 or (steps == tf.data.UNKNOWN_CARDINALITY and channel.size > 1):
        raise PartitionError(
            "the ranks do not have the same number of training steps, or it is unknown",
            expected="the same number of steps on all ranks",
            found=f"{by_rank} on ranks 0 to {channel.size - 1} ({tf.data.UNKNOWN_CARDINALITY} means unknown)",
            remedy="give steps_per_epoch, or distribute the samples evenly, as Dataset.tf_dataset does",
        )


@contextlib.contextmanager
def keras_loop(channel: Channel) -> Iterator[None]:
    """Context manager: a loop of Keras's runs over the data of these ranks, and raises errors of data as they were."""
    with warnings.catch_warnings(), unwrapped_errors(), batch_weights(channel.communicator).left_to_keras():
        warnings.filterwarnings("ignore", "Your input ran out of data")  # normal for the data of a rank
        yield
