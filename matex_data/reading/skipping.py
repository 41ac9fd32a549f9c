"""Samples that cannot be read: found one by one, remembered and reported.

Reads are coalesced and chunks are shared, so many samples fail at once. The rank then reads them again, by itself: in
halves, quarters and so on, until each of them is read or fails alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from matex_data._types import Integers
from matex_data.errors import (
    ChangedFile,
    DataError,
    FieldNotFound,
    FunctionError,
    OutOfMemory,
    PartitionError,
    UnsupportedVersion,
)
from matex_data.index.cache import ChunkCache
from matex_data.index.model import Index
from matex_data.index.runs import Runs, Samples, compress
from matex_data.io.counters import Profile
from matex_data.locks import Lock
from matex_data.mpi.activity import busy
from matex_data.mpi.communicator import Communicator
from matex_data.reading.context import NO_ROWS, ReadContext
from matex_data.reading.execute import run
from matex_data.reading.plan import Arrays, ReadPlan, plan_reads
from matex_data.warning import warn

MOST_NAMED = 5  # samples in a warning
PROBES = 9  # samples of a block that fail alone before all of it counts as damaged
_OTHER_ERRORS = (ChangedFile, PartitionError, OutOfMemory, FieldNotFound, FunctionError, UnsupportedVersion)


def present(arrays: Arrays, absent: Integers) -> Arrays:
    """Return arrays without these rows, of samples that cannot be read."""
    return {name: np.delete(array, absent, axis=0) for name, array in arrays.items()} if len(absent) else arrays


@dataclass(frozen=True)
class SkippedSample:
    """Sample that cannot be read.

    Parameters
    ----------
    file : path.
    row : number of the sample within the file; None if the file holds no other.
    problem : reason, in a few words.
    field : that is damaged; None if it is unknown.
    """

    file: str
    row: int | None
    problem: str
    field: str | None = None

    def __str__(self) -> str:
        where = repr(self.file) if self.row is None else f"{self.file!r}, row {self.row}"
        return f"{where}: {self.problem}"


def by_damage(samples: Iterable[SkippedSample]) -> Iterator[str]:
    """Yield a line for each damage: for rows that follow one another and have the same problem, as in a chunk."""

    def damage(numbered: tuple[int, SkippedSample]) -> tuple[object, ...]:
        number, sample = numbered
        return sample.file, sample.field, sample.problem, None if sample.row is None else sample.row - number

    for (file, name, problem, _), group in groupby(enumerate(samples), damage):
        rows = [sample.row for _, sample in group if sample.row is not None]
        where = [repr(file), *([] if name is None else [f"field {name!r}"])]
        if rows:
            where.append(f"row {rows[0]}" if len(rows) == 1 else f"rows {rows[0]} to {rows[-1]}")
        yield f"{', '.join(where)}: {problem}"


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

    def positions(self, runs: Samples) -> Integers:
        """Return the positions of the known ones in an ascending sequence of samples, int64, ascending."""
        numbers = self._numbers
        positions = runs.rank(numbers)
        return positions[runs.rank(numbers + 1) > positions]

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
        path, row = self._index.located(number)
        other = error.file not in (None, path)  # one of the many files of a folder
        reason = error.problem if error.found is None else f"{error.problem} ({error.found})"
        reason = " ".join(reason.split())[:200]
        return SkippedSample(error.file or path, error.row if other else row, reason, error.field)

    def report(self, comm: Communicator, tally: Tally, purpose: str) -> None:
        """Tell all ranks which samples were skipped; rank 0 warns if there are any. *Collective*.

        Parameters
        ----------
        comm : the ranks that read; this one, where each has its own status.
        tally : samples of this rank.
        purpose : for which they were read, as text.

        Raises
        ------
        DataError : samples were skipped, and none were delivered; on every rank.
        """
        own = {number: self._records[number] for number in tally.skipped}, tally.delivered
        by_rank = [own] if comm.alone else comm.allgather(own)
        skipped = {number: record for of_rank, _ in by_rank for number, record in of_rank.items()}
        if not skipped:
            return
        self._merge(skipped)
        named = [skipped[number] for number in sorted(skipped)]
        delivered = sum(count for _, count in by_rank)
        if not delivered:
            raise _nothing_readable(named, purpose)
        more = [f"and {len(named) - MOST_NAMED} more: see Dataset.skipped"] if len(named) > MOST_NAMED else []
        listed = "\n  ".join([*map(str, named[:MOST_NAMED]), *more])
        text = f"{len(named)} of {len(named) + delivered} samples {purpose} cannot be read and are skipped:\n  {listed}"
        comm.on_root(lambda: warn(text))


def _nothing_readable(named: list[SkippedSample], purpose: str) -> DataError:
    return DataError(
        f"none of the {len(named)} samples {purpose} can be read",
        file=named[0].file,
        row=named[0].row,
        expected='at least one sample that can be read, with on_error="skip"',
        found=named[0].problem,
        remedy="check the files and their storage; matex validate lists what is damaged",
    )


class SampleRead:
    """Read of samples, of which some may fail.

    Parameters
    ----------
    context : files and memory.
    skipped : samples that are known to fail, which are not read again, and to which others are added; None: each that
        fails is an error.
    tally : of the epoch.
    runs : samples, ascending.
    destination : int64[runs.total], a row of the arrays for each sample.
    arrays : field name -> array that receives the rows.

    Attributes
    ----------
    skips : samples that fail are left out.
    runs, destination : samples that are not known to fail, and their rows.
    absent : int64, rows of the samples that are left out.
    """

    def __init__(
        self,
        context: ReadContext,
        index: Index,
        skipped: SkippedSamples | None,
        tally: Tally,
        runs: Runs,
        destination: Integers,
        arrays: Arrays,
    ) -> None:
        self._context, self._index, self._skipped, self._tally, self._arrays = context, index, skipped, tally, arrays
        self._epoch, self.skips = 0, skipped is not None
        known = NO_ROWS if skipped is None else skipped.positions(runs)
        self._known = runs.numbers(known)
        self.absent = destination[known]
        if len(known):
            runs = compress(runs.numbers(np.delete(np.arange(runs.total), known)))
            destination = np.delete(destination, known)
        self.runs, self.destination = runs, destination

    def plan(self, chunks: ChunkCache) -> ReadPlan:
        """Plan to read the samples at once."""
        self._epoch = chunks.epoch
        return plan_reads(self._index, self.runs, self.destination, self._arrays, chunks, self._context.scratch)

    def finish(self, error: Exception | None) -> Exception | None:
        """Count the samples; after an error, find those that cannot be read and are left out, and read the others.

        Parameters
        ----------
        error : of the reads of the plan, none of which is under way any more.

        Returns
        -------
        error : it, or one of the new reads, if it is not in the samples.
        """
        if self._skipped is None:
            return error
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
        runs = self.runs.part(begin, end)
        chunks, files = ChunkCache(self._context.cache_bytes, self._epoch), self._context.session.files.independent()
        rows = self.destination[begin:end]
        try:
            plan = plan_reads(self._index, runs, rows, self._arrays, chunks, self._context.scratch)
        except DataError as error:
            return error
        return run(plan, files)


def _are_of_one_block(index: Index, samples: Integers, field: str | None) -> bool:
    """Return whether a block of several rows of a field, or of any field for None, has all of the samples."""
    files = index.file_of(samples)
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
