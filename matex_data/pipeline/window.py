"""A window on its way: planned, read, decoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass

from matex_data._types import Integers
from matex_data.errors import DataError
from matex_data.index.cache import ChunkCache
from matex_data.index.model import Index
from matex_data.io.counters import Profile
from matex_data.io.files import Files
from matex_data.io.sessions import ReadSession
from matex_data.pipeline.buffers import BufferPool
from matex_data.pipeline.execute import Arrays, Plan, execute, plan
from matex_data.sampling.schedule import Window


@dataclass(eq=False)
class ReadContext:
    """What the passes over some batches read with, one pass after the other.

    Parameters
    ----------
    channel : communicator and open files, for these passes alone.
    index : of the data set.
    pool : memory of the windows.
    scratch : memory for bytes that have to be decoded; apart from those, so that neither drives out the other.
    cache_bytes : decoded chunks that are kept, in bytes.
    profile : of all passes.
    changed : returns the error of a file that is another one by now, if there is one.
    """

    channel: ReadSession
    index: Index
    pool: BufferPool
    scratch: BufferPool
    cache_bytes: int
    profile: Profile
    changed: Callable[[], DataError | None]

    def __post_init__(self) -> None:
        self.channel.assign(self)


@dataclass
class LoadedWindow:
    """A window whose rows are in memory."""

    arrays: Arrays
    sizes: Integers
    padded: int  # rows at the end that are padding


class PendingWindow(ABC):
    """A window on its way: what a reader in the background does with it.

    Attributes
    ----------
    loaded : its arrays, whose contents are undefined before ``finish``.
    """

    loaded: LoadedWindow

    @abstractmethod
    def counts(self, files: int) -> Integers:
        """Return int64[files], how many collective reads this rank needs of each file."""

    @abstractmethod
    def start(self, files: Files, agreed: Integers, profile: Profile) -> None:
        """Bring the samples. *Collective*, once the ranks have agreed on it; every call is entered if it fails."""

    @abstractmethod
    def stand_in(self, files: Files, agreed: Integers) -> None:
        """Make the calls that the other ranks count on, for a window that this rank does not want. *Collective*."""

    @abstractmethod
    def finish(self, profile: Profile) -> None:
        """Wait until ``loaded`` is filled; raise what failed."""


@dataclass
class FileWindow(PendingWindow):
    """A window that is being read and decoded."""

    window: Window
    loaded: LoadedWindow
    plan: Plan
    work: list[Future[None]] | None = None

    def counts(self, files: int) -> Integers:
        return self.plan.counts(files)

    def stand_in(self, files: Files, agreed: Integers) -> None:
        execute(Plan(), files, agreed)

    def start(self, files: Files, agreed: Integers, profile: Profile) -> None:
        """Read, and start to decode, if that has not been done ahead. *Collective* in collective mode."""
        if self.work is not None:
            return
        with profile.timed("reading"):
            self.work = execute(self.plan, files, agreed)
        self.plan = Plan()  # lets go of the scratch memory

    def finish(self, profile: Profile) -> None:
        """Wait until all is read and decoded; raise what failed."""
        work = self.work or []
        with profile.timed("decoding"):
            wait(work)  # wakes this thread once, not for each of them
            for future in work:
                future.result()
        profile.add(samples=self.window.runs.total)


def plan_window(supply: ReadContext, window: Window, chunks: ChunkCache) -> FileWindow:
    """What is to be read for a window, and memory for it."""
    with supply.profile.timed("planning"):
        arrays = supply.pool.arrays(list(supply.index.fields.values()), window.rows)
        for name, array in arrays.items():
            supply.index.fields[name].blank(array[window.runs.total :])
        work = plan(supply.index, window.runs, window.destination, arrays, chunks, supply.scratch)
    return FileWindow(window, LoadedWindow(arrays, window.sizes, window.rows - window.runs.total), work)
