"""``fit``, ``evaluate`` and ``predict`` of every Keras model, for scripts that know nothing of ranks."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer

from matex_data import liveness
from matex_data.errors import PartitionError
from matex_data.training.alike import SameBatches
from matex_data.training.callbacks import together
from matex_data.training.channel import Channel
from matex_data.training.failures import readable_errors
from matex_data.training.loops import keras_iterates
from matex_data.training.metrics import combined_result
from matex_data.training.ranks import alone
from matex_data.training.reduction import Reducer
from matex_data.training.rows import is_local, share_rows, whole_element
from matex_data.training.saving import whole_model
from matex_data.training.sharing import Sharing
from matex_data.training.step import SharedStep, batch_size
from matex_data.training.trainer import quietly, without_empty

log = logging.getLogger("matex_data.training")

_job: ContextVar[Job | None] = ContextVar("job", default=None)


class Job:
    """One call of a patched method.

    Parameters
    ----------
    same : of a call that trains on the first data set that it iterates over, and evaluates on others:
        compares the ranks' data.
    noting : keep the sizes of the global batches.
    """

    def __init__(self, opened: Channel, same: SameBatches | None = None, noting: bool = False) -> None:
        self._channel = opened
        self._same = same
        self._whole = same is not None or noting
        self._noting = noting
        self.spec: Any = None
        self.steps: int | None = None  # of each rank; where one has fewer, empty batches are added
        self.sizes: list[int] = []

    def share(self, dataset: Any, x: Any) -> Any:
        """This rank's rows of what Keras is about to iterate over."""
        if not is_local(x):
            if self._noting:
                dataset = self._noting_sizes(dataset)
            if self._same is not None and self.spec is None:
                dataset = self._same.noting(dataset)
            dataset = share_rows(dataset, self._channel.rank, self._channel.size)
        first, self.spec = self.spec is None, self.spec or dataset.element_spec
        return dataset if first and self._whole else without_empty(dataset)

    def _noting_sizes(self, dataset: Any) -> Any:
        return dataset.map(lambda *parts: self._note(whole_element(dataset, parts)))

    def _note(self, data: Any) -> Any:
        with tf.control_dependencies([tf.numpy_function(self.sizes.append, [batch_size(data)], [])]):
            return tf.nest.map_structure(tf.identity, data)


class SharedEpochs(keras_trainer.TFEpochIterator):  # type: ignore[misc]  # Keras has no types
    """Keras's iterator over batches, whatever they come from, with this rank's rows of each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        job = _job.get()
        if job is not None:
            if job.steps is not None and job.spec is None:
                self._lengthen(job.steps)
            self.__dict__["_distributed_dataset"] = job.share(self.__dict__["_distributed_dataset"], kwargs.get("x"))

    def _lengthen(self, steps: int) -> None:
        """Add empty batches, so that this rank has as many steps as the others."""
        missing, dataset = steps - self.__dict__["_num_batches"], self.__dict__["_distributed_dataset"]
        if missing:
            nothing = tf.nest.map_structure(
                lambda leaf: tf.zeros([0, *leaf.shape[1:]], leaf.dtype), dataset.element_spec
            )
            filler = tf.data.Dataset.from_tensors(nothing).repeat(missing)
            self.__dict__["_distributed_dataset"] = dataset.concatenate(filler)
        self.data_adapter = _Longer(self.__dict__["data_adapter"], steps)
        self._num_batches = steps


class _Longer:
    """Keras's data adapter with another number of batches."""

    def __init__(self, adapter: Any, steps: int) -> None:
        self._adapter = adapter
        self.num_batches = steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)


class KerasPatches:
    """Patches ``keras.Model``. *Collective*."""

    def __init__(self, opened: Channel, reducer: Reducer, sync_batch_norm: bool) -> None:
        self._channel = opened
        self._reducer = reducer
        self._sync_batch_norm = sync_batch_norm
        self._told = False
        keras_trainer.TFEpochIterator = SharedEpochs
        self._patch("fit", self._fit)
        self._patch("evaluate", self._evaluate)
        self._patch("predict", self._predict)
        self._patch("train_on_batch", self._train_on_batch)

    def _patch(self, name: str, method: Callable[..., Any]) -> None:
        original = getattr(keras.Model, name)
        signature = inspect.signature(original)

        @functools.wraps(original)
        def patched(model: Any, *args: Any, **kwargs: Any) -> Any:
            mine = vars(model).get("_matex_sharing")
            foreign = isinstance(vars(model).get("train_step"), SharedStep) and mine is None
            if foreign or "_use_cached_eval_dataset" in kwargs:  # fit evaluates its validation data
                return original(model, *args, **kwargs)
            if alone.get():  # a callback of this rank alone
                if name in ("fit", "train_on_batch"):
                    raise PartitionError(
                        f"{name}() within a callback that runs on one rank alone, since it writes files",
                        expected="every rank trains",
                        remedy="derive the callback from keras.callbacks.Callback, whose hooks run on every rank",
                    )
                with whole_model(model):
                    return _within(None, functools.partial(original, model, *args), kwargs)
            bound = signature.bind(model, *args, **kwargs)
            given = {key: value for key, value in bound.arguments.items() if key not in ("self", "kwargs")}
            if self._channel.rank > 0 and "verbose" in signature.parameters:
                given["verbose"] = 0
            with quietly(), readable_errors(), keras_iterates(), liveness.collective(f"{name}()"):
                return method(functools.partial(original, model), model, {**given, **bound.arguments.get("kwargs", {})})

        setattr(keras.Model, name, patched)

    def _sharing(self, model: Any) -> Sharing:
        """The model's context, which stays open until it is compiled again. *Collective* at first."""
        found = vars(model).get("_matex_sharing")
        if found is not None and found.is_current():
            return found  # type: ignore[no-any-return]
        if found is not None:
            found.__exit__()
        sharing = Sharing(model, self._channel, self._sync_batch_norm, self._reducer)
        sharing.__enter__()
        object.__setattr__(model, "_matex_sharing", sharing)
        return sharing

    def _fit(self, original: Callable[..., Any], model: Any, options: dict[str, Any]) -> Any:
        model._assert_compile_called("fit")
        sharing = self._sharing(model)
        self._tell_of_generator(options.get("x"))
        same = SameBatches(self._channel)
        job = Job(self._channel, same)
        if is_local(options.get("x")) and not isinstance(options["x"], tf.data.Dataset):
            batch = max(1, (options.get("batch_size") or 32) // self._channel.size)
            steps = -(-len(keras.tree.flatten(options["x"])[0]) // batch)
            options["batch_size"], job.steps = batch, max(self._channel.host.objects(steps))
        callbacks = options.get("callbacks")
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            users = keras.tree.flatten(callbacks) if callbacks is not None else []
            options["callbacks"] = together(sharing, users, lambda: job.spec, [same])
        return _within(job, original, options)

    def _tell_of_generator(self, x: Any) -> None:
        """Once: every rank makes all batches of a generator, which then has no use of more ranks."""
        if inspect.isgenerator(x) and self._channel.rank == 0 and not self._told:
            self._told = True
            log.warning(
                "the generator given to fit runs on every rank, which trains on its rows of each batch: right if all "
                "ranks get the same batches, but batches are made no faster than in one process\n"
                "  remedy: give fit arrays, or matex_data.open_dataset(...).tf_dataset(...), of which each rank reads "
                "its part alone"
            )

    def _evaluate(self, original: Callable[..., Any], model: Any, options: dict[str, Any]) -> Any:
        model._assert_compile_called("evaluate")
        self._sharing(model)
        return _within(Job(self._channel), original, options)

    def _predict(self, original: Callable[..., Any], model: Any, options: dict[str, Any]) -> Any:
        """Each rank predicts its rows; all get the whole, in order. *Collective*."""
        if is_local(options.get("x")):
            return original(**options)
        job = Job(self._channel, noting=True)
        outputs = _within(job, original, options)
        places = np.concatenate([self._places(job.sizes, rank) for rank in range(self._channel.size)])

        def whole(mine: Any) -> Any:
            rows = self._channel.host.gather(mine)
            out = np.empty_like(rows)
            out[places] = rows
            return out

        return keras.tree.map_structure(whole, outputs)

    def _places(self, sizes: list[int], rank: int) -> Any:
        """Where the rows of a rank belong in the whole."""
        starts = np.cumsum([0, *sizes])
        size = self._channel.size
        parts = [
            np.arange(start + rows * rank // size, start + rows * (rank + 1) // size)
            for start, rows in zip(starts, sizes, strict=False)
        ]
        return np.concatenate(parts)

    def _train_on_batch(self, original: Callable[..., Any], model: Any, options: dict[str, Any]) -> Any:
        """One step on this rank's rows, and the metrics of all. *Collective*."""
        sharing = self._sharing(model)
        arrays = {name: options[name] for name in ("x", "y", "sample_weight") if options.get(name) is not None}
        data = keras.tree.map_structure(np.asarray, arrays)
        rows = {len(leaf) for leaf in keras.tree.flatten(data)}
        if len(rows) != 1:
            raise ValueError(f"arrays of a batch have one length, not {sorted(rows)}")
        if not is_local(list(arrays.values())):
            (count,), rank, size = rows, self._channel.rank, self._channel.size
            mine = slice(count * rank // size, count * (rank + 1) // size)
            data = keras.tree.map_structure(lambda leaf: leaf[mine], data)
        spec = keras.tree.map_structure(lambda leaf: tf.TensorSpec((None, *leaf.shape[1:]), leaf.dtype), data)
        if not sharing.begun:
            sharing.begin(tuple(spec.values()))
        as_dict = options.pop("return_dict", False)
        logs = combined_result(model, self._channel, original(**{**options, **data}, return_dict=True))
        logs = {name: float(value) for name, value in logs.items()}
        return logs if as_dict else model._flatten_metrics_in_order(logs)


def _within(job: Job | None, original: Callable[..., Any], options: dict[str, Any]) -> Any:
    token = _job.set(job)
    try:
        return original(**options)
    finally:
        _job.reset(token)
