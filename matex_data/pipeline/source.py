"""Opened files of a data set: their index, memory, counters, and whole reads of many samples."""

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
from matex_data.pipeline.execute import execute
from matex_data.pipeline.plan import Arrays, ReadPlan, plan_reads
from matex_data.pipeline.window import ReadContext
from matex_data.sampling.schedule import rank_range

LOAD_BYTES = 64 << 20  # of one read of ``load``
GLOBAL_READS = ("memory", "rows")
CACHE_BYTES = 64 << 20  # least capacity of the cache of decoded chunks


class Source:
    """Opened files of one data set.

    Parameters
    ----------
    sessions : communicators and open files of the ranks. *Collective*.
    index : index of all files, equal on all ranks.
    io : "auto", "collective" or "independent".
    window_bytes : limit on the samples that are shuffled together, in bytes over all ranks.
    cache : "memory": each rank reads its shard once and keeps it; None: read in every epoch.
    block_bytes : size of the blocks that are read and shuffled as one, in bytes; None: from the batch size.
    global_reads : "memory" or "rows", the access to samples with ``shuffle="global"``.
    transforms : digest or text of the transforms that made the samples of the index; resuming compares it.

    Raises
    ------
    PartitionError : unknown ``io``, ``cache`` or ``global_reads``, or ``block_bytes`` below 1.
    """

    def __init__(
        self,
        sessions: ReadSessions,
        index: Index,
        io: str,
        window_bytes: int,
        cache: str | None,
        block_bytes: int | None = None,
        global_reads: str = "memory",
        transforms: str = "",
    ) -> None:
        if cache not in (None, "memory"):
            raise PartitionError("unknown cache", expected='cache="memory" or None', found=repr(cache))
        if global_reads not in GLOBAL_READS:
            raise PartitionError(
                "unknown access to samples for a global shuffle",
                expected=f"global_reads= one of {GLOBAL_READS}",
                found=repr(global_reads),
            )
        if block_bytes is not None and block_bytes < 1:
            raise PartitionError("a block is too small", expected="block_bytes of 1 or more", found=block_bytes)
        self.cache = cache
        self.block_bytes, self.global_reads = block_bytes, global_reads
        self.index, self.transforms = index, transforms
        self.window_bytes = window_bytes
        self.row_bytes = max(1, sum(index.row_bytes(name) for name in index.fields))
        self.comm = comm = sessions.comm
        self.mode = mode_for(io, len(index.files), comm)
        self.profile = Profile()
        self.warned = False  # of a poor shuffle
        self.buffers, self.scratch = BufferPool(), BufferPool()
        self.threaded = sessions.threaded
        self._sessions = sessions
        self._process = os.getpid()
        if not sessions.threaded and comm.rank == 0:
            warnings.warn(
                "this MPI does not allow calls from threads: each rank reads independently, and an error of one rank "
                "does not stop the others",
                stacklevel=4,
            )

    def read_context(self) -> ReadContext:
        """Open the files for one reader. *Collective*."""
        cache_bytes = max(CACHE_BYTES, self.window_bytes // self.comm.size)
        paths = [file.path for file in self.index.files]
        if is_child_process() and self._process != os.getpid():
            self._process = os.getpid()
            self._sessions = ReadSessions(Communicator(rank=self.comm.rank, size=self.comm.size))
            self.mode = "independent"
        session = self._sessions.open(paths, self.mode, self.profile)
        return ReadContext(
            session, self.index, self.buffers, self.scratch, cache_bytes, self.profile, self.changed_file
        )

    def exchange_context(self) -> ReadContext:
        """Open a communicator for one reader that exchanges samples in memory. *Collective*.

        Raises
        ------
        PartitionError : this process cannot communicate with the other ranks.
        """
        if self.comm.size > 1:
            _ = self.comm.mpi  # raises in a forked process
        session = self._sessions.open([], "independent")
        return ReadContext(session, self.index, self.buffers, self.scratch, 0, self.profile, lambda: None)

    def changed_file(self) -> DataError | None:
        """Return the error of a file that changed after this rank indexed it, or None."""
        errors = (check_stamp(file.path, file.stamp) for file in self.index.files[self.comm.rank :: self.comm.size])
        return next((error for error in errors if error is not None), None)

    def load(self, runs: Runs) -> Arrays:
        """Read this rank's block of the samples to new arrays, in order. *Collective*.

        Raises
        ------
        DataError : the first error of any rank, on every rank.
        """
        return self.read(self._block(runs))

    def read(self, runs: Runs) -> Arrays:
        """Read samples to new arrays, in order. *Collective*.

        Parameters
        ----------
        runs : samples of this rank, ascending.

        Raises
        ------
        DataError : the first error of any rank, on every rank.
        """
        arrays: Arrays = {}
        memory_error: MemoryError | None = None
        try:
            arrays = {name: field.empty(runs.total) for name, field in self.index.fields.items()}
        except MemoryError as error:
            memory_error = error
        self.comm.agree(memory_error)
        ranges = ((part, rows, lambda: arrays) for part, rows in self._ranges(runs, self.row_bytes))
        for _ in self._read_all(self.index, ranges):
            pass
        return arrays

    def blocks(self, runs: Runs, names: Sequence[str], row_bytes: int | None = None) -> Iterator[Arrays]:
        """Yield fields of this rank's block of the samples, some megabytes at a time. *Collective*.

        Missing numbers are NaN, whatever ``missing=`` of ``open_dataset``. Every rank gets the same number of blocks;
        some may be empty. The memory of a block is reused once no array refers to it.

        Parameters
        ----------
        runs : samples of all ranks, ascending.
        names : fields to read.
        row_bytes : of a sample in memory, about; None: as the layouts estimate it.

        Raises
        ------
        DataError : the first error of any rank, on every rank.
        """
        fields = [self.index.fields[name] for name in names]
        row_bytes = row_bytes or max(1, sum(self.index.row_bytes(name) for name in names))
        ranges = (
            (part, np.arange(part.total), partial(self.buffers.arrays, fields, part.total))
            for part, _ in self._ranges(self._block(runs), row_bytes)
        )
        return self._read_all(self.index.raw, ranges)

    def _block(self, runs: Runs) -> Runs:
        """Return this rank's block of the samples."""
        start, stop = rank_range(runs.total, self.comm.rank, self.comm.size)
        return runs.slice(np.array([start]), np.array([stop - start]))

    def _read_all(
        self, index: Index, ranges: Iterable[tuple[Runs, Integers, Callable[[], Arrays]]]
    ) -> Iterator[Arrays]:
        """Read ranges of samples, and yield the arrays of each. *Collective*.

        Parameters
        ----------
        index : index of the data set.
        ranges : samples, their rows in the arrays, and a function that allocates the arrays. The number of ranges is
            equal on all ranks; the last one is empty, so that the ranks agree on the error of the one before.
        """
        context = self.read_context()
        status_exchange, files = context.session.status_exchange, context.session.files
        chunks = ChunkCache(context.cache_bytes)
        first_error: Exception | None = self.changed_file()
        for runs, destination, allocate in ranges:
            plan = ReadPlan()
            arrays: Arrays = {}
            try:
                arrays = allocate()
                if first_error is None and runs.total:
                    plan = plan_reads(index, runs, destination, arrays, chunks, self.scratch)
            except Exception as error:  # of any kind: the other ranks have to raise it
                first_error = first_error or error
            status = Status.FAILED if first_error else Status.CONTINUE
            status, agreed = status_exchange.exchange(status, plan.counts(len(self.index.files)))
            if status == Status.FAILED:
                raise status_exchange.first_error(first_error)
            first_error = _execute(plan, files, agreed)
            if first_error is None:
                yield arrays

    def _ranges(self, runs: Runs, row_bytes: int) -> Iterator[tuple[Runs, Integers]]:
        """Yield ranges of samples, and their rows: equally many on every rank, the last one empty. *Collective*."""
        step = max(1, LOAD_BYTES // row_bytes)
        (longest,) = self.comm.maximum(runs.total)
        for begin in range(0, -(-longest // step) * step + 1, step):
            low, high = min(begin, runs.total), min(begin + step, runs.total)
            yield runs.slice(np.array([low]), np.array([high - low])), np.arange(low, high)


def _execute(plan: ReadPlan, files: Files, agreed: Integers) -> Exception | None:
    """Read and decode; return the first error."""
    try:
        futures = execute(plan, files, agreed)
    except DataError as error:
        return error
    wait(futures)
    return next((e for e in (future.exception() for future in futures) if isinstance(e, Exception)), None)
