"""Available cores and memory, from simulated trees of /proc and /sys/fs/cgroup."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from matex_data import PartitionError, machine

GIB = 2**30


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_local_size", [1])
    monkeypatch.setattr(machine, "_cores_of_others", [])


class Tree:
    """Simulated machine of 64 GiB, 40 of them free."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        monkeypatch.setattr(machine, "PROC", folder / "proc")
        monkeypatch.setattr(machine, "CGROUPS", folder / "cgroup")
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        self.put("proc/meminfo", f"MemTotal:       {64 << 20} kB\nMemAvailable:   {40 << 20} kB\nHugePages_Total: 0\n")

    def put(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def group(self, name: str, limit: object, used: int = 0, kept: tuple[int, int] = (0, 0)) -> None:
        """Add a control group of version 2, with cached files of ``kept`` bytes: active and inactive ones."""
        self.put(f"cgroup/{name}/memory.max", f"{limit}\n")
        self.put(f"cgroup/{name}/memory.current", f"{used}\n")
        self.put(f"cgroup/{name}/memory.stat", f"anon 1\nactive_file {kept[0]}\ninactive_file {kept[1]}\n")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    return Tree(tmp_path, monkeypatch)


def test_free_memory_without_limits(tree: Tree) -> None:
    assert machine.free_memory() == 40 * GIB
    machine.set_local_size(4)
    assert machine.free_memory() == 10 * GIB


def test_least_of_nested_groups(tree: Tree) -> None:
    tree.put("proc/self/cgroup", "0::/slurm/job_7/step_0/task_0\n")
    tree.group("slurm", "max", 50 * GIB)
    tree.group("slurm/job_7", 8 * GIB, 3 * GIB)
    tree.group("slurm/job_7/step_0", 16 * GIB)
    assert machine.free_memory() == 5 * GIB
    tree.group("slurm/job_7/step_0", 4 * GIB, GIB)
    assert machine.free_memory() == 3 * GIB
    machine.set_local_size(2)
    assert machine.free_memory() == 3 * GIB // 2


def test_cached_files_count_as_free(tree: Tree) -> None:
    tree.put("proc/self/cgroup", "0::/job\n")
    tree.group("job", 8 * GIB, 8 * GIB, (4 * GIB, 3 * GIB))
    assert machine.free_memory() == 7 * GIB
    tree.group("job", 8 * GIB, 9 * GIB)
    assert machine.free_memory() == 0


def test_container_with_its_group_at_the_root(tree: Tree) -> None:
    tree.put("proc/self/cgroup", "0::/../../kubepods/pod1\n")
    tree.put("cgroup/memory.max", f"{2 * GIB}\n")
    tree.put("cgroup/memory.current", f"{GIB}\n")
    tree.put("cgroup/memory.stat", "anon 1\n")
    assert machine.free_memory() == GIB


def test_groups_of_version_1(tree: Tree) -> None:
    tree.put("proc/self/cgroup", "5:cpu,cpuacct:/job\n4:memory:/slurm/job_7\n0::/\n")
    for name, limit, used in (("", 2**63 - 4096, 30 * GIB), ("slurm/job_7", 6 * GIB, 5 * GIB)):
        tree.put(f"cgroup/memory/{name}/memory.limit_in_bytes", f"{limit}\n")
        tree.put(f"cgroup/memory/{name}/memory.usage_in_bytes", f"{used}\n")
        tree.put(f"cgroup/memory/{name}/memory.stat", f"active_file 1\ntotal_active_file {GIB}\ntotal_inactive_file 0")
    assert machine.free_memory() == 2 * GIB


def test_process_limit(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.put("proc/self/statm", f"{GIB // resource.getpagesize()} 2 3 4 0 6 0\n")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (3 * GIB, 3 * GIB))
    machine.set_local_size(4)
    assert machine.free_memory() == 2 * GIB  # each rank has its own


def test_machine_without_meminfo(tree: Tree) -> None:
    (tree.folder / "proc/meminfo").unlink()
    assert machine.free_memory() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_check_fits(tree: Tree) -> None:
    machine.check_fits(32 * GIB, "the array", remedy="none")
    machine.set_local_size(4)
    with pytest.raises(PartitionError, match="the array does not fit into the memory") as caught:
        machine.check_fits(32 * GIB, "the array", file="a.npz", field="x", remedy="use more machines")
    error = caught.value
    assert (error.file, error.field, error.remedy) == ("a.npz", "x", "use more machines")
    assert error.expected == "at most 8.59 GB for this rank, one of 4 on this machine"
    assert error.found == f"34.4 GB ({32 * GIB} bytes)"


def test_free_memory_of_this_machine() -> None:
    assert 2**20 < machine.free_memory() < 2**50


def test_limit_of_a_real_process() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32))\n"
        "from matex_data import machine; print(machine.free_memory())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert 0 < int(done.stdout) < 1 << 32


@pytest.mark.parametrize("names", machine._LOCAL_RANKS)
def test_local_size_is_the_launcher_s_until_mpi_has_counted(
    names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (name for pair in machine._LOCAL_RANKS for name in pair):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "_local_size", [])
    assert machine.local_size() == 1 and machine.launched_local_rank() is None
    monkeypatch.setenv(names[0], "4")
    monkeypatch.setenv(names[1], "6")
    assert machine.local_size() == 6 and machine.launched_local_rank() == (4, 6)
    machine.set_local_size(3)
    assert machine.local_size() == 3


def test_cores_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    monkeypatch.setattr(os, "process_cpu_count", lambda: 8, raising=False)
    assert machine.cores() == 8
    monkeypatch.delattr(os, "process_cpu_count")
    assert machine.cores() == 12
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert machine.cores() == 1
    for name in ("MATEX_THREADS", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    machine.set_local_size(5)
    assert machine.threads() == 2


def test_seconds_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MATEX_TIMEOUT", raising=False)
    assert machine.seconds_of("MATEX_TIMEOUT", 600.0) == 600.0
    for text, seconds in (("", 600.0), (" 2.5 ", 2.5), ("0", 0.0)):
        monkeypatch.setenv("MATEX_TIMEOUT", text)
        assert machine.seconds_of("MATEX_TIMEOUT", 600.0) == seconds
    for text in ("soon", "-1", "nan", "inf"):
        monkeypatch.setenv("MATEX_TIMEOUT", text)
        with pytest.raises(PartitionError, match=f"MATEX_TIMEOUT is not a number(.|\n)*found: '{text}'"):
            machine.seconds_of("MATEX_TIMEOUT", 600.0)


SETS = st.lists(st.frozensets(st.integers(0, 40), min_size=1), min_size=1, max_size=9)


@given(sets=SETS, most=st.none() | st.integers(1, 50))
def test_shares_of_cores(sets: list[frozenset[int]], most: int | None) -> None:
    """Ranks have no more threads than they may use cores, and no more than there are cores but for one each."""
    others = [sets[:rank] + sets[rank + 1 :] for rank in range(len(sets))]
    shares = [machine.share_of_cores(own, rest, most) for own, rest in zip(sets, others, strict=True)]
    assert all(1 <= share <= min(len(own), most or 50) for share, own in zip(shares, sets, strict=True))
    assert sum(share for share in shares if share > 1) <= len(frozenset().union(*sets))
    if most is None:
        assert all(
            share == len(own)
            for share, own, rest in zip(shares, sets, others, strict=True)
            if own.isdisjoint(frozenset().union(*rest))
        )


@given(st.frozensets(st.integers(0, 500), min_size=1), st.integers(1, 64))
def test_equal_sets_of_cores_are_divided_evenly(cores: frozenset[int], ranks: int) -> None:
    assert machine.share_of_cores(cores, [cores] * (ranks - 1)) == max(1, len(cores) // ranks)


def _block(number: int, cores: int = 16) -> frozenset[int]:
    return frozenset(range(number * cores, (number + 1) * cores))


@pytest.mark.parametrize(
    ("others", "ranks", "slurm", "expected"),
    [
        ([_block(1), _block(2), _block(3)], 4, None, 16),
        ([_block(0)] * 3, 4, None, 4),
        ([_block(0) | _block(1)] * 3, 4, None, 4),
        ([], 4, None, 4),  # before MPI has started
        ([_block(1)], 4, None, 16),  # the data set is of two ranks of four, which are bound
        ([_block(0)], 4, None, 4),
        ([_block(1)], 2, "6", 6),
        ([_block(0)], 2, "12", 8),  # Slurm has told an allocation, in which mpiexec has started two ranks
    ],
)
def test_cores_of_a_rank(
    others: list[frozenset[int]], ranks: int, slurm: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: _block(0), raising=False)
    monkeypatch.delenv("MATEX_THREADS", raising=False)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", slurm or "")
    machine.set_local_size(ranks)
    machine.set_cores_of_others(others)
    assert machine.own_cores() == machine.threads() == expected
    monkeypatch.setenv("MATEX_THREADS", "40")
    assert machine.own_cores() == expected and machine.threads() == 40
    machine.set_cores_of_others(others[1:])  # of a communicator of fewer ranks
    assert machine.own_cores() == expected


@pytest.mark.parametrize("variable", ["MATEX_THREADS", "SLURM_CPUS_PER_TASK", "MATEX_READ_THREADS"])
@pytest.mark.parametrize("value", ["four", "0", "-2", "2.5"])
def test_an_error_names_the_variable(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MATEX_THREADS", "SLURM_CPUS_PER_TASK", "MATEX_READ_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(PartitionError, match=f"{variable} is not a number") as caught:
        machine.threads(), machine.reading_threads()
    assert caught.value.found == repr(value)


def test_threads_that_read_do_not_depend_on_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MATEX_READ_THREADS", raising=False)
    monkeypatch.setenv("MATEX_THREADS", "2")
    assert machine.reading_threads() == 16 and machine.tasks_of_window() == 16
    monkeypatch.setenv("MATEX_THREADS", "12")
    assert machine.tasks_of_window() == 24
    monkeypatch.setenv("MATEX_READ_THREADS", "40")
    assert machine.reading_threads() == machine.tasks_of_window() == 40


ARENAS = """
import ctypes, os, re, sys, threading
if sys.argv[1] == "own":
    os.environ["MALLOC_ARENA_MAX"] = "8"
from matex_data.machine import keep_freed_memory

keep_freed_memory()

def allocate():
    kept.append(bytearray(1 << 16))

kept = []
threads = [threading.Thread(target=allocate) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc = ctypes.CDLL(None)
path = sys.argv[2].encode()
file = libc.fopen
file.restype, file.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_char_p]
stream = file(path, b"w")
libc.malloc_info(0, ctypes.c_void_p(stream))
libc.fclose(ctypes.c_void_p(stream))
print(len(re.findall("<heap nr=", open(path).read())))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has other arenas")
@pytest.mark.parametrize(("case", "arenas"), [("shared", {1}), ("own", {2, 3, 4, 5})])
def test_threads_share_an_arena_unless_the_user_says_otherwise(tmp_path: Path, case: str, arenas: set[int]) -> None:
    found = subprocess.run(
        [sys.executable, "-c", ARENAS, case, str(tmp_path / "info.xml")], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) in arenas


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such call")
def test_freed_memory_is_returned() -> None:
    process = psutil.Process()
    kept = [bytes(1000) for _ in range(200_000)]
    used = process.memory_info().rss
    last = kept[::1000]  # above the freed blocks, so that the C library keeps these
    del kept
    machine.return_freed_memory()
    assert process.memory_info().rss < used - 100_000_000
    assert len(last) == 200
