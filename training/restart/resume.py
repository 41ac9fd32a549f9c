"""Resume an interrupted run with the next global batch."""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data.epochs.batches import Batches
from matex_data.errors import DataError, PartitionError
from matex_data.sampling.state import read_step
from matex_data.training.comm.channel import Channel
from matex_data.training.exact.variables import learning_rate
from matex_data.training.progress import CheckpointProgress
from matex_data.training.restart import callback_state, checkpoint
from matex_data.training.restart.preemption import REQUESTS, exit_preempted, stop_agreement

log = logging.getLogger("matex_data.training")

DATA_OPTIONS = ("batch_size", "shuffle", "seed", "remainder")
"""Options of ``fit`` that belong to ``Dataset.tf_dataset``."""
EPOCH_ENDS = "the resumed epoch ends"
"""Value of ``stop_training`` by which Keras leaves an epoch alone; a callback that ends training sets True."""


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
    replicas : replicas of this rank's part of the model; None: every rank is one.
    verbose : as of ``fit``; 0 shows no progress of checkpoints.

    Attributes
    ----------
    checkpoint : that to resume from; None if there is none, or once it is restored.
    start : position at which the run begins or resumes.
    saved : position of its latest checkpoint.
    counts_from_start : steps of a resumed epoch count from ``start`` on, since the data begins there.
    """

    counts_from_start = True

    def __init__(
        self, channel: Channel, folder: Path | None, replicas: Channel | None = None, verbose: str | int = "auto"
    ) -> None:
        self.channel = channel
        self.folder = folder
        self._verbose = verbose if channel.rank == 0 else 0
        self.checkpoint: checkpoint.Checkpoint | None = None
        if folder:
            with self.progress("checking", folder) as progress:
                self.checkpoint = checkpoint.open_checkpoint(channel, folder, replicas, progress.add)
        self.start = TrainingPosition(**self.checkpoint.facts["position"]) if self.checkpoint else TrainingPosition()
        self.saved = replace(self.start)
        self._batches: list[tuple[Batches, int]] = []  # sources of the data, each with its first epoch

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
        else:
            resumed = self._pipeline(dataset)
        self._batches = [(batches, batches.epoch) for batches in sources(resumed)]
        if self.start.step:
            resumed.cardinality = lambda: tf.constant(self.start.steps, tf.int64)  # only the first epoch is shorter
        else:
            self.start.steps = int(resumed.cardinality())
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

    def _state(self, dataset: Any) -> Any:
        """Return the state at which a ``matex_data.Dataset`` begins."""
        if self.checkpoint is None:
            return None
        saved = self.checkpoint.facts["data"]
        if len(saved) != 1:
            raise _other_data(len(saved), 1)
        return {**saved[0], "step": read_step(saved[0]) + self.start.step}

    def _pipeline(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Return a pipeline from ``start`` on; datasets of this package in it begin with the epoch of ``start``."""
        if self.checkpoint is None:
            return dataset
        begin_sources(sources(dataset), self.checkpoint.facts["data"])
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
        return _skip_once(dataset, self.start.step)

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

    def leading_callbacks(self) -> list[Any]:
        """Return the callbacks that run before all others."""
        return [PartialEpoch(self.start)] if self.start.step else []

    def trailing_callbacks(
        self, user_callbacks: list[Any], every: int | None, state: Callable[[], checkpoint.ModelState]
    ) -> list[Any]:
        """Return the callbacks that restore and save checkpoints; they run after all others.

        Parameters
        ----------
        state : returns, once training begins, the state of the model.
        every : number of steps between checkpoints within an epoch; None: save after epochs only.
        """
        if self.folder is None:
            return []
        return [CheckpointSaver(self, user_callbacks, state, every)]

    def progress(self, action: str, folder: Path) -> CheckpointProgress:
        """Return the progress of an action on the file in a folder, whose size is that of the one to replace it."""
        path = folder / checkpoint.FILE
        try:
            size = path.stat().st_size if self._verbose else None
        except OSError:  # there is none
            size = None
        return CheckpointProgress(action, path, size, self._verbose)

    def began(self) -> None:
        """Note that training begins, after the checkpoint was restored."""

    def data_facts(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the facts of the data for a checkpoint: states of this package's datasets in the pipeline.

        Parameters
        ----------
        epoch, step : position of the checkpoint; the states are those at the beginning of the epoch.
        """
        done = epoch - self.start.epoch
        states = [batches.state((first + done) * batches.schedule.steps) for batches, first in self._batches]
        return {"data": states, "pipeline": {}}


class PartialEpoch(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Callback that ends the resumed epoch after its last batch.

    Without it, Keras would request one more batch and count it among the optimizer's iterations.
    """

    def __init__(self, start: TrainingPosition) -> None:
        super().__init__()
        self._steps_left = start.steps - start.step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Leave the loop over batches after the last one."""
        self._steps_left -= self.model.steps_per_execution
        if self._steps_left <= 0 and not self.model.stop_training:
            self.model.stop_training = EPOCH_ENDS

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stay in the loop over epochs."""
        if self._steps_left <= 0:
            if self.model.stop_training == EPOCH_ENDS:
                self.model.stop_training = False
            self._steps_left = sys.maxsize


class CheckpointSaver(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Callback that restores a run when training begins, and saves it after every epoch.

    If a rank is asked to stop, all save the run after the running step and raise ``Preempted``. They agree when a batch
    begins: hooks at its end, which there are to save within epochs alone, let Keras wait for the numbers of each step.

    Parameters
    ----------
    every : number of steps between two checkpoints within an epoch; None: save after epochs only.
    """

    def __init__(
        self,
        run: TrainingRun,
        user_callbacks: list[Any],
        state: Callable[[], checkpoint.ModelState],
        every: int | None = None,
    ) -> None:
        super().__init__()
        self._run, self._user_callbacks, self._model_state = run, user_callbacks, state
        self._identities = [callback_state.identity(callback) for callback in user_callbacks]
        self._epoch = run.start.epoch
        self._rank_values: list[tuple[Any, Any]] = []
        self._history: dict[str, Any] = {}
        self._rate: float | None = None  # of the checkpoint, unless it follows a schedule
        self._agreement = stop_agreement(run.channel.user)
        self._every, self._last = every or 0, 0
        if every:
            self.on_train_batch_end = self._save_within_epoch

    @property
    def restores(self) -> bool:
        """Return whether all variables are about to be set."""
        return self._run.checkpoint is not None

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the model and the callbacks. *Collective*."""
        found = self._run.checkpoint
        if found is not None:
            with self._run.progress("restoring", found.path.parent) as progress:
                found.popped = progress.add
                self._rank_values = self._model_state().restore(found)
                self._model_state().restore_rank_variables(self._rank_values)
                self._restore_callbacks(found)
            self._rate = float(rate.numpy()) if (rate := learning_rate(self.model.optimizer)) is not None else None
            self._history = found.facts["history"]
            self._run.checkpoint = None  # release the arrays that nothing has restored
        self._run.began()

    def _restore_callbacks(self, found: checkpoint.Checkpoint) -> None:
        """Restore the callbacks; broadcast the arrays that those of rank 0 need. *Collective*."""
        channel, entries = self._run.channel, found.facts["callbacks"]
        pairs = callback_state.match(self._user_callbacks, entries, warn=channel.rank == 0)
        needed = sorted(i for _, i in pairs)
        needed = channel.host.allgather_object(needed)[0] if channel.size > 1 else needed
        kept = {
            i: {
                name: [found.pop(f"callback{i}.{name}.{j}") for j in range(count)]
                for name, count in entries[i]["arrays"].items()
            }
            for i in needed
        }
        for callback, i in pairs:
            if i in kept:
                callback_state.restore(callback, entries[i], kept[i])

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Restore the metrics of a resumed epoch, which Keras has reset, and the rate, which callbacks may change.

        They have changed it once before the interruption, when the epoch began.
        """
        self._epoch = epoch
        self._last = self._run.start.step if self._resumed() else 0
        self._restore_history()
        if self._resumed():
            self._model_state().restore_rank_variables(self._rank_values)
            rate = learning_rate(self.model.optimizer)
            if rate is not None and self._rate is not None:
                rate.assign(self._rate)
        self._rank_values, self._rate = [], None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Save the run and end, if a rank was asked to before the previous step. *Collective*."""
        reason = self._agreement.after_step()
        if reason:
            step = self.step_number(batch)
            self.save(self._epoch, step, exact=True)
            self._exit(reason, self._epoch, step)

    def _save_within_epoch(self, batch: int, logs: Any = None) -> None:
        """Save the run if a checkpoint is due. *Collective* then."""
        step, steps = self.step_number(batch) + 1, self._run.start.steps
        if step - self._last >= self._every and (step < steps or steps <= 0):  # else the epoch ends
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

    def _resumed(self) -> bool:
        return self._epoch == self._run.start.epoch and self._run.start.step > 0

    def step_number(self, batch: int) -> int:
        """Return the number of steps of the epoch before a batch, those before a restart included."""
        return batch + (self._run.start.step if self._resumed() and self._run.counts_from_start else 0)

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
        arrays, names = self._model_state().capture(exact)
        error: DataError | None = None
        try:
            if run.channel.rank == 0 and run.folder is not None:
                self._write(run.folder, arrays, {**names, "history": self._history_with(epoch - 1, logs)})
        except OSError as cause:
            if run.folder is not None:
                error = DataError(
                    "the checkpoint cannot be written; the previous one is intact",
                    file=str(run.folder / checkpoint.FILE),
                    expected="a folder that rank 0 can write to, with enough free space",
                    found=cause,
                    remedy="free space there, or give another folder",
                )
        finally:
            deque(arrays, 0)  # sends the arrays that are left
        REQUESTS.limit.note_save(time.monotonic() - begin)
        run.channel.communicator.agree(error)

    def _write(self, folder: Path, arrays: Iterable[tuple[str, Any]], names: Mapping[str, Any]) -> None:
        run, entries, of_callbacks = self._run, [], dict[str, Any]()
        for i, (callback, identity) in enumerate(zip(self._user_callbacks, self._identities, strict=True)):
            entry, kept = callback_state.capture(callback)
            entries.append({**identity, **entry, "arrays": {name: len(values) for name, values in kept.items()}})
            for name, values in kept.items():
                of_callbacks |= {f"callback{i}.{name}.{j}": value for j, value in enumerate(values)}
        facts = {
            "position": vars(run.saved),
            **run.data_facts(run.saved.epoch, run.saved.step),
            "callbacks": entries,
            "stopped": run.saved.step == 0 and bool(self.model.stop_training),
        }
        with run.progress("writing", folder) as progress:
            named = progress.counted(itertools.chain(arrays, of_callbacks.items()))
            checkpoint.write(folder, named, {**facts, **names})


def sources(dataset: Any) -> list[Batches]:
    """Return the batches of this package that a pipeline reads."""
    found = getattr(dataset, "matex_batches", None)
    return [found] if found is not None else [b for source in dataset._inputs() for b in sources(source)]


def begin_sources(batches: Sequence[Batches], saved: Sequence[Any]) -> None:
    """Let the data of a pipeline begin with the epoch of a checkpoint, whose states they are compared with.

    Raises
    ------
    PartitionError : the run began with other data.
    """
    if len(batches) != len(saved):
        raise _other_data(len(saved), len(batches))
    for source, state in zip(batches, saved, strict=True):
        source.fingerprint.check(state)
        source.begin_at(read_step(state) // max(1, source.schedule.steps))


def _other_data(expected: int, found: int) -> PartitionError:
    return PartitionError(
        "the interrupted run had other data",
        expected=f"{expected} datasets of matex_data in the pipeline",
        found=f"{found} datasets of matex_data in the pipeline",
        remedy="resume with the data of the interrupted run, or give another checkpoint folder",
    )


def _skip_once(dataset: tf.data.Dataset, step: int) -> tf.data.Dataset:
    """Return the dataset without its first ``step`` batches in the first epoch, and whole in later epochs."""
    pending = [step]

    def pop_count() -> Any:
        return np.int64(pending.pop() if pending else 0)

    def one_epoch(_: Any) -> tf.data.Dataset:
        count = tf.ensure_shape(tf.numpy_function(pop_count, [], tf.int64), ())
        return dataset.skip(count)

    return tf.data.Dataset.range(1).flat_map(one_epoch)
