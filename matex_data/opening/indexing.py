"""The index of all files of a data set: each file is indexed by one rank, or was stored by an earlier job."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import entry_points, version
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np

from matex_data import memory
from matex_data.errors import FormatError
from matex_data.index import stored
from matex_data.index.descriptors import OF_JOB, Origin
from matex_data.index.files import FileColumns, FileColumnsBuilder, FileTable
from matex_data.index.model import FileIndex, Index, check_same
from matex_data.index.paths import PathTable
from matex_data.index.stamps import Stamp
from matex_data.index.whole import FILE, SAMPLE, WHOLES, united
from matex_data.io.ranks import MpiRanks
from matex_data.mpi.communicator import Communicator, pickle_error
from matex_data.mpi.shared import share
from matex_data.opening.ahead import made_ahead
from matex_data.readers import collective_reader, detect, folder_format, index_another, read_head, reader
from matex_data.readers.formats import GROUP, format_named
from matex_data.sampling.schedule import rank_range
from matex_data.storage.files import size_of
from matex_data.storage.trust import NONE, Trust

T = TypeVar("T")

NETCDF = "netcdf"  # the format whose samples have a coordinate
MOST_NAMED = 5  # files in a warning
MANY_SMALL, SMALL = 32, 1 << 20  # files, of as many bytes, each of which may be a sample
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
    """

    format: str | None
    names: list[str] | None
    options: Mapping[str, Any]
    coordinate: bool = False
    memory: Index | None = None
    trust: Trust = NONE

    def key(self, files: Sequence[str]) -> str:
        """Return a text that is equal for two indexes of the same files, made in the same way by the same release."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(os.fsencode("\0".join(files)))
        options = text_of(dict(sorted(self.options.items())))
        names = f"{self.names} and the coordinate" if self.coordinate else self.names
        return f"{version('matex_data')} {self.format} {names} {options} {digest.hexdigest()}"

    def resolved(self, format: str) -> Reading:
        """Return the reading of a format, whose reader has an option for the coordinate of the samples, or none."""
        has_option = self.coordinate and format == NETCDF
        return replace(self, options={**self.options, "coordinate": True}) if has_option else self


def text_of(value: Any) -> str:
    """Return a value as text, with all numbers of its arrays."""
    with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
        return repr(value)


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
    if reading.memory is not None:
        return memory.select(reading.memory, reading.names, bool(reading.options.get("static_as_inputs")))
    if path is None:
        return _index_all(comm, files, reading)
    known = _stored(comm, path, reading.key(files), files, _origin(reading.trust))
    stale = () if known is None else _changed_files(comm, known)
    if known is not None and not stale:
        return known
    usable = known is not None and len(known.files) == len(files) and 0 not in stale
    index = _index_all(comm, files, reading, known if usable else None, frozenset(stale))
    if not index.files.all_stamped:
        raise FormatError(
            "an index of this format cannot be stored, since a later job would not notice changes of its files",
            file=index.files.paths[0],
            remedy="leave out index=",
        )
    named = [files[number] for number in stale[:MOST_NAMED]] if usable else files[:1]
    comm.on_root(partial(_store, path, index, reading.key(files), named[: len(stale)], len(stale)))
    return index


def _store(path: str, index: Index, key: str, changed: Sequence[str], count: int) -> None:
    """Write an index to a file; warn of the files that have changed, some of which are named, or of a lack of room."""
    if count:
        more = f" and {count - len(changed)} more" if count > len(changed) else ""
        listed = ", ".join(map(repr, changed)) + more
        text = f"files have changed since the index {path!r} was written; indexed anew: {listed}"
        warnings.warn(text, stacklevel=5)
    try:
        stored.save(path, stored.to_bytes(index, key))
    except OSError as error:
        warnings.warn(f"the index {path!r} cannot be written: {error}", stacklevel=5)


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
    warnings.warn(f"the index {path!r} is made anew: {problem}", stacklevel=6)
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


def _changed_files(comm: Communicator, index: Index) -> tuple[int, ...]:
    """Return the numbers of the files that have changed since they were indexed. Each rank checks its block."""
    table = index.files
    own = range(*rank_range(len(table), comm.rank, comm.size))
    changed = [number for number in own if _has_changed(table.paths[number], table.stamp(number))]
    return tuple(number for of_rank in comm.allgather(changed) for number in of_rank)


def _has_changed(path: str, stamp: Stamp | None) -> bool:
    """Return whether a file may be another one than that of the stamp, which any rank of another job took."""
    try:
        return stamp is None or not stamp.is_of(path, Stamp.of(path))
    except OSError:
        return True


def _index_all(
    comm: Communicator,
    files: Sequence[str],
    reading: Reading,
    known: Index | None = None,
    stale: Collection[int] = (),
) -> Index:
    """Return the index of all files. Each rank indexes as many of them, which are neighbours. *Collective*.

    Parameters
    ----------
    known : index of an earlier job; its files are not indexed again, but for those of the numbers ``stale``.
    """
    resolved = resolve_format(comm, files[0], reading.format, reading.options)
    reading = reading.resolved(resolved)
    read_all = collective_reader(resolved)
    index: Index | None = None
    if read_all is not None:
        ranks = MpiRanks(comm)
        try:
            index = read_all(list(files), reading.names, ranks, reading.trust, **reading.options)
        finally:
            ranks.close()
        if comm.rank != 0:
            index = None  # rank 0 has all files
        elif len(files) > 1:
            index = index.in_columns()
    else:
        index_one = partial(_index_one, reading, resolved, known, stale)
        whole = reading.options.get(SAMPLE) in WHOLES
        own = _index_share(comm, files, index_one, format_named(resolved).concurrent, whole)
        by_rank = comm.gather(own)
        index = comm.agreed(lambda: None if by_rank is None else _joined(by_rank, len(files), whole))
    comm.agreed(partial(_tell_notices, index))
    if reading.options.get(SAMPLE) is None and FILE in format_named(resolved).samples:
        comm.agreed(partial(_tell_rows, index))
    return _on_all_ranks(comm, index)


def _tell_notices(index: Index | None) -> None:
    """Warn of what the layouts of the first file say about reads of such files, on the rank that has the index."""
    files = () if index is None else index.files[:1]
    for notice in {layout.notice: None for file in files for layout in file.layouts.values()}:
        if notice:
            warnings.warn(notice, stacklevel=6)


def _tell_rows(index: Index | None) -> None:
    """Say what a sample is of many small files of arrays of one shape, on the rank that has the index."""
    if index is None or len(index.files) < MANY_SMALL:
        return
    rows = index.files.rows
    if rows[0] > 1 and bool((rows == rows[0]).all()) and rows[0] * sum(map(index.row_bytes, index.fields)) < SMALL:
        text = (
            f"each of the {len(rows)} files has {rows[0]} samples, its rows; sample='file' makes each file one sample"
        )
        warnings.warn(text, stacklevel=6)


def share_facts(comm: Communicator, files: FileTable) -> None:
    """Look at the layouts of many files that were derived from others, each rank at those of its block. *Collective*.

    Parameters
    ----------
    comm : the ranks.
    files : the files, of which the ranks know the facts afterwards.
    """
    if comm.size > 1 and len(files) >= SHARED_FACTS and not files.has_facts:
        files.set_facts(comm.allgather(files.facts_of(range(*rank_range(len(files), comm.rank, comm.size)))))


def _joined(by_rank: Sequence[_Share], files: int, whole: bool) -> Index:
    """Return one index of what the ranks have indexed; raise the error of the first file that has one.

    Parameters
    ----------
    whole : a file, or a group of it, is a sample.
    """
    first = by_rank[0].first
    for of_rank in by_rank:
        for index in (of_rank.first, of_rank.other):
            if index is not None and first is not None and whole:
                first = united(first, index)
            elif index is not None and first is not None:
                check_same(first, index)
        if of_rank.error is not None:
            raise pickle.loads(of_rank.error)
    assert first is not None
    table = first.files if files == 1 else FileColumns.joined([of_rank.files for of_rank in by_rank])
    return Index(first.fields, table, first.static, first.facts)


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


@dataclass
class _Share:
    """Files that a rank has indexed.

    Parameters
    ----------
    files : the files, up to the first one that fails.
    first : index of the first file.
    other : index of the first file that is not of one data set with ``first``.
    error : of the first file that fails, pickled.
    """

    files: FileColumns
    first: Index | None = None
    other: Index | None = None
    error: bytes | None = None


def _index_share(
    comm: Communicator, files: Sequence[str], index_one: Callable[[str, int], Index], concurrent: bool, whole: bool
) -> _Share:
    """Index this rank's files, up to the first one that fails. A single rank raises the error.

    Parameters
    ----------
    comm : the ranks.
    files : of all ranks.
    index_one : indexes a file, given its path and number.
    concurrent : threads may index files at the same time.
    whole : a file, or a group of it, is a sample.
    """
    table, first, other, failure = FileColumnsBuilder(), None, None, None
    own = range(*rank_range(len(files), comm.rank, comm.size))

    def index_own(number: int) -> Index:
        return index_one(files[number], number)

    try:
        for result in made_ahead(index_own, own) if concurrent else (partial(index_own, number) for number in own):
            index = result()
            first = first or Index(index.fields, index.files, index.static, index.facts)
            if (index.fields, index.facts) != (first.fields, first.facts):
                if not whole:
                    other = index
                    break
                first = united(first, index)
            if len(files) > 1:
                for file in index.files:
                    table.add(file)
    except Exception as error:  # of any kind: every rank has to raise it
        if comm.size == 1:
            raise
        failure = pickle_error(error)
    return _Share(table.build(), first, other, failure)


def resolve_format(comm: Communicator, path: str, format: str | None, options: Mapping[str, Any]) -> str:
    """Return the requested format, or the one that rank 0 detects. *Collective*."""
    if format is not None:
        return format
    return comm.on_root(lambda: folder_format(path) or detect(path, read_head(path), options))


def _index_one(
    reading: Reading, first_format: str, known: Index | None, stale: Collection[int], path: str, number: int
) -> Index:
    """Return the index of one file.

    Parameters
    ----------
    reading : how it is read.
    first_format : format of the first file.
    known, stale : see `_index_all`.
    path, number : of the file. Of all but the first one, arrays that belong to no sample are left out.
    """
    if known is not None and number not in stale:
        return Index(known.fields, [known.files[number]], {} if number else known.static, known.facts)
    if number == 0:
        index = reader(first_format)(path, reading.names, reading.trust, **reading.options)
    else:
        is_named = reading.format is not None
        index = index_another(path, reading.names, first_format, reading.options, is_named, reading.trust)
    for file in index.files:
        if file.path == path:
            _check_size(file)
    return index


def _check_size(file: FileIndex) -> None:
    """Raise ``FormatError`` if a layout reaches beyond the end of its file."""
    ends = {name: layout.end() for name, layout in file.layouts.items()}
    if not any(ends.values()):
        return  # a folder, or a file of which the layouts open others
    size = size_of(file.path) if file.stamp is None else file.stamp.size
    for name, end in ends.items():
        if end > size:
            raise FormatError(
                "the file is truncated",
                file=file.path,
                field=name,
                byte=size,
                expected=f"{end} bytes",
                found=f"{size} bytes",
                remedy="copy it again from its source",
            )
