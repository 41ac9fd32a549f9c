"""Patch ``fit``, ``evaluate`` and ``predict`` of all Keras models, for scripts written for one process."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data.errors import PartitionError
from matex_data.mpi import deadlines
from matex_data.training.callbacks import rank_callbacks
from matex_data.training.comm.channel import Channel
from matex_data.training.comm.world import alone
from matex_data.training.keras_api import EpochIterator, keras_trainer, pythonify_logs
from matex_data.training.launcher.saving import local_model
from matex_data.training.launcher.verification import verify
from matex_data.training.reduction.ops import Reducer
from matex_data.training.sharding.batch_weights import batch_weights
from matex_data.training.sharding.determinism import FirstBatchCheck
from matex_data.training.sharding.rows import (
    batch_size,
    dataset_element,
    deterministic,
    is_sharded,
    rank_slice,
    shard_rows,
)
from matex_data.training.steps.distributed_model import DistributedModel
from matex_data.training.steps.evaluation import append_empty_batches
from matex_data.training.steps.metrics import combined_logs
from matex_data.training.steps.prediction import predict_stand_ins
from matex_data.training.steps.step import DistributedStep
from matex_data.training.trainer import drop_empty_batches, unwrapped_errors, without_keras_warnings

log = logging.getLogger("matex_data.training")

_current_call: ContextVar[PatchedCall | None] = ContextVar("current_call", default=None)


class PatchedCall:
    """State of one call of a patched method, for the epoch iterators that Keras creates in it.

    Parameters
    ----------
    channel : ranks of the call.
    distributed : model that the call trains on its first dataset, and evaluates on others; None for ``predict``.
    check : compares the first batches of the ranks, if the call trains.
    record_sizes : record the sizes of the global batches.
    verify : run the self-check on the first batch.

    Attributes
    ----------
    spec : element spec of the first dataset; None before Keras iterates over it.
    whole_batches : every rank gets whole batches, of which the training step selects its rows.
    steps : number of batches of every rank, to which empty batches pad shorter data; None: do not pad.
    sizes : recorded sizes of global batches.
    """

    def __init__(
        self,
        channel: Channel,
        distributed: DistributedModel | None = None,
        check: FirstBatchCheck | None = None,
        record_sizes: bool = False,
        verify: bool = False,
    ) -> None:
        self._channel = channel
        self._distributed = distributed
        self._check = check
        self._record_sizes = record_sizes
        self._verify = verify
        self.spec: Any = None
        self.whole_batches = False
        self.steps: int | None = None
        self.sizes: list[int] = []
        self.test = None if distributed is None else distributed.test

    def shard(self, dataset: Any, x: Any) -> tuple[Any, Any]:
        """Shard the dataset that Keras is about to iterate over; in training, the steps select this rank's rows.

        Returns
        -------
        first : dataset of the first epoch; in training, it records the first batch.
        later : dataset of the epochs after it, whose iterators take 0.4 ms to make where those of ``first`` take 7.
        """
        first, self.spec = self.spec is None, self.spec or dataset.element_spec
        check = self._check if first else None  # the first dataset is that of training
        lockstep = self.test is not None and self.test.lockstep and check is None
        if not is_sharded(x):
            if check is not None:
                self.whole_batches = True
                return deterministic(check.recording(dataset)), deterministic(dataset)
            if self._distributed is not None and self._distributed.step.whole:
                return dataset, dataset
            dataset = self._recording_sizes(dataset) if self._record_sizes else dataset
            dataset = shard_rows(dataset, self._channel.rank, self._channel.size)
        if check is None and not self._record_sizes and not lockstep:
            dataset = drop_empty_batches(dataset)
        return dataset, dataset

    def steps_of_test(self, steps: int | None, local: bool) -> int | None:
        """Return the largest number of batches of any rank for the next evaluation; None if nothing is to be padded.

        *Collective* if the data is sharded.

        Parameters
        ----------
        steps : number of batches of this rank; None: unknown.
        local : the data is sharded.
        """
        if self.test is None or (self._check is not None and self.spec is None):
            return None
        by_rank = self._channel.host.allgather_object(steps) if local else [steps]
        self.test.set_lockstep(not local or None not in by_rank)
        return max(by_rank) if local and self.test.lockstep else None

    def verified_iterator(self, iterator: Any) -> Any:
        """Return the iterator of a training epoch after the self-check on its first batch. *Collective*."""
        if self._distributed is None or not self.whole_batches or self._distributed.verified:
            return iterator
        self._distributed.verified = True
        if not self._verify:
            return iterator
        batches = list(itertools.islice(_until_out_of_range(iterator), self._distributed.model.steps_per_execution))
        if not batches:
            return iterator
        verify(self._distributed, keras.tree.map_structure(_without_optionals, batches[0]))
        if any(isinstance(leaf, tf.OptionalSpec) for leaf in tf.nest.flatten(self.spec)):
            return itertools.chain(batches, iterator)
        # With the same element spec, so that the step is traced once.
        return iter(tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=self.spec))

    def _recording_sizes(self, dataset: Any) -> Any:
        return dataset.map(lambda *args: self._record(dataset_element(dataset, args)))

    def _record(self, data: Any) -> Any:
        with tf.control_dependencies([tf.numpy_function(self.sizes.append, [batch_size(data)], [])]):
            return tf.nest.map_structure(tf.identity, data)


class ShardedEpochIterator(EpochIterator):  # type: ignore[misc]  # Keras has no types
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
            sharded = call.shard(self.__dict__["_distributed_dataset"], kwargs.get("x"))
            self.__dict__["_distributed_dataset"], self._matex_later = sharded

    def _enumerate_iterator(self) -> Iterator[Any]:
        for *steps, iterator in super()._enumerate_iterator():  # newer versions of Keras yield two step numbers
            call, self._matex_call = self._matex_call, None
            if call is not None:
                iterator = call.verified_iterator(iterator)
                self.__dict__["_distributed_dataset"] = self._matex_later
            yield (*steps, iterator)

    def _pad(self, steps: int) -> None:
        """Append empty batches, so that this rank has this number of steps."""
        missing, dataset = steps - self.__dict__["_num_batches"], self.__dict__["_distributed_dataset"]
        if missing:
            self.__dict__["_distributed_dataset"] = append_empty_batches(dataset, missing)
        self.data_adapter = _PaddedAdapter(self.__dict__["data_adapter"], steps)
        self._num_batches = steps


def _until_out_of_range(iterator: Any) -> Iterator[Any]:
    """Yield elements until the iterator raises ``OutOfRangeError``."""
    with contextlib.suppress(tf.errors.OutOfRangeError):
        yield from iterator


def _without_optionals(leaf: Any) -> Any:
    """Return None for the optional that stands for None in Keras's datasets."""
    return None if isinstance(leaf, tf.experimental.Optional) else leaf


class _PaddedAdapter:
    """Data adapter of Keras with another number of batches."""

    def __init__(self, adapter: Any, steps: int) -> None:
        self._adapter = adapter
        self.num_batches = steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)


class KerasPatches:
    """Patches of ``keras.Model``. *Collective*."""

    def __init__(self, channel: Channel, reducer: Reducer, sync_batch_norm: bool, verify: bool) -> None:
        self._channel = channel
        self._verify = verify
        self._reducer = reducer
        self._sync_batch_norm = sync_batch_norm
        self._warned = False
        keras_trainer.TFEpochIterator = ShardedEpochIterator
        self._patch("fit", self._fit)
        self._patch("evaluate", self._evaluate)
        self._patch("predict", self._predict)
        self._patch("train_on_batch", self._train_on_batch)

    def _patch(self, name: str, method: Callable[..., Any]) -> None:
        original = getattr(keras.Model, name)
        signature = inspect.signature(original)

        @functools.wraps(original)
        def patched(model: Any, *args: Any, **kwargs: Any) -> Any:
            by_launcher = vars(model).get("_matex_distributed") is not None
            trained_by_fit = isinstance(vars(model).get("train_step"), DistributedStep) and not by_launcher
            if trained_by_fit or "_use_cached_eval_dataset" in kwargs:  # fit calls evaluate
                return original(model, *args, **kwargs)
            if alone.get():
                if name in ("fit", "train_on_batch"):
                    raise PartitionError(
                        f"{name}() was called in a callback that writes files, which runs on one rank alone",
                        expected="training on every rank",
                        remedy="derive the callback from keras.callbacks.Callback, whose hooks run on every rank",
                    )
                with local_model(model):
                    return _call_within(None, functools.partial(original, model, *args), kwargs)
            bound = signature.bind(model, *args, **kwargs)
            given = {key: value for key, value in bound.arguments.items() if key not in ("self", "kwargs")}
            if self._channel.rank > 0 and "verbose" in signature.parameters:
                given["verbose"] = 0
            iteration = batch_weights(self._channel.communicator).left_to_keras()
            with without_keras_warnings(), unwrapped_errors(), iteration, deadlines.collective(f"{name}()"):
                return method(functools.partial(original, model), model, {**given, **bound.arguments.get("kwargs", {})})

        setattr(keras.Model, name, patched)

    def _distributed(self, model: Any) -> DistributedModel:
        """Return the context of a model, which stays open until the model is compiled again. *Collective* at first."""
        found = vars(model).get("_matex_distributed")
        if found is not None and found.is_current():
            return found  # type: ignore[no-any-return]
        if found is not None:
            found.__exit__()
        distributed = DistributedModel(model, self._channel, self._sync_batch_norm, self._reducer)
        distributed.__enter__()
        object.__setattr__(model, "_matex_distributed", distributed)
        return distributed

    def _fit(self, original: Callable[..., Any], model: Any, options: dict[str, Any]) -> Any:
        model._assert_compile_called("fit")
        distributed = self._distributed(model)
        self._warn_of_generator(options.get("x"))
        check = FirstBatchCheck(self._channel)
        call = PatchedCall(self._channel, distributed, check, verify=self._verify)
        if is_sharded(options.get("x")) and not isinstance(options["x"], tf.data.Dataset):
            batch = max(1, (options.get("batch_size") or 32) // self._channel.size)
            steps = -(-len(keras.tree.flatten(options["x"])[0]) // batch)
            options["batch_size"], call.steps = batch, max(self._channel.host.allgather_object(steps))
        callbacks = options.get("callbacks")
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            user_callbacks = keras.tree.flatten(callbacks) if callbacks is not None else []
            options["callbacks"] = rank_callbacks(
                distributed, user_callbacks, lambda: (call.spec, call.whole_batches), [check]
            )
        return _call_within(call, original, options)

    def _warn_of_generator(self, x: Any) -> None:
        """Warn once that every rank makes all batches of a generator, which saves no time."""
        if inspect.isgenerator(x) and self._channel.rank == 0 and not self._warned:
            self._warned = True
            log.warning(
                "the generator given to fit runs on every rank, which trains on its rows of each batch: correct if all "
                "ranks get the same batches, but batches are made no faster than in one process\n"
                "  remedy: give fit arrays, or matex_data.open_dataset(...).tf_dataset(...), of which each rank reads "
                "its own rows only"
            )

    def _evaluate(self, original: Callable[..., Any], model: Any, options: dict[str, Any]) -> Any:
        model._assert_compile_called("evaluate")
        distributed = self._distributed(model)
        if distributed.step.whole:
            return original(**options)
        return _call_within(PatchedCall(self._channel, distributed), original, options)

    def _predict(self, original: Callable[..., Any], model: Any, options: dict[str, Any]) -> Any:
        """Predict this rank's rows; return those of all ranks, in order. *Collective*."""
        distributed = vars(model).get("_matex_distributed")
        if is_sharded(options.get("x")) or (distributed is not None and distributed.step.whole):
            return original(**options)
        predict_stand_ins(model)
        call = PatchedCall(self._channel, record_sizes=True)
        outputs = _call_within(call, original, options)
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
        positions = np.concatenate([self._positions(sizes, rank) for rank in range(self._channel.size)])
        return keras.tree.map_structure(lambda output: self._gather(output, positions), outputs)

    def _gather(self, output: Any, positions: Any) -> Any:
        """Return the rows of all ranks in order: an array, or a ragged tensor if Keras returns one. *Collective*."""
        shapes = self._channel.host.allgather_object(output.shape[1:] if isinstance(output, np.ndarray) else None)
        if shapes[0] is not None and len(set(shapes)) == 1:
            rows = self._channel.host.gather(output)
            out = np.empty_like(rows)
            out[positions] = rows
            return out
        if isinstance(output, tf.SparseTensor):
            raise TypeError(
                "predict on several ranks cannot return sparse tensors; convert them with keras.ops.convert_to_tensor"
            )
        by_rank = self._channel.host.allgather_object([np.asarray(row) for row in output])
        gathered = list(itertools.chain.from_iterable(by_rank))
        ordered = [gathered[i] for i in np.argsort(positions)]
        return tf.RaggedTensor.from_row_lengths(np.concatenate(ordered), [len(row) for row in ordered])

    def _positions(self, sizes: list[int], rank: int) -> Any:
        """Return the positions of a rank's rows in the whole output."""
        starts = np.cumsum([0, *sizes])[:-1]
        slices = [rank_slice(rows, rank, self._channel.size) for rows in sizes]
        return np.concatenate(
            [np.arange(start + s.start, start + s.stop) for start, s in zip(starts, slices, strict=True)]
        )

    def _train_on_batch(self, original: Callable[..., Any], model: Any, options: dict[str, Any]) -> Any:
        """Run one step on this rank's rows; return the metrics of all ranks. *Collective*."""
        distributed = self._distributed(model)
        if distributed.step.whole:
            return original(**options)
        arrays = {name: options[name] for name in ("x", "y", "sample_weight") if options.get(name) is not None}
        data = keras.tree.map_structure(np.asarray, arrays)
        rows = {len(leaf) for leaf in keras.tree.flatten(data)}
        if len(rows) != 1:
            raise ValueError(f"the arrays of a batch must have one length, not {sorted(rows)}")
        whole = not is_sharded(list(arrays.values()))
        spec = keras.tree.map_structure(lambda leaf: tf.TensorSpec((None, *leaf.shape[1:]), leaf.dtype), data)
        if not distributed.prepared:
            distributed.prepare(tuple(spec.values()), whole)
        if whole and self._verify and not distributed.verified:
            verify(distributed, keras.tree.map_structure(keras.ops.convert_to_tensor, tuple(data.values())))
            if distributed.step.whole:
                return original(**options)
        as_dict = options.pop("return_dict", False)
        logs = combined_logs(model, self._channel, original(**{**options, **data}, return_dict=True))
        logs = pythonify_logs(logs)
        return logs if as_dict else model._flatten_metrics_in_order(logs)


def _rows(output: Any) -> int:
    """Return the length of the first axis; 0 if there is none."""
    shape = tuple(output.shape)
    return int(shape[0] or 0) if shape else 0


def _call_within(call: PatchedCall | None, original: Callable[..., Any], options: dict[str, Any]) -> Any:
    token = _current_call.set(call)
    try:
        return original(**options)
    finally:
        _current_call.reset(token)
