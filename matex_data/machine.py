"""What a rank may use of its machine: cores and memory."""

from __future__ import annotations

import errno
import os
import platform
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from matex_data.errors import OutOfMemory, PartitionError

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
SAFE = 0.8  # of the memory that is free; the rest is for windows, the model and what the system keeps
_LAUNCHERS = ("PMI", "OMPI_", "PRTE", "HYDRA", "HYDI", "MPI", "I_MPI_", "MV2_", "SLURM_", "FLUX_", "PALS_", "ALPS_")


def environment_without_mpi() -> dict[str, str]:
    """The environment for a child process that is no rank: without what MPI launchers set."""
    return {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHERS)}


_RANKS = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
)
_LOCAL_RANKS = (
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)
_local_size: list[int] = []


class RankAndSize(NamedTuple):
    """Rank of this process, and the number of ranks."""

    rank: int
    size: int


def launched_rank() -> RankAndSize | None:
    """Return the rank that the launcher put into the environment; None without one."""
    return _from_environment(_RANKS)


def launched_local_rank() -> RankAndSize | None:
    """Like ``launched_rank``, but among the ranks of this machine."""
    return _from_environment(_LOCAL_RANKS)


def _from_environment(variables: tuple[tuple[str, str], ...]) -> RankAndSize | None:
    for names in variables:
        rank, size = (os.environ.get(name, "") for name in names)
        if rank.isdecimal() and size.isdecimal():
            return RankAndSize(int(rank), max(1, int(size)))
    return None


def set_local_size(count: int) -> None:
    """Set the number of ranks on this machine; ``matex_data.mpi.node`` counts them."""
    _local_size[:] = [max(1, count)]


def local_size() -> int:
    """Return the number of ranks on this machine; before MPI has started, as the launcher gives it."""
    if _local_size:
        return _local_size[0]
    launched = launched_local_rank()
    return launched.size if launched else 1


def cores() -> int:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    count = getattr(os, "process_cpu_count", os.cpu_count)()  # macOS has no affinity; the former is of Python 3.13
    return int(count or 1)


def threads() -> int:
    """Return the threads that decode on this rank: ``MATEX_THREADS`` in the environment, or its share of the cores."""
    asked = os.environ.get("MATEX_THREADS") or os.environ.get("SLURM_CPUS_PER_TASK")
    if asked:
        return max(1, int(asked))
    return max(1, cores() // local_size())


def free_memory() -> int:
    """Return the bytes that each rank of this machine may still have; ``sys.maxsize`` where that cannot be known.

    The least of three: an equal share of the machine's free memory, one of what is left to the control groups that a
    batch system has put this process into, and what is left of this process's own limit (``ulimit -v``).
    """
    shared = min([_available(), *_left_in_groups()], default=sys.maxsize)
    return max(0, min(shared // local_size(), _left_to_process()))


def memory_shortage(
    nbytes: int, what: str, *, remedy: str, file: str | None = None, field: str | None = None
) -> PartitionError | None:
    """Return the error that says why ``nbytes`` cannot be held whole on this rank; None where they can.

    Parameters
    ----------
    nbytes : that the rank is about to allocate for as long as the data are used.
    what : is to be held, as a phrase in the singular: "the share of rank 2".
    remedy : what the user can do instead.
    file, field : where it comes from.
    """
    free = int(SAFE * free_memory())
    if nbytes <= free:
        return None
    several = f", one of {local_size()} on this machine" if local_size() > 1 else ""
    return PartitionError(
        f"{what} does not fit into the memory",
        file=file,
        field=field,
        expected=f"at most {_size(free)} for this rank{several}",
        found=f"{_size(nbytes)} ({nbytes} bytes)",
        remedy=remedy,
    )


def check_fits(nbytes: int, what: str, *, remedy: str, file: str | None = None, field: str | None = None) -> None:
    """Raise ``PartitionError`` if ``nbytes`` cannot be held whole on this rank; see `memory_shortage`."""
    error = memory_shortage(nbytes, what, remedy=remedy, file=file, field=field)
    if error is not None:
        raise error


def out_of_memory(error: BaseException, rank: int | None, what: str) -> OutOfMemory | None:
    """Return the error that tells all ranks where memory ran out; None if ``error`` is of another kind.

    Parameters
    ----------
    error : of NumPy or Python, of the system (``ENOMEM``), of a module that could not be loaded, or of a thread that
        could not be started.
    rank : that it happened on; None: in a process that is no rank.
    what : needed the memory: "40 bytes of a column".
    """
    no_thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    no_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    no_memory |= isinstance(error, ImportError) and "failed to map segment" in str(error)  # a library of a module
    if isinstance(error, OutOfMemory) or not (no_thread or no_memory):
        return None
    remedy = "use fewer ranks on each machine or more machines, smaller batches or a smaller window_bytes="
    where = f"in process {os.getpid()}" if rank is None else f"on rank {rank}"
    if no_thread:
        remedy = f"raise the limit on threads (ulimit -u) or on memory, or set MATEX_THREADS to less; or {remedy}"
    return OutOfMemory(
        f"memory ran out {where}, on the machine {platform.node()!r}",
        expected=f"memory for {what}",
        found=f"{error or 'none left'}; {_size(free_memory())} are left for it",
        remedy=remedy,
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def _available() -> int:
    """Return the memory of the machine that is free or can be freed; where no kernel says so, all of it."""
    with suppress(OSError, KeyError, ValueError, IndexError):
        return int(_table(PROC / "meminfo")["MemAvailable:"]) * 1024
    with suppress(OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return sys.maxsize


def _left_in_groups() -> Iterator[int]:
    """Yield what is left of the limit of each control group around this process, versions 1 and 2.

    Files that the system keeps in memory count as used there, but make room when memory is needed.
    """
    for root, group, version in _groups():
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        for folder in (root / group, *(root / group).parents):
            with suppress(OSError, ValueError, KeyError):  # no such group here, or no limit: "max"
                limit, used = (int((folder / name).read_text()) for name in names)
                kept = _table(folder / "memory.stat")
                prefix = "" if version == 2 else "total_"
                reclaimable = sum(int(kept.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
                yield limit - max(0, used - reclaimable)
            if folder == root:
                break


def _groups() -> Iterator[tuple[Path, str, int]]:
    """Yield where control groups of memory are mounted, the path of this process's group there, and the version.

    A container may see the path of its group on the host, and its own group at the root: parents are looked at, too.
    """
    with suppress(OSError):
        for line in (PROC / "self" / "cgroup").read_text().splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            inside = "/".join(name for name in path.split("/") if name not in ("", ".", ".."))
            if number == "0" and not controllers:
                yield CGROUPS, inside, 2
                yield CGROUPS / "unified", inside, 2
            elif "memory" in controllers.split(","):
                yield CGROUPS / "memory", inside, 1


def _left_to_process() -> int:
    """Return what is left of the limit on the addresses of this process."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    used = 0
    with suppress(OSError, ValueError, IndexError):
        used = int((PROC / "self" / "statm").read_text().split()[0]) * resource.getpagesize()
    return limit - used


def _table(path: Path) -> dict[str, str]:
    """Return the first two words of each line of a file: a name and its value."""
    words = (line.split() for line in path.read_text().splitlines())
    return {line[0]: line[1] for line in words if len(line) > 1}
