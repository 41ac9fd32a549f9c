"""``evaluate`` and ``predict``: Keras's methods on all ranks, each of which computes its share of the samples."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data._types import Integers
from matex_data.epochs.tfdata import marked_as_sharded, sharded_source
from matex_data.errors import ArgumentError, PartitionError
from matex_data.mpi.library import MPI
from matex_data.training import keras_api
from matex_data.training.arguments import (
    check_dataset,
    check_keras_options,
    check_model,
    open_checked,
    warn_of_ignored,
)
from matex_data.training.callbacks import evaluation_callbacks
from matex_data.training.checking.check import Mode
from matex_data.training.checking.rows import RowCheck
from matex_data.training.comm.channel import Channel
from matex_data.training.comm.world import check_not_alone, running_alone
from matex_data.training.distributed_model import BY_LAUNCHER, DistributedModel, evaluated_model, open_context
from matex_data.training.exact.listed import agreed_proof, specs_of
from matex_data.training.exact.preprocessing import check_preprocessing
from matex_data.training.exact.rows import batch_size as rows_of
from matex_data.training.exact.rows import dataset_element, recording_sizes
from matex_data.training.exact.step import StandInPredictStep
from matex_data.training.exact.variables import build_without_optimizer, replicated_weights
from matex_data.training.model_parallel.deferred import initialize_absent
from matex_data.training.model_parallel.stages.model import StagedModel, stages_of
from matex_data.training.partition.parts import broadcast_in, part_of
from matex_data.training.prediction_file import write_predictions
from matex_data.training.reduction.gathering import gathered
from matex_data.training.replacements import replaced
from matex_data.training.trainer import BATCH, cut_over, evaluation_data, keras_loop

PREDICTING = "_matex_predicting"
"""Attribute of a model: what its latest prediction of batches depended on, and the step and function of it."""


def evaluate(
    model: Any,
    dataset: Any,
    *,
    batch_size: int | None = None,
    comm: MPI.Intracomm | None = None,
    verify: Mode = "proven",
    **keras_evaluate_options: Any,
) -> Any:
    """Evaluate a compiled Keras model on all ranks, each of which computes its rows of every batch. *Collective*.

    Loss and metrics are those of one process on all samples, each of which counts once, however unevenly the ranks
    share them.

    Parameters
    ----------
    model : compiled Keras model, the same on every rank; the weights of rank 0 are broadcast.
    dataset : ``matex_data.Dataset``, of which all samples are evaluated; or a ``tf.data.Dataset`` with this rank's rows
        of every global batch, as ``Dataset.tf_dataset(..., remainder="keep")`` and ``shard`` return it.
    batch_size : samples of a global batch of a ``matex_data.Dataset``, a multiple of the number of ranks. None: 32, or
        the next multiple.
    comm : communicator; None: all ranks of the job.
    verify : which models are checked, a batch of all ranks against their shards, as by ``fit``. If a check fails, all
        ranks evaluate whole batches.
    keras_evaluate_options : other options of ``keras.Model.evaluate``, such as ``return_dict``.

    Returns
    -------
    results : as of ``keras.Model.evaluate``, the same on every rank.

    Raises
    ------
    ArgumentError : ``model`` is not compiled, or ``dataset`` neither of these.
    PartitionError : on all ranks, if their number does not divide ``batch_size``; in a callback that runs on one rank
        alone; if the model had to be trained on whole batches under ``matex run``.
    DataError : on all ranks, if samples cannot be read.

    Examples
    --------
    >>> import keras, numpy as np, tensorflow as tf, matex_data as md
    >>> x = np.arange(10, dtype="float32")[:, None]
    >>> data = tf.data.Dataset.from_tensor_slices((x, x + 2)).batch(4)
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])
    >>> model.compile(loss="mse")
    >>> md.training.evaluate(model, md.training.shard(data), verbose=0)
    4.0
    """
    channel, options = _begin(evaluate, locals(), keras_evaluate_options)
    if hasattr(dataset, "tf_dataset"):
        batch_size = channel.size * -(-BATCH // channel.size) if batch_size is None else batch_size
        dataset = dataset.tf_dataset(batch_size, remainder="keep")
    with keras_loop(channel), _evaluating(model, channel, dataset, verify) as (distributed, by_launcher):
        if not by_launcher:
            dataset = evaluation_data(distributed, dataset, verify)
            options["callbacks"] = evaluation_callbacks(distributed, options.get("callbacks"))
        own = marked_as_sharded(dataset.take(-1), channel.communicator)  # a copy, which alone is marked
        return model.evaluate(own, **options)


@contextlib.contextmanager
def _evaluating(
    model: Any, channel: Channel, dataset: tf.data.Dataset, verify: Mode
) -> Iterator[tuple[DistributedModel | StagedModel, bool]]:
    """Context manager: evaluate on all ranks, also within ``fit``; whether ``matex run`` does it already. *Collective*.

    Raises
    ------
    PartitionError : on all ranks, if the model is trained on whole batches.
    """
    within, staged = open_context(model), stages_of(model)
    if staged is not None:
        yield staged, False
        return
    if within is None:
        with cut_over(model, None, dataset.element_spec, False):
            build_without_optimizer(model, dataset.element_spec)
            check_preprocessing(model, channel)
            broadcast_in(channel, replicated_weights(model))
            with evaluated_model(model, channel, verify) as distributed:
                yield distributed, False
        return
    if within.step.whole:
        raise PartitionError(
            f"{model.name} was trained on whole batches on every rank, since it cannot be trained on rows of them",
            expected="a model that is the same function of each sample, whatever the batch",
            remedy="evaluate it with model.evaluate, on data that every rank has as a whole",
        )
    with within.within_epoch():
        yield within, vars(model).get(BY_LAUNCHER) is within


def predict(
    model: Any,
    dataset: Any,
    *,
    batch_size: int | None = None,
    gather: bool = False,
    to: str | os.PathLike[str] | None = None,
    fields: Sequence[str] = (),
    comm: MPI.Intracomm | None = None,
    verify: Mode = "proven",
    **keras_predict_options: Any,
) -> Any:
    """Predict with a Keras model on all ranks, each of which computes its share of the samples. *Collective*.

    Parameters
    ----------
    model : Keras model, the same on every rank; the weights of rank 0 are broadcast.
    dataset : ``matex_data.Dataset``, of which each rank reads its block of the samples, some megabytes at a time, and
        of those with targets the inputs alone. Or a ``tf.data.Dataset`` with this rank's rows of every global batch.
    batch_size : samples that all ranks together predict at once, of a ``matex_data.Dataset``; results do not depend on
        it. None: 32, or one for each rank.
    gather : return the rows of all ranks on every rank. Otherwise each rank has its own in memory, and no other.
    to : path of a file for the predictions of all samples of a ``matex_data.Dataset``, in the order of the files.
        ``.parquet`` and ``.csv`` get a column ``prediction``, or ``prediction_0``, ``prediction_1``, ... for many
        numbers a sample; ``.h5`` gets an array ``prediction`` of any shape. Outputs that are a dict have its names.
        Each rank writes what it predicts to a part beside the file, which rank 0 joins: no rank has more than a window
        of outputs in memory, and another file of that name is replaced once the new one is complete.
    fields : fields to write beside the predictions, also of the files, such as the ids of the samples.
    comm : communicator; None: all ranks of the job.
    verify : which models are checked, the rows of a first batch against fewer of them, as by ``fit``.
    keras_predict_options : other options of ``keras.Model.predict``. Of a ``matex_data.Dataset``, Keras's method is
        called for each window of samples, and so are the hooks of callbacks that begin and end a prediction.

    Returns
    -------
    outputs : ndarray of shape (samples, ...), or nested ones, as of ``keras.Model.predict``. Of a
        ``matex_data.Dataset``: in the order of the files, for the samples that ``load`` returns on this rank, which may
        be none; with ``gather`` for all samples. Of a ``tf.data.Dataset``: in the order of its rows; with ``gather``
        batch by batch, and within a batch by rank. With ``to``: None.

    Raises
    ------
    ArgumentError : ``model`` is no model, or ``dataset`` neither of these; ``steps`` of a ``matex_data.Dataset``.
    TypeError : with ``gather``, an output is sparse or ragged; ``to`` with ``gather`` or without a
        ``matex_data.Dataset``; ``fields`` without ``to``.
    PartitionError : on all ranks, in a callback that runs on one rank alone; outputs do not have one row per sample;
        batches are padded; a check finds that a row's outputs depend on other rows, so that they are not those of one
        process; outputs do not fit the file.
    DataError : on all ranks, if samples cannot be read, or the file cannot be written.

    Examples
    --------
    >>> import keras, numpy as np, tensorflow as tf, matex_data as md
    >>> data = tf.data.Dataset.from_tensor_slices(np.arange(5, dtype="float32")[:, None]).batch(4)
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(2)])
    >>> md.training.predict(model, md.training.shard(data), gather=True, verbose=0)[:, 0].tolist()
    [0.0, 2.0, 4.0, 6.0, 8.0]

    >>> import pandas, pathlib, tempfile
    >>> data = md.open_dataset({"x": np.ones((3, 1), "f4"), "event": np.arange(3)}, inputs="x")
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "scores.csv"
    >>> md.training.predict(model, data, to=path, fields=["event"])
    >>> pandas.read_csv(path).to_dict("list")
    {'event': [0, 1, 2], 'prediction': [2, 2, 2]}
    """
    _check_target(dataset, gather, to, fields)
    if hasattr(dataset, "tf_dataset") and keras_predict_options.get("steps") is not None:
        raise ArgumentError(
            "training.predict() takes no steps= with a matex_data.Dataset, whose samples it predicts in windows",
            expected="all samples",
            found=f"steps={keras_predict_options['steps']}",
            remedy='dataset.split(...), or steps= with dataset.tf_dataset(batch_size, remainder="keep")',
        )
    channel, options = _begin(predict, locals(), keras_predict_options)
    with keras_loop(channel):
        staged = stages_of(model)
        if open_context(model) is None and staged is None:
            initialize_absent(model.variables)
            check_preprocessing(model, channel)
            broadcast_in(channel, replicated_weights(model))
        spec = getattr(dataset, "element_spec", None)
        unchecked = verify == "never" or staged is not None
        leaves = [] if spec is None else specs_of(spec)  # of a matex_data.Dataset each has a row for each sample
        known = unchecked or (
            verify != "always" and agreed_proof(channel, model, leaves, losses=False, step="predict_step").proven
        )
        run = _Prediction(model, channel, options, RowCheck(channel, model, known, lambda: spec))
        if hasattr(dataset, "tf_dataset"):
            size = BATCH if batch_size is None else batch_size
            windows = itertools.starmap(run.of_window, dataset._matex_input_batches(max(1, -(-size // channel.size))))
            if to is not None:
                ids = dataset.load(fields=fields) if fields else {}
                return write_predictions(channel.communicator, to, ids, windows, run.check_rows)
            outputs, sizes = keras.tree.map_structure(_joined, *windows), None
        else:
            outputs, sizes = run.of_batches(dataset)
        run.check_rows()
        return run.gathered(outputs, sizes) if gather else outputs


class _Prediction:
    """Predictions of this rank, with options of ``keras.Model.predict`` and a check of the first batch."""

    def __init__(self, model: Any, channel: Channel, options: dict[str, Any], check: RowCheck) -> None:
        self._model, self._channel, self._options, self._check = model, channel, options, check
        self._staged = stages_of(model) is not None

    def of_window(self, batches: tf.data.Dataset, samples: int) -> Any:
        """Return the outputs for a window of samples; without any, the batches have one to discard."""
        outputs = self._predict(batches)
        return self._checked(outputs, samples) if samples else keras.tree.map_structure(lambda o: o[:0], outputs)

    def of_batches(self, dataset: tf.data.Dataset) -> tuple[Any, list[int]]:
        """Return the outputs for batches, and the rows of each batch."""
        source = sharded_source(dataset)
        if source is not None and hasattr(source, "matex_batches") and source.matex_batches.schedule.remainder == "pad":
            raise PartitionError(
                "predict() would predict the padding of batches, too",
                expected="batches of samples",
                found='tf_dataset(remainder="pad")',
                remedy='give remainder="keep", or the matex_data.Dataset itself',
            )
        if steps := self._options.pop("steps", None):  # of whole executions, and no batch more is recorded
            executed = self._model.steps_per_execution
            dataset = dataset.take(-(-steps // executed) * executed)
        sizes: list[int] = []
        recorded = recording_sizes(dataset, sizes)
        if self._staged:  # a batch without rows has no micro-batch
            recorded = recorded.filter(lambda *elements: rows_of(dataset_element(dataset, elements)) > 0)
        with stand_ins(self._model) if self._channel.size > 1 and not self._staged else contextlib.nullcontext():
            try:
                outputs = self._predict(recorded)
            except ValueError:
                if sum(sizes):
                    raise
                return self._none(dataset.element_spec), sizes
        return self._checked(outputs, sum(sizes)), sizes

    def _predict(self, batches: tf.data.Dataset) -> Any:
        alone = contextlib.nullcontext() if self._staged else running_alone()
        with alone, self._check.active():  # ranks, or replicas in stages, have different numbers of windows
            return self._model.predict(batches, **self._options)

    def check_rows(self) -> None:
        """Raise ``PartitionError`` on all ranks if the outputs of a row depend on other rows. *Collective*."""
        cause = self._check.cause()
        if cause is not None:
            raise PartitionError(
                f"{self._model.name} predicts a row otherwise if its batch has other rows, and each rank has its own",
                expected="a model that computes each row by itself",
                found=cause,
                remedy='model.predict on data that every rank has as a whole; verify="never", if this is intended',
            )

    def _none(self, spec: Any) -> Any:
        """Return the outputs for no samples."""
        blank = tf.nest.map_structure(lambda s: tf.zeros([1, *(n or 1 for n in s.shape[1:])], s.dtype), spec)
        return self.of_window(tf.data.Dataset.from_tensors(blank), 0)

    def _checked(self, outputs: Any, samples: int) -> Any:
        """Return outputs, or raise ``PartitionError`` if one of them does not have a row for each sample."""
        found = [output.shape[0] if len(output.shape) else None for output in keras.tree.flatten(outputs)]
        if set(found) - {samples}:
            raise PartitionError(
                f"{self._model.name} does not predict one row for each sample",
                expected=f"{samples} rows for as many samples",
                found=f"{found} rows in its outputs",
                remedy="predict batch by batch, with model.predict_on_batch",
            )
        return outputs

    def gathered(self, outputs: Any, sizes: list[int] | None) -> Any:
        """Return the outputs of all ranks on every rank. *Collective*.

        Parameters
        ----------
        outputs : of this rank.
        sizes : rows of each batch of this rank, whose rows are in the order of batches; None: in that of ranks.
        """
        if any(isinstance(leaf, tf.SparseTensor | tf.RaggedTensor) for leaf in keras.tree.flatten(outputs)):
            raise TypeError("sparse and ragged outputs are not gathered\n  remedy: predict with gather=False")
        rows = keras.tree.map_structure(lambda output: gathered(self._channel, output), outputs)
        if sizes is None:
            return rows
        positions = in_order_of_batches(self._channel.host.allgather_object(sizes))
        return keras.tree.map_structure(lambda output: output[positions], rows)


def in_order_of_batches(sizes: list[list[int]]) -> Integers:
    """Return for each row, batch by batch and within one by rank, its position among the rows of rank after rank.

    Parameters
    ----------
    sizes : rows of each batch, by rank.

    Examples
    --------
    >>> in_order_of_batches([[2, 1], [1]]).tolist()
    [0, 1, 3, 2]
    """
    steps = [np.repeat(np.arange(len(of_rank)), of_rank) for of_rank in sizes]
    positions: Integers = np.argsort(np.concatenate([*steps, np.empty(0, np.int64)]), kind="stable")
    return positions


def _joined(*outputs: Any) -> Any:
    if len(outputs) == 1:
        return outputs[0]
    return np.concatenate(outputs) if isinstance(outputs[0], np.ndarray) else tf.concat(outputs, 0)


@contextlib.contextmanager
def stand_ins(model: Any) -> Iterator[None]:
    """Context manager: batches without rows can be predicted, by a step that is traced once for an unchanged model."""
    step = model.predict_step
    compiled = getattr(model, "_loss_tracker", None)  # another one since each compile, after which Keras traces anew
    options = compiled, model.predict_function, model.jit_compile, model.run_eagerly, model.steps_per_execution
    parts = [getattr(step, "__func__", step), *options, *model._flatten_layers(), *(v.value for v in model.variables)]
    before, step, function = vars(model).get(PREDICTING, ([], None, None))
    if len(before) != len(parts) or any(a is not b for a, b in zip(before, parts, strict=True)):
        step, function = StandInPredictStep(model), None
    with replaced(model, predict_step=step, predict_function=function):
        yield
        object.__setattr__(model, PREDICTING, (parts, step, model.predict_function))


def _check_target(dataset: Any, gather: bool, to: Any, fields: Sequence[str]) -> None:
    """Raise ``TypeError`` if arguments of ``predict`` do not go with each other."""
    if to is None and fields:
        raise TypeError("predict(fields=) writes fields beside predictions\n  remedy: give to=, or data.load(fields=)")
    if to is not None and (gather or not hasattr(dataset, "tf_dataset")):
        raise TypeError(
            "predict(to=) writes all samples of a matex_data.Dataset, and returns nothing\n"
            "  remedy: give the Dataset in place of its tf_dataset(...), without gather=True"
        )


def _begin(
    function: Callable[..., Any], arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[Channel, dict[str, Any]]:
    """Return the ranks that share the rows of a call, which is checked, and its options of Keras here. *Collective*.

    Parameters
    ----------
    function, arguments : ``evaluate`` or ``predict``, and what it is given.
    options : those of Keras among it.
    """
    call, dataset = f"training.{function.__name__}", arguments["dataset"]

    def check() -> None:
        check_model(call, arguments["model"], compiled=function is evaluate)
        check_dataset(call, dataset)
        check_keras_options(call, options)

    check_not_alone(f"{function.__name__}()")
    channel = world = open_checked(call, function, arguments, check)
    channel.communicator.on_root(lambda: warn_of_ignored(call, dataset, arguments))
    staged = stages_of(arguments["model"])
    if staged is not None:
        channel, world = staged.replicas, staged.world
    elif "_matex_cut_model" not in vars(arguments["model"]):
        _check_whole(arguments["model"])
    keras_api.check(channel.rank, channel.size, keras_api.TRAINING)
    check_preprocessing(dataset, channel)
    default = 0 if function is predict and hasattr(dataset, "tf_dataset") else "auto"  # Keras would show each window
    return channel, {"verbose": default, **options} if world.rank == 0 else {**options, "verbose": 0}


def _check_whole(model: Any) -> None:
    """Raise ``PartitionError`` if a rank has parts of weights, with which layers compute after training alone."""
    parts = [variable.path for variable in model.variables if part_of(variable) is not None]
    if parts:
        raise PartitionError(
            f"the deferred model {model.name} is in parts, with which its layers compute after training alone",
            field=parts[0],
            expected="a model that is trained on its mesh, or a whole one",
            found="a part of a weight",
            remedy="train it first, with training.fit(model, data, mesh=mesh)",
        )
