"""What a rank may use of its machine: cores and memory."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

# Of the control group that a batch system has put this process into, versions 2 and 1.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


_ranks_here: list[int] = []


def set_ranks_here(count: int) -> None:
    """Note how many ranks share this machine, as MPI counts them (``Split_type``)."""
    _ranks_here[:] = [max(1, count)]


def ranks_here() -> int:
    """Ranks on this machine, as MPI has counted them; before that, as its launcher says."""
    if _ranks_here:
        return _ranks_here[0]
    names = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_LOCAL_SIZE")
    return max(1, *(int(os.environ.get(name, 1)) for name in names))


def cores() -> int:
    """Return the cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def threads() -> int:
    """Threads that decode on this rank: the environment variable ``MATEX_THREADS``, else its share of the cores."""
    asked = os.environ.get("MATEX_THREADS") or os.environ.get("SLURM_CPUS_PER_TASK")
    if asked:
        return max(1, int(asked))
    return max(1, len(os.sched_getaffinity(0)) // ranks_here())


def free_memory() -> int:
    """Bytes that each rank of this machine may have; ``sys.maxsize`` where that cannot be known."""
    left = [sys.maxsize]
    with suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        left.append(int(lines["MemAvailable"].split()[0]) * 1024)
    for limit in _LIMITS:
        with suppress(OSError, ValueError):  # no such group, or "max"
            left.append(int(Path(limit).read_text()))
    return min(left) // ranks_here()
