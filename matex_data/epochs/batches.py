"""Epochs of one rank, by the strategy that fits the data and the order, and their batches as NumPy arrays."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Array, Integers
from matex_data.display import table_html
from matex_data.epochs.kept import Exchanged, InMemory
from matex_data.epochs.prefetcher import Prefetcher
from matex_data.epochs.strategies import READ_BYTES, Shared, Strategy, Streamed
from matex_data.epochs.window import LoadedWindow
from matex_data.epochs.workers import WorkerEpochs
from matex_data.fields import ElementSpec
from matex_data.index.ragged import RaggedArray
from matex_data.mpi.communicator import Communicator
from matex_data.reading.context import ReadContext
from matex_data.reading.source import Source
from matex_data.sampling.schedule import Schedule
from matex_data.sampling.state import Fingerprint


def strategy_for(
    source: Source, schedule: Schedule, ranks: int, shared: bool = False, nbytes: int = READ_BYTES
) -> Strategy:
    """Return the strategy of the epochs of a schedule.

    Parameters
    ----------
    source : the opened files.
    schedule : order of the samples in all epochs.
    ranks : number of ranks.
    shared : the ranks read blocks for one another, where they read in every epoch.
    nbytes : of a rank's samples that are read at once, about, at most.
    """
    kind: type[Strategy] = Shared if shared else Streamed
    if schedule.uniform:
        kind = Streamed if source.options.global_reads == "rows" else Exchanged
    elif source.options.cache == "memory":
        kind = InMemory
    return kind(source, schedule, ranks, nbytes)


class Epochs:
    """Loaded windows of one rank, epoch by epoch. Only one epoch is under way at a time. *Collective*.

    Parameters
    ----------
    strategy : of the ranks of its source.

    Raises
    ------
    PartitionError : the samples that have to be in memory do not fit into that of a rank; a field or MPI does not allow
        the strategy.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy, self.source, self.schedule = strategy, strategy.source, strategy.schedule
        self.size, self.read_steps = strategy.ranks, strategy.read_steps
        strategy.prepare()
        self._context: ReadContext | None = strategy.open()
        self._process = os.getpid()
        self._prefetcher: Prefetcher | None = None

    def windows(self, epoch: int, start: int) -> Iterator[LoadedWindow]:
        """Yield this rank's windows of ``read_steps`` steps each, from step ``start`` on. *Collective*.

        End an unfinished earlier epoch.
        """
        if self._process != os.getpid():  # after a fork, MPI, open files and threads belong to the parent process
            self._context, self._process, self._prefetcher = None, os.getpid(), None
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher.join()
        self._context = self._context or self.strategy.open()
        self._prefetcher = prefetcher = Prefetcher(self.strategy.reader(self._context, epoch, start))
        try:
            yield from prefetcher
        finally:
            prefetcher.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_context": None, "_process": -1, "_prefetcher": None}


@dataclass(frozen=True)
class BatchWindow:
    """Consecutive batches of one rank.

    Parameters
    ----------
    arrays : field name -> samples of all batches, one batch after the other: an array, or a `RaggedArray`.
    sizes : int64[batches], samples of each batch.
    weight : float32[samples], the sample weights; None without weights and padding.
    """

    arrays: Mapping[str, Any]
    sizes: Integers
    weight: NDArray[np.float32] | None

    def part(self, begin: int, end: int, sizes: Integers) -> BatchWindow:
        """Return some batches: the samples from ``begin`` to ``end``, of batches of these ``sizes``."""
        weight = None if self.weight is None else self.weight[begin:end]
        return BatchWindow({name: array[begin:end] for name, array in self.arrays.items()}, sizes, weight)


class Batches:
    """Iterable over this rank's rows of every global batch. Each iteration is the next epoch.

    Iteration is *Collective*: all ranks begin an epoch, and take the same number of batches. The arrays are views of
    memory that is reused once no array refers to it.

    Parameters
    ----------
    epochs : source of the samples, in the order of the batches.
    elements : structure of a batch.
    fingerprint : facts that determine the order.
    step : global batches to skip, counted from the first batch of epoch 0.

    Attributes
    ----------
    first_epoch : that of the first pass.
    """

    def __init__(self, epochs: Epochs, elements: ElementSpec, fingerprint: Fingerprint, step: int = 0) -> None:
        self.schedule = epochs.schedule
        self.elements = elements
        self.fingerprint = fingerprint
        self.rows = self.schedule.batch_size // epochs.size
        self._epochs = epochs
        self._workers = WorkerEpochs()
        self._epoch, self._step = divmod(step, self.schedule.steps) if self.schedule.steps else (0, 0)
        self.first_epoch: int = self._epoch

    def __repr__(self) -> str:
        rows = ", ".join(f"{name}={value}" for name, value in self._summary().items())
        return f"Batches({rows})"

    def _repr_html_(self) -> str:
        return table_html(("batches", ""), self._summary().items())

    def _summary(self) -> dict[str, Any]:
        schedule = self.schedule
        order = "none" if schedule.seed is None else "global" if schedule.uniform else "blocks"
        return {
            "batch_size": schedule.batch_size,
            "rows_of_this_rank": self.rows,
            "steps": schedule.steps,
            "shuffle": order,
            "seed": schedule.seed,
            "remainder": repr(schedule.remainder),
            "next_epoch": self.epoch,
        }

    @property
    def comm(self) -> Communicator:
        """Return the communicator of the ranks that shard these batches."""
        return self._epochs.source.comm

    def __len__(self) -> int:
        """Return the number of batches of the next epoch, equal on all ranks."""
        return self.schedule.steps - (self._step if self._workers.next(self._epoch) == self._epoch else 0)

    def state(self, step: int) -> dict[str, Any]:
        """Return the state after ``step`` of these batches, counted from the first batch of epoch 0.

        See ``Dataset.state``.
        """
        return self.fingerprint.state(step)

    @property
    def fixed_rows(self) -> int | None:
        """Return the number of this rank's rows of every batch; None if batches may differ."""
        remainder, skips = self.schedule.remainder, self._epochs.source.skipped is not None
        return None if remainder == "keep" or (skips and remainder != "pad") else self.rows

    @property
    def epoch(self) -> int:
        """Return the number of the next epoch, from 0 on."""
        return self._workers.next(self._epoch)

    def begin_at(self, epoch: int) -> None:
        """Set the number of the next epoch, which begins with its first batch. Equal on all ranks."""
        self._epoch, self._step = epoch, 0
        self._workers.forget()

    @property
    def resumed(self) -> bool:
        """True if the next epoch begins after its first batch."""
        return self._step > 0

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's rows of each batch of the next epoch. *Collective*."""
        for window in self.windows():
            stops = np.cumsum(window.sizes).tolist()
            for start, stop in zip([0, *stops[:-1]], stops, strict=True):
                values = {name: _samples(array[start:stop]) for name, array in window.arrays.items()}
                weight = None if window.weight is None else window.weight[start:stop]
                yield self.elements.assemble(values, weight)

    def windows(self) -> Iterator[BatchWindow]:
        """Yield the batches of the next epoch, a window at a time. *Collective*. Counts as an iteration."""
        epoch = self._workers.begin(self._epoch)
        step = self._step if epoch == self._epoch else 0
        self._epoch, self._step = epoch + 1, 0
        skip = step % self._epochs.read_steps
        for window in self._epochs.windows(epoch, step - skip):
            yield self._without(window, skip)
            skip = 0

    def _without(self, window: LoadedWindow, skip: int) -> BatchWindow:
        """Return the window without its first ``skip`` batches."""
        begin = int(window.sizes[:skip].sum())
        weight = None
        if self.schedule.remainder == "pad":
            weight = np.ones(int(window.sizes.sum()), np.float32)
            weight[window.padding] = 0
            weight = weight[begin:]
        if self.elements.weights is not None:
            values = window.arrays[self.elements.weights][begin:].astype(np.float32)  # zeros where padded
            weight = values if weight is None else values * weight
        arrays = {name: array[begin:] for name, array in window.arrays.items()}
        return BatchWindow(arrays, window.sizes[skip:], weight)


def _samples(array: Array | RaggedArray) -> Array:
    return array.samples() if isinstance(array, RaggedArray) else array
