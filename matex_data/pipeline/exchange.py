"""Samples that the ranks keep in memory and exchange, a window at a time, in the thread that reads ahead.

Each rank holds one share of all samples. For every window it tells each other rank which of their samples it wants,
and they send these: two exchanges of numbers, and one of rows for every field. The ranks meet, and agree before rows
are sent, by non-blocking calls that they poll; then all of them are there, and data take as long as MPI takes to move
them. A rank that has left the pass, or has failed, takes part in the exchange that was agreed on all the same.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from matex_data._types import Array, Integers
from matex_data.fields import Field
from matex_data.index.scatter import scatter
from matex_data.io.counters import Profile
from matex_data.io.files import Files
from matex_data.mpi.communicator import Communicator
from matex_data.mpi.library import MPI
from matex_data.pipeline.execute import Arrays, submit
from matex_data.pipeline.window import LoadedWindow, PendingWindow, ReadContext
from matex_data.sampling.schedule import Schedule, StepPositions, rank_range

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Holding:
    """Samples that this rank keeps for all ranks.

    Parameters
    ----------
    comm : of the ranks.
    total : samples over all ranks, of which each holds ``rank_range(total, rank, size)``.
    arrays : field name -> the rank's share.
    """

    comm: Communicator
    total: int
    arrays: Arrays

    def owners(self, positions: Integers) -> Integers:
        """Return the rank that holds each of these samples."""
        first = np.array([rank_range(self.total, rank, self.comm.size)[0] for rank in range(self.comm.size)], np.int64)
        return np.searchsorted(first, positions, side="right") - 1

    def local(self, positions: Integers) -> Integers:
        """Return where samples that this rank holds are in ``arrays``."""
        local: Integers = positions - rank_range(self.total, self.comm.rank, self.comm.size)[0]
        return local


class Exchanges:
    """Windows of one rank's pass over a uniform permutation, from a step on. See ``Course``.

    Parameters
    ----------
    supply : of memory, and of a communicator for this pass alone.
    schedule : of all epochs, uniform.
    holding : of this rank.
    number : of the epoch.
    start : step to start with.
    together : steps that come together.
    """

    def __init__(
        self, supply: ReadContext, schedule: Schedule, holding: Holding, number: int, start: int, together: int
    ) -> None:
        self.supply = supply
        self.number = number
        self.begins = range(start, schedule.steps, together)
        self._schedule = schedule
        self._holding = holding
        self._epoch = schedule.epoch(number)

    def __len__(self) -> int:
        return len(self.begins)

    def plans(self) -> Iterator[Future[PendingWindow]]:
        """Yield each window, with memory for it, as soon as it is asked for."""
        for begin in self.begins:
            yield submit(self._planned, begin)

    def begin_ahead(self) -> None:
        """Begin nothing: samples are in memory."""

    def next_epoch(self) -> Exchanges:
        """Return the pass over the whole next epoch."""
        return Exchanges(self.supply, self._schedule, self._holding, self.number + 1, 0, self.begins.step)

    def _planned(self, begin: int) -> PendingWindow:
        with self.supply.profile.timed("planning"):
            comm, fields = self._holding.comm, self.supply.index.fields
            end = min(begin + self.begins.step, self._schedule.steps)
            draw = self._epoch.step_positions(begin, end, comm.rank, comm.size)
            arrays = self.supply.pool.arrays(list(fields.values()), draw.rows)
            for name, array in arrays.items():
                fields[name].blank(array[len(draw.positions) :])
            padded = draw.rows - len(draw.positions)
            return Exchange(self.supply, self._holding, draw, LoadedWindow(arrays, draw.sizes, padded))


class Exchange(PendingWindow):
    """One window whose samples come from the memory of the ranks."""

    def __init__(self, supply: ReadContext, holding: Holding, draw: StepPositions, loaded: LoadedWindow) -> None:
        self.loaded = loaded
        self._supply = supply
        self._holding = holding
        self._draw = draw
        self._work: list[Future[None]] = []

    def counts(self, files: int) -> Integers:
        """Return int64[files] zeros: nothing is read."""
        return np.zeros(files, np.int64)

    def start(self, files: Files, agreed: Integers, profile: Profile) -> None:
        """Exchange the samples. *Collective*.

        Raises
        ------
        MemoryError : there is no memory, on this rank. The other ranks have been told.
        """
        with profile.timed("reading"):
            if self._holding.comm.size == 1:
                self._work = [submit(self._take)]
            else:
                self._work = self._exchanged()

    def stand_in(self, files: Files, agreed: Integers) -> None:
        """Take part in the exchange, for the other ranks. *Collective*."""
        self.start(files, agreed, Profile())

    def finish(self, profile: Profile) -> None:
        """Wait until all rows are where they belong; raise what failed."""
        with profile.timed("decoding"):
            for future in self._work:
                future.result()
        profile.add(samples=len(self._draw.positions))

    def _take(self) -> None:
        """Copy the samples from this rank's own memory."""
        positions = self._draw.positions
        for name, array in self.loaded.arrays.items():
            np.take(self._holding.arrays[name], positions, axis=0, out=array[: len(positions)], mode="clip")

    def _exchanged(self) -> list[Future[None]]:
        comm, holding = self._supply.channel.comm, self._holding
        positions = self._draw.positions
        owner = holding.owners(positions)
        order = np.argsort(owner, kind="stable")
        wanted = _Counts.of(np.bincount(owner, minlength=comm.size))
        asked = wanted.exchanged(comm)
        numbers = np.empty(asked.total, np.int64)
        comm.wait(comm.mpi.Ialltoallv([positions[order], *wanted, MPI.INT64_T], [numbers, *asked, MPI.INT64_T]))
        failure: Exception | None = None
        parcels: list[_Parcel] = []
        try:
            local = holding.local(numbers)
            for name, field in self._supply.index.fields.items():
                parcels.append(_packed(field, holding.arrays[name], local, asked, wanted, self._supply))
        except Exception as error:  # whatever it is, the other ranks have to know
            failure = error
        for field in self._supply.index.fields.values():
            if field.array_dtype.hasobject:
                parcel = next((parcel for parcel in parcels if parcel.field is field), None)
                sizes = _Counts.of(np.zeros(comm.size, np.int64)) if parcel is None else parcel.sent
                received = sizes.exchanged(comm)
                if parcel is not None:
                    parcel.received = received
        try:
            for parcel in parcels:
                parcel.allocate(self._supply)
        except Exception as error:  # as above
            failure = failure or error
        (failed,) = comm.start_maximum([failure is not None]).result()
        if failure is not None:
            raise failure
        if failed:
            return []
        for parcel in parcels:
            parcel.exchange(comm)
        self._supply.profile.add(exchanged=sum(parcel.from_others(comm.rank) for parcel in parcels))
        return [submit(parcel.unpack, self.loaded.arrays[parcel.field.name], order) for parcel in parcels]


@dataclass(frozen=True)
class _Counts:
    """How many items go to, or come from, each rank.

    Parameters
    ----------
    each, first : int64[ranks], how many, and where they begin.
    """

    each: Integers
    first: Integers

    @classmethod
    def of(cls, each: Integers) -> _Counts:
        return cls(each.astype(np.int64), np.cumsum(each) - each)

    @property
    def total(self) -> int:
        return int(self.each.sum())

    def __iter__(self) -> Iterator[Integers]:
        return iter((self.each, self.first))

    def exchanged(self, comm: Communicator) -> _Counts:
        """Return what each rank has for this one. *Collective*."""
        received = np.empty_like(self.each)
        comm.poll(comm.mpi.Ialltoall(self.each, received))
        return _Counts.of(received)


@dataclass
class _Parcel:
    """Rows of one field on their way, as items of ``item_bytes``.

    Parameters
    ----------
    field : of the data set.
    sent, received : items for, and from, each rank.
    item_bytes : of a row; 1 where rows are pickled.
    data : uint8, what is sent.
    memory : uint8, what is received.
    """

    field: Field
    sent: _Counts
    received: _Counts
    item_bytes: int
    data: Bytes
    memory: Bytes

    def allocate(self, supply: ReadContext) -> None:
        self.memory = supply.scratch.bytes(self.received.total * self.item_bytes)

    def from_others(self, rank: int) -> int:
        """Return the bytes that come from other ranks."""
        return int(self.received.total - self.received.each[rank]) * self.item_bytes

    def exchange(self, comm: Communicator) -> None:
        """Send and receive. *Collective*."""
        if self.item_bytes == 0:
            return
        item = MPI.BYTE.Create_contiguous(self.item_bytes).Commit()
        try:
            comm.wait(comm.mpi.Ialltoallv([self.data, *self.sent, item], [self.memory, *self.received, item]))
        finally:
            item.Free()
        self.data = np.empty(0, np.uint8)  # lets go of the memory

    def unpack(self, out: Array, order: Integers) -> None:
        """Put the rows to ``out[order]``."""
        if self.field.array_dtype.hasobject:
            ends = np.cumsum(self.received.each).tolist()
            rows = [
                row
                for end, size in zip(ends, self.received.each.tolist(), strict=True)
                if size
                for row in pickle.loads(self.memory[end - size : end].tobytes())
            ]
            for at, row in zip(order.tolist(), rows, strict=True):
                out[at] = row
        elif self.item_bytes:
            scatter(out, order, self.memory.view(out.dtype).reshape(-1, *out.shape[1:]))
        self.memory = np.empty(0, np.uint8)  # as above


def _packed(
    field: Field, held: Array, local: Integers, asked: _Counts, wanted: _Counts, supply: ReadContext
) -> _Parcel:
    """Return the rows that other ranks have asked for, in the order of the ranks.

    Parameters
    ----------
    held : this rank's share of the field.
    local : int64[rows], which of them.
    asked, wanted : rows that each rank wants of this one, and this one of each.
    """
    empty = np.empty(0, np.uint8)
    if field.array_dtype.hasobject:
        ends = np.cumsum(asked.each).tolist()
        texts = [
            pickle.dumps(list(held[local[end - n : end]])) if n else b""
            for end, n in zip(ends, asked.each.tolist(), strict=True)
        ]
        sizes = _Counts.of(np.array([len(text) for text in texts], np.int64))
        return _Parcel(field, sizes, sizes, 1, np.frombuffer(b"".join(texts), np.uint8), empty)
    data = supply.scratch.bytes(len(local) * field.row_bytes)
    if field.row_bytes:
        rows = data.view(field.array_dtype).reshape(len(local), *field.shape)
        np.take(held, local, axis=0, out=rows, mode="clip")
    return _Parcel(field, asked, wanted, field.row_bytes, data, empty)
