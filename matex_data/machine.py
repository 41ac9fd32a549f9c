"""Cores and memory of the machine that are available to this rank."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple, TypeVar

from matex_data.errors import OutOfMemory, PartitionError
from matex_data.words import nbytes_text

A = TypeVar("A")
T = TypeVar("T")
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
MOST_SHARING = 16  # cores of a process whose threads share an arena
_M_ARENA_MAX = -8  # of malloc.h
READING_THREADS = 16  # reads under way of a rank: each may take milliseconds, and none of them needs a core
UNCHECKED = 1 << 20  # bytes of a block that take less time to decode than the system's answer, how much is free: 1 ms
SAFE = 0.8  # fraction of the free memory for whole data sets; the rest is for windows, the model and the system
_OF_A_RANK = (
    *("PMI_", "PMI2_", "PMIX_", "HYDI_", "HYDRA_", "MPI_LOCAL", "MV2_COMM_WORLD_", "PRTE_LAUNCHED", "PRTE_MCA_ess"),
    *("PRTE_MCA_prte", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_SIZE", "OMPI_FILE_", "OMPI_FIRST_RANKS", "OMPI_APP_CTX"),
    *("OMPI_MCA_ess", "OMPI_MCA_orte", "OMPI_MCA_pmix", "OMPI_NUM_APP", "OMPI_ARGV", "OMPI_COMMAND", "SLURM_PROCID"),
    *("SLURM_LOCALID", "FLUX_TASK_", "PALS_RANKID", "ALPS_APP_PE", "LOCAL_RANK"),
)


def without_rank() -> dict[str, str]:
    """Return the environment without what makes this process a rank; settings of the MPI library and the job stay."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_RANK)}


_RANKS = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("LOCAL_RANK", "WORLD_SIZE"),  # torchrun, and what starts processes as it does; RANK is not set by all of them
)
_RANKS_ALONE = ("PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE")  # of launchers that tell no number of ranks
_LOCAL_RANKS = (
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)
_local_size: list[int] = []
_cores_of_others: list[frozenset[int]] = []


class RankAndSize(NamedTuple):
    """Rank of this process, and the number of ranks."""

    rank: int
    size: int


class Launch(NamedTuple):
    """Processes that a launcher started, as it tells each of them in the environment.

    Attributes
    ----------
    rank : number of this process.
    size : number of processes; if the launcher tells none, the least that it can be.
    variable : name of the environment variable with ``size``, or with ``rank``.
    """

    rank: int
    size: int
    variable: str


def launch() -> Launch | None:
    """Return the processes that the launcher of this one started; None without a launcher."""
    for rank_name, size_name in _RANKS:
        rank, size = number_in(rank_name), number_in(size_name)
        if rank is not None and size is not None:
            return Launch(rank, max(1, size), size_name)
    found = ((name, number_in(name)) for name in _RANKS_ALONE)
    return next((Launch(rank, rank + 1, name) for name, rank in found if rank is not None), None)


def launched_rank() -> RankAndSize | None:
    """Return the rank that the launcher put into the environment, and the number of ranks; None without both."""
    found = launch()
    return None if found is None or found.variable in _RANKS_ALONE else RankAndSize(found.rank, found.size)


def launched_local_rank() -> RankAndSize | None:
    """Like ``launched_rank``, but among the ranks of this machine."""
    for names in _LOCAL_RANKS:
        rank, size = map(number_in, names)
        if rank is not None and size is not None:
            return RankAndSize(rank, max(1, size))
    return None


def number_in(variable: str) -> int | None:
    """Return the number that a launcher or a batch system has put into an environment variable; None if it has not."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None


def set_local_size(count: int) -> None:
    """Set the number of ranks on this machine; ``matex_data.mpi.node`` counts them."""
    _local_size[:] = [max(1, count)]


def set_cores_of_others(cores: Sequence[frozenset[int]]) -> None:
    """Set the cores that other ranks of this machine may use; ``matex_data.mpi.node`` gathers them."""
    if len(cores) >= len(_cores_of_others):  # else ``comm`` lacks ranks of the job that are known already
        _cores_of_others[:] = cores


def local_size() -> int:
    """Return the number of ranks on this machine; before MPI has started, as the launcher gives it."""
    if _local_size:
        return _local_size[0]
    launched = launched_local_rank()
    return launched.size if launched else 1


def cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(core_numbers())


def core_numbers() -> frozenset[int]:
    """Return the cores that this process may run on, by the numbers of the system."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    count = getattr(os, "process_cpu_count", os.cpu_count)()  # macOS: no affinity; the former: Python 3.13
    return frozenset(range(int(count or 1)))


def share_of_cores(own: frozenset[int], others: Sequence[frozenset[int]], most: int | None = None) -> int:
    """Return the number of cores of a rank, at least 1: a core that several ranks may use is divided among them.

    Parameters
    ----------
    own : cores that the rank may use, by the numbers of the system.
    others : likewise, for each of the other ranks of the machine.
    most : upper bound; None: no other than ``own``.

    Examples
    --------
    >>> one, two = frozenset(range(16)), frozenset(range(16, 32))
    >>> share_of_cores(one, [two]), share_of_cores(one, [one]), share_of_cores(one, [two], most=4)
    (16, 8, 4)
    """
    users = Counter(core for cores in (own, *others) for core in cores & own)
    share = int(sum(Fraction(1, users[core]) for core in own))
    return max(1, share if most is None else min(share, most))


def own_cores() -> int:
    """Return the number of cores of this rank: `share_of_cores`, and at most ``SLURM_CPUS_PER_TASK``.

    Ranks of this machine that are not heard of are taken to be bound like those that are: each to cores of its own, or
    to the cores of this rank. Before MPI has started, all are taken to use the cores of this rank.

    Raises
    ------
    PartitionError : ``SLURM_CPUS_PER_TASK`` is not a number.
    """
    own = core_numbers()
    unheard = local_size() - 1 - len(_cores_of_others)
    bound = bool(_cores_of_others) and not any(own & cores for cores in _cores_of_others)
    return share_of_cores(own, [*_cores_of_others, *([] if bound else [own] * unheard)], _count("SLURM_CPUS_PER_TASK"))


def threads() -> int:
    """Return the number of decoding threads of this rank: ``MATEX_THREADS`` in the environment, else `own_cores`.

    Raises
    ------
    PartitionError : a variable of the environment is not a number.
    """
    return _count("MATEX_THREADS") or own_cores()


def reading_threads() -> int:
    """Return the number of threads of this rank that wait for the storage: ``MATEX_READ_THREADS``, else 16.

    Raises
    ------
    PartitionError : the variable is not a number.
    """
    return _count("MATEX_READ_THREADS") or READING_THREADS


SHORT_WAIT = 50e-6  # seconds for a file: about what a look at its header takes


class Waiting:
    """Measure of how long a thread waits for the storage.

    Attributes
    ----------
    seconds : time that the thread has not computed.
    waits : how often it has waited; another program that takes its core is no wait. Only Linux tells.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.waits = 0

    def measured(self, task: Callable[[A], T], argument: A) -> T:
        """Return the result of a task, and measure its waits."""
        seconds, waits = _waited()
        try:
            return task(argument)
        finally:
            now, count = _waited()
            self.seconds += now - seconds
            self.waits += count - waits

    def is_long(self, files: int) -> bool:
        """Return whether threads are worth it, after tasks on so many files."""
        return self.seconds > SHORT_WAIT * files and (not _OF_THREAD or self.waits >= files)


_OF_THREAD = getattr(resource, "RUSAGE_THREAD", None)


def _waited() -> tuple[float, int]:
    """Return the seconds that this thread has not computed, and how often it has waited."""
    count = resource.getrusage(_OF_THREAD).ru_nvcsw if _OF_THREAD else 0
    return time.perf_counter() - time.thread_time(), count


def _count(variable: str) -> int | None:
    """Return the number in an environment variable, None if it is empty or not set; raise ``PartitionError``."""
    text = os.environ.get(variable, "").strip()
    if text and not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise _wrong(variable, "a number", "a whole number from 1 on")
    return int(text) if text else None


def seconds_of(variable: str, default: float) -> float:
    """Return the seconds in an environment variable, ``default`` if it is empty or not set.

    Raises
    ------
    PartitionError : the variable is no finite number from 0 on.
    """
    text = os.environ.get(variable, "").strip()
    try:
        seconds = float(text or default)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise _wrong(variable, "a number of seconds", "a finite number from 0 on")
    return seconds


def _wrong(variable: str, kind: str, expected: str) -> PartitionError:
    return PartitionError(
        f"the environment variable {variable} is not {kind}",
        expected=expected,
        found=repr(os.environ[variable].strip()),
        remedy=f"set it to another value, or unset {variable}",
    )


def tasks_of_window() -> int:
    """Return the number of tasks into which the reads of a window are divided: two or more for each thread."""
    return max(2 * threads(), reading_threads())


def keep_freed_memory() -> None:
    """Let all threads that start from now on allocate from one arena of the GNU C library.

    Other arenas give large blocks back to the system when they are freed. Each step of a training, and each window of
    samples, then pays for page faults: a step of a network with 7.5 MB of gradients took twice as long. Threads share
    the lock of the arena; so nothing changes on more than ``MOST_SHARING`` cores, nor if the user has set
    ``MALLOC_ARENA_MAX`` or ``GLIBC_TUNABLES``.
    """
    if "MALLOC_ARENA_MAX" in os.environ or "GLIBC_TUNABLES" in os.environ or cores() > MOST_SHARING:
        return
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Give memory that this process has freed back to the system, as far as the GNU C library keeps it."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def free_memory() -> int:
    """Return the memory that each rank of this machine may still allocate, in bytes; ``sys.maxsize`` if unknown.

    The least of `free_memory_by_limit`.
    """
    return min(free_memory_by_limit().values())


def free_memory_by_limit() -> dict[str, int]:
    """Return the memory that each rank of this machine may still allocate by each limit, in bytes.

    The free memory of the machine, divided by its ranks; the memory left to the control groups of this process, divided
    likewise; and the memory left by this process's limit. ``sys.maxsize`` where there is no limit.
    """
    shared = {"machine": _available(), "control group": min(_left_in_groups(), default=sys.maxsize)}
    own = {name: max(0, nbytes // local_size()) for name, nbytes in shared.items()}
    return {**own, "ulimit -v": max(0, _left_to_process())}


def memory_shortage(
    nbytes: int, item: str, *, remedy: str, file: str | None = None, field: str | None = None
) -> PartitionError | None:
    """Return an error if ``nbytes`` do not fit into the memory of this rank, else None.

    Parameters
    ----------
    nbytes : size to be allocated for as long as the data are used, in bytes.
    item : name of the data, as a phrase in the singular: "the array".
    remedy : alternative for the user, as an imperative sentence.
    file, field : source of the data.
    """
    free = int(SAFE * free_memory())
    if nbytes <= free:
        return None
    ranks = f", one of {local_size()} on this machine" if local_size() > 1 else ""
    return PartitionError(
        f"{item} does not fit into the memory",
        file=file,
        field=field,
        expected=f"at most {nbytes_text(free)} for this rank{ranks}",
        found=f"{nbytes_text(nbytes)} ({nbytes} bytes)",
        remedy=remedy,
    )


def check_fits(nbytes: int, item: str, *, remedy: str, file: str | None = None, field: str | None = None) -> None:
    """Raise ``PartitionError`` if ``nbytes``, more than `UNCHECKED`, do not fit into the memory of this rank.

    The parameters are those of `memory_shortage`.
    """
    if nbytes > UNCHECKED:
        error = memory_shortage(nbytes, item, remedy=remedy, file=file, field=field)
        if error is not None:
            raise error


def out_of_memory(error: BaseException, rank: int | None, item: str) -> OutOfMemory | None:
    """Return an ``OutOfMemory`` with rank and machine for an error caused by a lack of memory, else None.

    Parameters
    ----------
    error : of NumPy or Python, of the system (``ENOMEM``), of loading a module, or of starting a thread.
    rank : rank of the error; None: in a process that is no rank.
    item : the data that the memory was for, as a phrase: "40 bytes of a column".
    """
    no_thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    no_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    no_memory |= isinstance(error, ImportError) and "failed to map segment" in str(error)  # of a shared library
    if isinstance(error, OutOfMemory) or not (no_thread or no_memory):
        return None
    remedy = "use fewer ranks on each machine or more machines, smaller batches or a smaller window_bytes="
    where = f"in process {os.getpid()}" if rank is None else f"on rank {rank}"
    if no_thread:
        remedy = f"raise the limit on threads (ulimit -u) or on memory, or set MATEX_THREADS to less; or {remedy}"
    return OutOfMemory(
        f"memory ran out {where}, on the machine {platform.node()!r}",
        expected=f"memory for {item}",
        found=f"{error or 'none left'}; {nbytes_text(free_memory())} are left for it",
        remedy=remedy,
    )


def _available() -> int:
    """Return the memory of the machine that is free or can be freed; all of its memory if that is unknown."""
    with suppress(OSError, KeyError, ValueError, IndexError):
        return int(_table(PROC / "meminfo")["MemAvailable:"]) * 1024
    with suppress(OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return sys.maxsize


def _left_in_groups() -> Iterator[int]:
    """Yield the memory left by the limit of each control group of this process, versions 1 and 2.

    Cached files count as used in a group, but are evicted when memory is needed.
    """
    for root, group, version in _groups():
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        for folder in (root / group, *(root / group).parents):
            with suppress(OSError, ValueError, KeyError):  # no such group here, or no limit: "max"
                limit, used = (int((folder / name).read_text()) for name in names)
                stat = _table(folder / "memory.stat")
                prefix = "" if version == 2 else "total_"
                reclaimable = sum(int(stat.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
                yield limit - max(0, used - reclaimable)
            if folder == root:
                break


def _groups() -> Iterator[tuple[Path, str, int]]:
    """Yield the mount point of the memory control groups, the path of this process's group in it, and the version.

    A container may see its group's path on the host, but its own group at the root: the caller checks parents, too.
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
    """Return the memory left by the limit on this process's address space."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    used = 0
    with suppress(OSError, ValueError, IndexError):
        used = int((PROC / "self" / "statm").read_text().split()[0]) * resource.getpagesize()
    return limit - used


def _table(path: Path) -> dict[str, str]:
    """Return the first two words of each line of a file as names and values."""
    words = (line.split() for line in path.read_text().splitlines())
    return {line[0]: line[1] for line in words if len(line) > 1}
