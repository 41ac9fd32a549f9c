"""Files that are open for reading, by this rank alone or by all ranks as one."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from matex_data._types import Integers
from matex_data.index.runs import neighbours
from matex_data.index.stamps import Stamp, changed, check_stamp, part_state
from matex_data.io import preadv, probe
from matex_data.io.coalesce import ReadTask
from matex_data.io.collective import CollectiveFiles, too_short
from matex_data.io.counters import Profile
from matex_data.io.modes import choose
from matex_data.lru import LeastRecentlyUsed
from matex_data.mpi.communicator import Communicator
from matex_data.mpi.library import MPI
from matex_data.storage import objects
from matex_data.storage.files import unreadable
from matex_data.storage.objects import is_url

OBJECT_BYTES = 64 << 20  # about, of an object that are in memory for one task, with those between its ranges
OBJECT_GAP_BYTES = 4 << 10  # between two ranges of an object: to read them costs less than another request


def most_open_files(limit: int) -> int:
    """Return how many files a reader keeps open, by the limit of the process; a negative one is none.

    >>> most_open_files(256), most_open_files(1 << 20), most_open_files(-1)
    (128, 4096, 4096)
    """
    return 4096 if limit < 0 else min(4096, max(128, limit // 8))


MOST_OPEN_FILES = most_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""Files of one reader that a rank keeps open; a program has several readers, and files of its own."""


StampOf = Callable[[int], Stamp | None]
"""Callable that returns the stamp of the file of a number."""


class _Opened(Protocol):
    """File or object that one rank reads alone."""

    def stamp(self) -> Stamp: ...

    def read(self, task: ReadTask) -> int: ...

    def has_cached(self, offset: Integers) -> bool: ...


class Files:
    """The files of a dataset, open for reading. *Collective* if there are several ranks.

    Any number of threads may read at the same time, unless the ranks read collectively; see `CollectiveFiles`.

    Parameters
    ----------
    paths : paths of the files, the same on every rank. One that ends in a separator is a folder, which is not opened.
    io : "auto", "collective" or "independent"; see ``modes.choose``. Ranks of which one chooses otherwise, or which MPI
        does not let communicate in threads, read independently.
    stamp : returns the stamp of a file, or None, by which this rank checks each file as it opens it. None: others
        check them.

    Raises
    ------
    DataError : the system cannot open a file.

    Attributes
    ----------
    collective : the files that all ranks read as one; None: each rank reads by itself.
    """

    def __init__(
        self,
        comm: Communicator,
        paths: Sequence[str],
        io: str,
        profile: Profile | None = None,
        stamp: StampOf | None = None,
    ) -> None:
        self._stamp: StampOf = stamp or (lambda _: None)
        self._checked: set[int] = set()
        self._profile = profile or Profile()
        self.paths = paths
        self._open = LeastRecentlyUsed[_Opened](MOST_OPEN_FILES)
        self.collective: CollectiveFiles | None = None
        if _are_shared(comm, paths, io):
            self.collective = CollectiveFiles(comm, paths, self._profile)
            fault = self.collective.fault
            if fault is not None:
                self.close()
                if comm.rank == 0:
                    probe.tell(fault)

    def independent(self) -> Files:
        """Return the files for reads of this rank alone."""
        return Files(Communicator(), self.paths, "independent", self._profile) if self.collective else self

    def check(self, numbers: Iterable[int]) -> None:
        """Check files that this object does not open, each once until ``renew``.

        Raises
        ------
        ChangedFile : one of them has changed since it was indexed.
        """
        for number in numbers:
            if number in self._checked:
                continue
            error = check_stamp(self.paths[number], self._stamp(number), own=False)
            if error is not None:
                raise error
            self._checked.add(number)  # not before: other threads would read it meanwhile, and later calls

    def renew(self) -> None:
        """Open and check files anew where they are next needed: a new epoch begins."""
        self._checked.clear()
        self._open.clear()

    def read(self, number: int, task: ReadTask) -> None:
        """Make the reads of a task, by this rank alone.

        Raises
        ------
        DecodeError : the file has become shorter since it was opened.
        DataError : the system cannot read the file.
        """
        try:
            count = self._open.made(number, lambda: self._open_now(number)).read(task)
        except OSError as error:
            raise unreadable(self.paths[number], error) from error
        self._profile.add(bytes=count)
        if count != task.total:
            raise too_short(self.paths[number], task)

    def are_cached(self, number: int, tasks: Sequence[ReadTask]) -> bool:
        """Return whether a file is open, and the page cache has the bytes of tasks, as far as some of them show."""
        opened = self._open.get(number)
        if opened is None:
            return False
        return opened.has_cached(np.concatenate([task.offset[[0, len(task.offset) // 2]] for task in tasks]))

    def _open_now(self, number: int) -> _Opened:
        """Open a file, and raise ``ChangedFile`` if it has changed since it was indexed."""
        path, stamp = self.paths[number], self._stamp(number)
        kind: Callable[[str], _Opened] = _OpenObject if is_url(path) else _OpenFile
        try:
            opened = kind(path)
        except FileNotFoundError as error:
            raise unreadable(path, error) if stamp is None else changed(path, stamp, error) from error
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._open.clear()  # files that nobody reads are closed
            opened = kind(path)
        if stamp is not None:
            found = opened.stamp().with_parts(path, {name: part_state(path, name) for name in stamp.parts})
            if not stamp.is_of(path, found):
                raise changed(path, stamp, found)
        return opened

    def close(self) -> None:
        """Close all files. *Collective* where the ranks read as one."""
        self._open.clear()
        if self.collective is not None:
            self.collective.close()
            self.collective = None


def _are_shared(comm: Communicator, paths: Sequence[str], io: str) -> bool:
    """Return whether all ranks choose to read as one. *Collective*."""
    if io == "independent" or comm.alone or MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return False
    (other,) = comm.maximum(not choose(io, paths).collective)
    return not other


class _OpenFile:
    """Owner of a file descriptor, which is closed with the last reference to it.

    The descriptor is for its methods alone: a read holds its object, since the number of a descriptor that another
    thread has closed is given to the next file that opens.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)

    def stamp(self) -> Stamp:
        """Return the state of the file."""
        return Stamp.of_status(os.fstat(self._descriptor))

    def read(self, task: ReadTask) -> int:
        """Make the reads of a task, and return the number of bytes; raise ``OSError`` like ``preadv.read``."""
        first = task.first
        return preadv.read(self._descriptor, task.offset[first], first, task.address, task.nbytes)

    def has_cached(self, offset: Integers) -> bool:
        """Return whether bytes at int64[k] are in the page cache, like ``preadv.is_cached``."""
        return preadv.is_cached(self._descriptor, offset)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # globals are gone when Python ends
        if hasattr(self, "_descriptor"):
            close(self._descriptor)


class _OpenObject:
    """Object of a store; see `_OpenFile`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._state = objects.state(url)

    def stamp(self) -> Stamp:
        """Return the state of the object when it was opened."""
        return Stamp.of_object(self._state)

    def read(self, task: ReadTask) -> int:
        """Make the reads of a task side by side, and return the number of bytes; raise ``OSError`` if one fails. Raise
        ``ChangedFile`` if the object has changed since it was opened.
        """
        first = task.first
        offset, sizes = task.offset[first], np.add.reduceat(task.nbytes, first) if len(first) else first
        edges, total = np.append(first, len(task.nbytes)).tolist(), 0
        for runs in neighbours(sizes + OBJECT_GAP_BYTES, OBJECT_BYTES):
            wanted = offset[runs].tolist(), sizes[runs].tolist()
            try:
                read = objects.read_ranges(self._url, *wanted, OBJECT_GAP_BYTES, self._state.tag)
            except objects.ChangedObject as error:
                raise changed(self._url, self.stamp(), error) from error
            for run, data in zip(runs.tolist(), read, strict=True):
                total += _copied(data, task, edges[run], edges[run + 1])
        return total

    def has_cached(self, _: Integers) -> bool:
        """Return False: no page cache has bytes of a store."""
        return False


def _copied(data: memoryview, task: ReadTask, begin: int, end: int) -> int:
    """Copy the bytes of a run to its destinations, as far as they go, and return how many there are."""
    source, position = np.frombuffer(data, np.uint8).ctypes.data, 0
    for address, nbytes in zip(task.address[begin:end].tolist(), task.nbytes[begin:end].tolist(), strict=True):
        count = min(nbytes, len(data) - position)
        ctypes.memmove(address, source + position, count)
        position += count
    return position
