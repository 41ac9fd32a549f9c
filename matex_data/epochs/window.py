"""Windows of one rank while they are planned and loaded, and the readers that plan the windows of an epoch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from matex_data._types import Integers
from matex_data.index.cache import ChunkCache
from matex_data.io.counters import Profile
from matex_data.io.files import Files
from matex_data.locks import cached_property
from matex_data.reading.context import ReadContext
from matex_data.reading.execute import execute
from matex_data.reading.plan import Arrays, ReadPlan, plan_reads
from matex_data.reading.pool import submit, wait_for_all
from matex_data.reading.skipping import SkippedSamples, Tally
from matex_data.sampling.schedule import EpochOrder, Schedule, Window


@dataclass
class LoadedWindow:
    """Rows of one window in memory.

    Parameters
    ----------
    arrays : field name -> rows of all steps, one step after the other.
    sizes : int64[steps], rows of each step.
    padding : int64, rows that are padding.
    """

    arrays: Arrays
    sizes: Integers
    padding: Integers


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


class WholeWindow(PendingWindow):
    """Window whose samples are there once it is planned: no file is read.

    Parameters
    ----------
    loaded : the window.
    """

    def __init__(self, loaded: LoadedWindow) -> None:
        self.loaded = loaded

    def start(self, files: Files, profile: Profile) -> None:
        """Return at once."""

    def wait(self, profile: Profile) -> None:
        """Count the samples."""
        profile.add(samples=int(self.loaded.sizes.sum()) - len(self.loaded.padding))


class EpochReader(ABC):
    """Windows of one rank in one epoch, from a step on.

    Parameters
    ----------
    context : what the windows are loaded with.
    schedule : order of the samples in all epochs.
    epoch : number of the epoch, from 0 on.
    start : first step.
    window_steps : steps of one window; a multiple of those of the schedule.
    skipped : samples of the data set that cannot be read and are left out; None: such a sample is an error.
    """

    def __init__(
        self,
        context: ReadContext,
        schedule: Schedule,
        epoch: int,
        start: int,
        window_steps: int,
        skipped: SkippedSamples | None = None,
    ) -> None:
        self.context = context
        self.begins = range(start, schedule.steps, window_steps)
        self._schedule = schedule
        self._number = epoch
        self._skipped, self._tally = skipped, Tally()

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self.begins)

    def windows(self) -> Iterator[Future[PendingWindow]]:
        """Yield the windows in order. Each is planned, in the pool, when it is requested."""
        steps = self._schedule.steps
        # In the pool, since one thread more than there are cores would slow down the decoding.
        return (submit(self.plan, begin, min(begin + self.begins.step, steps)) for begin in self.begins)

    @cached_property
    def epoch(self) -> EpochOrder:
        """Return the order of the samples in this epoch; computed in the pool, with the first window."""
        return self._schedule.epoch(self._number)

    @cached_property
    def _chunks(self) -> ChunkCache:
        """Decoded chunks that later windows need."""
        return ChunkCache(self.context.cache_bytes, self._number)

    @abstractmethod
    def plan(self, begin: int, end: int) -> PendingWindow:
        """Plan the window of steps ``begin`` to ``end``, and allocate its arrays."""

    def finish(self) -> None:
        """End the epoch, after all ranks have loaded all windows. *Collective*, in the thread that reads.

        Report the samples that were skipped, and raise like ``SkippedSamples.report``.
        """
        if self._skipped is not None:
            self._skipped.report(self.context.session.status, self._tally, f"of epoch {self._number}")


@dataclass
class FileWindow(PendingWindow):
    """Window that is read from files.

    Parameters
    ----------
    window : samples of the window.
    loaded : its arrays.
    plan : reads that fill them.
    """

    window: Window
    loaded: LoadedWindow
    plan: ReadPlan
    _futures: list[Future[None]] = field(default_factory=list)

    def start(self, files: Files, profile: Profile) -> None:
        """Read, and start to decode. *Collective* in collective mode."""
        with profile.timed("reading"):
            self._futures = execute(self.plan, files)
        self.plan = ReadPlan()  # releases the scratch memory

    def wait(self, profile: Profile) -> None:
        """Wait until all samples are read and decoded. Raise the first error."""
        with profile.timed("decoding"):
            wait_for_all(self._futures)
            self.window.repeat(self.loaded.arrays)
        profile.add(samples=self.window.runs.total)


class FileEpochReader(EpochReader):
    """Windows of an epoch that is read from files. Parameters as of ``EpochReader``."""

    def plan(self, begin: int, end: int) -> PendingWindow:
        """Plan the reads of steps ``begin`` to ``end``, and allocate their arrays."""
        context, comm = self.context, self.context.session.comm
        with context.profile.timed("planning"):
            window = self.epoch.window(begin, end, comm.rank, comm.size)
            samples = window.runs.total
            arrays = context.allocate(window.rows, samples)
            return self._pending(window, LoadedWindow(arrays, window.sizes, np.arange(samples, window.rows)))

    @abstractmethod
    def _pending(self, window: Window, loaded: LoadedWindow) -> PendingWindow:
        """Plan the reads that fill the arrays of a window."""


class StrictEpochReader(FileEpochReader):
    """Windows of an epoch that is read from files; a sample that cannot be read is an error."""

    def _pending(self, window: Window, loaded: LoadedWindow) -> FileWindow:
        index, chunks, scratch = self.context.index, self._chunks, self.context.scratch
        plan = plan_reads(index, window.runs, window.destination, loaded.arrays, chunks, scratch)
        return FileWindow(window, loaded, plan)
