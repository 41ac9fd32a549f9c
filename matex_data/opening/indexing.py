"""The index of all files of a data set: each file is indexed by one rank, or was stored by an earlier job."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import entry_points, version
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from matex_data.errors import DataError, FieldNotFound, FormatError, NoSamples, truncated
from matex_data.fields import LISTED, SAMPLE_COORDINATE
from matex_data.index import stored
from matex_data.index.columns import PathTable
from matex_data.index.descriptors import OF_JOB, Origin
from matex_data.index.files import FileColumns, FileColumnsBuilder, FileTable, columns_of
from matex_data.index.library import forget_shared_files
from matex_data.index.model import FileIndex, Index
from matex_data.index.stamps import check_stamp
from matex_data.index.united import UnitedFields, adapted, check_common, is_alike, is_united, schema_key, unite
from matex_data.index.whole import FILE, SAMPLE
from matex_data.io.coalesce import ReadTask
from matex_data.io.files import Files
from matex_data.memory import HeldArrays
from matex_data.memory import select as select_arrays
from matex_data.mpi.communicator import Communicator
from matex_data.mpi.shared import share
from matex_data.opening.ahead import made_ahead
from matex_data.opening.folders import add_partitions, partitions
from matex_data.readers import collective_reader, detect, folder_format, index_another, read_head, reader
from matex_data.readers.formats import GROUP, format_named
from matex_data.sampling.schedule import rank_range
from matex_data.storage.files import size_of
from matex_data.storage.trust import NONE, Trust
from matex_data.transforms.patches import PatchShape, patched
from matex_data.warning import warn
from matex_data.words import exact_text

T = TypeVar("T")

WITH_COORDINATE = ("netcdf", "zarr")
"""Formats whose samples have a coordinate."""
COORDINATE = "coordinate"  # their option, which adds it to the fields
MOST_NAMED = 5  # files in a warning
MANY_SMALL, SMALL = 32, 1 << 20  # files, of as many bytes, each of which may be a sample
MOST_EMPTY = 64 << 10  # bytes of a file that may have no samples
SEARCHED = 8  # files in which a field is looked for that the first one lacks
SHARED_FACTS = 256  # files from which on a message costs less than a look at all of them


@dataclass(frozen=True)
class Reading:
    """Format, fields and options, on which an index depends beside the files.

    Parameters
    ----------
    format : that the user asks for; None: detected.
    names : fields to read; None: all.
    options : of the reader.
    coordinate : add the coordinate of the samples, of a format that has one.
    memory : arrays in memory, in place of files.
    trust : where bytes may come from beside the folders of the files; an index does not depend on it.
    roots : folders that the user names, below which those of partitions lie; see `matex_data.opening.folders`.
    absent : values of fields in the files that lack them, by name.
    patches : of the images of the files, which are the samples; None: whole rows are.
    """

    format: str | None
    names: list[str] | None
    options: Mapping[str, Any]
    coordinate: bool = False
    memory: HeldArrays | None = None
    trust: Trust = NONE
    roots: frozenset[str] = frozenset()
    absent: Mapping[str, Any] = field(default_factory=dict)
    patches: PatchShape | None = None

    def key(self, files: Sequence[str]) -> str:
        """Return a text that is equal for two indexes of the same files, made in the same way by the same release."""
        digest = hashlib.blake2b(digest_size=16)
        joined = "\0".join(files)
        digest.update(os.fsencode("\0".join([joined, *sorted(self.roots)]) if "=" in joined else joined))
        options = exact_text(dict(sorted(self.options.items())))
        names = f"{self.names} and the coordinate" if self.coordinate else self.names
        options += f" {self.absent}" if self.absent else ""
        return f"{version('matex_data')} {self.format} {names} {options} {digest.hexdigest()}"

    def resolved(self, format: str) -> Reading:
        """Return the reading of a format, whose reader has an option for the coordinate of the samples, or none."""
        has_option = self.coordinate and format in WITH_COORDINATE
        return replace(self, options={**self.options, COORDINATE: True}) if has_option else self


def index_files(comm: Communicator, files: Sequence[str], reading: Reading, path: str | None) -> Index:
    """Return the index of files, from a file that an earlier job has written if there is one. *Collective*.

    Parameters
    ----------
    comm : the ranks.
    files : paths of the files.
    reading : how they are read.
    path : of the stored index; None: none is read or written.

    Raises
    ------
    DataError : a file cannot be indexed; the file at ``path`` is no stored index.
    """
    forget_shared_files()
    index = _index_rows(comm, files, reading, path)
    return index if reading.patches is None else patched(index, reading.patches)


def _index_rows(comm: Communicator, files: Sequence[str], reading: Reading, path: str | None) -> Index:
    """Return the index of the rows of files; see `index_files`. *Collective*."""
    if reading.memory is not None:
        return select_arrays(reading.memory, reading.names, bool(reading.options.get("static_as_inputs")))
    if path is None:
        return _index_filled(comm, _Indexing.of(comm, files, reading))[0]
    known = _stored(comm, path, reading.key(files), files, _origin(reading.trust))
    stale = frozenset[int]() if known is None else _changed_files(comm, known)
    if known is not None and not stale:
        return known
    usable = known is not None and len(known.files) == len(files) and 0 not in stale
    usable &= known is not None and not reading.absent and not is_united(known)  # else their own fields are not known
    usable &= known is not None and LISTED not in known.facts  # nor is what each file has of the list
    indexing = _Indexing.of(comm, files, reading)
    index, left_out = _index_filled(comm, replace(indexing, known=known, stale=stale) if usable else indexing)
    if left_out:
        comm.on_root(
            lambda: warn(f"the index {path!r} is not written: nothing in it would tell when the others have samples")
        )
        return index
    if not index.files.all_stamped:
        raise FormatError(
            "an index of this format cannot be stored, since a later job would not notice changes of its files",
            file=index.files.paths[0],
            remedy="leave out index=",
        )
    named = [] if known is None else [known.files.paths[number] for number in sorted(stale)[:MOST_NAMED]]
    comm.on_root(partial(_store, path, index, reading.key(files), named, len(stale)))
    return index


def _store(path: str, index: Index, key: str, changed: Sequence[str], count: int) -> None:
    """Write an index to a file; warn of the files that have changed, some of which are named, or of a lack of room."""
    if count:
        more = f" and {count - len(changed)} more" if count > len(changed) else ""
        listed = ", ".join(map(repr, changed)) + more
        text = f"files have changed since the index {path!r} was written; indexed anew: {listed}"
        warn(text)
    try:
        stored.save(path, stored.to_bytes(index, key))
    except OSError as error:
        warn(f"the index {path!r} cannot be written: {error}")


def _stored(comm: Communicator, path: str, key: str, files: Sequence[str], origin: Origin) -> Index | None:
    """Return the index that is stored at a path, if it is the one of this key. *Collective*."""
    found = comm.agreed(lambda: _usable(path, key, files, origin) if comm.rank == 0 else None)
    if not comm.broadcast(found is not None):
        return None
    if comm.size == 1 and found is not None:
        return found[1]
    return stored.from_bytes(share(comm, found and found[0]), origin)[1]


def _usable(path: str, key: str, files: Sequence[str], origin: Origin) -> tuple[memoryview, Index] | None:
    """Return a stored index and its bytes; None, with a warning, if it is damaged or not the one of this key."""
    data = stored.mapped(path)
    if data is None:
        return None
    problem = "it is of other files, fields, options or another release of matex_data"
    try:
        found, index = stored.from_bytes(data, origin)
    except FormatError as error:
        problem = f"{error.problem} ({error.found})"
    else:
        if found == key and _are_of(index.files.paths, files):
            return data, index
    warn(f"the index {path!r} is made anew: {problem}")
    return None


def _are_of(paths: Sequence[str], files: Sequence[str]) -> bool:
    """Return whether paths are those of the files that the user names, or of files within the folders among these."""
    if len(paths) == len(files) and paths == PathTable.of(files):
        return True
    named = {file.rstrip("/") for file in files}
    return all(_is_within(path.rstrip("/"), named) for path in paths)


def _is_within(path: str, named: set[str]) -> bool:
    names = path.split("/")
    return path in named or (".." not in names and not named.isdisjoint(accumulate(names, "{}/{}".format)))


def _origin(trust: Trust) -> Origin:
    """Return the origin of a stored index: it may name what modules that have registered readers declare."""
    return Origin(False, frozenset(entry.module for entry in entry_points(group=GROUP)), trust)


def _changed_files(comm: Communicator, index: Index) -> frozenset[int]:
    """Return the numbers of the files that have changed since they were indexed. Each rank checks its block."""
    table = index.files
    own = range(*rank_range(len(table), comm.rank, comm.size))
    stamps = {number: table.stamp(number) for number in own}
    changed = [n for n, stamp in stamps.items() if stamp is None or check_stamp(table.paths[n], stamp, own=False)]
    return frozenset(number for of_rank in comm.allgather(changed) for number in of_rank)


def _index_filled(comm: Communicator, indexing: _Indexing) -> tuple[Index, int]:
    """Return the index of all files but those without samples, and how many these are. *Collective*.

    Their formats need a sample to tell the fields. That there are any shows as they are indexed: the others are indexed
    once more.
    """
    files = indexing.files
    try:
        return _index_all(comm, indexing), 0
    except NoSamples:
        if len(files) == 1:
            raise
        own = files[slice(*rank_range(len(files), comm.rank, comm.size))]
        found = comm.agreed(lambda: [path for path in own if _is_empty(path, indexing.format, indexing.reading)])
        by_rank = comm.allgather(found)
        empty = {path for of_rank in by_rank for path in of_rank}
        if len(empty) in (0, len(files)):
            raise
    such = next(path for path in files if path in empty)
    text = f"{len(empty)} of {len(files)} files have no samples, and are left out, such as {such!r}"
    comm.on_root(lambda: warn(text))
    filled = [path for path in files if path not in empty]
    return _index_all(comm, _Indexing.of(comm, filled, indexing.reading)), len(empty)


def _is_empty(path: str, format: str, reading: Reading) -> bool:
    """Return whether a file has no samples; a large one that has a header alone counts as another one."""
    try:
        size = size_of(path)
        if 0 < size <= MOST_EMPTY:
            reader(format)(path, None, reading.trust, **reading.options)
        return size == 0
    except NoSamples:
        return True
    except (DataError, OSError):  # it is told as all are indexed
        return False


def _index_all(comm: Communicator, indexing: _Indexing) -> Index:
    """Return the index of all files. Each rank indexes as many of them, which are neighbours. *Collective*."""
    reading, format = indexing.reading, format_named(indexing.format)
    read_all = collective_reader(indexing.format)
    index: Index | None = None
    if read_all is not None:
        ranks, given = MpiRanks(comm), {"absent": reading.absent} if reading.absent else {}
        try:
            index = read_all(list(indexing.files), reading.names, ranks, reading.trust, **reading.options, **given)
        finally:
            ranks.close()
        if comm.rank != 0:
            index = None  # rank 0 has all files
        elif len(indexing.files) > 1:
            index = index.in_columns()
    else:
        own, union = _index_share(comm, indexing, format.concurrent)
        by_rank = comm.gather(own)
        index = comm.agreed(lambda: None if by_rank is None else _joined(by_rank, union, indexing.single))
    may_be_samples = reading.options.get(SAMPLE) is None and FILE in format.samples
    comm.agreed(lambda: None if index is None else _warn_of(index, may_be_samples))
    return _on_all_ranks(comm, index)


def _warn_of(index: Index, may_be_samples: bool) -> None:
    """Warn of what layouts of the first file say about reads, and of many small files of arrays of one shape.

    Parameters
    ----------
    may_be_samples : a file may be a sample, and the user has not said what one is.
    """
    for notice in {layout.notice: None for file in index.files[:1] for layout in file.layouts.values()}:
        if notice:
            warn(notice)
    rows = index.files.rows
    if not may_be_samples or len(rows) < MANY_SMALL:
        return
    if rows[0] > 1 and bool((rows == rows[0]).all()) and rows[0] * sum(map(index.row_bytes, index.fields)) < SMALL:
        text = (
            f"each of the {len(rows)} files has {rows[0]} samples, its rows; sample='file' makes each file one sample"
        )
        warn(text)


def share_facts(comm: Communicator, files: FileTable) -> None:
    """Look at the layouts of many files that were derived from others, each rank at those of its block. *Collective*.

    Parameters
    ----------
    comm : the ranks.
    files : the files, of which the ranks know the facts afterwards.
    """
    if comm.size > 1 and len(files) >= SHARED_FACTS and not files.has_facts:
        files.set_facts(comm.allgather(files.facts_of(range(*rank_range(len(files), comm.rank, comm.size)))))


def _joined(by_rank: Sequence[_Share], union: UnitedFields, single: bool) -> Index:
    """Return one index of the files of all ranks; of a single one, that of the first rank."""
    _, first, _ = by_rank[0]
    assert first is not None
    _check_listed([listed for _, _, of_rank in by_rank for listed in of_rank])
    table = first.files if single else FileColumns.joined([files for files, _, _ in by_rank])
    return Index(union.fields, table, first.static, union.texts)


def _check_listed(listed: Sequence[_Listed]) -> None:
    """Raise ``FormatError`` unless the samples of the files are in the order of the list of ``sel=`` that has them."""
    for (before, _, last), (path, first, _) in pairwise(listed):
        if first <= last:
            raise FormatError(
                "sel= lists samples in another order than that of the files, or twice",
                file=path,
                expected="values in the order of the samples, each once",
                found=f"value {first + 1} of the list, behind value {last + 1} in {before!r}",
                remedy="list them in the order of the files; data[[2, 0, 1]] gives samples in any order",
            )


def _on_all_ranks(comm: Communicator, index: Index | None) -> Index:
    """Return the index of rank 0, in one copy for all ranks of a machine. *Collective*."""
    if comm.size == 1:
        assert index is not None
        return index
    static, data = None, None
    if index is not None:
        static, data = index.static, memoryview(stored.to_bytes(index.with_static({}), of_job=True))
    static = comm.broadcast(static)
    _, found = stored.from_bytes(share(comm, data), OF_JOB)
    return found.with_static(static or {})


_Listed = tuple[str, int, int]
"""File, and the positions of its first and last sample in the list of ``sel=``."""

_Share = tuple[FileColumns, Index | None, Sequence[_Listed]]
"""Files that a rank has indexed, with the fields of all files, the index of the first, and what they have of a list."""


class _Collected:
    """Files that a rank indexes, one after the other, with the fields of each."""

    def __init__(self, fills: Mapping[str, Any]) -> None:
        self._fills = fills
        self.first: Index | None = None
        self.listed: list[_Listed] = []
        self._builders: list[FileColumnsBuilder] = []
        self._number_of: dict[Hashable, int] = {}
        self._unions: list[UnitedFields] = []
        self._numbers: list[int] = []

    def add(self, index: Index) -> None:
        """Add the files of an index."""
        if LISTED in index.facts:
            count, *ends = index.facts[LISTED].split()
            if ends:
                first, last = map(int, ends)
                self.listed.append((index.files.paths[0], first, last))
            index = Index(index.fields, index.files, index.static, {**index.facts, LISTED: count})
        if self.first is None:  # one without samples is false
            self.first = Index(index.fields, index.files, index.static, index.facts)
        key = schema_key(index.fields, index.facts)
        number = self._number_of.setdefault(key, len(self._unions))
        if number == len(self._unions):
            self._builders.append(FileColumnsBuilder())
            path = next(iter(index.files.paths), "")  # of arrays without any file
            self._unions.append(UnitedFields.of(path, index.fields, index.facts, self._fills))
        for file in index.files:
            self._builders[number].add(file)
            self._numbers.append(number)

    @property
    def unions(self) -> list[UnitedFields]:
        """Unions of files with the same fields, in the order of their first files."""
        counts = np.bincount(self._numbers, minlength=len(self._unions)).tolist()
        return [union.of_files(count) for union, count in zip(self._unions, counts, strict=True)]

    def check(self, union: UnitedFields) -> None:
        """Raise ``FormatError`` if a file has no field of the first one."""
        for one in self._unions:
            check_common(one.path, one.fields, union)

    def share(self, union: UnitedFields, single: bool) -> _Share:
        """Return the files with the fields of a union; none of a single one, whose index stays what it is."""
        if single or not self._builders:
            return FileColumnsBuilder().build(), self.first, self.listed
        tables = [builder.build() for builder in self._builders]
        if len(tables) == 1 and is_alike(self._unions[0].fields, union):
            return tables[0], self.first, self.listed
        builder, entries = FileColumnsBuilder(), [iter(table) for table in tables]
        for number in self._numbers:
            builder.add(adapted(next(entries[number]), self._unions[number].fields, union))
        return builder.build(), self.first, self.listed


def _index_share(comm: Communicator, indexing: _Indexing, concurrent: bool) -> tuple[_Share, UnitedFields]:
    """Index this rank's files, and unite their fields with those of the other ranks. *Collective*.

    Parameters
    ----------
    comm : the ranks.
    indexing : of all files.
    concurrent : threads may index files at the same time.
    """
    own = range(*rank_range(len(indexing.files), comm.rank, comm.size))

    def index_one(number: int) -> Index:
        return indexing.index(number, number == own.start)

    def collect() -> _Collected:
        collected = _Collected(indexing.reading.absent)
        for result in made_ahead(index_one, own) if concurrent else (partial(index_one, number) for number in own):
            collected.add(result())
        return collected

    collected = comm.agreed(collect)
    names = indexing.reading.names
    union = unite(comm, collected.unions).with_absent(indexing.reading.absent if names is None else names)
    if names is None:
        comm.agreed(lambda: collected.check(union))
    return comm.agreed(lambda: collected.share(union, indexing.single)), union


def _without_fields(index: Index, coordinate: bool | None) -> Index:
    """Return the index of a file that has none of the named fields: its rows, and the coordinate of these if asked for.

    What the file tells of other fields does not concern the data set.
    """
    kept = [name for name, field in index.fields.items() if coordinate and field.attributes.get(SAMPLE_COORDINATE)]
    few = index.select(kept)
    return Index(few.fields, few.files, few.static, {LISTED: few.facts[LISTED]} if LISTED in few.facts else {})


def resolve_format(comm: Communicator, path: str, format: str | None, options: Mapping[str, Any]) -> str:
    """Return the requested format, or the one that rank 0 detects. *Collective*."""
    if format is not None:
        return format
    return comm.on_root(lambda: folder_format(path) or detect(path, read_head(path), options))


@dataclass(frozen=True)
class _Indexing:
    """Way to the index of one file.

    Parameters
    ----------
    reading : how the files are read.
    files : paths of all files.
    format : of the first file.
    known : index of an earlier job; its files are not indexed again, but for those of the numbers ``stale``.
    """

    reading: Reading
    files: Sequence[str]
    format: str
    known: Index | None = None
    stale: frozenset[int] = frozenset()

    @classmethod
    def of(cls, comm: Communicator, files: Sequence[str], reading: Reading) -> _Indexing:
        """Return the way to the index of files of the requested format, or of that of the first one. *Collective*."""
        format = resolve_format(comm, files[0], reading.format, reading.options)
        return cls(reading.resolved(format), files, format)

    @property
    def single(self) -> bool:
        """Return whether there is one file, with all fields."""
        return len(self.files) == 1 and not self.reading.absent

    def index(self, number: int, is_first: bool) -> Index:
        """Return the index of a file, with those of the named fields that it has.

        Parameters
        ----------
        number : of the file. Of all but number 0, arrays that belong to no sample are left out.
        is_first : the rank has looked at no file yet: it raises the error for a name that hardly any file has.
        """
        if self.known is not None and number not in self.stale:
            static = {} if number else self.known.static
            return Index(self.known.fields, [self.known.files[number]], static, self.known.facts)
        names, lacking = self.reading.names, list[FieldNotFound]()
        while True:
            try:
                index = self._read(number, names)
                break
            except FieldNotFound as error:
                given = error.field in self.reading.absent
                if names is None or error.field not in names or (len(self.files) == 1 and not given):
                    raise
                lacking.append(error)
                names = [name for name in names if name != error.field] or None
        for absent in lacking if is_first else ():
            if absent.field not in self.reading.absent and not self._is_somewhere(str(absent.field)):
                raise absent
        if lacking and names is None:
            index = _without_fields(index, self.reading.options.get(COORDINATE))
        for file in index.files:
            if file.path == self.files[number]:
                _check_size(file)
        return index

    def _is_somewhere(self, name: str) -> bool:
        """Return whether one of a few files, the first and others evenly behind it, has a field."""
        for number in np.unique(np.linspace(0, len(self.files) - 1, SEARCHED, dtype=np.int64)).tolist():
            try:
                self._read(number, [name])
            except FieldNotFound:
                continue
            return True
        return False

    def _read(self, number: int, names: Sequence[str] | None) -> Index:
        path, reading = self.files[number], self.reading
        if not format_named(self.format).partitioned:
            return self._read_file(number, names)
        dtype, values = reading.options.get("dtype"), partitions(path, reading.roots)
        types = dtype if isinstance(dtype, Mapping) else {}
        return add_partitions(path, values, names, types, lambda stored: self._read_file(number, stored))

    def _read_file(self, number: int, names: Sequence[str] | None) -> Index:
        path, reading = self.files[number], self.reading
        if number == 0:
            return reader(self.format)(path, names, reading.trust, **reading.options)
        is_named = reading.format is not None
        return index_another(path, names, self.format, reading.options, is_named, reading.trust)


def _check_size(file: FileIndex) -> None:
    """Raise ``FormatError`` if a layout reaches beyond the end of its file."""
    ends = {name: layout.end() for name, layout in file.layouts.items()}
    if not any(ends.values()):
        return  # a folder, or a file of which the layouts open others
    size = size_of(file.path) if file.stamp is None else file.stamp.size
    for name, end in ends.items():
        if end > size:
            raise truncated(file.path, size, end, name)


class MpiRanks:
    """Ranks of a communicator, with the interface of ``matex_data.readers.ranks.IndexingRanks``.

    Parameters
    ----------
    comm : communicator of these ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._files: Files | None = None
        self.rank = comm.rank
        self.size = comm.size

    def allgather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank. *Collective*."""
        return self._comm.allgather(value)

    def agree(self, error: Exception | None) -> None:
        """Raise the error of the lowest rank that has one, on every rank. *Collective*."""
        self._comm.agree(error)

    def gather_files(self, files: Sequence[FileIndex]) -> Sequence[FileIndex]:
        """Return the files of all ranks, by rank and in columns, on rank 0; elsewhere those of this rank. *Collective*.

        Raises
        ------
        Exception : a layout cannot be pickled.
        """
        by_rank = self._comm.gather(self._comm.agreed(lambda: columns_of(files)))
        return files if by_rank is None else FileColumns.joined(by_rank)

    def read(self, path: str, offset: int, memory: NDArray[np.uint8]) -> None:
        """Read bytes of a file; each rank has its own, or none.

        Parameters
        ----------
        path : the file.
        offset : first byte of this rank.
        memory : uint8[n], destination.

        Raises
        ------
        DataError : the file is too short, or cannot be read.
        """
        if self._files is None or list(self._files.paths) != [path]:
            self._files = Files(self._comm, [path], "independent")
        begin, nbytes, address = (np.array([value]) for value in (offset, len(memory), memory.ctypes.data))
        self._files.read(0, ReadTask(begin, nbytes, address))

    def close(self) -> None:
        """Close the file."""
        self._files = None
