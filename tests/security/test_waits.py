"""Nothing waits for ever: interrupts, reads that fail once, chunks of other threads, errors of one rank."""

from __future__ import annotations

import errno
import gzip
import os
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import matex_data as md
from matex_data.errors import DataError
from matex_data.index.cache import ChunkCache
from matex_data.index.runs import Runs
from matex_data.io import files as module_of_files
from matex_data.io.counters import Profile
from matex_data.io.files import Files
from matex_data.mpi.communicator import Communicator
from matex_data.opening import given
from matex_data.reading import plan as module_of_plans
from matex_data.reading import pool as threads
from matex_data.reading import samples
from matex_data.reading.buffers import BufferPool
from matex_data.reading.execute import execute
from matex_data.reading.plan import ReadPlan, plan_reads
from tests.support.launch import run_script
from tests.support.ranks import Pool

ROWS, WIDTH, CHUNK = 512, 16, 64
X = np.arange(ROWS * WIDTH).reshape(ROWS, WIDTH)
SECONDS = 20.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=X, chunks=(CHUNK, WIDTH), compression="gzip")
    return tmp_path / "x.h5"


@pytest.fixture
def one_decoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MATEX_THREADS", "1")
    threads.decoders.cache_clear()
    yield
    threads.decoders.cache_clear()


def _opened(path: Path) -> Any:
    return md.open_dataset(path, comm=MPI.COMM_SELF, inputs="x")


def _plan(data: Any, row: int, chunks: ChunkCache) -> tuple[ReadPlan, Any]:
    index = data._source.index
    field = index.fields["x"]
    arrays = {"x": np.zeros((1, *field.shape), field.dtype)}
    runs = Runs(np.array([row]), np.array([1]))
    return plan_reads(index, runs, np.arange(1), arrays, chunks, BufferPool()), arrays["x"]


def _within(seconds: float, action: Any) -> Any:
    """Return the result of an action in a thread; fail if it takes longer."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(action()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it waits for ever"
    return results.pop()


def _packed(folder: Path) -> Path:
    """Write the first column of the data as a compressed text, whose blocks of lines are decoded for many windows."""
    path = folder / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(b'{"x": %d}\n' % value for value in X[:, 0].tolist())))
    return path


@pytest.mark.filterwarnings("ignore:.*no part can be read alone")
@pytest.mark.usefixtures("one_decoder")
@pytest.mark.parametrize("kind", ["chunks", "lines"])
def test_a_worker_does_not_wait_for_a_chunk_that_a_task_behind_it_decodes(path: Path, kind: str) -> None:
    path = _packed(path.parent) if kind == "lines" else path
    data, chunks = _opened(path), ChunkCache(1 << 20)
    files = Files(Communicator(), [str(path)], "independent", Profile())
    owner, _ = _plan(data, 3, chunks)
    needing, out = _plan(data, 5, chunks)
    futures = execute(needing, files) + execute(owner, files)
    assert not wait(futures, SECONDS).not_done
    assert [future.exception() for future in futures] == [None] * len(futures)
    assert np.array_equal(out[0], X[5, 0] if kind == "lines" else X[5])


THREADS = """
import os, sys, threading
os.environ["MATEX_THREADS"] = "2"
import numpy as np
from mpi4py import MPI
import matex_data as md
from matex_data.reading import samples

sys.setswitchinterval(1e-5)
x, wrong = np.arange(512 * 16).reshape(512, 16), []

def take(reader, seed):
    for i in np.random.default_rng(seed).integers(0, 512, 20).tolist():
        if not np.array_equal(reader.take(np.array([i]))["x"][0], x[i]):
            wrong.append(i)

data = md.open_dataset(sys.argv[1], comm=MPI.COMM_SELF, inputs="x")
for trial in range(int(sys.argv[2])):
    samples._forget()  # nothing is decoded yet
    reader = samples.SampleReader(data._source, data._samples)
    threads = [threading.Thread(target=take, args=(reader, trial // 3 + k // 2)) for k in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
print(len(wrong))
"""


@pytest.mark.parametrize("trials", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_samples_from_three_threads_on_two_cores(path: Path, trials: int) -> None:
    done = run_script(0, THREADS, str(path), str(trials), timeout=100)
    assert done.stdout.strip() == "0", done.stderr


@pytest.mark.parametrize("error", [KeyboardInterrupt("Ctrl-C"), RuntimeError("in a plan")])
def test_a_plan_that_is_interrupted_leaves_its_chunks_to_others(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    data, original = _opened(path), module_of_plans.plan_tasks

    def failing(*arguments: Any) -> Any:
        monkeypatch.setattr(module_of_plans, "plan_tasks", original)
        raise error

    monkeypatch.setattr(module_of_plans, "plan_tasks", failing)
    with pytest.raises(type(error)):
        data[3]
    assert np.array_equal(_within(SECONDS, lambda: data[3]), X[3])


def test_who_needs_a_chunk_of_a_window_that_is_dropped_reads_it(path: Path) -> None:
    data = _opened(path)
    assert np.array_equal(data[0], X[0])
    reader = data._reader
    plan, _ = _plan_with(reader, 300)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(data[301]), daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive(), "the chunk is reserved"
    del plan
    thread.join(SECONDS)
    assert np.array_equal(results[0], X[301])


def _plan_with(reader: Any, row: int) -> tuple[ReadPlan, Any]:
    arrays = {"x": np.zeros((1, WIDTH), X.dtype)}
    runs = Runs(np.array([row]), np.array([1]))
    return plan_reads(reader._source.index, runs, np.arange(1), arrays, samples._chunks[0], BufferPool()), arrays["x"]


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_read_that_fails_once_fails_once(path: Path, monkeypatch: pytest.MonkeyPatch, is_cached: bool) -> None:
    data, read = _opened(path), module_of_files._OpenFile.read
    monkeypatch.setattr(module_of_files._OpenFile, "has_cached", lambda file, offset: is_cached)
    data[0]

    def failing(file: Any, task: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module_of_files._OpenFile, "read", failing)
    with pytest.raises(DataError, match="cannot be read"):
        data[100]
    monkeypatch.setattr(module_of_files._OpenFile, "read", read)
    assert np.array_equal(_within(SECONDS, lambda: data[100]), X[100])


@pytest.mark.usefixtures("one_decoder")
def test_a_worker_may_take_samples(path: Path) -> None:
    """A function of ``map`` runs in a thread that decodes, here the only one, which must not wait for itself."""
    data, other = _opened(path), _opened(path)
    plan, out = _plan(data, 7, ChunkCache(1 << 20))
    plan.completions.append((None, lambda: out.__setitem__(0, other[9])))
    files = Files(Communicator(), [str(path)], "independent", Profile())
    futures = execute(plan, files)
    assert not wait(futures, SECONDS).not_done
    assert [future.exception() for future in futures] == [None] * len(futures)
    assert out[0].tolist() in (X[7].tolist(), X[9].tolist())


INTERRUPTS = """
import faulthandler, os, random, signal, sys
os.environ["MATEX_THREADS"] = "2"
import numpy as np
from mpi4py import MPI
import matex_data as md

faulthandler.dump_traceback_later(60, exit=True)
x = np.arange(512 * 16).reshape(512, 16)
data = md.open_dataset(sys.argv[1], comm=MPI.COMM_SELF, inputs="x")
data[0]

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
draw, interrupted = random.Random(0), 0
while interrupted < 300:
    try:
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 2e-3))
        for _ in range(50):
            data[draw.randrange(512)]
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupted += 1
    i = draw.randrange(512)
    assert np.array_equal(data[i], x[i])
print("usable")
"""


def test_an_interrupt_at_any_moment_leaves_everything_usable(path: Path) -> None:
    done = run_script(0, INTERRUPTS, str(path), timeout=100)
    assert done.stdout.strip() == "usable", done.stderr[-3000:]


ENDED = """
import sys
from concurrent.futures import thread
from mpi4py import MPI
import matex_data as md
from matex_data.errors import PartitionError

data = md.open_dataset(sys.argv[1], comm=MPI.COMM_SELF, inputs="x")
thread._python_exit()  # as the interpreter does before the handlers of atexit
MPI.Finalize()
try:
    data[0]
except PartitionError as error:
    print(str(error).splitlines()[0], flush=True)
"""


def test_a_read_whose_caller_was_interrupted_may_outlive_mpi(path: Path) -> None:
    done = run_script(0, ENDED, str(path), timeout=60)
    assert done.stdout.startswith("the program of a rank has ended"), (done.returncode, done.stderr)


def _error(comm: Any, case: str, folder: str) -> str:
    scandir, is_file = os.scandir, Path.is_file

    def refuse(path: Any = ".", *_: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    paths: dict[str, Any] = {
        "long": "x" * 5000,
        "long folder": "x" * 300 + "/x.h5",
        "braces": "{0..3}" + "x" * 300,
        "empty": "",
        "closed": folder,
        "closed file": folder + "/x.h5",
        "no path": [3],
        "warning": folder + "/x.csv.gz",
    }
    if comm.rank == 0 and case == "closed":
        given.os.scandir = refuse  # type: ignore[attr-defined]
    if comm.rank == 0 and case == "closed file":
        Path.is_file = refuse  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            if case == "warning":
                warnings.simplefilter("error")
            md.open_dataset(paths[case], comm=comm)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.scandir, Path.is_file = scandir, is_file  # type: ignore[method-assign]
    return "opened"


@pytest.mark.rank_counts(1, 2, 3)
@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("long", "DataError: the path cannot be read"),
        ("long folder", "DataError: the path cannot be read"),
        ("braces", "DataError: the path cannot be read"),
        ("empty", "DataError: a path is empty"),
        ("closed", "DataError: the path cannot be read"),
        ("no path", "ArgumentError: open_dataset() takes no paths="),
        ("warning", "UserWarning: "),
    ],
)
def test_an_error_of_rank_0_is_one_of_all_ranks(pool: Pool, tmp_path: Path, case: str, told: str) -> None:
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 100))
    found = pool.run(_error, case, str(tmp_path), timeout=30)
    assert len(set(found)) == 1 and found[0].startswith(told), found
