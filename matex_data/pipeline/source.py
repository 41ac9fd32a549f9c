"""What all views of one opened data set share: its index, its memory, and how it is read."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from functools import partial

import numpy as np

from matex_data._types import Integers
from matex_data.errors import DataError, PartitionError
from matex_data.index.cache import ChunkCache
from matex_data.index.model import Index
from matex_data.index.runs import Runs
from matex_data.index.stamps import check_stamp
from matex_data.io.counters import Profile
from matex_data.io.files import Files, mode_for
from matex_data.io.sessions import ReadSessions
from matex_data.mpi.communicator import Communicator
from matex_data.mpi.processes import is_child_process
from matex_data.mpi.status import Status
from matex_data.pipeline.buffers import BufferPool
from matex_data.pipeline.execute import Arrays, Plan, execute, plan
from matex_data.pipeline.window import ReadContext
from matex_data.sampling.schedule import rank_range

LOAD_BYTES = 64 << 20  # read and decoded together by ``load``
GLOBAL_READS = ("memory", "rows")
CACHE_BYTES = 64 << 20  # of decoded chunks that are kept, at least


class Source:
    """An opened data set.

    Parameters
    ----------
    opened : of the ranks that share the data. *Collective*.
    index : of all files, the same on every rank.
    io : "auto", "collective" or "independent".
    window_bytes : what is shuffled together, over all ranks, at most.
    cache : "memory": a rank's share is read once and kept; None: read again in every epoch.
    block_bytes : neighbours that are read and shuffled as one, about; None: follows from the batch size.
    global_reads : "memory" or "rows", how samples come that are drawn from all of them alike.

    Raises
    ------
    PartitionError : no such ``io``, ``cache``, ``block_bytes`` or ``global_reads``.
    """

    def __init__(
        self,
        opened: ReadSessions,
        index: Index,
        io: str,
        window_bytes: int,
        cache: str | None,
        block_bytes: int | None = None,
        global_reads: str = "memory",
    ) -> None:
        if cache not in (None, "memory"):
            raise PartitionError("no such cache", expected='cache="memory" or None', found=repr(cache))
        if global_reads not in GLOBAL_READS:
            raise PartitionError(
                "no such way to read for a global shuffle",
                expected=f"global_reads= one of {GLOBAL_READS}",
                found=repr(global_reads),
            )
        if block_bytes is not None and block_bytes < 1:
            raise PartitionError("a block has at least one byte", expected="block_bytes=", found=block_bytes)
        self.cache = cache
        self.block_bytes, self.global_reads = block_bytes, global_reads
        self.index = index
        self.window_bytes = window_bytes
        self.row_bytes = max(1, sum(field.row_bytes for field in index.fields.values()))
        self.comm = comm = opened.comm
        self.mode = mode_for(io, len(index.files), comm)
        self.profile = Profile()
        self.warned = False  # that shuffled batches are not well mixed
        self.pool, self.scratch = BufferPool(), BufferPool()
        self.threaded = opened.threaded
        self._channels = opened
        self._process = os.getpid()
        if not opened.threaded and comm.rank == 0:
            warnings.warn(
                "this MPI does not allow calls from threads: each rank reads on its own, and an error of one rank "
                "does not reach the others",
                stacklevel=4,
            )

    def supply(self) -> ReadContext:
        """What one reader reads with. *Collective*."""
        cache_bytes = max(CACHE_BYTES, self.window_bytes // self.comm.size)
        paths = [file.path for file in self.index.files]
        if is_child_process() and self._process != os.getpid():
            self._process = os.getpid()
            self._channels = ReadSessions(Communicator(rank=self.comm.rank, size=self.comm.size))
            self.mode = "independent"
        channel = self._channels.open(paths, self.mode, self.profile)
        return ReadContext(channel, self.index, self.pool, self.scratch, cache_bytes, self.profile, self.changed)

    def exchange_supply(self) -> ReadContext:
        """Return what one reader exchanges samples with, that are in memory. *Collective*.

        Raises
        ------
        PartitionError : this process cannot speak to the other ranks.
        """
        if self.comm.size > 1:
            _ = self.comm.mpi  # raises in a process that has none
        channel = self._channels.open([], "independent")
        return ReadContext(channel, self.index, self.pool, self.scratch, 0, self.profile, lambda: None)

    def changed(self) -> DataError | None:
        """Return the error of a file that is another one by now, among those that this rank has indexed; or None."""
        errors = (check_stamp(file.path, file.stamp) for file in self.index.files[self.comm.rank :: self.comm.size])
        return next((error for error in errors if error is not None), None)

    def load(self, runs: Runs) -> Arrays:
        """This rank's block of the samples, in order, in memory of their own. *Collective*.

        Raises
        ------
        DataError : of any rank, on every rank.
        """
        start, stop = rank_range(runs.total, self.comm.rank, self.comm.size)
        return self.gather(runs.slice(np.array([start]), np.array([stop - start])))

    def gather(self, runs: Runs) -> Arrays:
        """The samples that this rank asks for, in order, in memory of their own. *Collective*.

        Parameters
        ----------
        runs : of this rank, in ascending order.

        Raises
        ------
        DataError : of any rank, on every rank.
        """
        arrays: Arrays = {}
        error: MemoryError | None = None
        try:
            arrays = {name: field.empty(runs.total) for name, field in self.index.fields.items()}
        except MemoryError as failure:
            error = failure
        self.comm.agree(error)
        pieces = ((part, destination, lambda: arrays) for part, destination in self._pieces(runs, self.row_bytes))
        for _ in self._read(self.index, pieces):
            pass
        return arrays

    def pieces(self, runs: Runs, names: Sequence[str]) -> Iterator[Arrays]:
        """Some fields of this rank's block of the samples, a few megabytes at a time. *Collective*.

        Missing numbers are NaN, whatever becomes of them elsewhere.
        Every rank gets as many pieces; some may be empty. The memory of one is used again for a later one.

        Raises
        ------
        DataError : of any rank, on every rank.
        """
        fields = [self.index.fields[name] for name in names]
        start, stop = rank_range(runs.total, self.comm.rank, self.comm.size)
        block = runs.slice(np.array([start]), np.array([stop - start]))
        parts = self._pieces(block, max(1, sum(field.row_bytes for field in fields)))
        pieces = ((part, np.arange(part.total), partial(self.pool.arrays, fields, part.total)) for part, _ in parts)
        return self._read(self.index.raw, pieces)

    def _read(self, index: Index, pieces: Iterable[tuple[Runs, Integers, Callable[[], Arrays]]]) -> Iterator[Arrays]:
        """Each piece as soon as it is read; as many on every rank, and nothing in the last. *Collective*."""
        supply = self.supply()
        status_exchange, files = supply.channel.status_exchange, supply.channel.files
        chunks = ChunkCache(supply.cache_bytes)
        failure: Exception | None = self.changed()
        for part, destination, allocate in pieces:
            work = Plan()
            arrays: Arrays = {}
            try:
                arrays = allocate()
                if failure is None and part.total:
                    work = plan(index, part, destination, arrays, chunks, self.scratch)
            except Exception as error:  # whatever it is, the other ranks have to know
                failure = failure or error
            status = Status.FAILED if failure else Status.CONTINUE
            status, needs = status_exchange.exchange(status, work.counts(len(self.index.files)))
            if status == Status.FAILED:
                raise status_exchange.first_error(failure)
            failure = _failure(work, files, needs)
            if failure is None:
                yield arrays

    def _pieces(self, runs: Runs, row_bytes: int) -> Iterator[tuple[Runs, Integers]]:
        """Samples that are read together and their places, as often on every rank; none at all at the end."""
        step = max(1, LOAD_BYTES // row_bytes)
        (longest,) = self.comm.maximum(runs.total)
        for done in range(0, -(-longest // step) * step + 1, step):
            low, high = min(done, runs.total), min(done + step, runs.total)
            yield runs.slice(np.array([low]), np.array([high - low])), np.arange(low, high)


def _failure(work: Plan, files: Files, needs: Integers) -> Exception | None:
    """Read and decode; what went wrong, if anything."""
    try:
        futures = execute(work, files, needs)
    except DataError as error:
        return error
    wait(futures)
    return next((e for e in (future.exception() for future in futures) if isinstance(e, Exception)), None)
