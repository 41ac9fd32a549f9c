"""Epochs of one rank: loaded windows, by the strategy that fits the data and the order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from matex_data.epochs.kept import Exchanged, InMemory
from matex_data.epochs.prefetcher import Prefetcher
from matex_data.epochs.strategies import READ_BYTES, Shared, Strategy, Streamed
from matex_data.epochs.window import LoadedWindow
from matex_data.reading.source import Source
from matex_data.sampling.schedule import Schedule


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
        self._context = strategy.open()
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
        if self._context is None:
            yield from self.strategy.loaded(epoch, start)
            return
        self._prefetcher = prefetcher = Prefetcher(self.strategy.reader(self._context, epoch, start))
        try:
            yield from prefetcher
        finally:
            prefetcher.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_context": None, "_process": -1, "_prefetcher": None}
