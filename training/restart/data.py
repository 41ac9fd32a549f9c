"""Training data of an interrupted run: the epochs of this package's data sets, and the steps that are left."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from matex_data.epochs.batches import Batches
from matex_data.errors import PartitionError
from matex_data.sampling.state import read_step
from matex_data.training.keras_api import CacheDataset, EpochIterator

if TYPE_CHECKING:
    from matex_data.training.restart.resume import TrainingRun


class Sources:
    """Data sets of this package that a pipeline reads.

    Parameters
    ----------
    dataset : the pipeline; None: there are none.
    """

    def __init__(self, dataset: tf.data.Dataset | None = None) -> None:
        self._found: list[tuple[Batches, bool]] = [] if dataset is None else list(_sources(dataset))

    def epochs(self) -> list[int]:
        """Return the epoch of each with which the next pass over the pipeline begins.

        That of a data set that a ``cache`` has kept is its first one, which has to be read again.
        """
        return [
            source.first_epoch if cached and source.epoch == source.first_epoch + 1 else source.epoch
            for source, cached in self._found
        ]

    def states(self, epochs: Sequence[int]) -> list[dict[str, Any]]:
        """Return their states at the beginning of these epochs."""
        return [
            source.state(epoch * source.schedule.steps) for (source, _), epoch in zip(self._found, epochs, strict=True)
        ]

    def begin(self, saved: Sequence[Any]) -> None:
        """Begin with the epochs of a checkpoint; raise ``PartitionError`` if its states are those of other data."""
        if len(self._found) != len(saved):
            raise other_data(len(saved), len(self._found))
        for (source, _), state in zip(self._found, saved, strict=True):
            source.fingerprint.check(state)
            source.begin_at(read_step(state) // max(1, source.schedule.steps))

    def begin_at(self, epochs: Sequence[int]) -> None:
        """Let them begin with these epochs."""
        for (source, _), epoch in zip(self._found, epochs, strict=False):
            source.begin_at(epoch)


def _sources(dataset: Any, cached: bool = False) -> Iterator[tuple[Batches, bool]]:
    """Yield the batches of this package that a pipeline reads, and whether it keeps them."""
    found = getattr(dataset, "matex_batches", None)
    if found is not None:
        yield found, cached
        return
    cached |= isinstance(dataset, CacheDataset)
    for source in dataset._inputs():
        yield from _sources(source, cached)


def shuffles_what_repeats(dataset: Any, repeats: bool = False) -> bool:
    """Return whether a pipeline shuffles data that it repeats afterwards.

    Parameters
    ----------
    repeats : what takes the elements repeats the data set.

    Examples
    --------
    >>> data = tf.data.Dataset.range(9)
    >>> shuffles_what_repeats(data.shuffle(9).repeat()), shuffles_what_repeats(data.repeat().shuffle(9))
    (True, False)
    """
    name = type(dataset).__name__
    if repeats and "Shuffle" in name:
        return True
    repeats |= "Repeat" in name or "FlatMap" in name
    return any(shuffles_what_repeats(source, repeats) for source in dataset._inputs())


def other_data(expected: int, found: int) -> PartitionError:
    """Return the error for another number of data sets of this package."""
    return PartitionError(
        "the interrupted run had other data",
        expected=f"{expected} datasets of matex_data in the pipeline",
        found=f"{found} datasets of matex_data in the pipeline",
        remedy="resume with the data of the interrupted run, or give another checkpoint folder",
    )


class TrainingIterator(EpochIterator):  # type: ignore[misc]  # Keras has no types
    """Epoch iterator of Keras over the training data of a run with checkpoints.

    Attributes
    ----------
    run : the run, which notes each iterator, and numbers the steps of its first epoch; None: there is none.
    """

    run: TrainingRun | None = None

    def _get_iterator(self) -> Any:
        if self.run is not None:
            self.run.note_iterator(self._distributed_dataset)
        return super()._get_iterator()

    def _enumerate_iterator(self) -> Iterator[Any]:
        steps = super()._enumerate_iterator()
        return steps if self.run is None else self.run.steps(self, steps)


def steps_from(begin: int, total: int, executed: int, steps: Iterator[Any]) -> Iterator[Any]:
    """Yield the executions of an epoch that are left, with the numbers that they have in the whole epoch.

    Parameters
    ----------
    begin : steps of the epoch that were trained before, of which the data has no batches.
    total : steps of the whole epoch; 0 or less: unknown.
    executed : steps of an execution.
    steps : numbers of the first and of the last step of each execution, and the iterator over batches.
    """
    left = itertools.dropwhile(lambda step: step[0] + executed <= begin, steps)
    shift: int | None = None  # unless the steps before are whole executions
    for first, last, batches in left:
        shift = max(0, begin - first) if shift is None else shift
        if total <= 0 or first + shift < total:
            yield first + shift, last + shift, batches


def skip_once(dataset: tf.data.Dataset, step: int) -> tf.data.Dataset:
    """Return the dataset without its first ``step`` batches in the first epoch, and whole in later epochs."""
    pending = [step]

    def pop_count() -> Any:
        return np.int64(pending.pop() if pending else 0)

    def one_epoch(_: Any) -> tf.data.Dataset:
        count = tf.ensure_shape(tf.numpy_function(pop_count, [], tf.int64), ())
        return dataset.skip(count)

    skipping = tf.data.Dataset.range(1).flat_map(one_epoch)
    vars(skipping).update({name: value for name, value in vars(dataset).items() if name.startswith("matex_")})
    return skipping
