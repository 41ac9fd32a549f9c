"""Reads that all ranks make as one, by MPI-IO. The only module that uses ``MPI.File``.

ROMIO's data sieving and collective buffering read scattered ranges 3 to 100 times slower than plain reads of the same
ranges, which are few and large here. Both are off unless the environment variable ``MATEX_IO_HINTS``
("key=value,key=value") enables them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from matex_data._types import Bytes
from matex_data.errors import DataError, DecodeError
from matex_data.io import probe
from matex_data.io.coalesce import ReadTask
from matex_data.io.counters import Profile
from matex_data.mpi.communicator import Communicator
from matex_data.mpi.deadlines import reading, waiting_for
from matex_data.mpi.library import MPI
from matex_data.storage.files import exists, size_of, unreadable


def hints() -> dict[str, str]:
    """Return the MPI-IO hints for opening files; an error if ``MATEX_IO_HINTS`` has one without a value."""
    values = {"romio_cb_read": "disable", "romio_ds_read": "disable"}
    for pair in filter(None, os.environ.get("MATEX_IO_HINTS", "").split(",")):
        key, separator, value = pair.partition("=")
        if not separator:
            raise DataError("MATEX_IO_HINTS has a hint without a value", expected="name=value,...", found=repr(pair))
        values[key.strip()] = value.strip()
    return values


class CollectiveFiles:
    """Files that all ranks have opened by MPI-IO. *Collective*, as are all methods.

    Only the thread of the user's program may open and close files, since both wait for the other ranks while they hold
    a lock of the MPI library. Any one thread may read: reads do not wait as long as collective buffering is off.

    Parameters
    ----------
    paths : paths of the files, the same on every rank. One that ends in a separator is a folder, which is not opened.

    Raises
    ------
    DataError : the system cannot open a file.

    Attributes
    ----------
    fault : why the files cannot be read collectively: the ranks do not see the same, or MPI does not read well; None:
        they can.
    """

    def __init__(self, comm: Communicator, paths: Sequence[str], profile: Profile) -> None:
        self._comm, self._paths, self._profile = comm, paths, profile
        self._open: dict[int, Any] = {}
        regular = {number: path for number, path in enumerate(paths) if not path.endswith(os.sep)}
        self.fault = probe.obstacle(comm, list(regular.values())) if regular else None
        if self.fault is not None or not regular:
            return
        info = MPI.Info.Create(comm.agreed(hints))
        for number, path in regular.items():
            error: DataError | None = None
            comm.barrier()
            try:
                with waiting_for(comm.liveness, f"File.Open of {path!r}"):
                    self._open[number] = MPI.File.Open(comm.mpi, path, MPI.MODE_RDONLY, info)
            except MPI.Exception as mpi_error:
                error = unreadable(path, mpi_error)
            comm.agree(error)
        info.Free()
        self.fault = self._fault_of_reading(*next(iter(regular.items())))

    def _fault_of_reading(self, number: int, path: str) -> str | None:
        """Return what is wrong with a collective read of a pattern of two blocks; None if nothing is. *Collective*."""
        try:
            found = probe.pattern(path, self._comm.rank)
        except OSError:
            found = None  # the reads to come raise it
        tasks = {} if found is None else {number: [found[0]]}
        error = self.read(tasks, lambda _: np.empty(0, np.uint8), lambda *_: None)
        wrong = found is not None and (error is not None or not probe.is_as_expected(*found[1:]))
        (any_wrong,) = self._comm.maximum(wrong)
        return f"MPI reads other bytes of {path!r} than the system" if any_wrong else None

    def read(
        self,
        tasks: Mapping[int, Sequence[ReadTask]],
        scratch: Callable[[ReadTask], Bytes],
        done: Callable[[ReadTask, Bytes], None],
    ) -> Exception | None:
        """Make the reads of this rank, as many of each file as the rank that has most; return the first error.

        The ranks agree on these numbers first. No error keeps a rank from the reads that the others make.

        Parameters
        ----------
        tasks : of this rank, by file number.
        scratch : returns the scratch memory of a task.
        done : called with a task and its memory once its bytes are there.
        """
        counts = np.zeros(len(self._paths), np.int64)
        for number, of_file in tasks.items():
            counts[number] = sum(task.count for task in of_file)
        agreed = self._comm.start_maximum(counts).result()
        failure: Exception | None = None
        for number in np.flatnonzero(agreed).tolist():
            left = int(agreed[number])
            for task in tasks.get(number, ()):
                try:
                    memory = scratch(task)
                    with _mpi_buffers(task.into(memory)) as calls:
                        left -= task.count
                        self._read(number, task, calls)
                    done(task, memory)
                except Exception as error:
                    failure = failure or error
            with reading(f"File.Read_at_all of {self._paths[number]!r}"):
                for _ in range(left):
                    self._open[number].Read_at_all(0, [bytearray(), 0, MPI.BYTE])
        return failure

    def _read(self, number: int, task: ReadTask, calls: Sequence[tuple[int, Any, MPI.Status]]) -> None:
        """Make one collective call for each run of adjacent ranges, all of them whatever fails.

        Everything is allocated before the first call and freed after the last one, when Python code is not slowed down
        by the bytes that have replaced it in the cache of the processor.

        Raises
        ------
        DecodeError : the file has become shorter since it was opened.
        DataError : the system cannot read the file.
        """
        handle, failure = self._open[number], None
        with reading(f"File.Read_at_all of {self._paths[number]!r}"):
            for offset, buffer, status in calls:
                try:
                    handle.Read_at_all(offset, buffer, status)
                except MPI.Exception as error:
                    failure = failure or unreadable(self._paths[number], error)
        if failure is not None:
            raise failure
        count = sum(status.Get_elements(MPI.BYTE) for _, _, status in calls)
        self._profile.add(bytes=count)
        if count != task.total:
            raise too_short(self._paths[number], task)

    def close(self) -> None:
        """Close all files. *Collective*."""
        if self._open:
            self._comm.barrier()
        for number in list(self._open):  # in the order of opening, the same on every rank
            with waiting_for(self._comm.liveness, f"File.Close of {self._paths[number]!r}"):
                self._open.pop(number).Close()


@contextmanager
def _mpi_buffers(task: ReadTask) -> Iterator[list[tuple[int, Any, MPI.Status]]]:
    """Context manager: offset, destination (a buffer or a datatype of several) and status of each run of ranges."""
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
        statuses = [MPI.Status() for _ in buffers]
        yield list(zip(task.offset[first].tolist(), buffers, statuses, strict=True))
    finally:
        for datatype in datatypes:
            datatype.Free()


def too_short(path: str, task: ReadTask) -> DecodeError:
    """Return the error of a file that ends before the bytes of a task."""
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
