"""Resume an interrupted run with the next global batch."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data.errors import DataError, PartitionError
from matex_data.mpi.communicator import Equal
from matex_data.sampling.state import read_step
from matex_data.training.comm.channel import Channel
from matex_data.training.exact.variables import learning_rate
from matex_data.training.keras_api import keras_trainer
from matex_data.training.progress import CheckpointProgress
from matex_data.training.replacements import replaced
from matex_data.training.restart import callback_state, checkpoint
from matex_data.training.restart.data import Sources, TrainingIterator, other_data, skip_once, steps_from
from matex_data.training.restart.preemption import REQUESTS, exit_preempted, stop_agreement

log = logging.getLogger("matex_data.training")

DATA_OPTIONS = ("batch_size", "shuffle", "seed", "remainder")
"""Options of ``fit`` that belong to ``Dataset.tf_dataset``."""


@dataclass
class TrainingPosition:
    """Position of a run in its data.

    Parameters
    ----------
    epoch : number of complete epochs.
    step : global batches since the beginning of this epoch.
    steps : global batches of an epoch.
    """

    epoch: int = 0
    step: int = 0
    steps: int = 0


class TrainingRun:
    """Training run and its checkpoint folder. *Collective*.

    Parameters
    ----------
    channel : ranks that train.
    folder : folder of the checkpoint; None: neither save nor resume.
    replicas : replicas of this rank's part of the model.
    verbose : as of ``fit``; 0 shows no progress of checkpoints.
    save_every : number of steps between checkpoints within an epoch; None: save after epochs only.

    Attributes
    ----------
    checkpoint : that to resume from; None if there is none, or once it is restored.
    start : position at which the run begins or resumes.
    saved : position of its latest checkpoint.
    """

    def __init__(
        self, channel: Channel, folder: Path | None, replicas: Channel, verbose: str | int, save_every: int | None
    ) -> None:
        self.channel, self.replicas, self.folder, self.save_every = channel, replicas, folder, save_every
        self._verbose = verbose if channel.rank == 0 else 0
        self.checkpoint: checkpoint.Checkpoint | None = None
        if folder:
            with self.progress("checking", folder) as progress:
                self.checkpoint = checkpoint.open_checkpoint(channel, folder, replicas, progress.add)
        self.start = TrainingPosition(**self.checkpoint.facts["position"]) if self.checkpoint else TrainingPosition()
        self.saved = replace(self.start)
        self._sources = Sources()
        self._epochs: list[int] = []  # of the sources, when the running epoch began
        self._began = False

    def resumed_dataset(self, dataset: Any, options: dict[str, Any]) -> tf.data.Dataset:
        """Return the training data from ``start`` on. *Collective*.

        Parameters
        ----------
        dataset : ``tf.data.Dataset``, or an object with ``tf_dataset`` and ``state``, such as ``matex_data.Dataset``.
        options : options of ``fit``; those of ``tf_dataset`` are removed from it.

        Raises
        ------
        PartitionError : on all ranks, if the run began with other data.
        """
        if hasattr(dataset, "tf_dataset"):
            given = {name: options.pop(name) for name in DATA_OPTIONS if name in options}
            resumed = dataset.tf_dataset(given.pop("batch_size", 32), **given, start=self._state(dataset))
            self._sources = Sources(resumed)
        else:
            resumed = self._pipeline(dataset)
        if not self.start.step:
            self.start.steps = int(resumed.cardinality())
        self._set_cardinality(resumed)
        if self.folder and options.get("steps_per_epoch"):
            steps = options.pop("steps_per_epoch")
            if steps != self.start.steps:
                raise PartitionError(
                    "a checkpoint does not record the position of the data in epochs of steps_per_epoch",
                    expected="epochs that pass over all of the data",
                    found=f"steps_per_epoch={steps}",
                    remedy="leave out steps_per_epoch, and give the batches of an epoch, as dataset.take(n) does; or "
                    "leave out the checkpoint",
                )
        return resumed

    def _set_cardinality(self, data: tf.data.Dataset) -> None:
        """Give the data the number of steps of a whole epoch: only the first one is shorter."""
        if self.start.step:
            data.cardinality = lambda: tf.constant(self.start.steps, tf.int64)

    def iterating(self, data: tf.data.Dataset) -> AbstractContextManager[Any]:
        """Return a context manager: Keras iterates over this training data with the numbers of a whole run."""
        if self.folder is None:
            return nullcontext()
        self._set_cardinality(data)
        of_keras = keras_trainer.TFEpochIterator

        def iterator(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("x") is not data:
                return of_keras(*args, **kwargs)
            made = TrainingIterator(*args, **kwargs)
            made.run = self
            return made

        return replaced(keras_trainer, TFEpochIterator=iterator)

    def note_iterator(self, dataset: Any) -> None:
        """Note an iterator over the training data that Keras is about to make."""
        self._epochs = self._sources.epochs()

    def steps(self, epoch_iterator: Any, steps: Iterator[Any]) -> Iterator[Any]:
        """Return the steps of an epoch that are left, of those that Keras's iterator enumerates; see ``steps_from``."""
        return steps_from(self._first_step(), self.start.steps, epoch_iterator.steps_per_execution, steps)

    def _first_step(self) -> int:
        """Return the number of the first step of an epoch that begins: that of ``start`` in the first one."""
        begins, self._began = self._began, False
        return self.start.step if begins else 0

    def _state(self, dataset: Any) -> Any:
        """Return the state at which a ``matex_data.Dataset`` begins."""
        if self.checkpoint is None:
            return None
        saved = self.checkpoint.facts["data"]
        if len(saved) != 1:
            raise other_data(len(saved), 1)
        return {**saved[0], "step": read_step(saved[0]) + self.start.step}

    def _pipeline(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Return a pipeline from ``start`` on; datasets of this package in it begin with the epoch of ``start``."""
        self._sources = Sources(dataset)
        if self.checkpoint is None:
            return dataset
        self._sources.begin(self.checkpoint.facts["data"])
        if not self.start.step:
            return dataset
        steps = int(dataset.cardinality())
        if steps >= 0 and steps != self.start.steps:
            raise PartitionError(
                "an epoch of the interrupted run has another number of steps",
                expected=f"{self.start.steps} steps",
                found=f"{steps} steps",
                remedy="resume with the data and the batch size of the interrupted run, or without its checkpoint",
            )
        return skip_once(dataset, self.start.step)

    def last_epoch(self, user_callbacks: list[Any], epochs: int) -> int:
        """Return the epoch with which to end: at once, if ``EarlyStopping`` has ended the run. *Collective*.

        A run that was ended resumes if the callback now has more patience than it had waited.
        """
        if self.checkpoint is None or not self.checkpoint.facts["stopped"]:
            return epochs
        saved = self.checkpoint.facts["callbacks"]
        ended = any(
            saved[i]["state"]["stopped_epoch"] > 0 and saved[i]["state"]["wait"] >= callback.patience
            for callback, i in callback_state.match(user_callbacks, saved, warn=False)
            if isinstance(callback, keras.callbacks.EarlyStopping)
        )
        if not (self.channel.host.allgather_object(ended)[0] if self.channel.size > 1 else ended):
            return epochs
        if self.channel.rank == 0:
            log.warning("EarlyStopping ended this run after %d epochs: nothing is left to train", self.start.epoch)
        return min(epochs, self.start.epoch)

    def callbacks(
        self, user_callbacks: list[Any], state: Callable[[], checkpoint.ModelState]
    ) -> tuple[list[Any], list[Any]]:
        """Return the callbacks that restore and save checkpoints: those that run before, and after, all others.

        Parameters
        ----------
        state : returns, once training begins, the state of the model.
        """
        if self.folder is None:
            return [], []
        for callback in user_callbacks:
            if self.checkpoint is not None and isinstance(callback, keras.callbacks.CSVLogger):
                callback.append = True  # to the rows of this run
        saver = CheckpointSaver(self, user_callbacks, state)
        stop = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: saver.stop_if_asked(batch))
        return [stop], [saver]

    def progress(self, action: str, folder: Path) -> CheckpointProgress:
        """Return the progress of an action on the file in a folder, whose size is that of the one to replace it."""
        path = folder / checkpoint.FILE
        try:
            size = path.stat().st_size if self._verbose else None
        except OSError:  # there is none
            size = None
        return CheckpointProgress(action, path, size, self._verbose)

    def began(self) -> None:
        """Note that training begins, after the checkpoint was restored: the next pass over the data is an epoch."""
        self._began = True

    def data_facts(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the facts of the data for a checkpoint: states of this package's datasets in the pipeline.

        Parameters
        ----------
        epoch, step : position of the checkpoint; the states are those at the beginning of the epoch.
        """
        epochs = self._epochs if step else self._sources.epochs()
        return {"data": self._sources.states(epochs), "pipeline": {}}


class CheckpointSaver(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Callback that restores a run when training begins, and saves it after every epoch.

    It restores an epoch within which the run has ended once more when this begins: what the callbacks do then, they
    have done before the interruption. If a rank is asked to stop, all save the run after the running step and raise
    ``Preempted``. They agree when a batch begins, before the callbacks of the user: hooks at its end, which there are
    to save within epochs alone, let Keras wait for the numbers of each step.
    """

    def __init__(self, run: TrainingRun, user_callbacks: list[Any], state: Callable[[], checkpoint.ModelState]) -> None:
        super().__init__()
        self._run, self._user_callbacks, self._model_state = run, user_callbacks, state
        self._identities = [callback_state.identity(callback) for callback in user_callbacks]
        self._epoch = run.start.epoch
        self._history: dict[str, Any] = {}
        self._rates: list[float] = []  # with which the run began
        self._agreement = stop_agreement(run.channel.user)
        self._every, self._last = run.save_every or 0, 0
        if run.save_every:
            self.on_train_batch_end = self._save_within_epoch

    @property
    def restores(self) -> bool:
        """Return whether all variables are about to be set."""
        return self._run.checkpoint is not None

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the model and the callbacks. *Collective*."""
        found = self._run.checkpoint
        self._rates = rates = self._present_rates()
        if found is not None:
            restoring = self._run.progress("restoring", found.path.parent)
            with restoring as progress, replaced(found, was_read=progress.add):
                self._restore(found, warn=self._run.channel.rank == 0)
            self._history = found.facts["history"]
            self._rates, present = found.facts["rates"], self._present_rates()
            if self._rates and rates not in (self._rates, present) and self._run.channel.rank == 0:
                log.warning(
                    "the learning rate of the script is %s now, but training goes on with that of the checkpoint, %s\n"
                    "  remedy: set it in a callback, such as LearningRateScheduler; or give another checkpoint folder",
                    *(", ".join(f"{rate:g}" for rate in of) for of in (rates, present)),
                )
            if not self._run.start.step:
                self._run.checkpoint = None
        self._run.began()

    def _present_rates(self) -> list[float]:
        """Return the learning rate, unless it follows a schedule."""
        rate = learning_rate(self.model.optimizer)
        return [] if rate is None else [float(rate.numpy())]

    def _restore(self, found: checkpoint.Checkpoint, warn: bool = False) -> None:
        """Restore model and callbacks; broadcast the arrays that those of rank 0 need. *Collective*."""
        state = self._model_state()
        state.restore(found)
        channel, entries = self._run.channel, found.facts["callbacks"]
        pairs = callback_state.match(self._user_callbacks, entries, warn)
        needed = sorted(i for _, i in pairs)
        needed = channel.host.allgather_object(needed)[0] if channel.size > 1 else needed
        kept = {
            i: {
                name: [found.array(f"callback{i}.{name}.{j}") for j in range(count)]
                for name, count in entries[i]["arrays"].items()
            }
            for i in needed
        }
        for callback, i in pairs:
            if i in kept:
                own = {name: state.own_weights(arrays) for name, arrays in kept[i].items()}
                callback_state.restore(callback, entries[i], own)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Restore what Keras and the callbacks have changed as they began a resumed epoch again. *Collective*."""
        self._epoch, self._last = epoch, 0
        self._restore_history()
        found, self._run.checkpoint = self._run.checkpoint, None
        if found is not None:
            self._last = self._run.start.step
            self._restore(found)

    def stop_if_asked(self, batch: int) -> None:
        """Save the run before a batch and end, if a rank was asked to before the previous one. *Collective*."""
        reason = self._agreement.after_step()
        if reason:
            self.save(self._epoch, batch, exact=True)
            self._exit(reason, self._epoch, batch)

    def _save_within_epoch(self, batch: int, logs: Any = None) -> None:
        """Save the run if a checkpoint is due. *Collective* then."""
        step, steps = batch + 1, self._run.start.steps
        # At steps that do not depend on where the run has begun again: a save averages over the ranks.
        if step // self._every > self._last // self._every and (step < steps or steps <= 0):  # else the epoch ends
            self._last = step
            self.save(self._epoch, step)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save the run, and end if a rank was asked to. *Collective*."""
        self.save(epoch + 1, 0, logs)
        reason = self._agreement.now()
        if reason and epoch + 1 < self.params["epochs"] and not self.model.stop_training:
            self._exit(reason, epoch + 1, 0)

    def on_train_end(self, logs: Any = None) -> None:
        """Give the history the epochs before a restart, if none was left to train."""
        self._restore_history()

    def _exit(self, reason: int, epoch: int, step: int) -> None:
        exit_preempted(reason, self._run.channel.rank, f"{self._run.folder} after {epoch} epochs and {step} steps")

    def _restore_history(self) -> None:
        """Give Keras's history the epochs before a restart, after Keras has emptied it."""
        if self._history:
            self.model.history.epoch = list(self._history["epoch"])
            self.model.history.history = {name: list(values) for name, values in self._history["logs"].items()}
            self._history = {}

    def _history_with(self, epoch: int, logs: Any) -> dict[str, Any]:
        """Return the history for a checkpoint, with the logs of an epoch that Keras is about to append."""
        kept = getattr(self.model, "history", None)
        epochs = [] if kept is None else list(kept.epoch)
        of_epochs = {} if kept is None else {name: list(values) for name, values in kept.history.items()}
        if logs is not None:
            epochs.append(epoch)
            for name, value in logs.items():
                of_epochs.setdefault(name, []).append(value)
        plain = {name: [np.asarray(value).tolist() for value in values] for name, values in of_epochs.items()}
        return {"epoch": [int(number) for number in epochs], "logs": plain}

    def save(self, epoch: int, step: int, logs: Any = None, exact: bool = False) -> None:
        """Write a checkpoint on rank 0. *Collective*.

        Parameters
        ----------
        logs : of an epoch that has just ended.
        exact : save also what a save averages over the ranks, since an uninterrupted run would not have saved.

        Raises
        ------
        DataError : on all ranks, if the checkpoint cannot be written.
        """
        run, begin = self._run, time.monotonic()
        vars(run.saved).update(vars(run.start), epoch=epoch, step=step)
        state = self._model_state()
        variables, names = state.capture(exact)
        arrays = itertools.chain(variables, self._of_callbacks(state))
        error: DataError | None = None
        try:
            if run.channel.rank == 0 and run.folder is not None:
                self._write(run.folder, arrays, {**names, "history": self._history_with(epoch - 1, logs)})
        except OSError as cause:
            if run.folder is not None:
                error = checkpoint.unwritable(run.folder, cause)
        finally:
            deque(arrays, 0)  # sends the arrays that are left
        REQUESTS.limit.note_save(time.monotonic() - begin)
        run.channel.communicator.agree(error)

    def _write(self, folder: Path, arrays: Iterable[tuple[str, Any]], names: Mapping[str, Any]) -> None:
        run, entries = self._run, []
        for callback, identity in zip(self._user_callbacks, self._identities, strict=True):
            entry, kept = callback_state.capture(callback)
            entries.append({**identity, **entry, "arrays": {name: len(values) for name, values in kept.items()}})
        facts = {
            "position": vars(run.saved),
            "rates": self._rates,
            **run.data_facts(run.saved.epoch, run.saved.step),
            "callbacks": entries,
            "stopped": run.saved.step == 0 and bool(self.model.stop_training),
        }
        with run.progress("writing", folder) as progress:
            checkpoint.write(folder, progress.counted(arrays), {**facts, **names})

    def _of_callbacks(self, state: checkpoint.ModelState) -> Iterator[tuple[str, Any]]:
        """Yield names and arrays that the callbacks keep, whole on rank 0; each step is *collective*."""
        kept = {
            f"callback{i}.{name}": arrays
            for i, callback in enumerate(self._user_callbacks)
            for name, arrays in callback_state.kept_arrays(callback).items()
        }
        run = self._run
        if run.replicas is not run.channel:  # each rank may have parts of them
            problem = "the ranks have other callbacks that keep weights, of which each has a part"
            given = Equal({name: len(arrays) for name, arrays in kept.items()}, problem, "give them on every rank")
            run.channel.communicator.agree(equal=given)
        for name, arrays in kept.items():
            yield from ((f"{name}.{j}", whole) for j, whole in enumerate(state.whole_weights(arrays)))
