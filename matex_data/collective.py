"""Reading bytes: the only user of ``MPI.File``.

Hints: ROMIO's data sieving and collective buffering read scattered ranges 3 to 100 times slower than plain reads of
the same ranges, and these are already few and large. So both are off unless the environment variable
``MATEX_IO_HINTS`` ("key=value,key=value") says otherwise.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpi4py import MPI

from matex_data.coalesce import Ranges
from matex_data.errors import DataError, DecodeError, PartitionError

MODES = ("auto", "collective", "independent")
MOST_SHARED_FILES = 64  # opened by all ranks together; of more files each rank opens those it reads
MOST_OPEN_FILES = 128
IO_VECTORS = 1024  # of one preadv, the limit of POSIX systems


@dataclass
class Counters:
    """What this process has read from data files: by path, bytes, calls, and times opened."""

    bytes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    opens: Counter[str] = field(default_factory=Counter)


_COUNTERS = Counters()


def counters() -> Counters:
    """What this process has read so far; counts go on from there."""
    return _COUNTERS


def hints() -> dict[str, str]:
    """The MPI-IO hints that files are opened with."""
    chosen = {"romio_cb_read": "disable", "romio_ds_read": "disable"}
    for pair in filter(None, os.environ.get("MATEX_IO_HINTS", "").split(",")):
        key, _, value = pair.partition("=")
        chosen[key.strip()] = value.strip()
    return chosen


def mode_for(io: str, files: int) -> str:
    """How to read that many files: "collective" or "independent".

    Raises
    ------
    PartitionError : no such mode.
    """
    if io not in MODES:
        raise PartitionError("no such way to read", expected=f"io= one of {MODES}", found=repr(io))
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return "independent"
    if io != "auto":
        return io
    return "collective" if files <= MOST_SHARED_FILES else "independent"


class Files:
    """The files of a data set, opened when they are first read.

    Parameters
    ----------
    comm : whose ranks read together; not used for anything else at the same time.
    paths : of the files, the same on every rank.
    mode : "collective" or "independent".
    """

    def __init__(self, comm: MPI.Comm, paths: Sequence[str], mode: str) -> None:
        self._comm = comm
        self._paths = paths
        self._collective = mode == "collective"
        self._open: OrderedDict[int, Any] = OrderedDict()

    @property
    def collective(self) -> bool:
        """Whether every rank takes part in every read."""
        return self._collective

    def read(self, number: int, ranges: Ranges | None) -> None:
        """Fill the memory of the ranges. *Collective* in collective mode: also with None, if others read.

        Raises
        ------
        DecodeError : the file has become shorter than it was.
        DataError : the system cannot read it.
        """
        path = self._paths[number]
        try:
            handle = self._handle(number)
            found = _read_all(handle, ranges) if self._collective else _read_own(handle, ranges)
        except (MPI.Exception, OSError) as error:
            raise DataError("the file cannot be read", file=path, found=error) from error
        expected = ranges.total if ranges is not None else 0
        _COUNTERS.bytes[path] += found
        _COUNTERS.calls[path] += expected > 0
        if found != expected:
            raise _short(path, ranges)

    def _handle(self, number: int) -> Any:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        if len(self._open) >= MOST_OPEN_FILES:
            _close(self._open.popitem(last=False)[1])
        path = self._paths[number]
        _COUNTERS.opens[path] += 1
        if not self._collective:
            self._open[number] = os.open(path, os.O_RDONLY)
        else:
            self._open[number] = MPI.File.Open(self._comm, path, MPI.MODE_RDONLY, MPI.Info.Create(hints()))
        return self._open[number]

    def close(self) -> None:
        """*Collective* in collective mode."""
        while self._open:
            _close(self._open.popitem()[1])


def _close(handle: Any) -> None:
    if isinstance(handle, int):
        os.close(handle)
    else:
        handle.Close()


def _read_all(handle: MPI.File, ranges: Ranges | None) -> int:
    """One collective call for all ranges: scattered in the file, scattered in memory."""
    if ranges is None or not len(ranges.offset):
        handle.Set_view(0, MPI.BYTE, MPI.BYTE)
        handle.Read_at_all(0, [bytearray(), 0, MPI.BYTE])
        return 0
    lengths = ranges.nbytes.tolist()
    in_file = MPI.BYTE.Create_hindexed(lengths, ranges.offset.tolist()).Commit()
    in_memory = MPI.BYTE.Create_hindexed(lengths, ranges.address.tolist()).Commit()
    try:
        status = MPI.Status()
        handle.Set_view(0, MPI.BYTE, in_file)
        handle.Read_at_all(0, [MPI.BOTTOM, 1, in_memory], status)
        return int(status.Get_elements(MPI.BYTE))
    finally:
        in_file.Free()
        in_memory.Free()


def _read_own(handle: int, ranges: Ranges | None) -> int:
    found = 0
    if ranges is None:
        return 0
    offset, vectors, end = 0, list[Any](), -1
    for start, count, address in zip(
        ranges.offset.tolist(), ranges.nbytes.tolist(), ranges.address.tolist(), strict=True
    ):
        if start != end or len(vectors) == IO_VECTORS:
            found += _read_vectors(handle, vectors, offset)
            offset, vectors = start, []
        vectors.append((ctypes.c_char * count).from_address(address))
        end = start + count
    return found + _read_vectors(handle, vectors, offset)


def _read_vectors(handle: int, vectors: list[Any], offset: int) -> int:
    """Neighbouring ranges of the file in one call; the system may stop early, and is asked again."""
    found = 0
    views = [memoryview(vector).cast("B") for vector in vectors]
    while views:
        count = os.preadv(handle, views, offset + found)
        if count == 0:
            break
        found += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if views:
            views[0] = views[0][count:]
    return found


def _short(path: str, ranges: Ranges | None) -> DecodeError:
    size = Path(path).stat().st_size if Path(path).exists() else 0
    end = int((ranges.offset + ranges.nbytes).max()) if ranges is not None else 0
    return DecodeError(
        "the file is shorter than when it was opened",
        file=path,
        byte=size,
        expected=f"at least {end} bytes",
        found=f"{size} bytes",
        remedy="let nobody write to the data while it is read, and open it again",
    )
