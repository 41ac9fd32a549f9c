"""Windows of one rank while they are planned and loaded, and the readers that plan the windows of an epoch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from matex_data._types import Integers
from matex_data.fields import Schema
from matex_data.index.cache import ChunkCache
from matex_data.index.computed import NUMBER, Drawing
from matex_data.index.ragged import RaggedOutput
from matex_data.index.runs import Runs
from matex_data.io.counters import Profile
from matex_data.io.files import Files
from matex_data.locks import cached_property
from matex_data.reading.context import NO_ROWS, ReadContext
from matex_data.reading.execute import execute
from matex_data.reading.plan import Arrays, ReadPlan
from matex_data.reading.pool import first_error, submit
from matex_data.reading.skipping import SampleRead, SkippedSamples, Tally, present
from matex_data.sampling.schedule import EpochOrder, Schedule, Window


@dataclass
class LoadedWindow:
    """Rows of one window in memory.

    Parameters
    ----------
    arrays : field name -> rows of all steps, one step after the other: an array, or a `RaggedArray`.
    sizes : int64[steps], rows of each step.
    padding : int64, rows that are padding.
    """

    arrays: Arrays
    sizes: Integers
    padding: Integers


def leave_out(loaded: LoadedWindow, rows: Integers, fields: Schema, pad: bool) -> LoadedWindow:
    """Return the window without some rows.

    Parameters
    ----------
    loaded : the window.
    rows : int64, rows to leave out.
    fields : of the arrays.
    pad : turn the rows into padding, so that the batches keep their sizes.
    """
    if not len(rows):
        return loaded
    if pad:
        for name, array in loaded.arrays.items():
            for row in rows.tolist():
                fields[name].blank(array[row : row + 1])
        return replace(loaded, padding=np.union1d(loaded.padding, rows))
    steps = np.searchsorted(np.cumsum(loaded.sizes), rows, side="right")
    sizes = loaded.sizes - np.bincount(steps, minlength=len(loaded.sizes))
    return LoadedWindow(present(loaded.arrays, rows), sizes, NO_ROWS)


def joined(loaded: LoadedWindow) -> LoadedWindow:
    """Return the window with the lists of its samples in their order, one after the other."""
    outputs = {name: array for name, array in loaded.arrays.items() if isinstance(array, RaggedOutput)}
    return replace(loaded, arrays={**loaded.arrays, **{name: output.joined() for name, output in outputs.items()}})


class PendingWindow(ABC):
    """Window that is planned, or is being loaded.

    Attributes
    ----------
    loaded : the window; its contents are undefined until ``wait`` returns.
    exchanges : all ranks have to start the window, also one that has failed.
    """

    loaded: LoadedWindow
    exchanges = False

    @abstractmethod
    def start(self, files: Files, profile: Profile) -> None:
        """Start to load the window. *Collective* where the ranks exchange, or read as one, whatever fails."""

    @abstractmethod
    def wait(self, profile: Profile) -> None:
        """Wait until ``loaded`` is complete. Raise the first error."""


PlanWindow = Callable[["EpochReader", int, int], PendingWindow]
"""Function that plans the window of the steps from a first one to an end, and allocates its arrays."""


class EpochReader:
    """Windows of one rank in one epoch, from a step on.

    Parameters
    ----------
    context : what the windows are loaded with.
    schedule : order of the samples in all epochs.
    number : of the epoch, from 0 on.
    begins : first step of each window.
    plan : plans a window.
    skipped : samples of the data set that cannot be read and are left out; None: such a sample is an error.
    """

    def __init__(
        self,
        context: ReadContext,
        schedule: Schedule,
        number: int,
        begins: range,
        plan: PlanWindow,
        skipped: SkippedSamples | None = None,
    ) -> None:
        self.context, self.number, self.begins = context, number, begins
        self._schedule, self._plan = schedule, plan
        self._skipped, self._tally = skipped, Tally()

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self.begins)

    def windows(self) -> Iterator[Future[PendingWindow]]:
        """Yield the windows in order. Each is planned, in the pool, when it is requested."""
        steps = self._schedule.steps
        # In the pool, since one thread more than there are cores would slow down the decoding.
        return (submit(self._planned, begin, min(begin + self.begins.step, steps)) for begin in self.begins)

    def _planned(self, begin: int, end: int) -> PendingWindow:
        with self.context.profile.timed("planning"):
            return self._plan(self, begin, end)

    @cached_property
    def epoch(self) -> EpochOrder:
        """Return the order of the samples in this epoch; computed in the pool, with the first window."""
        return self._schedule.epoch(self.number)

    @cached_property
    def chunks(self) -> ChunkCache:
        """Decoded chunks that later windows need."""
        return ChunkCache(self.context.cache_bytes, self.number)

    @property
    def pads(self) -> bool:
        """Return whether samples that are left out become padding."""
        return self._schedule.remainder == "pad"

    def read(self, runs: Runs, destination: Integers, arrays: Arrays) -> SampleRead:
        """Return the read of samples from files, with or without those that cannot be read."""
        return SampleRead(self.context, self.context.index, self._skipped, self._tally, runs, destination, arrays)

    def finish(self) -> None:
        """End the epoch, after all ranks have loaded all windows. *Collective*, in the thread that reads.

        Report the samples that were skipped, and raise like ``SkippedSamples.report``.
        """
        if self._skipped is not None:
            self._skipped.report(self.context.session.status, self._tally, f"of epoch {self.number}")


class FileWindow(PendingWindow):
    """Window that is read from files.

    Samples that cannot be read, with ``on_error="skip"``, leave their batch or become padding of it, so that global
    batch k has the same samples on any number of ranks. The reads that all ranks have agreed on are made nevertheless.

    Parameters
    ----------
    window : samples that are read.
    loaded : its arrays.
    read : fills them.
    plan : of the read.
    reader : of the epoch.
    """

    def __init__(
        self, window: Window, loaded: LoadedWindow, read: SampleRead, plan: ReadPlan, reader: EpochReader
    ) -> None:
        self.loaded = loaded
        self._window, self._read, self._plan, self._reader = window, read, plan, reader
        self._futures: list[Future[None]] = []
        self._error: Exception | None = None

    def start(self, files: Files, profile: Profile) -> None:
        """Read, and start to decode. *Collective* in collective mode.

        Where samples are skipped, keep an error for ``wait``: the other ranks go on.
        """
        try:
            with profile.timed("reading"):
                self._futures = execute(self._plan, files)
        except Exception as error:
            if not self._read.skips:
                raise
            self._error = error
        self._plan = ReadPlan()  # releases the scratch memory

    def wait(self, profile: Profile) -> None:
        """Wait until all samples that can be read are in ``loaded``. Raise the first error that is not in these."""
        if self._error is None:
            with profile.timed("decoding"):
                self._error = first_error(self._futures)
        failure = self._read.finish(self._error)
        if failure is not None:
            raise failure
        self._window.repeat(self.loaded.arrays)
        absent = self._window.with_copies(self._read.absent)
        profile.add(samples=int(self.loaded.sizes.sum()) - len(self.loaded.padding) - len(absent))
        self.loaded = joined(leave_out(self.loaded, absent, self._reader.context.index.fields, self._reader.pads))


def file_window(reader: EpochReader, begin: int, end: int) -> FileWindow:
    """Plan the reads of this rank's samples of steps ``begin`` to ``end``, and allocate their arrays."""
    context, comm = reader.context, reader.context.session.comm
    window = reader.epoch.window(begin, end, comm.rank, comm.size)
    samples = window.runs.total
    arrays = context.allocate(window.rows, samples)
    loaded = LoadedWindow(arrays, window.sizes, np.arange(samples, window.rows))
    read = reader.read(window.runs, window.destination, arrays)
    readable = replace(window, runs=read.runs, destination=read.destination)
    return FileWindow(readable, loaded, read, read.plan(reader.chunks), reader)


def compute_fields(loaded: LoadedWindow, drawn: Drawing, epoch: int) -> LoadedWindow:
    """Return a window with the fields that functions compute of what was kept in memory.

    Parameters
    ----------
    loaded : rows of the fields of ``drawn.index``.
    drawn : the functions.
    epoch : number of the epoch.

    Raises
    ------
    FunctionError : a function fails.
    """
    numbers = loaded.arrays[NUMBER]
    present: Any = slice(None)
    if len(loaded.padding):
        present = np.setdiff1d(np.arange(len(numbers)), loaded.padding)
    given = {name: array[present] for name, array in loaded.arrays.items()}
    computed = drawn.apply(given, numbers[present], epoch)
    arrays: dict[str, Any] = {}
    for name, field in drawn.fields.items():
        if name not in computed:
            arrays[name] = loaded.arrays[drawn.delivered[name]]
        elif len(loaded.padding):
            arrays[name] = field.empty(len(numbers))
            arrays[name][present] = computed[name]
            blanked = field.empty(len(loaded.padding))
            field.blank(blanked)
            arrays[name][loaded.padding] = blanked
        else:
            arrays[name] = np.ascontiguousarray(computed[name])
    return replace(loaded, arrays=arrays)
