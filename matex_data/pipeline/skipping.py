"""Samples that cannot be read, left out of their batches: ``on_error="skip"`` of ``open_dataset``.

A window fails as a whole, since its reads are coalesced and its chunks are shared. The rank then reads the samples
again, by itself: in halves, quarters and so on, until each of them is read or fails alone. Samples that fail leave
their batch, or become padding of it, so that global batch k has the same samples on any number of ranks. The reads that
all ranks have agreed on are made nevertheless, and the number of steps stays. At the end of an epoch the ranks exchange
what they have skipped, rank 0 warns, and later epochs do not read these samples again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from matex_data._types import Integers
from matex_data.errors import DataError, FieldNotFound, OutOfMemory, PartitionError, UnsupportedVersion
from matex_data.fields import Schema
from matex_data.index.cache import ChunkCache
from matex_data.index.model import Index
from matex_data.index.runs import Runs, compress
from matex_data.io.counters import Profile
from matex_data.io.files import Files
from matex_data.locks import Lock
from matex_data.mpi.activity import busy
from matex_data.mpi.status import StatusExchange
from matex_data.pipeline.execute import run
from matex_data.pipeline.plan import Arrays, ReadPlan, plan_reads
from matex_data.pipeline.window import NO_ROWS, FileEpochReader, FileWindow, LoadedWindow, PendingWindow, ReadContext
from matex_data.sampling.schedule import Schedule, Window

ON_ERROR = ("raise", "skip")
MOST_NAMED = 5  # samples in a warning
PROBES = 9  # samples of a block that fail alone before all of it counts as damaged
_OTHER_ERRORS = (PartitionError, OutOfMemory, FieldNotFound, UnsupportedVersion)


@dataclass(frozen=True)
class SkippedSample:
    """Sample that cannot be read.

    Parameters
    ----------
    file : path.
    row : number of the sample within the file; None if the file holds no other.
    problem : reason, in a few words.
    """

    file: str
    row: int | None
    problem: str

    def __str__(self) -> str:
        where = repr(self.file) if self.row is None else f"{self.file!r}, row {self.row}"
        return f"{where}: {self.problem}"


@dataclass
class Tally:
    """Samples of this rank in one epoch, or in one read of many samples.

    Parameters
    ----------
    skipped : numbers of the samples that were left out.
    delivered : number of the others.
    """

    skipped: list[int] = field(default_factory=list)
    delivered: int = 0


class SkippedSamples:
    """Samples of a data set that cannot be read, as far as this rank knows. Any thread may call the methods.

    Parameters
    ----------
    index : index of the data set.
    profile : counts the samples that this rank has found.
    """

    def __init__(self, index: Index, profile: Profile) -> None:
        self._index = index
        self._profile = profile
        self._records: dict[int, SkippedSample] = {}
        self._numbers: Integers = np.empty(0, np.int64)
        self._lock = Lock()

    @property
    def records(self) -> list[SkippedSample]:
        """Return the samples in the order of the data set."""
        with self._lock:
            return [self._records[number] for number in self._numbers.tolist()]

    def positions(self, runs: Runs) -> Integers:
        """Return the positions of the known ones in an ascending sequence of samples, int64, ascending."""
        numbers = self._numbers
        run = np.searchsorted(runs.start, numbers, side="right") - 1
        numbers, run = numbers[run >= 0], run[run >= 0]
        position = numbers - runs.start[run]
        within = position < runs.count[run]
        found: Integers = (runs.first[run] + position)[within]
        return found

    def add(self, errors: Mapping[int, DataError]) -> None:
        """Add samples that this rank cannot read, by number, with the errors of their reads."""
        self._profile.add(skipped=self._merge({number: self._record(number, errors[number]) for number in errors}))

    def _merge(self, found: Mapping[int, SkippedSample]) -> int:
        """Add samples, and return the number of those that were not known."""
        with self._lock:
            before = len(self._records)
            self._records.update(found)
            self._numbers = np.union1d(self._numbers, np.fromiter(found, np.int64, len(found)))
            return len(self._records) - before

    def _record(self, number: int, error: DataError) -> SkippedSample:
        file = int(np.searchsorted(self._index.first_row, number, side="right")) - 1
        path, row = self._index.files[file].path, number - int(self._index.first_row[file])
        other = error.file not in (None, path)  # one of the many files of a folder
        reason = error.problem if error.found is None else f"{error.problem} ({error.found})"
        return SkippedSample(error.file or path, error.row if other else row, " ".join(reason.split())[:200])

    def report(self, exchange: StatusExchange, tally: Tally, purpose: str) -> None:
        """Tell all ranks which samples were skipped; rank 0 warns if there are any. *Collective*.

        Parameters
        ----------
        exchange : of the ranks that read.
        tally : samples of this rank.
        purpose : for which they were read, as text.

        Raises
        ------
        DataError : samples were skipped, and none were delivered; on every rank.
        """
        by_rank = exchange.gather(({number: self._records[number] for number in tally.skipped}, tally.delivered))
        skipped = {number: record for of_rank, _ in by_rank for number, record in of_rank.items()}
        if not skipped:
            return
        self._merge(skipped)
        named = [skipped[number] for number in sorted(skipped)]
        delivered = sum(count for _, count in by_rank)
        if not delivered:
            raise _nothing_readable(named, purpose)
        if exchange.rank == 0:
            more = [f"and {len(named) - MOST_NAMED} more: see Dataset.skipped"] if len(named) > MOST_NAMED else []
            total = len(named) + delivered
            listed = "\n  ".join([*map(str, named[:MOST_NAMED]), *more])
            warnings.warn(
                f"{len(named)} of {total} samples {purpose} cannot be read and are skipped:\n  {listed}", stacklevel=2
            )


def _nothing_readable(named: list[SkippedSample], purpose: str) -> DataError:
    return DataError(
        f"none of the {len(named)} samples {purpose} can be read",
        file=named[0].file,
        row=named[0].row,
        expected='at least one sample that can be read, with on_error="skip"',
        found=named[0].problem,
        remedy="check the files and their storage; matex validate reads them all",
    )


class SkippingRead:
    """Read of samples of which some may fail.

    Parameters
    ----------
    context : files and memory.
    index : of the data set.
    skipped : samples that are known to fail, which are not read again, and to which others are added.
    tally : of the epoch.
    runs : samples, ascending.
    destination : int64[runs.total], a row of the arrays for each sample.
    arrays : field name -> array that receives the rows.

    Attributes
    ----------
    runs, destination : samples that are not known to fail, and their rows.
    absent : int64, rows of the samples that are left out.
    """

    def __init__(
        self,
        context: ReadContext,
        index: Index,
        skipped: SkippedSamples,
        tally: Tally,
        runs: Runs,
        destination: Integers,
        arrays: Arrays,
    ) -> None:
        self._context, self._index, self._skipped, self._tally, self._arrays = context, index, skipped, tally, arrays
        known = skipped.positions(runs)
        self._known = runs.numbers(known)
        self.absent = destination[known]
        if len(known):
            runs = compress(runs.numbers(np.delete(np.arange(runs.total), known)))
            destination = np.delete(destination, known)
        self.runs, self.destination = runs, destination

    def plan(self, chunks: ChunkCache) -> ReadPlan:
        """Plan to read the samples at once."""
        return plan_reads(self._index, self.runs, self.destination, self._arrays, chunks, self._context.scratch)

    def finish(self, error: Exception | None) -> Exception | None:
        """Count the samples; after an error, find those that cannot be read, and read the others.

        Parameters
        ----------
        error : of the reads of the plan, none of which is under way any more.

        Returns
        -------
        error : it, or one of the new reads, if it is not in the samples.
        """
        failed: dict[int, DataError] = {}
        if error is not None:
            if not _is_in_samples(error):
                return error
            try:
                with busy("reads samples again to find those that are damaged"):
                    failed = dict(self._unreadable(0, self.runs.total))
            except Exception as other:
                return other
        positions = np.fromiter(failed, np.int64, len(failed))
        numbers = self.runs.numbers(positions).tolist()
        self._skipped.add(dict(zip(numbers, failed.values(), strict=True)))
        self.absent = np.concatenate([self.absent, self.destination[positions]])
        self._tally.skipped += [*self._known.tolist(), *numbers]
        self._tally.delivered += self.runs.total - len(numbers)
        return None

    def _unreadable(self, begin: int, end: int) -> Iterator[tuple[int, DataError]]:
        """Read samples ``begin`` to ``end``, and yield those that cannot be read, with their errors."""
        error = self._read(begin, end)
        if error is None:
            return
        if not isinstance(error, DataError) or not _is_in_samples(error):
            raise error
        if end - begin == 1 or self._is_one_damage(begin, end, error):
            yield from ((at, error) for at in range(begin, end))
            return
        middle = (begin + end) // 2
        yield from self._unreadable(begin, middle)
        yield from self._unreadable(middle, end)

    def _is_one_damage(self, begin: int, end: int, error: DataError) -> bool:
        """Return whether the samples are of one block, and the first, the last and some others fail with this error.

        So not every sample of a damaged chunk is read alone.
        """
        if not _are_of_one_block(self._index, self.runs.numbers(np.array([begin, end - 1])), error.field):
            return False
        alone = np.unique(np.linspace(begin, end - 1, PROBES).astype(np.int64)).tolist()
        return all(str(self._read(at, at + 1)) == str(error) for at in alone)

    def _read(self, begin: int, end: int) -> Exception | None:
        """Read samples by this rank alone, and return the first error.

        The cache is a new one: a failed chunk fails others that are decoded after it.
        """
        runs = self.runs.slice(np.array([begin]), np.array([end - begin]))
        chunks, files = ChunkCache(self._context.cache_bytes), self._context.session.files.independent()
        rows = self.destination[begin:end]
        try:
            plan = plan_reads(self._index, runs, rows, self._arrays, chunks, self._context.scratch)
        except DataError as error:
            return error
        return run(plan, files, plan.counts(len(self._index.files)))


def _are_of_one_block(index: Index, samples: Integers, field: str | None) -> bool:
    """Return whether a block of several rows of a field, or of any field for None, has all of the samples."""
    files = np.searchsorted(index.first_row, samples, side="right") - 1
    if len(set(files.tolist())) > 1:
        return False
    layouts, rows = index.files[files[0]].layouts, samples - index.first_row[files[0]]
    for layout in [layouts[field]] if field in layouts else layouts.values():
        borders = layout.borders()
        blocks = rows // layout.block_rows if borders is None else np.searchsorted(borders, rows, side="right")
        if layout.block_rows > 1 and len(set(blocks.tolist())) == 1:
            return True
    return False


def _is_in_samples(error: Exception) -> bool:
    """Return whether an error is one of the data, not of their use or of the machine."""
    return isinstance(error, DataError) and not isinstance(error, _OTHER_ERRORS)


def leave_out(loaded: LoadedWindow, rows: Integers, fields: Schema, pad: bool) -> LoadedWindow:
    """Return the window without some rows.

    Parameters
    ----------
    loaded : the window.
    rows : int64, rows to leave out.
    fields : of the arrays.
    pad : turn the rows into padding, so that the batches keep their sizes.
    """
    if not len(rows):
        return loaded
    if pad:
        for name, array in loaded.arrays.items():
            for row in rows.tolist():
                fields[name].blank(array[row : row + 1])
        return replace(loaded, padding=np.union1d(loaded.padding, rows))
    steps = np.searchsorted(np.cumsum(loaded.sizes), rows, side="right")
    sizes = loaded.sizes - np.bincount(steps, minlength=len(loaded.sizes))
    return LoadedWindow({name: np.delete(array, rows, axis=0) for name, array in loaded.arrays.items()}, sizes, NO_ROWS)


class SkippingWindow(PendingWindow):
    """Window that is read from files, without the samples that cannot be read.

    Parameters
    ----------
    window : the window.
    read : its read.
    fields : of the samples.
    pad : turn the samples that are left out into padding.
    """

    def __init__(self, window: FileWindow, read: SkippingRead, fields: Schema, pad: bool) -> None:
        self.loaded = window.loaded
        self._window, self._read, self._fields, self._pad = window, read, fields, pad
        self._error: Exception | None = None

    def counts(self, files: int) -> Integers:
        """Return int64[files], the number of collective reads of each file."""
        return self._window.counts(files)

    def start(self, files: Files, agreed: Integers, profile: Profile) -> None:
        """Read, and start to decode. Keep an error for ``wait``: the other ranks go on. *Collective*."""
        try:
            self._window.start(files, agreed, profile)
        except Exception as error:
            self._error = error

    def participate(self, files: Files, agreed: Integers) -> None:
        """Make the agreed reads of the other ranks. *Collective* in collective mode."""
        self._window.participate(files, agreed)

    def wait(self, profile: Profile) -> None:
        """Wait until all samples that can be read are in ``loaded``. Raise an error that is not in the samples."""
        if self._error is None:
            try:
                self._window.wait(profile)
            except Exception as error:
                self._error = error
        failure = self._read.finish(self._error)
        if failure is not None:
            raise failure
        self.loaded = leave_out(self.loaded, self._read.absent, self._fields, self._pad)


class SkippingEpochReader(FileEpochReader):
    """Windows of an epoch that is read from files, without the samples that cannot be read.

    Parameters
    ----------
    context, schedule, epoch, start, window_steps : see ``EpochReader``.
    skipped : samples of the data set that cannot be read.
    """

    def __init__(
        self,
        context: ReadContext,
        schedule: Schedule,
        epoch: int,
        start: int,
        window_steps: int,
        skipped: SkippedSamples,
    ) -> None:
        super().__init__(context, schedule, epoch, start, window_steps)
        self._skipped, self._tally = skipped, Tally()

    def pending(self, window: Window, loaded: LoadedWindow) -> SkippingWindow:
        """Plan the reads of a window, without the samples that are known to fail."""
        index, pad = self.context.index, self._schedule.remainder == "pad"
        read = SkippingRead(
            self.context, index, self._skipped, self._tally, window.runs, window.destination, loaded.arrays
        )
        readable = replace(window, runs=read.runs, destination=read.destination)
        return SkippingWindow(FileWindow(readable, loaded, read.plan(self._chunks)), read, index.fields, pad)

    def finish(self) -> None:
        """Report the samples that all ranks have skipped. *Collective*. Raises like ``SkippedSamples.report``."""
        self._skipped.report(self.context.session.status_exchange, self._tally, f"of epoch {self._number}")
