"""Opened files of a data set: their index, memory, counters, and whole reads of many samples."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import partial
from typing import Any

import numpy as np

from matex_data._types import Integers
from matex_data.errors import DataError, PartitionError
from matex_data.fields import RANDOM
from matex_data.index.cache import ChunkCache
from matex_data.index.chosen import Chosen, Samples
from matex_data.index.computed import Drawing, drawing
from matex_data.index.model import Index
from matex_data.index.runs import Runs
from matex_data.index.stamps import check_stamp
from matex_data.io.counters import Profile
from matex_data.io.modes import MOST_SHARED_FILES, choose
from matex_data.io.sessions import ReadSessions, prepare_process
from matex_data.machine import tasks_of_window
from matex_data.mpi.communicator import Communicator
from matex_data.mpi.processes import is_child_process
from matex_data.reading.buffers import BufferPool
from matex_data.reading.context import NO_ROWS, ReadContext
from matex_data.reading.execute import run
from matex_data.reading.plan import Arrays, ReadPlan, plan_reads
from matex_data.reading.skipping import ON_ERROR, SkippedSamples, SkippingRead, Tally
from matex_data.sampling.schedule import rank_range
from matex_data.sampling.sizing import KEPT_WINDOWS, WINDOW_LIMIT
from matex_data.storage.objects import is_url

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
    window_bytes : limit on the samples that are shuffled together, in bytes over all ranks; None: from the data and the
        batch size.
    cache : "memory": each rank reads its shard once and keeps it; None: read in every epoch.
    block_bytes : size of the blocks that are read and shuffled as one, in bytes; None: from the batch size.
    global_reads : "memory" or "rows", the access to samples with ``shuffle="global"``.
    transforms : digest or text of the transforms that made the samples of the index; resuming compares it.
    on_error : "raise", or "skip": leave out samples that cannot be read.

    Attributes
    ----------
    skipped : samples that cannot be read; None if they are not left out.
    kept_bytes : memory for a sample that a rank keeps while it reads the block of it; 0: that of the sample itself.
    draws_within : the samples in the files differ between epochs: images of which a random section is decoded.

    Raises
    ------
    PartitionError : unknown ``io``, ``cache``, ``global_reads`` or ``on_error``, or ``block_bytes`` below 1.
    """

    def __init__(
        self,
        sessions: ReadSessions,
        index: Index,
        io: str,
        window_bytes: int | None,
        cache: str | None,
        block_bytes: int | None = None,
        global_reads: str = "memory",
        transforms: str = "",
        on_error: str = "raise",
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
        if on_error not in ON_ERROR:
            raise PartitionError(
                "unknown treatment of samples that cannot be read",
                expected=f"on_error= one of {ON_ERROR}",
                found=repr(on_error),
            )
        self.cache, self.io, self.on_error = cache, io, on_error
        self.block_bytes, self.global_reads = block_bytes, global_reads
        self.index, self.transforms = index, transforms
        self.window_bytes = window_bytes
        self.row_bytes = max(1, sum(index.row_bytes(name) for name in index.fields))
        first = next(iter(index.files[:1]), None)
        self._kept_of_file = max((layout.kept_bytes() for layout in first.layouts.values()), default=0) if first else 0
        self.kept_bytes = self._kept_of_file // max(1, first.rows) if first else 0
        self.comm = comm = sessions.comm
        choose(io, (), ranks=1)  # raises where there is no such mode
        self.profile = Profile()
        self.skipped = SkippedSamples(index, self.profile) if on_error == "skip" else None
        self.shared: bool | None = None  # whether ranks read blocks for one another; None: by the costs
        self.draws_within = any(field.attributes.get(RANDOM, False) for field in index.fields.values())
        self.repeats = False  # whether a sample may be in a window several times
        self.warned: set[str] = set()  # of a poor shuffle, and of chunks that are read again and again
        self.buffers, self.scratch = BufferPool(), BufferPool(kept=tasks_of_window())
        self.threaded = sessions.threaded
        self._sessions = sessions
        self._process = os.getpid()
        if not sessions.threaded:
            text = "each rank reads independently, and an error of one rank does not stop the others"
            comm.on_root(lambda: warnings.warn(f"this MPI does not allow calls from threads: {text}", stacklevel=7))

    @property
    def options(self) -> dict[str, Any]:
        """Options of reading, which data sets that are joined have in common."""
        names = ("io", "window_bytes", "cache", "block_bytes", "global_reads", "on_error")
        return {name: getattr(self, name) for name in names}

    def shares_ranks(self, other: Source) -> bool:
        """Return whether the same ranks share another data set, with the same communicator."""
        return self._sessions is other._sessions or (self.comm.size == other.comm.size == 1)

    def of_index(self, index: Index, transforms: str) -> Source:
        """Open the files of another index with the same options. *Collective*."""
        return Source(self._sessions, index, transforms=transforms, **self.options)

    @property
    def draws(self) -> bool:
        """True if a function that computes fields gets seeds, so that samples differ between epochs."""
        return self.draws_within or self.index.draws

    def with_map(self, index: Index, identity: str) -> Source:
        """Open the same files with fields that one more function computes. *Collective*.

        Parameters
        ----------
        index : with these fields.
        identity : text that identifies the function.
        """
        source = self.of_index(index, self.transforms + identity)
        source.draws_within, source.repeats, source.shared = self.draws_within, self.repeats, self.shared
        return source

    def kept(self) -> tuple[Source, Drawing | None]:
        """Return what is kept in memory for many epochs, and the functions to call in each. *Collective*.

        Functions that get seeds are called in each epoch anew, on their inputs, which are kept; others are called once.

        Raises
        ------
        PartitionError : the samples themselves differ between epochs.
        """
        drawn = drawing(self.index)
        if self.draws_within or (self.draws if drawn is None else drawn.index.draws):
            raise PartitionError(
                "the samples in memory would have the same random numbers in every epoch",
                expected="samples that are decoded in every epoch, or functions that get seeds, called last",
                found="images of which a random section is decoded, or data sets that were joined after map()",
                remedy="read in every epoch (shuffle=True without cache), or call map() after concat, merge or mix",
            )
        if drawn is None:
            return self, None
        source = self.of_index(drawn.index, self.transforms)
        source.profile, source.skipped = self.profile, self.skipped
        return source, drawn

    def with_index(self, index: Index, transforms: str) -> Source:
        """Return the same opened files with another index, whose rows are the same; they share memory and counters."""
        source = object.__new__(Source)  # a copy would share no communicator
        source.__dict__.update({**self.__dict__, "index": index, "transforms": transforms})
        return source

    def alone(self) -> Source:
        """Return the opened files for reads that this process makes on its own."""
        source = copy(self)
        source.comm, source.threaded, source._process = Communicator(), True, os.getpid()
        source._sessions = ReadSessions(source.comm)
        return source

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs to read the share of this rank, without MPI and open files."""
        comm = Communicator(rank=self.comm.rank, size=self.comm.size)
        return {**self.__dict__, "comm": comm, "_sessions": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        prepare_process()
        self.__dict__.update(state)
        self._sessions, self._process = ReadSessions(self.comm), os.getpid()

    def cache_bytes(self, ranks: int, window_bytes: int = 0) -> int:
        """Return the capacity of a rank's cache of decoded chunks, in bytes.

        Parameters
        ----------
        ranks : number of ranks that share the samples.
        window_bytes : of a window, over all ranks.
        """
        # Of each lane two blocks are cached where windows begin and end: a window, and something more.
        windows = KEPT_WINDOWS if self.kept_bytes else 1
        least = max(CACHE_BYTES, self._kept_of_file * 5 // 2)
        return max(least, windows * max(self.window_bytes or WINDOW_LIMIT, window_bytes * 5 // 4) // ranks)

    def read_context(self, window_bytes: int = 0, io: str | None = None) -> ReadContext:
        """Open the files for one reader, of windows of ``window_bytes`` over all ranks. *Collective*.

        Parameters
        ----------
        window_bytes : of a window, over all ranks.
        io : as of ``Files``; None: that of the data set.
        """
        if is_child_process() and self._process != os.getpid():
            self._process = os.getpid()
            self._sessions = ReadSessions(Communicator(rank=self.comm.rank, size=self.comm.size))
        files = self.index.sources
        of_store = len(files) > 0 and is_url(files.paths[0])  # an object may change between a look at it and a read
        stamp = files.stamp if self._checks_when_opening or of_store else None
        session = self._sessions.open(files.paths, io or self.io, self.profile, stamp)
        return ReadContext(
            session,
            self.index,
            self.buffers,
            self.scratch,
            self.cache_bytes(self.comm.size, window_bytes),
            self.profile,
            self._changed_file,
            lists=self.skipped is None and not self.repeats,
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

    @property
    def _checks_when_opening(self) -> bool:
        """Return whether each rank checks the files that it reads as it opens them: all would be too many."""
        alone = self.io != "collective" or self.comm.alone
        return alone and len(self.index.sources) > MOST_SHARED_FILES

    def _changed_file(self) -> DataError | None:
        """Return the error of a file that changed after this rank indexed it, or None; of many, see ``Files``."""
        if self._checks_when_opening:
            return None
        table = self.index.sources
        own = range(*rank_range(len(table), self.comm.rank, self.comm.size))
        errors = (check_stamp(table.paths[number], table.stamp(number)) for number in own)
        return next((error for error in errors if error is not None), None)

    def load(self, runs: Samples) -> Arrays:
        """Read this rank's block of the samples to new arrays, in order. *Collective*.

        Raises
        ------
        DataError : the first error of any rank, on every rank.
        """
        arrays, absent = self.read(self.block(runs))
        return {name: np.delete(array, absent, axis=0) for name, array in arrays.items()} if len(absent) else arrays

    def read(self, runs: Samples) -> tuple[Arrays, Integers]:
        """Read samples to new arrays, in order. *Collective*.

        Parameters
        ----------
        runs : samples of this rank, ascending.

        Returns
        -------
        arrays : by field name.
        absent : int64, ascending: rows of the arrays that are undefined, since their samples are skipped.

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
        absent = [rows for _, rows in self._read_all(self.index, ranges)]
        return arrays, np.sort(np.concatenate(absent))

    def use_block(
        self,
        runs: Samples,
        names: Sequence[str],
        use: Callable[[Integers, Arrays], None],
        row_bytes: int | None = None,
    ) -> None:
        """Call a function with fields of this rank's block of the samples, some megabytes at a time. *Collective*.

        Missing numbers are NaN, whatever ``missing=`` of ``open_dataset``. A part may be empty. Its memory is reused
        once no array refers to it.

        Parameters
        ----------
        runs : samples of all ranks, ascending.
        names : fields to read.
        use : gets int64[rows], the positions of samples in the block, of which some may be skipped, and arrays of their
            fields by name. When it has raised an error, this rank reads on, since the other ranks may need its reads.
        row_bytes : of a sample in memory, about; None: as the layouts estimate it.

        Raises
        ------
        Exception : the first error of any rank, also of ``use``, on every rank.
        """
        failure: Exception | None = None
        fields = [self.index.fields[name] for name in names]
        row_bytes = row_bytes or max(1, sum(self.index.row_bytes(name) for name in names))
        parts = list(self._ranges(self.block(runs), row_bytes))
        ranges = ((part, np.arange(part.total), partial(self.buffers.arrays, fields, part.total)) for part, _ in parts)
        for (_, rows), (arrays, absent) in zip(parts, self._read_all(self.index.raw, ranges), strict=True):
            if len(absent):
                rows, arrays = np.delete(rows, absent), {n: np.delete(a, absent, axis=0) for n, a in arrays.items()}
            try:
                if failure is None:
                    use(rows, arrays)
            except Exception as error:
                failure = error
        self.comm.agree(failure)

    def windows(self, runs: Samples) -> Iterator[tuple[Arrays, Integers]]:
        """Yield arrays and absent rows like ``read``, some megabytes at a time. *Collective*.

        The memory of a window is reused once no array refers to it.

        Raises
        ------
        DataError : the first error of any rank, on every rank.
        """
        fields = list(self.index.fields.values())
        ranges = self._ranges(runs, self.row_bytes)
        made = ((part, np.arange(part.total), partial(self.buffers.arrays, fields, part.total)) for part, _ in ranges)
        yield from self._read_all(self.index, made)

    def block(self, runs: Samples) -> Samples:
        """Return this rank's block of the samples."""
        start, stop = rank_range(runs.total, self.comm.rank, self.comm.size)
        if isinstance(runs, Chosen):
            return runs.at(Runs(np.array([start]), np.array([stop - start])))
        return runs.slice(np.array([start]), np.array([stop - start]))

    def _read_all(
        self, index: Index, ranges: Iterable[tuple[Runs, Integers, Callable[[], Arrays]]]
    ) -> Iterator[tuple[Arrays, Integers]]:
        """Read ranges of samples, and yield the arrays of each, and their rows without a sample. *Collective*.

        Parameters
        ----------
        index : index of the data set.
        ranges : samples, their rows in the arrays, and a function that allocates the arrays. The number of ranges is
            equal on all ranks; the last one is empty, so that the ranks agree on the error of the one before.
        """
        context = self.read_context()
        status, files = context.session.status, context.session.files
        chunks, tally = ChunkCache(context.cache_bytes), Tally()
        first_error: Exception | None = context.changed_file()
        for runs, destination, allocate in ranges:
            plan, read = ReadPlan(), None
            arrays: Arrays = {}
            try:
                arrays = allocate()
                if first_error is None and runs.total and self.skipped is None:
                    plan = plan_reads(index, runs, destination, arrays, chunks, self.scratch)
                elif first_error is None and runs.total and self.skipped is not None:
                    read = SkippingRead(context, index, self.skipped, tally, runs, destination, arrays)
                    plan = read.plan(chunks)
            except Exception as error:  # of any kind: the other ranks have to raise it
                first_error = first_error or error
            status.agree(first_error)
            first_error = run(plan, files)
            if read is not None:
                first_error = read.finish(first_error)
            if first_error is None:
                yield arrays, NO_ROWS if read is None else read.absent
        if self.skipped is not None:
            self.skipped.report(status, tally, "that were loaded")

    def _ranges(self, runs: Samples, row_bytes: int) -> Iterator[tuple[Runs, Integers]]:
        """Yield ranges of samples, and their rows: equally many on every rank, the last one empty. *Collective*."""
        step = max(1, LOAD_BYTES // row_bytes)
        (longest,) = self.comm.maximum(runs.total)
        for begin in range(0, -(-longest // step) * step + 1, step):
            low, high = min(begin, runs.total), min(begin + step, runs.total)
            yield runs.slice(np.array([low]), np.array([high - low])), np.arange(low, high)
