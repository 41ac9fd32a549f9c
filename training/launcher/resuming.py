"""Checkpoints of the calls of ``fit`` of an unchanged script, and going on from them with the next batch.

The script runs again from its beginning, with the random numbers of its first start. Each call of ``fit`` has a folder
of its own: one that had ended returns its history and weights at once, the interrupted one goes on. Its data is
iterated over as before, since data sets of TensorFlow draw a seed for each iterator; the batches before the
interruption are made and dropped.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from matex_data.errors import PartitionError
from matex_data.training.comm.channel import Channel
from matex_data.training.exact.attributes import random_state, set_random_state
from matex_data.training.exact.digests import leaf_digests
from matex_data.training.exact.rows import is_sharded
from matex_data.training.launcher.root import say_once
from matex_data.training.restart.data import Sources, shuffles_what_repeats, steps_from
from matex_data.training.restart.resume import TrainingPosition, TrainingRun


class ScriptCheckpoints:
    """Folders of the checkpoints of a script, one for each call of ``fit``.

    Parameters
    ----------
    save_every : number of steps between checkpoints within an epoch; None: save after epochs only.
    """

    def __init__(self, folder: Path, save_every: int | None) -> None:
        self._folder, self._save_every = folder, save_every
        self._calls = 0
        self._latest: tuple[str, TrainingPosition] | None = None  # digest of the latest call, and how far it has come

    def next_run(self, world: Channel, replicas: Channel, options: dict[str, Any], within: bool) -> ScriptRun | None:
        """Return the run of the next call of ``fit``; None if it saves no checkpoint. *Collective*.

        Parameters
        ----------
        within : a callback of another call makes this one, again if it runs again.
        """
        if within:
            text = "a call of fit within another one saves no checkpoint: if it is interrupted, it begins anew"
            say_once(world.rank, f"{text} with the epoch of the other one")
            return None
        if isinstance(options.get("callbacks"), keras.callbacks.CallbackList):
            text = "this call of fit saves no checkpoint: give it a list of callbacks, not a CallbackList"
            say_once(world.rank, text)
            return None
        self._calls += 1
        before = None if self._latest is None else (self._latest[0], self._latest[1].epoch)
        run = ScriptRun(world, self._folder / f"fit-{self._calls}", replicas, options, self._save_every, before)
        self._latest = run.digest, run.saved
        return run


class ScriptRun(TrainingRun):
    """Call of ``fit`` in a script, and its checkpoint. *Collective*.

    Parameters
    ----------
    channel, folder, replicas, save_every : as of ``TrainingRun``.
    before : digest of the call before, and the number of its epochs.

    Raises
    ------
    PartitionError : on all ranks, if the interrupted call had other data or options, or came after another training.
    """

    def __init__(
        self,
        channel: Channel,
        folder: Path,
        replicas: Channel,
        options: dict[str, Any],
        save_every: int | None,
        before: tuple[str, int] | None,
    ) -> None:
        super().__init__(channel, folder, replicas, options.get("verbose", "auto"), save_every)
        self._options = options
        self.digest = _digest(options, before)
        self._iterators = 0  # made so far, the one of the running epoch included
        self._consumed = 0  # batches of this iterator before the running epoch
        self._random = random_state()  # when this iterator was made
        self._iterator: Any = None
        self._validation = Sources()  # of the data of validation
        self._validations = 0  # iterators over it that Keras has made so far
        self._to_restore = self.checkpoint.facts if self.checkpoint else None
        self._of_validation = self._to_restore["pipeline"].get("validation") if self._to_restore else None
        if self._to_restore is not None and self._to_restore["pipeline"].get("digest") != self.digest:
            raise PartitionError(
                f"call {folder.name.rpartition('-')[2]} of fit had other data or options when it was interrupted",
                file=str(folder),
                expected="the arrays, the batch size and the steps of the interrupted run, after as many epochs",
                found="others, or another order of the calls of fit, or another number of epochs in the call before",
                remedy="run the script unchanged, with the same data; or delete this folder and those of later calls, "
                "whose training then begins anew; or give another folder to --checkpoint",
            )

    def last_epoch(self, user_callbacks: list[Any], epochs: int) -> int:
        """Return the epoch with which to end: at once, if a callback has ended the run."""
        if self.checkpoint is None:
            return epochs
        last = min(epochs, self.start.epoch) if self.checkpoint.facts["stopped"] else epochs
        if last <= self.start.epoch:
            self._advance(self.checkpoint.facts)
        return last

    def _advance(self, facts: dict[str, Any]) -> None:
        """Leave random numbers and data sets of the script as this call, which has ended, has left them."""
        pipeline = facts["pipeline"]
        x, validation = self._options.get("x"), self._options.get("validation_data")
        made, epochs, state = pipeline["after"]
        if isinstance(x, tf.data.Dataset):
            self._make_iterators(x, made)
            found = Sources(x)
            found.begin(facts["data"])
            found.begin_at(epochs)
        if isinstance(validation, tf.data.Dataset):
            self._make_iterators(validation, pipeline["validation"][0])
            Sources(validation).begin_at(pipeline["validation"][1])
        set_random_state(state)

    def _make_iterators(self, dataset: tf.data.Dataset, number: int) -> None:
        """Make iterators, for each of which a data set draws a seed, and read nothing."""
        if number and shuffles_what_repeats(dataset):
            say_once(
                self.channel.rank,
                "a data set is shuffled below repeat() or within flat_map(), and draws a seed for each repetition that "
                "is read: its order is another one from this restart on\n"
                "  remedy: repeat() first, then shuffle(); or one call of fit with steps_per_epoch=",
            )
        for _ in range(number):
            iter(dataset)

    def note_iterator(self, dataset: Any) -> None:
        """Count an iterator over the training data that Keras is about to make."""
        if self._iterators == 0:
            self._sources = Sources(dataset)
        super().note_iterator(dataset)
        self._iterators += 1
        self._random = random_state()

    def note_validation(self, dataset: Any) -> None:
        """Count an iterator over validation data that Keras is about to make; a restart first makes those before it.

        Each passes over the data from its beginning, and draws a seed as it is made.
        """
        if self._validations == 0:
            self._validation = Sources(dataset)
        if self._of_validation is not None:
            self._validations, epochs = self._of_validation
            self._validation.begin_at(epochs)
            self._make_iterators(dataset, self._validations)
            self._of_validation = None
        self._validations += 1

    def steps(self, epoch_iterator: Any, steps: Iterator[Any]) -> Iterator[Any]:
        """Yield the steps of an epoch that are left; see ``TrainingRun.steps``."""
        self._iterator, begins = epoch_iterator, self._began
        self.start.steps = int(epoch_iterator.num_batches or 0)
        first_step = self._first_step()
        if begins and self._to_restore is not None:
            self._restore(epoch_iterator, self._to_restore)
            self._to_restore = None
        executed = epoch_iterator.steps_per_execution

        def counted() -> Iterator[Any]:
            for first, last, batches in steps:
                if first == 0:
                    self._consumed = max(0, epoch_iterator._steps_seen - executed)
                    for _ in range(first_step):
                        next(batches)
                yield first, last, batches

        yield from steps_from(first_step, self.start.steps, executed, counted())

    def _restore(self, epoch_iterator: Any, facts: dict[str, Any]) -> None:
        """Make the iterators of the epochs before, which draw seeds, and drop the batches of the last one."""
        pipeline, dataset = facts["pipeline"], epoch_iterator._distributed_dataset
        before = max(0, pipeline["iterators"] - 1 - self._iterators)
        self._make_iterators(dataset, before)
        self._iterators += before
        self._sources = Sources(dataset)
        self._sources.begin(facts["data"])
        set_random_state(pipeline["random"])  # as ``random.shuffle`` of a ``PyDataset`` leaves them in each epoch
        if epoch_iterator.steps_per_epoch:
            epoch_iterator._current_iterator = iter(epoch_iterator._get_iterator())
            for _ in range(pipeline["consumed"]):
                next(epoch_iterator._current_iterator)
            epoch_iterator._steps_seen = pipeline["consumed"]

    def data_facts(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the facts of the data at the beginning of an epoch; see ``TrainingRun.data_facts``."""
        iterators, consumed, epochs = self._iterators, self._consumed, self._epochs
        state = self._random
        if step == 0:  # Keras has not begun the next epoch
            goes_on = self._iterator.steps_per_epoch and self._iterator._current_iterator is not None
            iterators, consumed = (iterators, self._iterator._steps_seen) if goes_on else (iterators + 1, 0)
            epochs = epochs if goes_on else self._sources.epochs()
            state = state if goes_on else random_state()
        validation = self._of_validation or (self._validations, self._validation.epochs())
        pipeline = {"iterators": iterators, "consumed": consumed, "digest": self.digest, "random": state}
        pipeline |= {"after": (self._iterators, self._sources.epochs(), random_state()), "validation": validation}
        return {"data": self._sources.states(epochs), "pipeline": pipeline}


def _digest(options: dict[str, Any], before: tuple[str, int] | None) -> str:
    """Return a digest of the data of a call of ``fit``, as far as it can be read without iterating over it."""
    data = [options.get(name) for name in ("x", "y", "sample_weight")]
    described: list[Any] = [
        options.get(name) for name in ("batch_size", "steps_per_epoch", "shuffle", "validation_split")
    ]
    described.append(before)
    if is_sharded(data[0]):
        described.append("sharded")
    else:
        with contextlib.suppress(Exception):  # data of any class
            described += leaf_digests(data)
    return hashlib.blake2b(repr(described).encode(), digest_size=16).hexdigest()
