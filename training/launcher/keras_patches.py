"""Patch ``fit``, ``evaluate`` and ``predict`` of all Keras models, for scripts written for one process."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data.errors import PartitionError
from matex_data.locks import setting
from matex_data.mpi.abort import abort_job
from matex_data.mpi.activity import collective
from matex_data.mpi.communicator import Equal
from matex_data.training.callbacks import evaluation_callbacks
from matex_data.training.checking.batches import without_optionals
from matex_data.training.checking.check import CheckSchedule, Mode, SelfCheck
from matex_data.training.checking.fitting import TestCheck
from matex_data.training.checking.report import CheckReport
from matex_data.training.checking.rows import ForwardProofs, RowCheck
from matex_data.training.comm.channel import Channel, open_channel
from matex_data.training.comm.world import alone, check_not_alone
from matex_data.training.distributed_model import BY_LAUNCHER, DistributedModel, replace_function
from matex_data.training.exact.digests import check_same, difference
from matex_data.training.exact.listed import own_method
from matex_data.training.exact.preprocessing import check_preprocessing
from matex_data.training.exact.rows import (
    batch_size,
    deterministic,
    is_sharded,
    rank_row_counts,
    recording_sizes,
    shard_rows,
)
from matex_data.training.exact.step import DistributedStep, append_empty_batches
from matex_data.training.inference import in_order_of_batches, stand_ins
from matex_data.training.keras_api import OF_FIT, keras_trainer, pythonify_logs
from matex_data.training.launcher.resuming import ScriptCheckpoints, ScriptRun
from matex_data.training.launcher.root import say_once
from matex_data.training.launcher.root_batches import batches_of_root, draws_in_parallel, warn_of_difference
from matex_data.training.launcher.saving import local_model
from matex_data.training.model_parallel.mesh import Mesh
from matex_data.training.reduction.ops import Reducer
from matex_data.training.replacements import patch
from matex_data.training.restart.data import TrainingIterator
from matex_data.training.session import Session
from matex_data.training.trainer import BATCH, cut_over, keras_loop

TRAINING = ("fit", "train_on_batch")
"""Patched methods that change a model."""
ONE_THREAD = "train one model after the other in one thread; use more ranks, or processes, to train several at once"
_current_call: ContextVar[Any] = ContextVar("current_call", default=None)


class PatchedCall:
    """State of one call of a patched method, for the epoch iterators that Keras creates in it.

    Parameters
    ----------
    distributed : model that the call trains on its first dataset, and evaluates on others; None for ``predict``, and
        for models in stages.
    check : self-check of the model, if the call trains on whole batches.
    run : of ``fit``: its checkpoints; None without.
    asked : of ``fit``: returns whether the script has asked for its rank, on which its data may depend.

    Attributes
    ----------
    spec : element spec of the first dataset; None before Keras iterates over it.
    whole_batches : every rank gets whole batches, of which the training step selects its rows.
    steps : number of batches of every rank, to which empty batches pad shorter data; None: do not pad.
    """

    def __init__(
        self,
        channel: Channel,
        distributed: DistributedModel | None = None,
        check: SelfCheck | None = None,
        record_sizes: bool = False,
        epochs: int = 1,
        run: ScriptRun | None = None,
        asked: Callable[[], bool] = lambda: True,
    ) -> None:
        self.run = run
        self._asked = asked
        self._draws = False
        self._of_rank_0 = False  # batches are those of rank 0, since the ranks' have differed
        self._channel = channel
        self._distributed = distributed
        self.check = check
        self._record_sizes = record_sizes
        self._epochs, self._epoch = epochs, -1
        self._position: dict[str, bool] = {}
        self.spec: Any = None
        self.whole_batches = False
        self.steps: int | None = None
        self.sizes: list[int] = []
        self.test = None if distributed is None else distributed.test

    def shard(self, dataset: Any, x: Any) -> Any:
        """Shard the dataset that Keras is about to iterate over; in training, the steps select this rank's rows."""
        first, self.spec = self.spec is None, self.spec or dataset.element_spec
        trains = first and self.check is not None  # the first dataset is that of training
        check_preprocessing(x, self._channel)
        if is_sharded(x):
            return dataset if self._distributed is not None else deterministic(dataset)  # stages get the same rows
        if trains:
            self.whole_batches = True
            self._draws = isinstance(dataset, tf.data.Dataset) and draws_in_parallel(dataset)
            return deterministic(dataset)
        if self._distributed is not None and self._distributed.step.whole:
            return dataset
        dataset = recording_sizes(dataset, self.sizes) if self._record_sizes else dataset
        size = self._channel.size
        return deterministic(dataset) if size == 1 else shard_rows(dataset, self._channel.rank, size)

    def trains(self) -> bool:
        """Return whether the next dataset is that of training, with checks or checkpoints."""
        return self.spec is None and (self.check is not None or self.run is not None)

    def steps_of_test(self, steps: int | None, local: bool) -> int | None:
        """Return the largest number of batches of any rank for the next evaluation; None if nothing is to be padded.

        *Collective* if the data is sharded.

        Parameters
        ----------
        steps : number of batches of this rank; None: unknown.
        """
        if self.test is None or self.trains():
            return None
        by_rank = self._channel.host.allgather_object(steps) if local else [steps]
        self.test.agrees = local and None in by_rank
        return max(by_rank) if local and not self.test.agrees else None

    def checked_steps(self, steps: Iterator[Any], per_epoch: int | None) -> Iterator[Any]:
        """Yield the executions of a training epoch, and note where they are in training. *Collective* at first.

        Parameters
        ----------
        steps : numbers of the first and of the last step of each execution, and the iterator over batches.
        per_epoch : steps of an epoch, if known.
        """
        assert self._distributed is not None
        assert self.check is not None
        self._epoch += 1
        executed = self._distributed.model.steps_per_execution
        for number, execution in enumerate(steps):
            first, begin = number == 0, execution[0]
            last = self._epoch == self._epochs - 1 and per_epoch is not None and begin + executed >= per_epoch
            fit = first and self._epoch == 0
            self._position = {"first_of_fit": fit, "last_of_fit": last}
            if first and not self.whole_batches:
                self.check.of_shards(self.spec)
            yield execution

    def execute(self, run: Callable[..., Any], iterator: Any) -> Any:
        """Run an execution of steps, each after the self-check of its batch if one is due. *Collective*."""
        assert self.check is not None
        assert self._distributed is not None
        if self.whole_batches:
            return self.check.execute(run, iterator, self.spec, self._position, self._of_root)
        self.check.schedule.steps += self._distributed.model.steps_per_execution
        return run(iterator)

    def _of_root(self, due: bool) -> Callable[[list[Any]], list[Any]] | None:
        """Return what replaces batches by those of rank 0 where the ranks' differ; None if nothing does."""
        return functools.partial(self._sent, due) if due or self._of_rank_0 else None

    def _sent(self, due: bool, batches: list[Any]) -> list[Any]:
        assert self.check is not None
        if self._draws and due and not self._of_rank_0 and batches:
            found = difference(self._channel, tf.nest.map_structure(without_optionals, batches[0]))
            if found is not None and not any(self._channel.host.allgather_object(self._asked())):
                schedule = self.check.schedule
                equal = 0 if schedule.checked is None else schedule.checked + 1
                warn_of_difference(self._channel.rank, found, schedule.steps + 1, equal)
                self._of_rank_0 = True
        return batches_of_root(self._channel, batches) if self._of_rank_0 else batches


class ShardedEpochIterator(TrainingIterator):
    """Epoch iterator of Keras that yields this rank's rows of each batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._matex_call = call = _current_call.get()
        if call is not None:
            local = is_sharded(kwargs.get("x"))
            if call.steps is not None and call.spec is None:
                self._pad(call.steps)
            elif (steps := call.steps_of_test(self.__dict__["_num_batches"], local)) is not None:
                self._pad(steps)
            self._matex_trains = call.trains()
            self.run = call.run if self._matex_trains else None
            self.__dict__["_distributed_dataset"] = call.shard(self.__dict__["_distributed_dataset"], kwargs.get("x"))

    def _get_iterator(self) -> Any:
        call = self._matex_call
        if call is not None and call.run is not None and not self._matex_trains:
            call.run.note_validation(self._distributed_dataset)
        return super()._get_iterator()

    def _enumerate_iterator(self) -> Iterator[Any]:
        steps, call = super()._enumerate_iterator(), self._matex_call
        if call is None or not self._matex_trains or call.check is None:
            return steps
        return call.checked_steps(steps, self.steps_per_epoch or self._num_batches)  # type: ignore[no-any-return]

    def _pad(self, steps: int) -> None:
        """Append empty batches, so that this rank has this number of steps."""
        missing, dataset = steps - self.__dict__["_num_batches"], self.__dict__["_distributed_dataset"]
        if missing:
            self.__dict__["_distributed_dataset"] = append_empty_batches(dataset, missing)
        self.data_adapter = _PaddedAdapter(self.__dict__["data_adapter"], steps)
        self._num_batches = steps


class _PaddedAdapter:
    """Data adapter of Keras with another number of batches."""

    def __init__(self, adapter: Any, steps: int) -> None:
        self._adapter = adapter
        self.num_batches = steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)


class KerasPatches:
    """Patches of ``keras.Model``. *Collective*.

    Parameters
    ----------
    channel, reducer, sync_batch_norm, verify, shard_optimizer : see ``run``.
    checkpoints : those of all calls of ``fit``; None: there are none.

    Attributes
    ----------
    asked : returns whether the script has asked for its rank, as far as that is known.
    """

    def __init__(
        self,
        channel: Channel,
        reducer: Reducer,
        sync_batch_norm: bool,
        verify: Mode,
        shard_optimizer: bool = False,
        checkpoints: ScriptCheckpoints | None = None,
    ) -> None:
        self.asked: Callable[[], bool] = lambda: True
        self._checkpoints = checkpoints
        self._world = self._channel = channel
        self._training = threading.RLock()  # of the thread that trains
        self._mesh: Mesh | None = None
        self._shard_optimizer = shard_optimizer
        self._verify: Mode = verify
        self._report = CheckReport(channel.rank, channel.size)
        self._proofs = ForwardProofs(channel, self._report)
        self._reducer = reducer
        self._sync_batch_norm = sync_batch_norm
        keras_trainer.TFEpochIterator = ShardedEpochIterator
        self._patch("fit", self._fit)
        self._patch("evaluate", self._evaluate)
        self._patch("predict", self._predict)
        self._patch("train_on_batch", self._train_on_batch)

    def use_mesh(self, mesh: Mesh) -> None:
        """Cut the weights of the models that train from now on over the ranks of a mesh. *Collective*."""
        self._mesh = mesh
        self._channel = open_channel(mesh.data)
        before = self._reducer
        options: Any = {"wire_dtype": before.wire_dtype, "collectives": before.collectives}
        self._reducer = Reducer(self._channel, before.strategy, **options)
        self._proofs = ForwardProofs(self._channel, self._report)
        if self._channel.size == 1:
            self._verify = "never"  # nothing is shared out

    def check_loop(self) -> None:
        """Raise ``PartitionError`` on all ranks if a loop of the script's own trains a model that is to be cut.

        Warn once if it keeps the state of an optimizer that is to be cut.
        """
        if self._mesh is not None:
            raise PartitionError(
                "a training loop of this script would train the whole model on every rank",
                expected="model.fit, or matex_data.training.fit",
                found=f"a gradient tape or an optimizer outside of them, on a mesh of shape {self._mesh.shape}",
                remedy="train with model.fit, or run the script without --model and without ModelParallel",
            )
        if self._shard_optimizer:
            say_once(
                self._channel.rank,
                "a training loop of this script keeps the whole state of its optimizer on every rank: "
                "--shard-optimizer cuts that of model.fit alone\n"
                "  remedy: train with model.fit",
            )

    def _patch(self, name: str, method: Callable[..., Any]) -> None:
        signature = inspect.signature(getattr(keras.Model, name))

        def patched(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            by_launcher = vars(model).get(BY_LAUNCHER) is not None
            trained_by_fit = isinstance(vars(model).get("train_step"), DistributedStep) and not by_launcher
            if trained_by_fit or OF_FIT in kwargs:  # fit calls evaluate
                return original(model, *args, **kwargs)
            if alone.get():
                if name in TRAINING:
                    check_not_alone(f"{name}()")
                with local_model(model):
                    return call_within(None, functools.partial(original, model, *args), kwargs)
            bound = signature.bind(model, *args, **kwargs)
            given = {key: value for key, value in bound.arguments.items() if key not in ("self", "kwargs")}
            if self._channel.rank > 0 and "verbose" in signature.parameters:
                given["verbose"] = 0
            thread = self._only_thread(name) if name in TRAINING else contextlib.nullcontext()
            with thread, keras_loop(self._channel), collective(f"{name}()"):
                return method(functools.partial(original, model), model, {**given, **bound.arguments.get("kwargs", {})})

        patch(keras.Model, patched, name)

    @contextmanager
    def _only_thread(self, name: str) -> Iterator[None]:
        """Context manager: a call of a method that trains. *Collective* outside of the main thread.

        End the job if another thread trains: on another rank it may train the model of this one.

        Raises
        ------
        PartitionError : another thread makes this call on another rank.
        """
        thread = threading.current_thread()
        if self._world.size == 1:
            yield
            return
        if not self._training.acquire(blocking=False):
            error = PartitionError(
                f"{name}() is called while another thread trains",
                expected="one thread at a time, in the same order on all ranks",
                found=f"the thread {thread.name!r}",
                remedy=ONE_THREAD,
            )
            abort_job(f"rank {self._world.rank} of {self._world.size} ends the job: {error}")
        try:
            if thread is not threading.main_thread():
                problem = f"{name}() is called by other threads on other ranks"
                self._world.communicator.agree(equal=Equal({"thread": thread.name}, problem, ONE_THREAD))
            yield
        finally:
            self._training.release()

    def _distributed(self, model: Any) -> DistributedModel:
        """Return the context of a model, which stays open until the model is compiled again. *Collective* at first."""
        found = vars(model).get(BY_LAUNCHER)
        if found is not None and found.is_current():
            return found  # type: ignore[no-any-return]
        if found is not None:
            found.__exit__()
        distributed = DistributedModel(model, self._channel, self._sync_batch_norm, self._reducer, self._world)
        distributed.__enter__()
        object.__setattr__(model, BY_LAUNCHER, distributed)
        object.__setattr__(model, "_matex_check", SelfCheck(distributed, self._verify, self._report))
        replace_function(distributed.replacements, model, "train", functools.partial(_execute, model))
        TestCheck(distributed, self._verify, self._report, CheckSchedule())
        return distributed

    def _fit(self, original: Callable[..., Any], model: Any, options: dict[str, Any]) -> Any:
        model._assert_compile_called("fit")
        distributed = self._distributed(model)
        if inspect.isgenerator(options.get("x")):
            say_once(
                self._channel.rank,
                "the generator given to fit runs on every rank, which trains on its rows of each batch: correct if all "
                "ranks get the same batches, but batches are made no faster than in one process\n"
                "  remedy: give fit arrays, or matex_data.open_dataset(...).tf_dataset(...), of which each rank reads "
                "its own rows only",
            )
        check = model._matex_check
        saved, callbacks = self._checkpoints, options.get("callbacks")
        listed = not isinstance(callbacks, keras.callbacks.CallbackList)
        run = None if saved is None else saved.next_run(self._world, self._channel, options, is_within_call())
        session = Session(distributed, options if listed else {}, run, self._shard_optimizer)
        call: PatchedCall
        if listed:
            after = keras.callbacks.LambdaCallback(on_train_end=lambda logs: check.after_training())
            session.begin(lambda: (call.spec, call.whole_batches), after)
        epochs = options.get("epochs", 1) - (options.get("initial_epoch") or 0)
        call = PatchedCall(self._channel, distributed, check, epochs=epochs, run=run, asked=self.asked)
        if is_sharded(options.get("x")) and not isinstance(options["x"], tf.data.Dataset):
            batch = max(1, (options.get("batch_size") or BATCH) // self._channel.size)
            steps = -(-len(keras.tree.flatten(options["x"])[0]) // batch)
            options["batch_size"], call.steps = batch, max(self._channel.host.allgather_object(steps))
        with session.running():
            return self._train(call, original, model, options)

    def _train(self, call: PatchedCall, original: Callable[..., Any], model: Any, options: dict[str, Any]) -> Any:
        """Call ``fit`` on a model that is whole, cut over a mesh, or has a cut optimizer. *Collective*."""
        if self._mesh is None and not self._shard_optimizer:
            return call_within(call, original, options)
        with contextlib.ExitStack() as parts:

            def cut(logs: Any) -> None:
                totals = parts.enter_context(cut_over(model, self._mesh, call.spec, self._shard_optimizer))
                if self._shard_optimizer:
                    parts.enter_context(vars(model)[BY_LAUNCHER].owned_optimizer(totals))
                model.make_train_function(force=True)

            options["callbacks"] = [keras.callbacks.LambdaCallback(on_train_begin=cut), *options["callbacks"]]
            return call_within(call, original, options)

    def _evaluate(self, original: Callable[..., Any], model: Any, options: dict[str, Any]) -> Any:
        model._assert_compile_called("evaluate")
        distributed = self._distributed(model)
        check_same(self._channel, "evaluate()", [options.get(name) for name in DATA])
        if distributed.step.whole:
            return original(**options)
        epoch = distributed.within_epoch() if _current_call.get() is not None else contextlib.nullcontext()
        with epoch:
            checkable = self._verify == "never" or (model.built and not model.run_eagerly)
            if not is_sharded(options.get("x")) and (_is_small(options, self._channel.size) or not checkable):
                with local_model(model):
                    return call_within(None, original, options)
            options["callbacks"] = evaluation_callbacks(distributed, options.get("callbacks"))
            return call_within(PatchedCall(self._channel, distributed), original, options)

    def _predict(self, original: Callable[..., Any], model: Any, options: dict[str, Any]) -> Any:
        """Predict this rank's rows; return those of all ranks, in order. *Collective*."""
        distributed = vars(model).get(BY_LAUNCHER)
        check_same(self._channel, "predict()", options.get("x"))
        check_preprocessing(options.get("x"), self._channel)
        if is_sharded(options.get("x")) or (distributed is not None and distributed.step.whole):
            return original(**options)
        if _is_small(options, self._channel.size) or not self._predicts_shards(model, options.get("x")):
            return call_within(None, original, options)
        call = PatchedCall(self._channel, record_sizes=True)
        proof = distributed.model._matex_check.proof if distributed is not None else None
        known = self._verify == "never" or distributed is None or (proof is not None and proof.proven)
        check = RowCheck(self._channel, model, known, lambda: call.spec, stops=True)
        with stand_ins(model), check.active():
            outputs = call_within(call, original, options)
        cause = check.cause()
        if cause is not None:
            if isinstance(options.get("x"), Iterator):
                raise PartitionError(
                    f"{model.name} cannot predict shards of a batch, and its data are taken",
                    expected="a model that computes each row by itself, or data that can be read again",
                    found=cause,
                    remedy="give predict arrays or a tf.data.Dataset in place of a generator",
                )
            self._report.predicts_whole(model, cause)
            return call_within(None, original, options)
        recorded = list(call.sizes)  # prefetching may have recorded more batches than were predicted
        rows = {_rows(leaf) for leaf in keras.tree.flatten(outputs)}
        by_rank = self._channel.host.allgather_object(rows)
        total = sum(min(counts) for counts in by_rank)
        sizes = recorded[: int(np.searchsorted(np.cumsum(recorded), total)) + 1]
        if any(len(counts) > 1 for counts in by_rank) or sum(sizes) != total:
            raise ValueError(
                "predict on several ranks needs outputs with one row per sample\n"
                f"  expected: {sum(sizes)} rows for batches of {sizes} samples\n"
                f"  found: {[sorted(counts) for counts in by_rank]} rows on ranks 0 to {self._channel.size - 1}\n"
                "  remedy: call predict_on_batch, which runs on the whole batch on every rank"
            )
        ranks = self._channel.size
        order = in_order_of_batches([[rank_row_counts(n, ranks)[rank] for n in sizes] for rank in range(ranks)])
        return keras.tree.map_structure(lambda output: self._gather(output, order), outputs)

    def _predicts_shards(self, model: Any, x: Any) -> bool:
        """Return whether a model may predict shards: it is proven, or was trained on them and checked. *Collective*."""
        check = vars(model).get("_matex_check")
        trained = check is not None and check.schedule.checked is not None
        own = own_method(model, "predict_step") is not None
        if self._verify == "never" or (trained and not own):
            return True
        return not (model.run_eagerly or own) and self._proofs.proven(model, x)

    def _gather(self, output: Any, order: Any) -> Any:
        """Return the rows of all ranks in order: an array, or a ragged tensor if Keras returns one. *Collective*."""
        shapes = self._channel.host.allgather_object(output.shape[1:] if isinstance(output, np.ndarray) else None)
        if shapes[0] is not None and len(set(shapes)) == 1:
            return self._channel.host.gather(output)[order]
        if isinstance(output, tf.SparseTensor):
            raise TypeError(
                "predict on several ranks cannot return sparse tensors; convert them with keras.ops.convert_to_tensor"
            )
        by_rank = self._channel.host.allgather_object([np.asarray(row) for row in output])
        gathered = list(itertools.chain.from_iterable(by_rank))
        ordered = [gathered[i] for i in order]
        return tf.RaggedTensor.from_row_lengths(np.concatenate(ordered), [len(row) for row in ordered])

    def _train_on_batch(self, original: Callable[..., Any], model: Any, options: dict[str, Any]) -> Any:
        """Run one step on this rank's rows; return the metrics of all ranks. *Collective*.

        Raises
        ------
        PartitionError : the weights or the optimizer's state are to be cut over ranks, which ``fit`` does.
        """
        if self._mesh is not None or self._shard_optimizer:
            raise PartitionError(
                "train_on_batch() would train the whole model on every rank",
                expected="model.fit, which cuts the model or the state of its optimizer over the ranks",
                found="train_on_batch() under --model, keras.distribution.ModelParallel or --shard-optimizer",
                remedy="train with model.fit, or leave out that option",
            )
        distributed = self._distributed(model)
        if distributed.step.whole:
            return original(**options)
        data = {name: _as_arrays(options.get(name)) for name in DATA}
        batch = tuple(data.values())
        whole = not is_sharded([leaf for leaf in tf.nest.flatten([*map(options.get, data)]) if leaf is not None])
        rows = int(batch_size(tf.nest.map_structure(_as_tensor, batch)))
        spec = tf.nest.map_structure(functools.partial(_spec_of_rows, rows), batch)
        if not distributed.prepared:
            distributed.prepare(spec, whole)
        check = model._matex_check
        distributed.watch.agree(self._channel)
        if whole and (check.due(first_of_fit=check.schedule.checked is None) or check.is_new(spec)):
            check.before_step(tf.nest.map_structure(_as_tensor, batch), spec, "train_on_batch()")
        elif not whole:
            check.of_shards(spec)
        check.schedule.steps += 1
        if distributed.step.whole:
            return original(**options)
        data = {name: value for name, value in data.items() if value is not None}
        as_dict = options.pop("return_dict", False)
        own = original(**{**options, **data}, return_dict=True)
        distributed.merge_accumulated()
        logs = pythonify_logs(distributed.combined(own, of_batch=True))
        return logs if as_dict else model._flatten_metrics_in_order(logs)


def _execute(model: Any, run: Callable[..., Any], data: Any) -> Any:
    """Run the train function of a model, within ``fit`` with the checks that are due. *Collective*."""
    call = _current_call.get()
    of_fit = call is not None and call.check is model._matex_check and isinstance(data, tf.data.Iterator)
    return call.execute(run, data) if of_fit else run(data)


DATA = ("x", "y", "sample_weight")
"""Parameters of ``evaluate`` and ``train_on_batch`` that hold one row per sample."""
FEW = 16
"""Rows for each rank up to which a single batch is not shared out: that would cost more than it saves."""


def _is_small(options: dict[str, Any], size: int) -> bool:
    """Return whether the data of a call is one small batch of arrays, or Keras cuts all calls off, for a trial."""
    limit = getattr(keras.config, "max_steps_per_epoch", None)  # since Keras 3.8
    if limit is not None and limit() is not None:
        return True
    leaves = [leaf for leaf in keras.tree.flatten(options.get("x")) if leaf is not None]
    if not leaves or not all(isinstance(leaf, np.ndarray | tf.Tensor) and leaf.ndim for leaf in leaves):
        return False
    return len(leaves[0]) <= min(options.get("batch_size") or BATCH, FEW * size)


def _as_arrays(data: Any) -> Any:
    return None if data is None else keras.tree.map_structure(np.asarray, data)


def _as_tensor(leaf: Any) -> Any:
    return None if leaf is None else tf.convert_to_tensor(leaf)


def _spec_of_rows(rows: int, leaf: Any) -> Any:
    """Return the spec of an array of a batch: any number of rows, if it has those of the batch."""
    if leaf is None:
        return None
    return tf.TensorSpec((None, *leaf.shape[1:]) if leaf.shape[:1] == (rows,) else leaf.shape, leaf.dtype)


def _rows(output: Any) -> int:
    """Return the length of the first axis; 0 if there is none."""
    shape = tuple(output.shape)
    return int(shape[0] or 0) if shape else 0


def is_within_call() -> bool:
    """Return whether a patched method is running in this thread."""
    return _current_call.get() is not None


def call_within(call: Any, original: Callable[..., Any], options: dict[str, Any]) -> Any:
    with setting(_current_call, call):
        return original(**options)
