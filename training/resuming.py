"""Going on where a run was interrupted: with the very next global batch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data.training import checkpoint as files
from matex_data.training.channel import Channel

DATA_OPTIONS = ("batch_size", "shuffle", "seed", "remainder")
"""Options of ``fit`` that go to a data set's ``tf_dataset``."""


@dataclass
class Position:
    """Where a run stands: ``step`` global batches after the beginning of ``epoch``.

    Parameters
    ----------
    steps : of an epoch.
    seed : of the shuffled order.
    """

    epoch: int = 0
    step: int = 0
    steps: int = 0
    seed: int | None = None


class Run:
    """One training run and its folder of checkpoints.

    Parameters
    ----------
    folder : None: nothing is saved, nothing resumed. Making one is *collective*.
    """

    def __init__(self, opened: Channel, folder: Path | None) -> None:
        self.channel = opened
        self.folder = folder
        found = files.read_together(opened, folder) if folder else None
        self.arrays, self.facts = found or ({}, {})
        self.start = Position(**self.facts.get("position", {}))

    def data(self, dataset: Any, options: dict[str, Any]) -> tf.data.Dataset:
        """The data from the start of this run on. *Collective*.

        Parameters
        ----------
        dataset : a ``tf.data.Dataset``, or what has ``tf_dataset`` and ``state`` (a ``matex_data.Dataset``).
        options : of ``fit``; those of the data are taken out.
        """
        done = self.start.epoch * self.start.steps + self.start.step
        if not hasattr(dataset, "tf_dataset"):
            resumed = _skipping(dataset, self.start.step) if self.start.step else dataset
        else:
            given = {name: options.pop(name) for name in DATA_OPTIONS if name in options}
            given["seed"] = self._seed(given)
            start = dataset.state(done) if done else None
            resumed = dataset.tf_dataset(given.pop("batch_size", 32), **given, start=start)
            self.start.seed = given["seed"]
        if self.start.step:
            resumed.cardinality = lambda: tf.constant(self.start.steps, tf.int64)  # of every pass but the first
        else:
            self.start.steps = int(resumed.cardinality())
        return resumed

    def _seed(self, given: Mapping[str, Any]) -> int | None:
        if not given.get("shuffle") or given.get("seed") is not None:
            return given.get("seed")
        if self.start.seed is not None:
            return self.start.seed
        drawn = int(np.random.SeedSequence().generate_state(1)[0])
        return int(self.channel.host.objects(drawn)[0]) if self.channel.size > 1 else drawn

    def first(self) -> list[Any]:
        """Callbacks that come before all others."""
        return [ShorterEpoch(self.start)] if self.start.step else []

    def last(self, users: list[Any], every: int | None) -> list[Any]:
        """Callbacks that restore and save, and come after all others."""
        if self.folder is None:
            return []
        return [StepSaver(self, users, every) if every else Saver(self, users)]


class ShorterEpoch(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Ends the epoch in which a run goes on at its last batch. Comes first.

    Keras would ask for one batch more, and count it among the optimizer's iterations although there is none.
    """

    def __init__(self, start: Position) -> None:
        super().__init__()
        self._left = start.steps - start.step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Leave the loop over batches."""
        self._left -= self.model.steps_per_execution
        if self._left <= 0 and not self.model.stop_training:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """But stay in the loop over epochs."""
        if self._left <= 0:
            self.model.stop_training = False
            self._left = sys.maxsize


class Saver(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Restores a run when it begins, and saves it after every epoch."""

    def __init__(self, run: Run, users: list[Any]) -> None:
        super().__init__()
        self._run, self._users = run, users
        self._epoch = run.start.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """*Collective*."""
        if not self._run.arrays:
            return
        files.restore(self.model, self._run.channel, self._run.arrays)
        for callback, saved in zip(self._users, self._run.facts["callbacks"], strict=False):
            vars(callback).update(saved)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """In mid-epoch metrics, too, go on where they were."""
        self._epoch = epoch
        if self._resumed():
            files.restore_own(self.model, self._run.channel, self._run.arrays)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """*Collective*."""
        self.save(epoch + 1, 0)

    def _resumed(self) -> bool:
        return self._epoch == self._run.start.epoch and self._run.start.step > 0

    def save(self, epoch: int, step: int) -> None:
        """*Collective*."""
        run = self._run
        arrays = files.capture(self.model, run.channel)
        if run.channel.rank == 0 and run.folder is not None:
            position = {**vars(run.start), "epoch": epoch, "step": step}
            facts = {"position": position, "callbacks": [_plain_state(callback) for callback in self._users]}
            files.write(run.folder, arrays, facts)


class StepSaver(Saver):
    """The same, and saves every so many steps."""

    def __init__(self, run: Run, users: list[Any], every: int) -> None:
        super().__init__(run, users)
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


def _plain_state(callback: Any) -> dict[str, Any]:
    """Counters and best values of a callback such as ``EarlyStopping``."""
    return {name: value for name, value in vars(callback).items() if isinstance(value, bool | int | float)}


def _skipping(dataset: tf.data.Dataset, step: int) -> tf.data.Dataset:
    """The data set without its first batches, in its first pass alone."""
    waiting = [step]

    def first() -> Any:
        return np.int64(waiting.pop() if waiting else 0)

    def one_pass(_: Any) -> tf.data.Dataset:
        count = tf.ensure_shape(tf.numpy_function(first, [], tf.int64), ())
        return dataset.skip(count)

    return tf.data.Dataset.range(1).flat_map(one_pass)
