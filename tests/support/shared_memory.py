"""Shared memory of MPICH, which outlives processes that are killed unless its files are unlinked."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path


def mapped(process: int | str = "self") -> set[Path]:
    """Return the files of MPI's shared memory that a process, by default this one, maps."""
    with suppress(OSError):
        return {Path(path) for path in re.findall(r"/dev/shm/mpi\S+", Path(f"/proc/{process}/maps").read_text())}
    return set()


def unlink() -> None:
    """Unlink the shared-memory files that this process maps; call it once all ranks have mapped them."""
    for path in mapped():
        path.unlink(missing_ok=True)
