"""Going on where a run was interrupted: with the very next global batch."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data.errors import DataError, PartitionError
from matex_data.pipeline.batches import Batches
from matex_data.sampling.state import read_step
from matex_data.training.comm.channel import Channel
from matex_data.training.restart import callback_state
from matex_data.training.restart import checkpoint as checkpoint

log = logging.getLogger("matex_data.training")

DATA_OPTIONS = ("batch_size", "shuffle", "seed", "remainder")
"""Options of ``fit`` that go to a data set's ``tf_dataset``."""


@dataclass
class TrainingPosition:
    """Where a run stands: ``step`` global batches after the beginning of ``epoch``.

    Parameters
    ----------
    steps : of an epoch.
    """

    epoch: int = 0
    step: int = 0
    steps: int = 0


class TrainingRun:
    """One training run and its folder of checkpoints.

    Parameters
    ----------
    folder : None: nothing is saved, nothing resumed. Making one is *collective*.
    """

    def __init__(self, channel: Channel, folder: Path | None) -> None:
        self.channel = channel
        self.folder = folder
        self.found = checkpoint.open_checkpoint(channel, folder) if folder else None
        self.start = TrainingPosition(**self.found.facts["position"]) if self.found else TrainingPosition()
        self._batches: list[tuple[Batches, int]] = []  # of which the data is made, and the epoch that each begins with

    def resumed_dataset(self, dataset: Any, options: dict[str, Any]) -> tf.data.Dataset:
        """The data from the start of this run on. *Collective*.

        Parameters
        ----------
        dataset : a ``tf.data.Dataset``, or what has ``tf_dataset`` and ``state`` (a ``matex_data.Dataset``).
        options : of ``fit``; those of the data are taken out.

        Raises
        ------
        PartitionError : on all ranks, if the run began with other data.
        """
        if hasattr(dataset, "tf_dataset"):
            given = {name: options.pop(name) for name in DATA_OPTIONS if name in options}
            resumed = dataset.tf_dataset(given.pop("batch_size", 32), **given, start=self._state(dataset))
        else:
            resumed = self._pipeline(dataset)
        self._batches = [(batches, batches.epoch) for batches in _sources(resumed)]
        if self.folder and self._batches and options.get("steps_per_epoch"):
            raise PartitionError(
                "a checkpoint does not know where an epoch of steps_per_epoch ends in the data",
                found=f"steps_per_epoch={options['steps_per_epoch']}",
                remedy="leave out steps_per_epoch, or the checkpoint",
            )
        if self.start.step:
            resumed.cardinality = lambda: tf.constant(self.start.steps, tf.int64)  # of every pass but the first
        else:
            self.start.steps = int(resumed.cardinality())
        return resumed

    def _state(self, dataset: Any) -> Any:
        """The state with which a data set has to begin."""
        if self.found is None:
            return None
        saved = self.found.facts["data"]
        if len(saved) != 1:
            raise _other_data(len(saved), 1)
        return {**saved[0], "step": read_step(saved[0]) + self.start.step}

    def _pipeline(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """A pipeline from the start on: data sets of this package in it begin with the epoch that was reached."""
        if self.found is None:
            return dataset
        batches, saved = _sources(dataset), self.found.facts["data"]
        if len(batches) != len(saved):
            raise _other_data(len(saved), len(batches))
        for source, state in zip(batches, saved, strict=True):
            source.fingerprint.check(state)
            source.begin_at(read_step(state) // max(1, source.schedule.steps))
        if not self.start.step:
            return dataset
        steps = int(dataset.cardinality())
        if steps >= 0 and steps != self.start.steps:
            raise PartitionError(
                "an epoch of the run that goes on has another number of steps",
                expected=f"{self.start.steps} steps",
                found=f"{steps} steps",
                remedy="resume with the data and the batch size that the run began with, or without its checkpoint",
            )
        return _skipping(dataset, self.start.step)

    def last_epoch(self, user_callbacks: list[Any], epochs: int) -> int:
        """The epoch to end with: none is left of a run that ``EarlyStopping`` has ended. *Collective*.

        With more patience than it had waited for the run goes on.
        """
        if self.found is None or not self.found.facts["stopped"]:
            return epochs
        saved = self.found.facts["callbacks"]
        ended = any(
            saved[i]["state"]["stopped_epoch"] > 0 and saved[i]["state"]["wait"] >= callback.patience
            for callback, i in callback_state.match(user_callbacks, saved, warn=False)
            if isinstance(callback, keras.callbacks.EarlyStopping)
        )
        if not (self.channel.host.allgather_object(ended)[0] if self.channel.size > 1 else ended):
            return epochs
        if self.channel.rank == 0:
            log.warning("EarlyStopping has ended this run after %d epochs: none is left", self.start.epoch)
        return min(epochs, self.start.epoch)

    def leading_callbacks(self) -> list[Any]:
        """Callbacks that come before all others."""
        return [PartialEpoch(self.start)] if self.start.step else []

    def trailing_callbacks(self, user_callbacks: list[Any], every: int | None) -> list[Any]:
        """Callbacks that restore and save, and come after all others."""
        if self.folder is None:
            return []
        return [StepCheckpointSaver(self, user_callbacks, every) if every else CheckpointSaver(self, user_callbacks)]

    def dataset_states(self, epoch: int) -> list[dict[str, Any]]:
        """Where the data sets of this package stand when that epoch begins."""
        done = epoch - self.start.epoch
        return [batches.state((first + done) * batches.schedule.steps) for batches, first in self._batches]


class PartialEpoch(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Ends the epoch in which a run goes on at its last batch. Comes first.

    Keras would ask for one batch more, and count it among the optimizer's iterations although there is none.
    """

    def __init__(self, start: TrainingPosition) -> None:
        super().__init__()
        self._steps_left = start.steps - start.step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Leave the loop over batches."""
        self._steps_left -= self.model.steps_per_execution
        if self._steps_left <= 0 and not self.model.stop_training:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """But stay in the loop over epochs."""
        if self._steps_left <= 0:
            self.model.stop_training = False
            self._steps_left = sys.maxsize


class CheckpointSaver(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Restores a run when it begins, and saves it after every epoch."""

    def __init__(self, run: TrainingRun, user_callbacks: list[Any]) -> None:
        super().__init__()
        self._run, self._user_callbacks = run, user_callbacks
        self._identities = [callback_state.identity(callback) for callback in user_callbacks]
        self._epoch = run.start.epoch
        self._rank_values: list[Any] = []

    @property
    def restores(self) -> bool:
        """Whether all variables are about to be set."""
        return self._run.found is not None

    def on_train_begin(self, logs: Any = None) -> None:
        """*Collective*."""
        found = self._run.found
        if found is None:
            return
        self._rank_values = checkpoint.restore(self.model, found)
        checkpoint.restore_rank_variables(self.model, self._run.channel, self._rank_values)
        self._restore_callbacks(found)
        self._run.found = None  # what nobody has taken is not kept

    def _restore_callbacks(self, found: checkpoint.Checkpoint) -> None:
        """Ranks may have different callbacks: those of rank 0 decide what is sent. *Collective*."""
        channel, entries = self._run.channel, found.facts["callbacks"]
        pairs = callback_state.match(self._user_callbacks, entries, warn=channel.rank == 0)
        epochs = sorted(i for _, i in pairs)
        epochs = channel.host.allgather_object(epochs)[0] if channel.size > 1 else epochs
        kept = {
            i: {
                name: [found.pop(f"callback{i}.{name}.{j}") for j in range(count)]
                for name, count in entries[i]["arrays"].items()
            }
            for i in epochs
        }
        for callback, i in pairs:
            if i in kept:
                callback_state.restore(callback, entries[i], kept[i])

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """In mid-epoch metrics, too, go on where they were."""
        self._epoch = epoch
        if self._resumed():
            checkpoint.restore_rank_variables(self.model, self._run.channel, self._rank_values)
        self._rank_values = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """*Collective*."""
        self.save(epoch + 1, 0)

    def _resumed(self) -> bool:
        return self._epoch == self._run.start.epoch and self._run.start.step > 0

    def save(self, epoch: int, step: int) -> None:
        """Write a checkpoint, by rank 0. *Collective*.

        Raises
        ------
        DataError : on all ranks, if it cannot be written.
        """
        run = self._run
        arrays, names = checkpoint.capture(self.model, run.channel)
        error: DataError | None = None
        if run.channel.rank == 0 and run.folder is not None:
            try:
                self._write(run.folder, arrays, names, epoch, step)
            except OSError as cause:
                error = DataError(
                    "the checkpoint cannot be written",
                    file=str(run.folder / checkpoint.FILE),
                    found=cause,
                    remedy="make room there, or give another folder; the last checkpoint is whole",
                )
        if run.channel.size > 1:
            error = run.channel.host.allgather_object(error)[0]
        if error is not None:
            raise error

    def _write(self, folder: Path, arrays: dict[str, Any], names: Mapping[str, Any], epoch: int, step: int) -> None:
        run, entries = self._run, []
        for i, (callback, identity) in enumerate(zip(self._user_callbacks, self._identities, strict=True)):
            entry, kept = callback_state.capture(callback)
            entries.append({**identity, **entry, "arrays": {name: len(values) for name, values in kept.items()}})
            for name, values in kept.items():
                arrays |= {f"callback{i}.{name}.{j}": value for j, value in enumerate(values)}
        facts = {
            "position": {**vars(run.start), "epoch": epoch, "step": step},
            "data": run.dataset_states(epoch),
            "callbacks": entries,
            "stopped": step == 0 and bool(self.model.stop_training),
        }
        checkpoint.write(folder, arrays, {**facts, **names})


class StepCheckpointSaver(CheckpointSaver):
    """The same, and saves every so many steps."""

    def __init__(self, run: TrainingRun, user_callbacks: list[Any], every: int) -> None:
        super().__init__(run, user_callbacks)
        self._every = every
        self._last = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin to count."""
        super().on_epoch_begin(epoch, logs)
        self._last = self._run.start.step if self._resumed() else 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """*Collective*."""
        step = batch + 1 + (self._run.start.step if self._resumed() else 0)
        if step - self._last >= self._every and step < self._run.start.steps:
            self._last = step
            self.save(self._epoch, step)


def _sources(dataset: tf.data.Dataset) -> list[Batches]:
    """The batches of this package that a pipeline is made of."""
    found = getattr(dataset, "matex_batches", None)
    return [found] if found is not None else [b for source in dataset._inputs() for b in _sources(source)]


def _other_data(expected: int, found: int) -> PartitionError:
    return PartitionError(
        "the run that goes on began with other data",
        expected=f"{expected} data sets of matex_data in it",
        found=f"{found} data sets of matex_data in it",
        remedy="resume with the data that the run began with, or give another folder as checkpoint",
    )


def _skipping(dataset: tf.data.Dataset, step: int) -> tf.data.Dataset:
    """The data set without its first batches, in its first pass alone."""
    waiting = [step]

    def first() -> Any:
        return np.int64(waiting.pop() if waiting else 0)

    def one_pass(_: Any) -> tf.data.Dataset:
        count = tf.ensure_shape(tf.numpy_function(first, [], tf.int64), ())
        return dataset.skip(count)

    return tf.data.Dataset.range(1).flat_map(one_pass)
