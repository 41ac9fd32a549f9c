"""Probe of collective reading: do all ranks see the same files, and does MPI read of them what the system reads.

Open MPI may wait for ever when ranks of two machines open copies of a file, and a broken MPI-IO may end the process or
give wrong bytes. Each of these is a reason to read independently, which is as fast (``matex_data.io.files``).
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from matex_data._types import Bytes
from matex_data.io.coalesce import ReadTask
from matex_data.io.modes import LOCAL, mount_of, mount_table
from matex_data.mpi.communicator import Communicator
from matex_data.mpi.library import MPI

log = logging.getLogger("matex_data")

BYTES = 64
"""Bytes of each block of the pattern."""
_ABORTS = re.compile(r"MPICH Version:\s*4\.0[.abrc]")
"""Libraries whose MPI-IO ends the process when memory is described by a datatype of MPI 4, as mpi4py makes it."""


def obstacle(comm: Communicator, paths: Sequence[str]) -> str | None:
    """Return why these files cannot be opened collectively; None if nothing is known against it. *Collective*.

    Ranks compare size, inode and time of change of each file, and nothing of its contents: on a file system of one
    machine the inode is that of a copy.

    Parameters
    ----------
    comm : ranks that read; several.
    paths : paths of the files, the same on every rank.
    """
    node = _number(platform.node(), _boot())
    files = [_identity(path) for path in paths]
    one_machine, *same = comm.same(node, *files)
    aborts, local = comm.maximum(bool(_ABORTS.match(MPI.Get_library_version())), _any_local(paths))
    if aborts:
        return f"{_library()} ends the process when it reads into separate buffers"
    if not all(same):
        path = paths[same.index(False)]
        return f"the ranks see different files (size, inode or time of change) as {path!r}"
    if local and not one_machine:
        return "the files are on a file system of one machine, and the ranks are on several"
    return None


def pattern(path: str, rank: int) -> tuple[ReadTask, Bytes, bytes] | None:
    """Return reads of two adjacent blocks into separate memory, that memory, and what it should hold; None if empty.

    Parameters
    ----------
    path : of a file.
    rank : each rank begins at another byte.
    """
    with Path(path).open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        block = min(BYTES, size // 2)
        if not block:
            return None
        begin = rank * block % (size - 2 * block + 1)
        expected = os.pread(file.fileno(), 2 * block, begin)
    memory = np.zeros(4 * block, np.uint8)  # the second block lies behind a gap
    offset, address = np.array([begin, begin + block]), memory.ctypes.data + np.array([0, 3 * block])
    return ReadTask(offset, np.full(2, block), address), memory, expected


def is_as_expected(memory: Bytes, expected: bytes) -> bool:
    """Return whether the memory of a `pattern` holds what it should, and no byte between the blocks is written."""
    block = len(expected) // 2
    return memory.tobytes() == expected[:block] + bytes(2 * block) + expected[block:]


@cache
def tell(reason: str) -> None:
    """Log once why the ranks read independently."""
    log.warning("each rank reads on its own, not collectively: %s", reason)


def _library() -> str:
    return " ".join(MPI.Get_library_version().partition("\n")[0].split()).replace(" Version:", "")


def _identity(path: str) -> int:
    """Return a number that is equal for one file on all ranks; 0 if there is none."""
    with suppress(OSError):
        status = Path(path).stat()
        return _number(status.st_size, status.st_ino, status.st_mtime_ns)
    return 0


def _any_local(paths: Sequence[str]) -> bool:
    """Return whether one of the files is on a file system of one machine."""
    table = mount_table()
    mounts = (mount_of(path, table) for path in paths)
    return any(mount is not None and mount.type in LOCAL for mount in mounts)


def _number(*values: object) -> int:
    """Return 62 bits of a digest."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "little") >> 2


@cache
def _boot() -> str:
    """Return what tells machines of one name apart."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    return ""
