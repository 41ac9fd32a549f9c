"""Opened files of a data set: their index, options, memory, counters, and whole reads of many samples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import tee
from typing import Any, Literal, TypeVar

import numpy as np

from matex_data._types import Integers, Io
from matex_data.errors import DataError, PartitionError
from matex_data.fields import RANDOM
from matex_data.index.cache import ChunkCache
from matex_data.index.computed import Drawing, drawing
from matex_data.index.model import Index
from matex_data.index.runs import Runs, Samples
from matex_data.index.stamps import check_stamp
from matex_data.io.counters import Profile
from matex_data.io.modes import MOST_SHARED_FILES
from matex_data.io.sessions import ReadSessions
from matex_data.locks import cached_property
from matex_data.machine import tasks_of_window
from matex_data.mpi.communicator import Communicator, Equal
from matex_data.reading.buffers import BufferPool
from matex_data.reading.context import NO_ROWS, ReadContext
from matex_data.reading.execute import run
from matex_data.reading.plan import Arrays, ReadPlan
from matex_data.reading.skipping import SampleRead, SkippedSamples, Tally, present
from matex_data.sampling.schedule import rank_range
from matex_data.sampling.sizing import KEPT_WINDOWS, POSITION_BYTES, WINDOW_LIMIT, position_bytes
from matex_data.storage.objects import is_url

Taking = TypeVar("Taking")


@dataclass(frozen=True)
class ReadOptions:
    """Options of ``open_dataset`` that say how samples are read. A new one is a field here, and a parameter there.

    Parameters
    ----------
    io, window_bytes, block_bytes, global_reads, cache, on_error : see ``open_dataset``.

    Raises
    ------
    PartitionError : an option has an unknown value, or ``block_bytes`` or ``window_bytes`` is below 1.

    Examples
    --------
    >>> ReadOptions(cache="memory").io
    'auto'
    """

    io: Io = "auto"
    window_bytes: int | None = None
    block_bytes: int | None = None
    global_reads: Literal["memory", "rows"] = "memory"
    cache: Literal["memory"] | None = None
    on_error: Literal["raise", "skip"] = "raise"

    def __post_init__(self) -> None:
        for kind, nbytes in (("block", self.block_bytes), ("window", self.window_bytes)):
            if nbytes is not None and nbytes < 1:
                raise PartitionError(f"a {kind} is too small", expected=f"{kind}_bytes of 1 or more", found=nbytes)


def taken(kind: type[Taking], arguments: Mapping[str, Any]) -> Taking:
    """Return a dataclass of the arguments that have the names of its fields.

    Examples
    --------
    >>> taken(ReadOptions, {"where": None, "cache": "memory"}).cache
    'memory'
    """
    return kind(**{field.name: arguments[field.name] for field in fields(kind) if field.name in arguments})  # type: ignore[arg-type]


LOAD_BYTES = 64 << 20  # of one read of ``load``, about
CACHE_BYTES = 64 << 20  # least capacity of the cache of decoded chunks


@dataclass(frozen=True, eq=False)
class Source:
    """Opened files of one data set, made by `open_source`. What changes belongs to the objects that it holds.

    Parameters
    ----------
    sessions : communicators and open files of the ranks.
    index : index of all files, equal on all ranks.
    transforms : digest or text of the transforms that made the samples of the index; resuming compares it.
    skipped : samples that cannot be read; None if they are not left out.
    drawn : fields of which others are computed differ between epochs, as ``draws_within``.
    repeats : a sample may be in a window several times.
    shared : whether ranks read blocks for one another; None: by the costs.
    buffers, scratch : memory of samples, and of bytes to decode.
    warned : what users have been told of: a poor shuffle, and chunks that are read again and again.
    """

    sessions: ReadSessions
    index: Index
    options: ReadOptions
    transforms: str
    profile: Profile
    skipped: SkippedSamples | None
    drawn: bool = False
    repeats: bool = False
    shared: bool | None = None
    buffers: BufferPool = field(default_factory=BufferPool)
    scratch: BufferPool = field(default_factory=lambda: BufferPool(kept=tasks_of_window()))
    warned: set[str] = field(default_factory=set)

    @property
    def comm(self) -> Communicator:
        """Ranks that share the data set."""
        return self.sessions.comm

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a sample in memory, about, 1 or more."""
        return max(1, sum(self.index.row_bytes(name) for name in self.index.fields))

    @cached_property
    def _kept_of_file(self) -> int:
        first = next(iter(self.index.files[:1]), None)
        return max((layout.kept_bytes() for layout in first.layouts.values()), default=0) if first else 0

    @cached_property
    def kept_bytes(self) -> int:
        """Memory for a sample that a rank keeps while it reads the block of it; 0: that of the sample itself."""
        return self._kept_of_file // max([1, *(file.rows for file in self.index.files[:1])])

    @property
    def draws_within(self) -> bool:
        """True if the samples in the files differ between epochs: images of which a random section is decoded."""
        return self.drawn or any(one.attributes.get(RANDOM, False) for one in self.index.fields.values())

    @property
    def draws(self) -> bool:
        """True if a function that computes fields gets seeds, so that samples differ between epochs."""
        return self.draws_within or self.index.draws

    def shares_ranks(self, other: Source) -> bool:
        """Return whether the same ranks share another data set, with the same communicator."""
        return self.sessions is other.sessions or (self.comm.size == other.comm.size == 1)

    def of_index(self, index: Index, transforms: str) -> Source:
        """Return the files of another index, opened with the same options."""
        return open_source(self.sessions, index, self.options, transforms)

    def with_map(self, index: Index, identity: str) -> Source:
        """Return the same files with fields that one more function computes.

        Parameters
        ----------
        index : with these fields.
        identity : text that identifies the function.
        """
        source = self.of_index(index, self.transforms + identity)
        return replace(source, drawn=self.draws_within, repeats=self.repeats, shared=self.shared)

    def kept(self) -> tuple[Source, Drawing | None]:
        """Return what is kept in memory for many epochs, and the functions to call in each.

        Functions that get seeds are called in each epoch anew, on their inputs, which are kept; others are called once.

        Raises
        ------
        PartitionError : the samples themselves differ between epochs.
        """
        made = drawing(self.index)
        if self.draws_within or (self.draws if made is None else made.index.draws):
            raise PartitionError(
                "the samples in memory would have the same random numbers in every epoch",
                expected="samples that are decoded in every epoch, or functions that get seeds, called last",
                found="images of which a random section is decoded, or data sets that were joined after map()",
                remedy="read in every epoch (shuffle=True without cache), or call map() after concat, merge or mix",
            )
        if made is None:
            return self, None
        source = self.of_index(made.index, self.transforms)
        return replace(source, profile=self.profile, skipped=self.skipped), made

    def with_index(self, index: Index, transforms: str) -> Source:
        """Return the same opened files with another index, whose rows are the same; they share memory and counters."""
        return replace(self, index=index, transforms=transforms)

    def alone(self, rank: int = 0, size: int = 1) -> Source:
        """Return the opened files for reads that this process makes on its own, of the share of a rank."""
        return replace(self, sessions=ReadSessions(Communicator(rank=rank, size=size)))

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
        return max(least, windows * max(self.options.window_bytes or WINDOW_LIMIT, window_bytes * 5 // 4) // ranks)

    def read_context(self, window_bytes: int = 0, io: str | None = None) -> ReadContext:
        """Open the files for one reader, of windows of ``window_bytes`` over all ranks. *Collective*.

        Parameters
        ----------
        window_bytes : of a window, over all ranks.
        io : as of ``Files``; None: that of the data set.
        """
        files = self.index.sources
        of_store = len(files) > 0 and is_url(files.paths[0])  # an object may change between a look at it and a read
        stamp = files.stamp if self._checks_when_opening or of_store else None
        session = self.sessions.open(files.paths, io or self.options.io, self.profile, stamp)
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

    def context_without_files(self) -> ReadContext:
        """Open a communicator for one reader of samples that are in memory. *Collective*."""
        session, lists = self.sessions.open([], "independent"), self.skipped is None
        return ReadContext(session, self.index, self.buffers, self.scratch, 0, self.profile, lambda: None, lists=lists)

    @property
    def _checks_when_opening(self) -> bool:
        """Return whether each rank checks the files that it reads as it opens them: all would be too many.

        Ranks that read the same few stores, each of which has dozens of parts to look at, share all of them.
        """
        alone, files = self.options.io != "collective" or self.comm.alone, self.index.sources
        stamp = files.stamp(0) if len(files) else None
        ranks = self.comm.size if stamp is not None and stamp.parts and not self.comm.alone else 1
        return alone and len(files) > MOST_SHARED_FILES * ranks

    def _changed_file(self) -> DataError | None:
        """Return the error of a file of this rank's share that changed after it was indexed, or None; see ``Files``."""
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
        self.compare_reads(self.index.fields, runs)
        return present(*self.read(self.block(runs)))

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
        fields = self.index.fields.items()
        arrays = self.comm.agreed(lambda: {name: one.empty(runs.total) for name, one in fields})
        parts = self._ranges(runs, self.row_bytes)
        ranges = ((part, np.arange(first, first + part.total), lambda: arrays) for part, first in parts)
        absent = [rows for _, rows in self._read_all(self.index, ranges)]
        return arrays, np.sort(np.concatenate(absent))

    def compare_reads(self, names: Iterable[str], samples: Samples) -> None:
        """Raise ``PartitionError`` unless all ranks are about to read these fields of these samples. *Collective*.

        The call of another rank may be another one, or none.
        """
        if self.comm.alone:
            return
        remedy = (
            "call statistics, load and what else reads samples on every rank, not within `if rank == 0:`, and make the "
            "data set by the same calls, such as split with the same seed="
        )
        identity = hashlib.blake2b(samples.identity(), digest_size=16).hexdigest()
        given = {"fields": list(names), "samples": samples.total, "digest": identity}
        self.comm.agree(equal=Equal(given, "the ranks do not read the same samples and fields", remedy))

    def use_block(
        self,
        runs: Samples,
        names: Sequence[str],
        use: Callable[[Integers, Arrays], None],
        row_bytes: int | None = None,
    ) -> None:
        """Call a function with fields of this rank's block of the samples, some megabytes at a time. *Collective*.

        The fields are those of ``Index.raw``. A part may be empty. Its memory is reused once no array refers to it.

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
        self.compare_reads(names, runs)
        failure: Exception | None = None
        row_bytes = row_bytes or max(1, sum(self.index.row_bytes(name) for name in names))
        for rows, arrays in self._parts(self.index.raw, names, self.block(runs), row_bytes):
            try:
                if failure is None:
                    use(rows, arrays)
            except Exception as error:
                failure = error
        self.comm.agree(failure)

    def windows(self, runs: Samples) -> Iterator[Arrays]:
        """Yield the samples that can be read, in order, some megabytes at a time. *Collective*.

        The memory of a window is reused once no array refers to it.

        Raises
        ------
        DataError : the first error of any rank, on every rank.
        """
        yield from (arrays for _, arrays in self._parts(self.index, list(self.index.fields), runs, self.row_bytes))

    def _parts(
        self, index: Index, names: Sequence[str], runs: Samples, row_bytes: int
    ) -> Iterator[tuple[Integers, Arrays]]:
        """Yield the positions of the samples that can be read, and their fields, some megabytes at a time."""
        fields, (parts, read) = [index.fields[name] for name in names], tee(self._ranges(runs, row_bytes))
        ranges = ((part, np.arange(part.total), partial(self.buffers.arrays, fields, part.total)) for part, _ in read)
        for (part, first), (arrays, absent) in zip(parts, self._read_all(index, ranges), strict=True):
            yield np.delete(np.arange(first, first + part.total), absent), present(arrays, absent)

    def block(self, runs: Samples) -> Samples:
        """Return this rank's block of the samples."""
        return runs.at(Runs.between(*rank_range(runs.total, self.comm.rank, self.comm.size)))

    def _read_all(
        self, index: Index, ranges: Iterable[tuple[Runs, Integers, Callable[[], Arrays]]]
    ) -> Iterator[tuple[Arrays, Integers]]:
        """Read ranges of samples, and yield the arrays of each, and their rows without a sample. *Collective*.

        Parameters
        ----------
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
                if first_error is None and runs.total:
                    read = SampleRead(context, index, self.skipped, tally, runs, destination, arrays)
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

    def _ranges(self, runs: Samples, row_bytes: int) -> Iterator[tuple[Runs, int]]:
        """Yield ranges of samples, and their first rows: as many on every rank, the last one empty. *Collective*."""
        longest, nbytes = self.comm.maximum(runs.total, max(row_bytes, position_bytes(runs)))
        step = rows_at_once(nbytes)
        for begin in range(0, -(-longest // step) * step + 1, step):
            low, high = min(begin, runs.total), min(begin + step, runs.total)
            yield runs.part(low, high), low


def rows_at_once(row_bytes: int) -> int:
    """Return the number of samples of so many bytes that are loaded at once."""
    return max(1, LOAD_BYTES // max(row_bytes, POSITION_BYTES))


def open_source(sessions: ReadSessions, index: Index, options: ReadOptions, transforms: str = "") -> Source:
    """Return the files of an index, with memory and counters of their own. Parameters as of `Source`."""
    profile = Profile()
    skipped = SkippedSamples(index, profile) if options.on_error == "skip" else None
    return Source(sessions, index, options, transforms, profile, skipped)
