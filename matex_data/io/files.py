"""Reading bytes: the only user of ``MPI.File``.

Hints: ROMIO's data sieving and collective buffering read scattered ranges 3 to 100 times slower than plain reads of
the same ranges, and these are already few and large. So both are off unless the environment variable
``MATEX_IO_HINTS`` ("key=value,key=value") says otherwise.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from matex_data.errors import DataError, DecodeError, PartitionError
from matex_data.io import preadv
from matex_data.io.coalesce import Ranges
from matex_data.io.counters import Profile
from matex_data.io.destinations import destinations
from matex_data.mpi.communicator import Communicator
from matex_data.mpi.library import MPI
from matex_data.mpi.watchdog import waiting_for

MODES = ("auto", "collective", "independent")
MOST_SHARED_FILES = 64  # opened by all ranks together; of more files each rank opens those it reads
MOST_OPEN_FILES = 128


def hints() -> dict[str, str]:
    """The MPI-IO hints that files are opened with."""
    chosen = {"romio_cb_read": "disable", "romio_ds_read": "disable"}
    for pair in filter(None, os.environ.get("MATEX_IO_HINTS", "").split(",")):
        key, _, value = pair.partition("=")
        chosen[key.strip()] = value.strip()
    return chosen


def mode_for(io: str, files: int, comm: Communicator) -> str:
    """Return how these ranks read so many files: "collective" or "independent".

    A rank alone reads independently, and so do ranks whose MPI does not allow calls from threads.

    Raises
    ------
    PartitionError : no such mode.
    """
    if io not in MODES:
        raise PartitionError("no such way to read", expected=f"io= one of {MODES}", found=repr(io))
    if comm.alone or comm.liveness is None:
        return "independent"
    if io != "auto":
        return io
    return "collective" if files <= MOST_SHARED_FILES else "independent"


class Files:
    """The files of a data set. In independent mode any threads may read at the same time.

    In collective mode they are opened here and now, by all ranks. Opening and closing wait for the other ranks while
    they hold a lock of the MPI library: only the thread that runs the user's program may do that. Reading does not
    wait, as long as collective buffering is off, so that any thread may read.

    Parameters
    ----------
    comm : whose ranks read together. *Collective* in collective mode.
    paths : of the files, the same on every rank.
    mode : "collective" or "independent".
    profile : counts the bytes that are read.

    Raises
    ------
    DataError : the system cannot open a file.
    """

    def __init__(self, comm: Communicator, paths: Sequence[str], mode: str, profile: Profile | None = None) -> None:
        self._comm = comm
        self._profile = profile or Profile()
        self.paths = tuple(paths)
        self.collective = mode == "collective"
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._lock = Lock()
        if self.collective:
            info = MPI.Info.Create(hints())
            for number, path in enumerate(self.paths):
                error: DataError | None = None
                comm.barrier()
                try:
                    with waiting_for(comm.liveness):
                        self._open[number] = MPI.File.Open(comm.mpi, path, MPI.MODE_RDONLY, info)
                except MPI.Exception as failure:
                    error = _unreadable(path, failure)
                comm.agree(error)
            info.Free()

    def read(self, number: int, ranges: Ranges) -> None:
        """Fill the memory of the ranges. In collective mode ``len(ranges.first)`` collective calls.

        Raises
        ------
        DecodeError : the file has become shorter than it was.
        DataError : the system cannot read it.
        """
        path = self.paths[number]
        found = (self._read_together if self.collective else self._read_alone)(number, ranges)
        self._profile.add(bytes=found)
        if found != ranges.total:
            raise _short(path, ranges)

    def _read_together(self, number: int, ranges: Ranges) -> int:
        """One collective call for each run of bytes that follow one another in the file.

        What the calls need is made before the first and given back after the last: Python is slow where the bytes that
        have been read meanwhile have driven it out of the processor's cache.
        """
        handle, left = self._open[number], len(ranges.first)
        try:
            offsets = ranges.offset[ranges.first].tolist()
            statuses = [MPI.Status() for _ in offsets]
            with destinations(ranges, self._profile.bytes) as runs:
                for offset, run, status in zip(offsets, runs, statuses, strict=True):
                    left -= 1
                    handle.Read_at_all(offset, run.destination, status)
                    if run.copied is not None:
                        run.copied()
        except Exception as error:  # of MPI, or there was no memory for what describes the places
            self.read_nothing(number, left)  # the other ranks count on these calls
            if isinstance(error, MPI.Exception):
                raise _unreadable(self.paths[number], error) from error
            raise
        return sum(status.Get_elements(MPI.BYTE) for status in statuses)

    def _read_alone(self, number: int, ranges: Ranges) -> int:
        """The same without MPI."""
        first = ranges.first
        try:
            return preadv.read(
                self._opened(number).descriptor, ranges.offset[first], first, ranges.address, ranges.nbytes
            )
        except OSError as error:
            raise _unreadable(self.paths[number], error) from error

    def read_nothing(self, number: int, calls: int) -> None:
        """Take part in reads of other ranks, with nothing to read. *Collective* in collective mode."""
        for _ in range(calls if self.collective else 0):
            self._open[number].Read_at_all(0, [bytearray(), 0, MPI.BYTE])

    def _opened(self, number: int) -> _Opened:
        with self._lock:
            if number not in self._open:
                if len(self._open) >= MOST_OPEN_FILES:
                    self._open.popitem(last=False)
                try:
                    self._open[number] = _Opened(self.paths[number])
                except OSError as error:
                    raise _unreadable(self.paths[number], error) from error
            self._open.move_to_end(number)
            opened: _Opened = self._open[number]
        return opened

    def close(self) -> None:
        """*Collective* in collective mode."""
        if self.collective and self._open:
            self._comm.barrier()
        while self._open:
            _, handle = self._open.popitem(last=False)  # in the order of opening, which is that of every rank
            if self.collective:
                with waiting_for(self._comm.liveness):
                    handle.Close()


class _Opened:
    """A file that this process has opened; closed when nobody reads it any more."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def _unreadable(path: str, error: Exception) -> DataError:
    return DataError("the file cannot be read", file=path, found=error)


def _short(path: str, ranges: Ranges) -> DecodeError:
    size = Path(path).stat().st_size if Path(path).exists() else 0
    end = int((ranges.offset + ranges.nbytes).max())
    return DecodeError(
        "the file is shorter than when it was opened",
        file=path,
        byte=size,
        expected=f"at least {end} bytes",
        found=f"{size} bytes",
        remedy="let nobody write to the data while it is read, and open it again",
    )
