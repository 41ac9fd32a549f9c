"""MPI's shared memory of processes that are going to be killed: its name has to go before they do."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path


def forget() -> None:
    """Remove the names of what this process maps of MPICH's shared memory; all ranks have to have it by now."""
    with suppress(OSError):
        for path in set(re.findall(r"/dev/shm/mpi\S+", Path("/proc/self/maps").read_text())):
            Path(path).unlink(missing_ok=True)
