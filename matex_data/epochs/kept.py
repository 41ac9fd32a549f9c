"""Strategies that read each sample once and keep it in memory: shuffled on its rank, or exchanged between the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from matex_data._types import Integers
from matex_data.epochs.exchange import ABSENT, ExchangedWindow, KeptSamples
from matex_data.epochs.strategies import EXCHANGE_BYTES, READ_BYTES, WINDOWS_IN_MEMORY, Strategy, single_row_error
from matex_data.epochs.window import EpochReader, LoadedWindow, PendingWindow, WholeWindow, compute_fields, leave_out
from matex_data.errors import PartitionError
from matex_data.index.runs import Runs
from matex_data.machine import memory_shortage
from matex_data.reading.context import ReadContext
from matex_data.reading.source import LOAD_BYTES, Source
from matex_data.sampling.schedule import Schedule, Window, rank_range


class _Share:
    """Samples that a rank keeps, which it reads some megabytes at a time: the windows that are counted.

    Parameters
    ----------
    source : the opened files.
    samples : number of them, about.
    samples_of : returns the samples of a rank, ascending.
    """

    def __init__(self, source: Source, samples: int, samples_of: Callable[[int], Runs]) -> None:
        self._at_once, self._samples_of = max(1, LOAD_BYTES // source.row_bytes), samples_of
        self._latest: tuple[int, Runs] | None = None
        self.windows = max(1, -(-samples // self._at_once))
        self.effort = min(samples, self._at_once)

    def window(self, rank: int, number: int) -> tuple[Runs, Integers, int]:
        if self._latest is None or self._latest[0] != rank:
            self._latest = rank, self._samples_of(rank)
        share = self._latest[1]
        low, high = (min(n * self._at_once, share.total) for n in (number, number + 1))
        return share.part(low, high), np.arange(high - low), high - low


class InMemory(Strategy):
    """Samples that each rank reads once, keeps, and shuffles as a whole every time.

    Functions that get seeds compute fields of them anew in each epoch, in the pool; all ranks raise the error of one.
    """

    def __init__(self, source: Source, schedule: Schedule, ranks: int, nbytes: int = READ_BYTES) -> None:
        whole = replace(schedule, window_steps=max(1, schedule.steps), fixed_block_order=True)
        super().__init__(source, whole, ranks, nbytes)
        self.read_steps = max(1, nbytes * ranks // max(1, schedule.batch_size * source.row_bytes))
        self.samples_mixed = -(-schedule.segments.total // ranks)
        self._reads = _Share(source, self.samples_mixed, self._samples_of)
        self.windows, self.effort = self._reads.windows, self._reads.effort

    def _samples_of(self, rank: int) -> Runs:
        return self.epoch.window(0, self.schedule.steps, rank, self.ranks).runs

    def prepare(self) -> None:
        comm = self.source.comm
        self._kept, self._drawing = kept, _ = self.source.kept()
        share = self.window_of(0, comm.rank).runs
        remedy = 'leave out cache="memory", or use more machines'
        comm.agree(memory_shortage(share.total * kept.row_bytes, f"the shard of rank {comm.rank}", remedy=remedy))
        self._arrays, absent = kept.read(share)
        self._is_absent = np.zeros(share.total, bool)
        self._is_absent[absent] = True
        self._order: tuple[int, Integers, Integers] | None = None  # of the latest epoch

    def open(self) -> ReadContext:
        return replace(self.source.read_context(io="independent"), changed_file=lambda: None)  # all have been read

    def plan(self, reader: EpochReader, begin: int, end: int) -> PendingWindow:
        order = self._order  # other epochs may be planned at the same time
        if order is None or order[0] != reader.number:
            order = self._order = reader.number, *self._rows_of(reader.number)
        loaded = self._take(*order[1:], begin, end)
        return WholeWindow(loaded if self._drawing is None else compute_fields(loaded, self._drawing, reader.number))

    def _rows_of(self, epoch: int) -> tuple[Integers, Integers]:
        """Return the rows of this rank's samples in the order of an epoch.

        Returns
        -------
        rows : int64, those of all steps, one step after the other; -1 for padding, which comes last in a step.
        sizes : int64[steps], rows of each step.
        """
        window = self.window_of(epoch, self.source.comm.rank)
        rows = np.full(window.rows, -1, np.int64)
        rows[window.destination] = np.arange(window.runs.total)
        return rows, window.sizes

    def _take(self, rows: Integers, sizes: Integers, begin: int, end: int) -> LoadedWindow:
        """Copy the samples of steps ``begin`` to ``end``."""
        first, sizes = int(sizes[:begin].sum()), sizes[begin:end]
        rows = rows[first : first + int(sizes.sum())]
        fields = self._kept.index.fields
        arrays = self._kept.buffers.arrays(list(fields.values()), len(rows))
        samples = int((rows >= 0).sum())
        for name, array in arrays.items():
            np.take(self._arrays[name], rows[:samples], axis=0, out=array[:samples], mode="clip")
            fields[name].blank(array[samples:])
        loaded = LoadedWindow(arrays, sizes, np.arange(samples, len(rows)))
        absent = np.flatnonzero(self._is_absent[rows[:samples]])
        return leave_out(loaded, absent, fields, self.schedule.remainder == "pad")

    def window_of(self, epoch: int, rank: int) -> Window:
        """Return the samples of an epoch of a rank, as one window."""
        return self.schedule.epoch(epoch).window(0, self.schedule.steps, rank, self.ranks)

    def window(self, rank: int, number: int, ranks: int) -> tuple[Runs, Integers, int]:
        return self._reads.window(rank, number)

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
        self._reads = _Share(source, -(-schedule.segments.total // ranks), self._samples_of)
        self.windows, self.effort = self._reads.windows, self._reads.effort

    def _samples_of(self, rank: int) -> Runs:
        return self.schedule.samples.part(*rank_range(self.schedule.segments.total, rank, self.ranks))

    def prepare(self) -> None:
        source, comm, total = self.source, self.source.comm, self.schedule.segments.total
        comm.agree(_exchange_error(source))
        self._kept, self._drawing = kept, _ = source.kept()
        start, stop = rank_range(total, comm.rank, comm.size)
        single = single_row_error(source) is None
        remedy = 'global_reads="rows" (reads single rows in every epoch), ' if single else ""
        purpose = f'the shard of rank {comm.rank} of {comm.size}, which shuffle="global" keeps,'
        remedy = f"use {remedy}more machines, fewer fields, or shuffle=True"
        comm.agree(memory_shortage((stop - start) * kept.row_bytes, purpose, remedy=remedy))
        arrays, absent = kept.read(kept.block(self.schedule.samples))
        if source.skipped is not None:
            arrays = {**arrays, ABSENT: np.isin(np.arange(stop - start), absent)}
        self._samples = KeptSamples(comm, total, arrays)

    def open(self) -> ReadContext:
        context = self._kept.exchange_context()
        return context if self._drawing is None else replace(context, lists=False)

    def plan(self, reader: EpochReader, begin: int, end: int) -> PendingWindow:
        comm, drawing = self.source.comm, self._drawing
        drawn = reader.epoch.step_positions(begin, end, comm.rank, comm.size)
        finish = None if drawing is None else partial(compute_fields, drawn=drawing, epoch=reader.number)
        marks = ABSENT in self._samples.arrays
        return ExchangedWindow(reader.context, comm, drawn, lambda: self._samples, reader.pads, marks, finish)

    def window(self, rank: int, number: int, ranks: int) -> tuple[Runs, Integers, int]:
        return self._reads.window(rank, number)

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
