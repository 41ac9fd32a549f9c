"""Batches in which several data sets have fixed shares: a schedule made of one schedule for each of them.

Global batch k has the next samples of each data set, in the order that its own schedule gives. A data set that ends is
begun again, in another order. The data sets alternate in the rows of a batch, so that the adjacent rows that a rank
owns have the shares of the batch, to a row. Those of one data set are adjacent lanes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from matex_data._types import Integers
from matex_data.errors import PartitionError
from matex_data.index.runs import Runs, Samples, compress, ranges, within
from matex_data.locks import cached_property
from matex_data.sampling.permutation import random_words
from matex_data.sampling.schedule import EpochOrder, Schedule, StepPositions, Window, in_file_order

STOPS = ("first", "longest")


@dataclass(frozen=True)
class Mixture:
    """Shares of several data sets in each batch.

    Parameters
    ----------
    weights : of the data sets, which sum to 1.
    first : int64[data sets + 1], first sample of each data set, and the number of all.
    stop : end of an epoch. "first": with the data set that ends first. "longest": with the one that ends last.
    seed : that is added to those of the batches.
    """

    weights: tuple[float, ...]
    first: tuple[int, ...]
    stop: str
    seed: int

    def parts(self, samples: Samples) -> list[Samples]:
        """Return the samples of each data set."""
        edges = np.array(self.first)
        return [within(samples, Runs(edges[i : i + 1], np.diff(edges[i : i + 2]))) for i in range(len(edges) - 1)]

    def sizes(self, batch_size: int) -> list[int]:
        """Return the samples of each data set in a batch: their shares, rounded up or down.

        Raises
        ------
        PartitionError : the share of a data set is less than half a sample.

        Examples
        --------
        >>> Mixture((0.7, 0.3), (0, 10, 20), "first", 0).sizes(8)
        [6, 2]
        """
        exact = np.array(self.weights) * batch_size
        sizes = np.floor(exact + 1e-9).astype(np.int64)
        rest = batch_size - int(sizes.sum())
        sizes[np.argsort(sizes - exact, kind="stable")[:rest]] += 1
        if not sizes.all():
            raise PartitionError(
                "a batch has no sample of one of the data sets",
                expected=f"a batch_size of {round(1 / min(self.weights))} or more",
                found=f"batch_size={batch_size}, weights={list(self.weights)}",
                remedy="give larger batches, or weights= that differ less",
            )
        return [int(size) for size in sizes]

    def text(self) -> str:
        """Return a text that identifies the mixture."""
        return f"mix {list(self.weights)} {self.stop} {self.seed}"


@dataclass(frozen=True)
class MixedSchedule(Schedule):
    """Assignment of the samples of several data sets to global batches.

    Parameters
    ----------
    parts : schedule of each data set, with its share of the batch.
    positions : int64[parts], position of the first sample of each data set among all.
    stop, mixture_seed : see `Mixture`.
    """

    parts: tuple[Schedule, ...] = ()
    positions: tuple[int, ...] = ()
    stop: str = STOPS[0]
    mixture_seed: int = 0

    @classmethod
    def of(
        cls, mixture: Mixture, samples: Samples, whole: Schedule, schedule_of: Callable[[Samples, int], Schedule]
    ) -> MixedSchedule:
        """Return the schedule of a mixture.

        Parameters
        ----------
        samples : of all data sets.
        whole : schedule of all samples, whose segments and blocks stand for all of the parts.
        schedule_of : returns the schedule of samples of one data set, given its share of a batch.

        Raises
        ------
        PartitionError : the last batch is not to be dropped; a data set has less samples than its share of a batch.
        """
        if whole.remainder != "drop":
            raise PartitionError(
                "all batches of a mixture are full",
                expected='remainder="drop"',
                found=f"remainder={whole.remainder!r}",
                remedy="evaluate the data sets one by one, or concatenate them",
            )
        sizes = mixture.sizes(whole.batch_size)
        parts = [schedule_of(own, size) for own, size in zip(mixture.parts(samples), sizes, strict=True)]
        for number, part in enumerate(parts, 1):
            if not part.full_steps:
                raise PartitionError(
                    f"data set {number} of the mixture has fewer samples than its share of a batch",
                    expected=f"at least {part.batch_size} samples",
                    found=f"{part.segments.total} samples",
                    remedy="give a smaller batch_size, or other weights=",
                )
        steps = min(part.window_steps for part in parts)
        positions = np.cumsum([0, *(part.segments.total for part in parts)])[:-1].tolist()
        return cls(
            whole.segments,
            whole.batch_size,
            sum(part.lanes for part in parts),
            steps,
            whole.seed,
            whole.blocks,
            whole.remainder,
            uniform=whole.uniform,
            chosen=whole.chosen,
            parts=tuple(parts),
            positions=tuple(positions),
            stop=mixture.stop,
            mixture_seed=mixture.seed,
        )

    @property
    def full_steps(self) -> int:
        """Number of batches in an epoch, all of which are full."""
        choose = min if self.stop == STOPS[0] else max
        return choose(part.full_steps for part in self.parts)

    @property
    def left_over(self) -> int:
        """No samples: what does not fill a batch comes in a later epoch, or is drawn anew."""
        return 0

    def epoch(self, number: int) -> MixedOrder:
        """Return the order of one epoch, counted from 0."""
        return MixedOrder(self, self.segments, number)


@dataclass(frozen=True)
class MixedOrder(EpochOrder):
    """Order of the samples of several data sets in one epoch.

    With a seed, a data set that is longer than the epoch goes on in the next one, so that all of its samples are used.
    """

    schedule: MixedSchedule
    passes: dict[tuple[int, int], EpochOrder] = field(default_factory=dict, compare=False)

    @cached_property
    def _parts(self) -> tuple[Schedule, ...]:
        """Schedules of the data sets, with seeds of their own."""
        schedule = self.schedule
        if schedule.seed is None:
            return schedule.parts
        keys = [(schedule.seed, schedule.mixture_seed, number) for number in range(len(schedule.parts))]
        seeds = [int(random_words(1, *key)[0]) for key in keys]
        return tuple(replace(part, seed=seed) for part, seed in zip(schedule.parts, seeds, strict=True))

    def _pass(self, number: int, epoch: int) -> EpochOrder:
        """Return the order of a data set in one pass over it."""
        found = self.passes.get((number, epoch))
        if found is None:
            found = self.passes[number, epoch] = self._parts[number].epoch(epoch)
        return found

    def window(self, begin: int, end: int, rank: int, size: int) -> Window:
        """Return the window of a rank for steps ``begin`` to ``end``. A sample may be in it several times."""
        shard_rows = self.schedule.batch_size // size
        numbers, destination = [_NONE], [_NONE]
        for number, low, own_rows in self._shares(rank * shard_rows, shard_rows):
            for order, first, last, at in self._passes(number, begin, end):
                runs, steps, rows = _rows(order, first, last, low, len(own_rows))
                runs = order.schedule.of_positions(runs) if order.schedule.chosen is not None else runs
                own = (steps >= first) & (steps < last)
                numbers.append(ranges(runs.start, runs.count)[own])
                destination.append(((steps - first + at) * shard_rows + own_rows[rows])[own])
        sizes = np.full(max(0, end - begin), shard_rows, np.int64)
        every, to = np.concatenate(numbers), np.concatenate(destination)
        order_of = np.argsort(every, kind="stable")
        every, to = every[order_of], to[order_of]
        again = np.flatnonzero(np.diff(every, prepend=-1) == 0)
        firsts = np.delete(np.arange(len(every)), again)
        copied = to[firsts][np.searchsorted(every[firsts], every[again])]
        copies = np.stack([copied, to[again]]) if len(again) else None
        return Window(compress(every[firsts]), to[firsts], sizes, shard_rows * len(sizes), copies)

    def step_positions(self, begin: int, end: int, rank: int, size: int) -> StepPositions:
        """Return the samples of a rank in steps ``begin`` to ``end`` of uniform permutations."""
        shard_rows = self.schedule.batch_size // size
        sizes = np.full(max(0, end - begin), shard_rows, np.int64)
        positions = np.empty((len(sizes), shard_rows), np.int64)
        for number, low, own_rows in self._shares(rank * shard_rows, shard_rows):
            for order, first, last, at in self._passes(number, begin, end):
                drawn = order.drawn(first, last, low, len(own_rows)) + self.schedule.positions[number]
                positions[at : at + last - first, own_rows] = drawn.reshape(-1, len(own_rows))
        return StepPositions(positions.reshape(-1), sizes, positions.size)

    def _shares(self, low: int, count: int) -> Iterator[tuple[int, int, Integers]]:
        """Yield the data sets with rows among ``low`` to ``low + count`` of a batch.

        Each with its first row there, counted within its share, and its rows, counted from ``low``.
        """
        for number, rows in enumerate(alternating([part.batch_size for part in self.schedule.parts])):
            first, last = np.searchsorted(rows, (low, low + count)).tolist()
            if first < last:
                yield number, first, rows[first:last] - low

    def _passes(self, number: int, begin: int, end: int) -> Iterator[tuple[EpochOrder, int, int, int]]:
        """Yield the passes over a data set in steps ``begin`` to ``end``, cut at the windows of its schedule.

        Each with its first and last step there, and the number of steps since ``begin``.
        """
        schedule, part = self.schedule, self.schedule.parts[number]
        length = part.full_steps
        shift = self.number * schedule.full_steps if schedule.seed is not None else 0
        at, stop = begin + shift, end + shift
        while at < stop:
            epoch, first = divmod(at, length)
            window = length if schedule.seed is None or schedule.uniform else part.window_steps
            last = min(first - first % window + window, length, first + stop - at)
            yield self._pass(number, epoch), first, last, at - shift - begin
            at += last - first


_NONE = np.empty(0, np.int64)


def alternating(sizes: Sequence[int]) -> list[Integers]:
    """Return the rows of each data set in a batch, ascending, so that any adjacent rows have about the shares of all.

    Parameters
    ----------
    sizes : rows of each data set.

    Examples
    --------
    >>> [rows.tolist() for rows in alternating([6, 2])]
    [[0, 1, 3, 4, 5, 7], [2, 6]]
    """
    middle = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes])
    owner = np.repeat(np.arange(len(sizes)), sizes)[np.argsort(middle, kind="stable")]
    return [np.flatnonzero(owner == number) for number in range(len(sizes))]


def _rows(order: EpochOrder, first: int, last: int, low: int, count: int) -> tuple[Runs, Integers, Integers]:
    """Return samples of a pass, and for each its step and its row among ``low`` to ``low + count`` of the share.

    Of a window that is shuffled as a whole, all steps are returned.
    """
    schedule = order.schedule
    if schedule.uniform:
        runs, to = in_file_order(order.sequence.numbers(order.drawn(first, last, low, count)))
    elif schedule.seed is None:
        runs, to = order.in_order(first, last, low, count)
    else:
        first -= first % schedule.window_steps
        runs, to = order.shuffled(first, min(first + schedule.window_steps, schedule.full_steps), low, count)
    steps, rows = np.divmod(to, count)
    return runs, first + steps, rows
