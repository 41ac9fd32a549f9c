"""``fit``, ``evaluate`` and ``predict`` of every Keras model, for scripts that know nothing of ranks."""

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
from matex_data.training.callbacks import together
from matex_data.training.comm.channel import Channel
from matex_data.training.comm.errors import readable_errors
from matex_data.training.comm.world import alone
from matex_data.training.keras_api import EpochIterator, keras_trainer, pythonify_logs
from matex_data.training.launcher.saving import whole_model
from matex_data.training.launcher.verification import verify
from matex_data.training.reduction.ops import Reducer
from matex_data.training.sharding.batch_weights import keras_iterates
from matex_data.training.sharding.determinism import SameBatches
from matex_data.training.sharding.rows import batch_size, in_order, is_local, part, share_rows, whole_element
from matex_data.training.steps.distributed_model import DistributedModel
from matex_data.training.steps.metrics import combined_result
from matex_data.training.steps.step import DistributedStep
from matex_data.training.trainer import quietly, without_empty

log = logging.getLogger("matex_data.training")

_job: ContextVar[Job | None] = ContextVar("job", default=None)


class Job:
    """One call of a patched method.

    Parameters
    ----------
    sharing : of a call that trains on the first data set that it iterates over, and evaluates on others.
    same : compares the ranks' data, where the call trains.
    noting : keep the sizes of the global batches.
    verify : check the first batch.
    """

    def __init__(
        self,
        opened: Channel,
        sharing: DistributedModel | None = None,
        same: SameBatches | None = None,
        noting: bool = False,
        verify: bool = False,
    ) -> None:
        self._channel = opened
        self._sharing = sharing
        self._same = same
        self._noting = noting
        self._verify = verify
        self.spec: Any = None
        self.cut = False  # every rank trains on its rows of whole batches
        self.steps: int | None = None  # of each rank; where one has fewer, empty batches are added
        self.sizes: list[int] = []
        self.test = None if sharing is None else sharing.test

    def share(self, dataset: Any, x: Any) -> Any:
        """Return this rank's part of what Keras is about to iterate over; training takes its rows in each step."""
        first, self.spec = self.spec is None, self.spec or dataset.element_spec
        same = self._same if first else None  # of training
        together = self.test is not None and self.test.together and same is None
        if not is_local(x):
            if same is not None:
                self.cut = True
                return in_order(same.noting(dataset))
            if self._sharing is not None and self._sharing.step.whole:
                return dataset
            dataset = self._noting_sizes(dataset) if self._noting else dataset
            dataset = share_rows(dataset, self._channel.rank, self._channel.size)
        return dataset if same is not None or self._noting or together else without_empty(dataset)

    def steps_of_test(self, steps: int | None, local: bool) -> int | None:
        """Return the largest number of batches of any rank for what is evaluated next; None if it stays as it is.

        *Collective* where each rank has its part.
        """
        if self.test is None or (self._same is not None and self.spec is None):
            return None
        everyone = self._channel.host.allgather_object(steps) if local else [steps]
        self.test.use(not local or None not in everyone)
        return max(everyone) if local and self.test.together else None

    def begun(self, iterator: Any) -> Any:
        """Return the iterator of a training epoch after the check of its first batch. *Collective*."""
        if self._sharing is None or not self.cut or self._sharing.verified:
            return iterator
        self._sharing.verified = True
        if not self._verify:
            return iterator
        batches = list(itertools.islice(_until_the_end(iterator), self._sharing.model.steps_per_execution))
        if not batches:
            return iterator
        verify(self._sharing, keras.tree.map_structure(_without_optionals, batches[0]))
        if any(isinstance(leaf, tf.OptionalSpec) for leaf in tf.nest.flatten(self.spec)):
            return itertools.chain(batches, iterator)
        # Of the same element spec, so that the graph of the step is made once.
        return iter(tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=self.spec))

    def _noting_sizes(self, dataset: Any) -> Any:
        return dataset.map(lambda *parts: self._note(whole_element(dataset, parts)))

    def _note(self, data: Any) -> Any:
        with tf.control_dependencies([tf.numpy_function(self.sizes.append, [batch_size(data)], [])]):
            return tf.nest.map_structure(tf.identity, data)


class ShardedEpochIterator(EpochIterator):  # type: ignore[misc]  # Keras has no types
    """Keras's iterator over batches, whatever they come from, with this rank's rows of each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._matex_job = job = _job.get()
        if job is not None:
            local = is_local(kwargs.get("x"))
            if job.steps is not None and job.spec is None:
                self._lengthen(job.steps)
            elif (steps := job.steps_of_test(self.__dict__["_num_batches"], local)) is not None:
                self._lengthen(steps)
            self.__dict__["_distributed_dataset"] = job.share(self.__dict__["_distributed_dataset"], kwargs.get("x"))

    def _enumerate_iterator(self) -> Iterator[Any]:
        for *steps, iterator in super()._enumerate_iterator():  # one or two numbers of steps, by the version of Keras
            job, self._matex_job = self._matex_job, None
            yield (*steps, iterator if job is None else job.begun(iterator))

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


def _until_the_end(iterator: Any) -> Iterator[Any]:
    """Return an iterator that ends in the way of Python's."""
    with contextlib.suppress(tf.errors.OutOfRangeError):
        yield from iterator


def _without_optionals(leaf: Any) -> Any:
    """Return None in place of the optional that Keras puts for it into data sets."""
    return None if isinstance(leaf, tf.experimental.Optional) else leaf


class _Longer:
    """Keras's data adapter with another number of batches."""

    def __init__(self, adapter: Any, steps: int) -> None:
        self._adapter = adapter
        self.num_batches = steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)


class KerasPatches:
    """Patches ``keras.Model``. *Collective*."""

    def __init__(self, opened: Channel, reducer: Reducer, sync_batch_norm: bool, verify: bool) -> None:
        self._channel = opened
        self._verify = verify
        self._reducer = reducer
        self._sync_batch_norm = sync_batch_norm
        self._told = False
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
            mine = vars(model).get("_matex_sharing")
            foreign = isinstance(vars(model).get("train_step"), DistributedStep) and mine is None
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
            with quietly(), readable_errors(), keras_iterates(), deadlines.collective(f"{name}()"):
                return method(functools.partial(original, model), model, {**given, **bound.arguments.get("kwargs", {})})

        setattr(keras.Model, name, patched)

    def _sharing(self, model: Any) -> DistributedModel:
        """The model's context, which stays open until it is compiled again. *Collective* at first."""
        found = vars(model).get("_matex_sharing")
        if found is not None and found.is_current():
            return found  # type: ignore[no-any-return]
        if found is not None:
            found.__exit__()
        sharing = DistributedModel(model, self._channel, self._sync_batch_norm, self._reducer)
        sharing.__enter__()
        object.__setattr__(model, "_matex_sharing", sharing)
        return sharing

    def _fit(self, original: Callable[..., Any], model: Any, options: dict[str, Any]) -> Any:
        model._assert_compile_called("fit")
        sharing = self._sharing(model)
        self._tell_of_generator(options.get("x"))
        same = SameBatches(self._channel)
        job = Job(self._channel, sharing, same, verify=self._verify)
        if is_local(options.get("x")) and not isinstance(options["x"], tf.data.Dataset):
            batch = max(1, (options.get("batch_size") or 32) // self._channel.size)
            steps = -(-len(keras.tree.flatten(options["x"])[0]) // batch)
            options["batch_size"], job.steps = batch, max(self._channel.host.allgather_object(steps))
        callbacks = options.get("callbacks")
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            users = keras.tree.flatten(callbacks) if callbacks is not None else []
            options["callbacks"] = together(sharing, users, lambda: (job.spec, job.cut), [same])
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
        sharing = self._sharing(model)
        if sharing.step.whole:
            return original(**options)
        return _within(Job(self._channel, sharing), original, options)

    def _predict(self, original: Callable[..., Any], model: Any, options: dict[str, Any]) -> Any:
        """Each rank predicts its rows; all get the whole, in order. *Collective*."""
        mine = vars(model).get("_matex_sharing")
        if is_local(options.get("x")) or (mine is not None and mine.step.whole):
            return original(**options)
        job = Job(self._channel, noting=True)
        outputs = _within(job, original, options)
        noted = list(job.sizes)  # of more batches than were predicted, where they are read ahead
        rows = {_rows(leaf) for leaf in keras.tree.flatten(outputs)}
        everyone = self._channel.host.allgather_object(rows)
        total = sum(min(counts) for counts in everyone)
        sizes = noted[: int(np.searchsorted(np.cumsum(noted), total)) + 1]
        if any(len(counts) > 1 for counts in everyone) or sum(sizes) != total:
            raise ValueError(
                f"predict gave {[sorted(counts) for counts in everyone]} rows on ranks 0 to {self._channel.size - 1} "
                f"for batches of {sizes} samples; each output has to have one row per sample\n"
                "  remedy: call predict_on_batch, which runs on the whole batch on every rank"
            )
        places = np.concatenate([self._places(sizes, rank) for rank in range(self._channel.size)])
        return keras.tree.map_structure(lambda mine: self._whole(mine, places), outputs)

    def _whole(self, mine: Any, places: Any) -> Any:
        """Return the rows of all ranks in order: an array, or a ragged tensor where Keras gives one. *Collective*."""
        shapes = self._channel.host.allgather_object(mine.shape[1:] if isinstance(mine, np.ndarray) else None)
        if shapes[0] is not None and len(set(shapes)) == 1:
            rows = self._channel.host.gather(mine)
            out = np.empty_like(rows)
            out[places] = rows
            return out
        if isinstance(mine, tf.SparseTensor):
            raise TypeError("predict of sparse outputs on several ranks: convert them by keras.ops.convert_to_tensor")
        found = [row for part in self._channel.host.allgather_object([np.asarray(row) for row in mine]) for row in part]
        ordered = [found[i] for i in np.argsort(places)]
        return tf.RaggedTensor.from_row_lengths(np.concatenate(ordered), [len(row) for row in ordered])

    def _places(self, sizes: list[int], rank: int) -> Any:
        """Return where the rows of a rank belong in the whole."""
        starts = np.cumsum([0, *sizes])[:-1]
        parts = [part(rows, rank, self._channel.size) for rows in sizes]
        return np.concatenate(
            [np.arange(start + p.start, start + p.stop) for start, p in zip(starts, parts, strict=True)]
        )

    def _train_on_batch(self, original: Callable[..., Any], model: Any, options: dict[str, Any]) -> Any:
        """One step on this rank's rows, and the metrics of all. *Collective*."""
        sharing = self._sharing(model)
        if sharing.step.whole:
            return original(**options)
        arrays = {name: options[name] for name in ("x", "y", "sample_weight") if options.get(name) is not None}
        data = keras.tree.map_structure(np.asarray, arrays)
        rows = {len(leaf) for leaf in keras.tree.flatten(data)}
        if len(rows) != 1:
            raise ValueError(f"arrays of a batch have one length, not {sorted(rows)}")
        whole = not is_local(list(arrays.values()))
        spec = keras.tree.map_structure(lambda leaf: tf.TensorSpec((None, *leaf.shape[1:]), leaf.dtype), data)
        if not sharing.begun:
            sharing.begin(tuple(spec.values()), whole)
        if whole and self._verify and not sharing.verified:
            verify(sharing, keras.tree.map_structure(keras.ops.convert_to_tensor, tuple(data.values())))
            if sharing.step.whole:
                return original(**options)
        as_dict = options.pop("return_dict", False)
        logs = combined_result(model, self._channel, original(**{**options, **data}, return_dict=True))
        logs = pythonify_logs(logs)
        return logs if as_dict else model._flatten_metrics_in_order(logs)


def _rows(output: Any) -> int:
    """Return the length of the first axis; 0 where there is none."""
    shape = tuple(output.shape)
    return int(shape[0] or 0) if shape else 0


def _within(job: Job | None, original: Callable[..., Any], options: dict[str, Any]) -> Any:
    token = _job.set(job)
    try:
        return original(**options)
    finally:
        _job.reset(token)
