"""The windows that one rank's pass over the data goes through, each on its way before anybody asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from functools import cached_property

from matex_data.index.cache import ChunkCache
from matex_data.pipeline.execute import reads_aside, submit
from matex_data.pipeline.window import FileWindow, PendingWindow, ReadContext, plan_window
from matex_data.sampling.schedule import EpochOrder, Schedule


class EpochReader:
    """One rank's share of an epoch, from a step on.

    The threads that decode also plan: one thread more than cores would hold up the others.

    Parameters
    ----------
    supply : what it is read with.
    schedule : of all epochs.
    number : of the epoch.
    start : step to start with.
    together : steps that are read together; whole windows of the schedule.
    """

    def __init__(self, supply: ReadContext, schedule: Schedule, number: int, start: int, together: int) -> None:
        self.supply = supply
        self.schedule = schedule
        self.number = number
        self.begins = range(start, schedule.steps, together)
        self._chunks = ChunkCache(supply.cache_bytes)
        self._first: Future[PendingWindow] | None = None

    def __len__(self) -> int:
        return len(self.begins)

    def plans(self) -> Iterator[Future[PendingWindow]]:
        """What is to be read for each window; the next one's is found out once it is asked for."""
        for begin in self.begins:
            ahead, self._first = self._first, None
            yield ahead or submit(self._planned, begin)

    def begin_ahead(self) -> None:
        """Read the first window already, or only plan it where ranks read together or there is one thread.

        What goes wrong is heard of when the window is asked for.
        """
        aside = reads_aside(self.supply.channel.files)
        self._first = submit(self._started) if aside else submit(self._planned, self.begins[0])

    def next_epoch(self) -> EpochReader:
        """The course through the whole next epoch."""
        return EpochReader(self.supply, self.schedule, self.number + 1, 0, self.begins.step)

    @cached_property
    def _epoch(self) -> EpochOrder:
        return self.schedule.epoch(self.number)

    def _planned(self, begin: int) -> FileWindow:
        comm = self.supply.channel.comm
        end = min(begin + self.begins.step, self.schedule.steps)
        return plan_window(self.supply, self._epoch.window(begin, end, comm.rank, comm.size), self._chunks)

    def _started(self) -> PendingWindow:
        filling, files = self._planned(self.begins[0]), self.supply.channel.files
        filling.start(files, filling.plan.counts(len(self.supply.index.files)), self.supply.profile)
        return filling
