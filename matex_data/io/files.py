"""Read byte ranges of files, by MPI-IO or by each rank alone. The only module that uses ``MPI.File``.

ROMIO's data sieving and collective buffering read scattered ranges 3 to 100 times slower than plain reads of the same
ranges, which are few and large here. Both are off unless the environment variable ``MATEX_IO_HINTS``
("key=value,key=value") enables them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from matex_data._types import Integers
from matex_data.errors import DataError, DecodeError, PartitionError
from matex_data.index.stamps import Stamp, changed
from matex_data.io import preadv, probe
from matex_data.io.coalesce import ReadTask
from matex_data.io.counters import Profile
from matex_data.locks import Lock
from matex_data.mpi.communicator import Communicator
from matex_data.mpi.deadlines import reading, waiting_for
from matex_data.mpi.library import MPI
from matex_data.storage import objects
from matex_data.storage.files import exists, size_of
from matex_data.storage.objects import is_url

MODES = ("auto", "collective", "independent")
MOST_SHARED_FILES = 64  # that all ranks open; of more files, each rank opens those that it reads
OBJECT_BYTES = 64 << 20  # about, of an object that are in memory for one task, with those between its ranges
OBJECT_GAP_BYTES = 4 << 10  # between two ranges of an object: to read them costs less than another request
MOST_OPEN_FILES = min(4096, max(128, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))
"""Files of one reader that a rank keeps open; a program has several readers, and files of its own."""


def hints() -> dict[str, str]:
    """Return the MPI-IO hints for opening files."""
    values = {"romio_cb_read": "disable", "romio_ds_read": "disable"}
    for pair in filter(None, os.environ.get("MATEX_IO_HINTS", "").split(",")):
        key, _, value = pair.partition("=")
        values[key.strip()] = value.strip()
    return values


def mode_for(io: str, paths: Sequence[str], comm: Communicator) -> str:
    """Return the mode in which to read a dataset: "collective" or "independent".

    A single rank reads independently, and so do all ranks if MPI does not provide ``MPI_THREAD_MULTIPLE``, and from a
    store of objects, which MPI does not read.

    Parameters
    ----------
    io : mode that the user requests, one of ``MODES``.
    paths : of the files.
    comm : the ranks that read.

    Raises
    ------
    PartitionError : there is no such mode.
    """
    if io not in MODES:
        raise PartitionError("unknown mode of reading", expected=f"io= one of {MODES}", found=repr(io))
    if comm.alone or MPI.Query_thread() < MPI.THREAD_MULTIPLE or (len(paths) and is_url(paths[0])):
        return "independent"
    if io != "auto":
        return io
    return "collective" if len(paths) <= MOST_SHARED_FILES else "independent"


StampOf = Callable[[int], Stamp | None]
"""Callable that returns the stamp of the file of a number."""


def _no_stamp(_: int) -> None:
    return None


class _Opened(Protocol):
    """File or object that one rank reads alone."""

    def stamp(self) -> Stamp: ...

    def read(self, task: ReadTask) -> int: ...

    def has_cached(self, offset: Integers) -> bool: ...


class Files:
    """The files of a dataset, open for reading. *Collective* in collective mode.

    In independent mode, any number of threads may read at the same time. In collective mode, only the thread of the
    user's program may open and close files, since both wait for the other ranks while they hold a lock of the MPI
    library. Any one thread may read: reads do not wait as long as collective buffering is off.

    Parameters
    ----------
    comm : ranks that read.
    paths : paths of the files, the same on every rank. One that ends in a separator is a folder, which is not opened.
    mode : "collective" or "independent".
    profile : counts the bytes that are read.
    stamp : returns the stamp of a file, or None, by which this rank checks each file as it opens it. None: others
        check them. In independent mode only.

    Raises
    ------
    DataError : the system cannot open a file.

    Attributes
    ----------
    collective : whether the mode is "collective", and a probe has found nothing against it.
    shared : number of files that all ranks read together: all of them, or 0.
    """

    def __init__(
        self,
        comm: Communicator,
        paths: Sequence[str],
        mode: str,
        profile: Profile | None = None,
        stamp: StampOf | None = None,
    ) -> None:
        self._comm = comm
        self._stamp: StampOf = stamp or _no_stamp
        self._checked: set[int] = set()
        self._profile = profile or Profile()
        self.paths = paths
        self.collective = mode == "collective"
        self.shared = len(paths) * self.collective
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._lock = Lock()
        if self.collective:
            self._open_collectively()

    def _open_collectively(self) -> None:
        """Open all files on all ranks; read independently if the ranks do not see the same, or MPI does not read well.

        *Collective*.
        """
        regular = {number: path for number, path in enumerate(self.paths) if not path.endswith(os.sep)}
        reason = probe.obstacle(self._comm, list(regular.values())) if regular else None
        if reason is None:
            info = MPI.Info.Create(hints())
            for number, path in regular.items():
                error: DataError | None = None
                self._comm.barrier()
                try:
                    with waiting_for(self._comm.liveness, f"File.Open of {path!r}"):
                        self._open[number] = MPI.File.Open(self._comm.mpi, path, MPI.MODE_RDONLY, info)
                except MPI.Exception as mpi_error:
                    error = _unreadable(path, mpi_error)
                self._comm.agree(error)
            info.Free()
            reason = self._fault_of_reading(*next(iter(regular.items()))) if regular else None
        if reason is not None:
            self.close()
            self.collective, self.shared = False, 0
            if self._comm.rank == 0:
                probe.tell(reason)

    def _fault_of_reading(self, number: int, path: str) -> str | None:
        """Return what is wrong with a collective read of a pattern of two blocks; None if nothing is. *Collective*."""
        try:
            found = probe.pattern(path, self._comm.rank)
        except OSError:
            found = None  # the reads to come raise it
        wrong = False
        if found is None:
            self.read_nothing(number, 1)
        else:
            task, memory, expected = found
            try:
                wrong = self._read_collectively(number, task) != len(expected)
            except DataError:
                wrong = True
            wrong |= not probe.is_as_expected(memory, expected)
        (any_wrong,) = self._comm.maximum(wrong)
        return f"MPI reads other bytes of {path!r} than the system" if any_wrong else None

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
            stamp = None if number in self._checked else self._stamp(number)
            self._checked.add(number)
            if stamp is None:
                continue
            try:
                found = Stamp.of(self.paths[number])
            except OSError as error:
                raise changed(self.paths[number], stamp, error) from error
            if not stamp.is_of(self.paths[number], found):
                raise changed(self.paths[number], stamp, found)

    def renew(self) -> None:
        """Open and check files anew where they are next needed: a new epoch begins."""
        if not self.collective:
            self._checked.clear()
            with self._lock:
                self._open.clear()

    def read(self, number: int, task: ReadTask) -> None:
        """Make the reads of a task. ``task.count`` *collective* calls in collective mode.

        Raises
        ------
        DecodeError : the file has become shorter since it was opened.
        DataError : the system cannot read the file.
        """
        count = (self._read_collectively if self.collective else self._read_independently)(number, task)
        self._profile.add(bytes=count)
        if count != task.total:
            raise _too_short(self.paths[number], task)

    def _read_collectively(self, number: int, task: ReadTask) -> int:
        """Make one collective call for each run of adjacent task.

        Allocate everything before the first call and free it after the last one, when Python code is not slowed down
        by the bytes that have replaced it in the cache of the processor.
        """
        handle, pending = self._open[number], task.count
        try:
            offsets = task.offset[task.first].tolist()
            statuses = [MPI.Status() for _ in offsets]
            with _mpi_buffers(task) as buffers, reading(f"File.Read_at_all of {self.paths[number]!r}"):
                for offset, buffer, status in zip(offsets, buffers, statuses, strict=True):
                    pending -= 1
                    handle.Read_at_all(offset, buffer, status)
        except Exception as error:  # of MPI, or no memory for a datatype
            self.read_nothing(number, pending)  # the other ranks make these calls
            if isinstance(error, MPI.Exception):
                raise _unreadable(self.paths[number], error) from error
            raise
        return sum(status.Get_elements(MPI.BYTE) for status in statuses)

    def _read_independently(self, number: int, task: ReadTask) -> int:
        """Read without MPI."""
        try:
            return self._opened(number).read(task)
        except OSError as error:
            raise _unreadable(self.paths[number], error) from error

    def are_cached(self, number: int, tasks: Sequence[ReadTask]) -> bool:
        """Return whether a file is open, and the page cache has the bytes of tasks, as far as some of them show."""
        with self._lock:
            opening: _Opening | None = None if self.collective else self._open.get(number)
        if opening is None or opening.file is None:
            return False
        return opening.file.has_cached(np.concatenate([task.offset[[0, len(task.offset) // 2]] for task in tasks]))

    def read_nothing(self, number: int, calls: int) -> None:
        """Take part in reads of other ranks. *Collective* in collective mode.

        Parameters
        ----------
        number : of the file.
        calls : number of collective calls.
        """
        if self.collective and calls:
            with reading(f"File.Read_at_all of {self.paths[number]!r}"):
                for _ in range(calls):
                    self._open[number].Read_at_all(0, [bytearray(), 0, MPI.BYTE])

    def _opened(self, number: int) -> _Opened:
        """Return a file, opened by the first thread that needs it; other files open at the same time."""
        opening = self._opening(number)
        with opening.lock:
            opening.file = opening.file or self._open_now(number)
            return opening.file

    def _open_now(self, number: int) -> _Opened:
        """Open a file, and raise ``ChangedFile`` if it has changed since it was indexed."""
        path, stamp = self.paths[number], self._stamp(number)
        kind: Callable[[str], _Opened] = _OpenObject if is_url(path) else _OpenFile
        try:
            opened = kind(path)
        except FileNotFoundError as error:
            raise _unreadable(path, error) if stamp is None else changed(path, stamp, error) from error
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            with self._lock:
                self._open.clear()  # files that nobody reads are closed
            opened = kind(path)
        found = opened.stamp()
        if stamp is not None and not stamp.is_of(path, found):
            raise changed(path, stamp, found)
        return opened

    def _opening(self, number: int) -> _Opening:
        """Return the entry of a file, which the thread that needs it first opens."""
        with self._lock:
            if number in self._open:
                self._open.move_to_end(number)
            else:
                if len(self._open) >= MOST_OPEN_FILES:
                    self._open.popitem(last=False)
                self._open[number] = _Opening()
            opening: _Opening = self._open[number]
            return opening

    def close(self) -> None:
        """Close all files. *Collective* in collective mode."""
        if self.collective and self._open:
            self._comm.barrier()
        while self._open:
            number, handle = self._open.popitem(last=False)  # in the order of opening, the same on every rank
            if self.collective:
                with waiting_for(self._comm.liveness, f"File.Close of {self.paths[number]!r}"):
                    handle.Close()


class _Opening:
    """Entry of a file that is open, or that a thread opens while it holds the lock.

    Parameters
    ----------
    file : None until it is open, which it may never be.
    """

    def __init__(self) -> None:
        self.file: _Opened | None = None
        self.lock = Lock()


class _OpenFile:
    """Owner of a file descriptor, which is closed with the last reference to it.

    The descriptor is for its methods alone: a read holds its object, since the number of a descriptor that another
    thread has closed is given to the next file that opens.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)

    def stamp(self) -> Stamp:
        """Return the state of the file."""
        return Stamp.found(os.fstat(self._descriptor))

    def read(self, task: ReadTask) -> int:
        """Make the reads of a task, and return the number of bytes; raise ``OSError`` like ``preadv.read``."""
        first = task.first
        return preadv.read(self._descriptor, task.offset[first], first, task.address, task.nbytes)

    def has_cached(self, offset: Integers) -> bool:
        """Return whether bytes at int64[k] are in the page cache, like ``preadv.is_cached``."""
        return preadv.is_cached(self._descriptor, offset)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


class _OpenObject:
    """Object of a store; see `_OpenFile`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._state = objects.state(url)

    def stamp(self) -> Stamp:
        """Return the state of the object when it was opened."""
        return Stamp.of_object(self._state)

    def read(self, task: ReadTask) -> int:
        """Make the reads of a task side by side, and return the number of bytes; raise ``OSError`` if one fails.

        Raises
        ------
        ChangedFile : the object has changed since it was opened.
        """
        first = task.first
        offset, sizes = task.offset[first], np.add.reduceat(task.nbytes, first) if len(first) else first
        edges, total = np.append(first, len(task.nbytes)).tolist(), 0
        held = np.cumsum(sizes + OBJECT_GAP_BYTES) // OBJECT_BYTES
        for runs in np.split(np.arange(len(first)), np.flatnonzero(np.diff(held)) + 1):
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


@contextmanager
def _mpi_buffers(task: ReadTask) -> Iterator[list[Any]]:
    """Context manager: the destination of each run, as a buffer or as a datatype of several buffers."""
    first, nbytes = task.first, task.nbytes
    begins, ends = first.tolist(), [*first[1:].tolist(), len(nbytes)]
    totals = np.add.reduceat(nbytes, first).tolist() if begins else []
    buffers: list[Any] = []
    datatypes: list[MPI.Datatype] = []
    try:
        for begin, end, address, total in zip(begins, ends, task.address[first].tolist(), totals, strict=True):
            if end - begin == 1:
                buffers.append(MPI.memory.fromaddress(address, total))
            else:
                lengths, addresses = nbytes[begin:end].tolist(), task.address[begin:end].tolist()
                datatypes.append(MPI.BYTE.Create_hindexed(lengths, addresses).Commit())
                buffers.append([MPI.BOTTOM, 1, datatypes[-1]])
        yield buffers
    finally:
        for datatype in datatypes:
            datatype.Free()


def _unreadable(path: str, error: Exception) -> DataError:
    return DataError("the file cannot be read", file=path, found=error)


def _too_short(path: str, task: ReadTask) -> DecodeError:
    size = size_of(path) if exists(path) else 0
    end = int((task.offset + task.nbytes).max())
    return DecodeError(
        "the file is shorter than when it was opened",
        file=path,
        byte=size,
        expected=f"at least {end} bytes",
        found=f"{size} bytes",
        remedy="do not write to the file while it is read; open it again",
    )
