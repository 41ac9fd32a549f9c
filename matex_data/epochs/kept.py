"""Strategies that read each sample once and keep it in memory: shuffled on its rank, or exchanged between the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from matex_data._types import Integers
from matex_data.epochs.exchange import ABSENT, ExchangedWindow, KeptSamples
from matex_data.epochs.strategies import EXCHANGE_BYTES, READ_BYTES, WINDOWS_IN_MEMORY, Strategy, single_row_error
from matex_data.epochs.window import EpochReader, PendingWindow, compute_fields
from matex_data.errors import PartitionError
from matex_data.index.runs import Runs
from matex_data.machine import memory_shortage
from matex_data.mpi.communicator import Communicator
from matex_data.reading.context import ReadContext
from matex_data.reading.source import Source, rows_at_once
from matex_data.sampling.schedule import EpochOrder, Schedule, StepPositions, Window, rank_range


class _Share:
    """Samples that a rank reads once and keeps, some megabytes at a time: the windows that are counted.

    Functions that get seeds compute fields of them anew in each epoch; all ranks raise the error of one.

    Parameters
    ----------
    source : the opened files.
    samples : number of them, about.
    samples_of : returns the samples of a rank, ascending.
    """

    def __init__(self, source: Source, samples: int, samples_of: Callable[[int], Runs]) -> None:
        self._source, self._samples_of = source, samples_of
        self._at_once = rows_at_once(source.row_bytes)
        self._latest: tuple[int, Runs] | None = None
        self.windows = max(1, -(-samples // self._at_once))
        self.effort = min(samples, self._at_once)

    def window(self, rank: int, number: int) -> tuple[Runs, Integers, int]:
        if self._latest is None or self._latest[0] != rank:
            self._latest = rank, self._samples_of(rank)
        share = self._latest[1]
        low, high = (min(n * self._at_once, share.total) for n in (number, number + 1))
        return share.part(low, high), np.arange(high - low), high - low

    def read(self, ranks: Communicator, total: int | None, purpose: str, remedy: str) -> None:
        """Read the samples of this rank. *Collective*.

        Parameters
        ----------
        ranks : that exchange samples.
        total : number of samples that they keep; None: those of this rank.
        purpose, remedy : for the error of a rank that has not enough memory.
        """
        comm, (kept, self._drawing) = self._source.comm, self._source.kept()
        share = self._samples_of(comm.rank)
        comm.agree(memory_shortage(share.total * kept.row_bytes, purpose, remedy=remedy))
        arrays, absent = kept.read(share)
        if kept.skipped is not None:
            arrays = {**arrays, ABSENT: np.isin(np.arange(share.total), absent)}
        held = KeptSamples(ranks, share.total if total is None else total, arrays)
        self._kept, self._samples = kept, held

    def open(self) -> ReadContext:
        """Open a context for epochs of what was read. *Collective*."""
        context = self._kept.context_without_files()
        return context if self._drawing is None else replace(context, lists=False)

    def plan(self, reader: EpochReader, drawn: StepPositions) -> PendingWindow:
        """Plan the window of samples that are drawn from those of the ranks."""
        samples, drawing = self._samples, self._drawing
        finish = None if drawing is None else partial(compute_fields, drawn=drawing, epoch=reader.number)
        marks = ABSENT in samples.arrays
        return ExchangedWindow(reader.context, samples.comm, drawn, lambda: samples, reader.pads, marks, finish)


class InMemory(Strategy):
    """Samples that each rank reads once, keeps, and shuffles as a whole every time."""

    def __init__(self, source: Source, schedule: Schedule, ranks: int, nbytes: int = READ_BYTES) -> None:
        whole = replace(schedule, window_steps=max(1, schedule.steps), fixed_block_order=True)
        super().__init__(source, whole, ranks, nbytes)
        self.read_steps = max(1, nbytes * ranks // max(1, schedule.batch_size * source.row_bytes))
        self.samples_mixed = -(-schedule.segments.total // ranks)
        self._share = _Share(source, self.samples_mixed, self._samples_of)
        self.windows, self.effort = self._share.windows, self._share.effort
        self._order: tuple[int, Integers, Integers] | None = None  # of the latest epoch

    def _samples_of(self, rank: int) -> Runs:
        return self._whole(self.epoch, rank).runs

    def _whole(self, order: EpochOrder, rank: int) -> Window:
        """Return the samples of an epoch of a rank, as one window."""
        return order.window(0, self.schedule.steps, rank, self.ranks)

    def prepare(self) -> None:
        rank = self.source.comm.rank
        remedy = 'leave out cache="memory", or use more machines'
        self._share.read(Communicator(), None, f"the shard of rank {rank}", remedy)

    def open(self) -> ReadContext:
        return self._share.open()

    def plan(self, reader: EpochReader, begin: int, end: int) -> PendingWindow:
        order = self._order  # other epochs may be planned at the same time
        if order is None or order[0] != reader.number:
            order = self._order = reader.number, *self._rows_of(reader.epoch)
        _, rows, sizes = order
        first, sizes = int(sizes[:begin].sum()), sizes[begin:end]
        rows = rows[first : first + int(sizes.sum())]
        return self._share.plan(reader, StepPositions(rows[rows >= 0], sizes, len(rows)))

    def _rows_of(self, order: EpochOrder) -> tuple[Integers, Integers]:
        """Return the rows of this rank's samples in the order of an epoch.

        Returns
        -------
        rows : int64, those of all steps, one step after the other; -1 for padding, which comes last in a step.
        sizes : int64[steps], rows of each step.
        """
        window = self._whole(order, self.source.comm.rank)
        rows = np.full(window.rows, -1, np.int64)
        rows[window.destination] = np.arange(window.runs.total)
        return rows, window.sizes

    def window(self, rank: int, number: int, ranks: int) -> tuple[Runs, Integers, int]:
        return self._share.window(rank, number)

    def memory(self) -> int:
        return self.share_bytes + WINDOWS_IN_MEMORY * min(READ_BYTES, self.share_bytes)

    def messages_per_step(self) -> float:
        return 0.0


class Exchanged(Strategy):
    """Samples in a uniform permutation, which the ranks keep in memory and exchange."""

    def __init__(self, source: Source, schedule: Schedule, ranks: int, nbytes: int = READ_BYTES) -> None:
        super().__init__(source, schedule, ranks, nbytes)
        step_bytes = max(1, schedule.batch_size // ranks * source.row_bytes)
        self.read_steps = max(1, min(self.read_steps, EXCHANGE_BYTES // step_bytes))
        self.samples_mixed = schedule.segments.total
        self._share = _Share(source, -(-schedule.segments.total // ranks), self._samples_of)
        self.windows, self.effort = self._share.windows, self._share.effort

    def _samples_of(self, rank: int) -> Runs:
        return self.schedule.samples.part(*rank_range(self.schedule.segments.total, rank, self.ranks))

    def prepare(self) -> None:
        source, comm = self.source, self.source.comm
        comm.agree(_exchange_error(source))
        single = single_row_error(source) is None
        remedy = 'global_reads="rows" (reads single rows in every epoch), ' if single else ""
        purpose = f'the shard of rank {comm.rank} of {comm.size}, which shuffle="global" keeps,'
        remedy = f"use {remedy}more machines, fewer fields, or shuffle=True"
        self._share.read(comm, self.schedule.segments.total, purpose, remedy)

    def open(self) -> ReadContext:
        if self.source.comm.size > 1:
            _ = self.source.comm.mpi  # raises in a forked process
        return self._share.open()

    def plan(self, reader: EpochReader, begin: int, end: int) -> PendingWindow:
        comm = self.source.comm
        return self._share.plan(reader, reader.epoch.step_positions(begin, end, comm.rank, comm.size))

    def window(self, rank: int, number: int, ranks: int) -> tuple[Runs, Integers, int]:
        return self._share.window(rank, number)

    def memory(self) -> int:
        # Windows, and as many that are sent or received.
        return self.share_bytes + 2 * WINDOWS_IN_MEMORY * min(EXCHANGE_BYTES, self.share_bytes)

    def messages_per_step(self) -> float:
        if self.ranks == 1:
            return 0.0
        exchanges = 1 + len(self.source.index.fields)  # of positions, and of each field
        partners = min(self.ranks - 1, self.schedule.batch_size // self.ranks * self.read_steps)
        return 4 * super().messages_per_step() + exchanges * partners / self.read_steps


def _exchange_error(source: Source) -> PartitionError | None:
    """Return the error if the ranks cannot exchange samples in the background, else None."""
    if source.comm.size == 1 or source.sessions.threaded:
        return None
    return PartitionError(
        'shuffle="global" exchanges samples between the ranks in a thread, which this MPI does not allow',
        expected="MPI_THREAD_MULTIPLE",
        remedy='use an MPI library that provides it, global_reads="rows", or shuffle=True',
    )
