"""Samples distributed over the memory of all ranks, and exchanged window by window.

Each rank holds a share of the samples: of all samples, for as long as the data set is open, or of one window that the
ranks have read for one another. It sends the positions of the samples that it needs to the ranks that hold them, and
receives the rows: one exchange of counts, one of positions, and one of rows for every field. The ranks meet, and agree
before positions and before rows are sent, by non-blocking calls that they poll. After that all of them take part, and
the exchange takes as long as MPI needs to move the data. A rank that has left the epoch, or has failed, participates in
the exchanges agreed before.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.epochs.window import EpochReader, LoadedWindow, PendingWindow, joined, leave_out
from matex_data.errors import FormatError
from matex_data.fields import Field
from matex_data.index.ragged import RaggedOutput
from matex_data.index.runs import Runs, ranges
from matex_data.index.scatter import scatter
from matex_data.io.counters import Profile
from matex_data.io.files import Files
from matex_data.mpi.communicator import Communicator
from matex_data.mpi.library import MPI
from matex_data.reading.context import NO_ROWS, ReadContext
from matex_data.reading.execute import execute
from matex_data.reading.plan import Arrays
from matex_data.reading.pool import first_error, submit, wait_for_all
from matex_data.reading.skipping import SampleRead
from matex_data.sampling.schedule import EpochOrder, StepPositions, rank_range

ABSENT = ""
"""Name of the field that is True for samples that could not be read."""
_ABSENT = Field(ABSENT, (), np.dtype(bool))
_NO_BYTES = np.empty(0, np.uint8)
_NO_POSITIONS = np.empty(0, np.int64)


class DistributedSamples(ABC):
    """Samples in the memory of all ranks.

    Attributes
    ----------
    comm : the ranks.
    arrays : field name -> this rank's share; ``ABSENT``, where samples may be left out: which of them are.
    """

    comm: Communicator
    arrays: Arrays

    @abstractmethod
    def owners(self, positions: Integers) -> Integers:
        """Return the rank that holds each sample, int64[samples]."""

    @abstractmethod
    def local(self, positions: Integers) -> Integers:
        """Return the rows of this rank's ``arrays`` that hold these samples, int64[samples]."""


@dataclass(frozen=True)
class KeptSamples(DistributedSamples):
    """All samples of a data set, of which each rank keeps a shard.

    Parameters
    ----------
    comm : the ranks.
    total : number of samples; each rank keeps those of ``rank_range(total, rank, size)``.
    arrays : field name -> this rank's shard, see `DistributedSamples`.
    """

    comm: Communicator
    total: int
    arrays: Arrays

    def owners(self, positions: Integers) -> Integers:
        first = np.array([rank_range(self.total, rank, self.comm.size)[0] for rank in range(self.comm.size)], np.int64)
        return np.searchsorted(first, positions, side="right") - 1

    def local(self, positions: Integers) -> Integers:
        return positions - rank_range(self.total, self.comm.rank, self.comm.size)[0]


class ExchangedWindow(PendingWindow):
    """Window whose samples come from the memory of the ranks.

    Parameters
    ----------
    context : memory and communicator.
    comm : the ranks.
    drawn : samples of the window.
    held : returns those of all ranks, once this one has read its own.
    pad : turn samples that could not be read into padding.
    marks : it is known which samples could not be read: they have the field `ABSENT`.
    finish : called with the window once its rows are there; returns the window to deliver. None: nothing is left to do.
    """

    def __init__(
        self,
        context: ReadContext,
        comm: Communicator,
        drawn: StepPositions,
        held: Callable[[], DistributedSamples],
        pad: bool,
        marks: bool,
        finish: Callable[[LoadedWindow], LoadedWindow] | None = None,
    ) -> None:
        self._context, self._drawn, self._pad, self._finish = context, drawn, pad, finish
        self._held: Callable[[], DistributedSamples] | None = held
        self._fields = {**context.index.fields, **({ABSENT: _ABSENT} if marks else {})}
        self._absent = np.zeros(len(drawn.positions), bool)
        self.loaded = LoadedWindow({}, drawn.sizes, NO_ROWS)
        self._futures: list[Future[None]] = []
        self._error: Exception | None = None
        self.exchanges = comm.size > 1

    def start(self, files: Files, profile: Profile) -> None:
        """Wait for the samples of this rank, exchange them, and start to scatter rows into the window. *Collective*.

        Keep the error of this rank for ``wait``: the windows before this one are complete.

        Raises
        ------
        MemoryError : memory has run out on this rank. The other ranks have been informed.
        """
        drawn, samples, arrays = self._drawn, len(self._drawn.positions), dict[str, Any]()
        held, self._held = self._held, None  # the memory of samples is free once their rows are sent
        assert held is not None
        found: DistributedSamples | None = None
        with profile.timed("reading"):
            try:
                found = held()
                arrays = self._context.allocate(drawn.rows, samples)
                self.loaded = LoadedWindow(dict(arrays), drawn.sizes, np.arange(samples, drawn.rows))
            except Exception as failure:  # of any kind: the other ranks have to raise it
                self._error = failure
            arrays[ABSENT] = self._absent
            try:
                if self.exchanges:
                    self._futures = exchange_rows(
                        self._context, found, drawn.positions, self._fields, arrays, self._error
                    )
                elif found is not None and self._error is None:
                    self._futures = [submit(_take, found.arrays, drawn.positions, self._fields, arrays)]
            except Exception as failure:
                if failure is not self._error:
                    raise

    def wait(self, profile: Profile) -> None:
        """Wait until all rows are in the window. Raise the first error."""
        if self._error is not None:
            raise self._error
        if not self._futures:
            return  # the epoch ends before it is loaded, or another rank has failed: the ranks agree on that next
        with profile.timed("decoding"):
            wait_for_all(self._futures)
        absent = np.flatnonzero(self._absent)
        self.loaded = joined(leave_out(self.loaded, absent, self._context.index.fields, self._pad))
        if self._finish is not None:
            self.loaded = self._finish(self.loaded)
        profile.add(samples=len(self._absent) - len(absent))


def _take(held: Arrays, positions: Integers, fields: Iterable[str], arrays: Mapping[str, Any]) -> None:
    """Copy samples of this rank alone."""
    for name in fields:
        rows, out = held[name], arrays[name]
        if isinstance(out, RaggedOutput):
            out[: len(positions)] = rows[positions]
        else:
            np.take(rows, positions, axis=0, out=out[: len(positions)], mode="clip")


def exchange_rows(
    context: ReadContext,
    samples: DistributedSamples | None,
    positions: Integers,
    fields: Mapping[str, Field],
    arrays: Mapping[str, Any],
    first_error: Exception | None = None,
) -> list[Future[None]]:
    """Fetch rows from the ranks that hold them, and start to write them to arrays. *Collective*.

    Parameters
    ----------
    context : memory, and the communicator.
    samples : samples of all ranks; None after an error of this rank.
    positions : int64[rows], the samples that this rank needs.
    fields : of the samples, by name, in the same order on all ranks.
    arrays : field name -> destination of the rows.
    first_error : error of this rank, which prevents the exchange.

    Returns
    -------
    Futures of writing the rows; none if another rank has failed, which the ranks agree on next.

    Raises
    ------
    Exception : ``first_error``, or that of a lack of memory on this rank. The other ranks have been informed.
    """
    comm = context.session.comm
    order = sent = received = _NO_POSITIONS
    wanted = _RankCounts.of(np.zeros(comm.size, np.int64))
    try:
        if samples is not None and first_error is None:
            owner = samples.owners(positions)
            order = np.argsort(owner, kind="stable")
            sent, wanted = positions[order], _RankCounts.of(np.bincount(owner, minlength=comm.size))
    except Exception as error:  # of any kind: the other ranks have to stop, too
        first_error = error
    requested = wanted.exchanged(comm)
    try:
        received = np.empty(requested.total, np.int64)
    except MemoryError as error:
        first_error = first_error or error
    if _any_failed(comm, first_error) or samples is None:
        return []
    comm.wait(comm.mpi.Ialltoallv([sent, *wanted, MPI.INT64_T], [received, *requested, MPI.INT64_T]))
    transfers: dict[str, _Transfer] = {}
    try:
        local = samples.local(received)
        for name, field in fields.items():
            transfers[name] = _pack(field, samples.arrays[name], local, requested, wanted, context)
    except Exception as error:  # as above
        first_error = error
    for name, field in fields.items():
        if field.array_dtype.hasobject:
            transfer = transfers.get(name)
            sizes = _RankCounts.of(np.zeros(comm.size, np.int64)) if transfer is None else transfer.sent
            from_ranks = sizes.exchanged(comm)
            if transfer is not None:
                transfer.received = from_ranks
    try:
        for transfer in transfers.values():
            transfer.allocate(context)
    except Exception as error:  # as above
        first_error = first_error or error
    if _any_failed(comm, first_error):
        return []
    for transfer in transfers.values():
        transfer.exchange(comm)
    context.profile.add(exchanged=sum(transfer.from_others(comm.rank) for transfer in transfers.values()))
    return [submit(transfer.unpack, arrays[name], order) for name, transfer in transfers.items()]


def _any_failed(comm: Communicator, error: Exception | None) -> bool:
    """Raise the error of this rank, if there is one; else return whether another rank has one. *Collective*."""
    (failed,) = comm.start_maximum([error is not None]).result()
    if error is not None:
        raise error
    return bool(failed)


@dataclass(frozen=True)
class _RankCounts:
    """Counts and offsets of the items to, or from, each rank.

    Parameters
    ----------
    count : int64[ranks], number of items.
    first : int64[ranks], position of the first item.
    """

    count: Integers
    first: Integers

    @classmethod
    def of(cls, count: Integers) -> _RankCounts:
        """Return counts of items in the order of the ranks."""
        return cls(count.astype(np.int64), np.cumsum(count) - count)

    @property
    def total(self) -> int:
        """Return the number of items of all ranks."""
        return int(self.count.sum())

    def __iter__(self) -> Iterator[Integers]:
        """Yield counts and offsets, in the order of a buffer specification of mpi4py."""
        return iter((self.count, self.first))

    def exchanged(self, comm: Communicator) -> _RankCounts:
        """Return the counts of each rank for this one. *Collective*."""
        received = np.empty_like(self.count)
        comm.poll(comm.mpi.Ialltoall(self.count, received))
        return _RankCounts.of(received)


@dataclass
class _Transfer:
    """Rows of one field on their way between the ranks, as items of ``item_bytes`` bytes.

    Parameters
    ----------
    field : the field.
    sent, received : items to, and from, each rank.
    item_bytes : bytes of a row; 1 where rows are pickled.
    data : uint8, the items to send.
    memory : uint8, memory for the items to receive.
    """

    field: Field
    sent: _RankCounts
    received: _RankCounts
    item_bytes: int
    data: Bytes
    memory: Bytes

    def allocate(self, context: ReadContext) -> None:
        """Allocate the memory to receive."""
        self.memory = context.scratch.bytes(self.received.total * self.item_bytes)

    def from_others(self, rank: int) -> int:
        """Return the number of bytes that other ranks send to ``rank``."""
        return int(self.received.total - self.received.count[rank]) * self.item_bytes

    def exchange(self, comm: Communicator) -> None:
        """Send and receive. *Collective*."""
        if self.item_bytes == 0:
            return
        item = MPI.BYTE.Create_contiguous(self.item_bytes).Commit()
        try:
            comm.wait(comm.mpi.Ialltoallv([self.data, *self.sent, item], [self.memory, *self.received, item]))
        finally:
            item.Free()
        self.data = _NO_BYTES  # releases the memory

    def unpack(self, out: Array, order: Integers) -> None:
        """Scatter the received rows into ``out[order]``."""
        if self.field.array_dtype.hasobject:
            ends = np.cumsum(self.received.count).tolist()
            rows = [
                row
                for end, size in zip(ends, self.received.count.tolist(), strict=True)
                if size
                for row in pickle.loads(self.memory[end - size : end].tobytes())
            ]
            for at, row in zip(order.tolist(), rows, strict=True):
                out[at] = row
        elif self.item_bytes:
            scatter(out, order, self.memory.view(out.dtype).reshape(-1, *out.shape[1:]))
        self.memory = _NO_BYTES  # releases the memory


def _pack(
    field: Field, shard: Array, local: Integers, requested: _RankCounts, wanted: _RankCounts, context: ReadContext
) -> _Transfer:
    """Gather the rows that the ranks have requested, in the order of the ranks.

    Parameters
    ----------
    field : the field.
    shard : this rank's samples of the field.
    local : int64[rows], the requested rows of ``shard``.
    requested : number of rows that each rank requests from this one.
    wanted : number of rows that this rank requests from each other one.
    context : memory.

    Raises
    ------
    FormatError : the values belong to this process, as references of HDF5 do.
    """
    if field.array_dtype.hasobject:
        ends = np.cumsum(requested.count).tolist()
        try:
            pickles = [
                pickle.dumps(list(shard[local[end - n : end]])) if n else b""
                for end, n in zip(ends, requested.count.tolist(), strict=True)
            ]
        except (TypeError, pickle.PicklingError) as error:
            raise FormatError(
                "values of the field cannot be sent to another rank",
                field=field.name,
                expected="numbers or texts",
                found=error,
                remedy="select other fields with inputs= and targets=",
            ) from error
        sizes = _RankCounts.of(np.array([len(data) for data in pickles], np.int64))
        return _Transfer(field, sizes, sizes, 1, np.frombuffer(b"".join(pickles), np.uint8), _NO_BYTES)
    data = context.scratch.bytes(len(local) * field.row_bytes)
    if field.row_bytes:
        rows = data.view(field.array_dtype).reshape(len(local), *field.shape)
        np.take(shard, local, axis=0, out=rows, mode="clip")
    return _Transfer(field, requested, wanted, field.row_bytes, data, _NO_BYTES)


@dataclass(frozen=True)
class OwnedSamples(DistributedSamples):
    """Samples of one window, of which each rank holds those of the blocks that it has read.

    Parameters
    ----------
    comm : the ranks.
    order : of the epoch, from which the owner of each sample follows.
    runs : samples of this rank, ascending.
    arrays : field name -> their rows.
    """

    comm: Communicator
    order: EpochOrder
    runs: Runs
    arrays: Arrays

    def owners(self, positions: Integers) -> Integers:
        return self.order.owners(positions, self.comm.size)

    def local(self, positions: Integers) -> Integers:
        return self.runs.rank(positions)


def shared_window(reader: EpochReader, begin: int, end: int) -> ExchangedWindow:
    """Plan steps ``begin`` to ``end``, and start to read the blocks that this rank reads for all."""
    context, comm = reader.context, reader.context.session.comm
    window = reader.epoch.window(begin, end, comm.rank, comm.size)
    runs = reader.epoch.owned(begin, end, comm.rank, comm.size)
    # Rows are taken from these arrays one by one: lists in arrays of their own, not in one.
    arrays = context.buffers.arrays(list(context.index.fields.values()), runs.total)
    owned = OwnedSamples(comm, reader.epoch, runs, arrays)
    read = reader.read(runs, np.arange(runs.total), arrays)
    futures = execute(read.plan(reader.chunks), context.session.files)
    positions = np.empty(window.runs.total, np.int64)
    positions[window.destination] = ranges(window.runs.start, window.runs.count)
    drawn = StepPositions(positions, window.sizes, window.rows)
    return ExchangedWindow(context, comm, drawn, partial(_held, owned, read, futures), reader.pads, marks=True)


def _held(owned: OwnedSamples, read: SampleRead, futures: list[Future[None]]) -> OwnedSamples:
    """Wait for the reads of this rank, and return its samples, with those that could not be read."""
    error = read.finish(first_error(futures))
    if error is not None:
        raise error
    absent = np.zeros(owned.runs.total, bool)
    absent[read.absent] = True
    return replace(owned, arrays={**owned.arrays, ABSENT: absent})
