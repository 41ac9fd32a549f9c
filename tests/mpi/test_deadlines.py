"""Deadlines of waits for other ranks, and the location of the absent rank in the error."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

from matex_data.reading.buffers import BufferPool as Buffers
from tests.mpi.conftest import ROWS
from tests.support.launch import Completed, run_script
from tests.support.machine_speed import scaled

SCRIPT = """
import os, sys, threading, time
from mpi4py import MPI
import matex_data as md

case, path = sys.argv[1:]
rank = MPI.COMM_WORLD.rank

def oversleep(when):
    if case == when and rank == 1:
        time.sleep(60)

oversleep("open")
if case == "raise-before" and rank == 1:
    raise ValueError("rank one fails")
data = md.open_dataset(path, inputs="x")
oversleep("batches")
if case == "missing":
    oversleep("missing")
    md.open_dataset(path, inputs="x", missing="drop")
batches = data.batches(48, shuffle=True)
for step, batch in enumerate(batches):
    oversleep("loop") if step == 2 else None
    if case == "raise-in-loop" and step == 2 and rank == 1:
        raise ValueError("rank one fails")
    if case == "leave" and step == 2 and rank == 1:
        sys.exit(0)
oversleep("statistics")
data.statistics("x")
oversleep("load")
data.load()
if case == "held":
    iterator = iter(batches)
    next(iterator)
    time.sleep(5 if rank == 0 else 0)  # longer than MATEX_TIMEOUT
print("end", rank)
"""
SECONDS = 3.0
"""``MATEX_TIMEOUT`` of these tests."""


def _run(case: str, path: str, ranks: int = 2) -> Completed:
    return run_script(ranks, SCRIPT, case, path, env={"MATEX_TIMEOUT": str(SECONDS)}, timeout=60)


@pytest.mark.parametrize(
    "case",
    [
        "open",
        pytest.param("loop", marks=pytest.mark.openmpi),
        "statistics",
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("batches", "missing", "load")),
    ],
)
def test_the_error_names_the_absent_rank_and_its_location(case: str, path: str) -> None:
    done = _run(case, path)
    assert done.returncode != 0
    assert done.seconds < scaled(40)
    assert "another rank does not take part" in done.stderr
    if case != "open":  # the ranks cannot query one another yet
        assert "rank 1 is at" in done.stderr and "in oversleep" in done.stderr
    assert "MATEX_TIMEOUT" in done.stderr and "end" not in done.stdout


ALONE = """
import sys, time
from mpi4py import MPI
import matex_data as md
from matex_data.mpi import deadlines

deadlines.CHECK_INTERVAL = 1.0
case, path = sys.argv[1:]
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
data = md.open_dataset(path, inputs="x")
made = data.batches(48)

def batches(pause=0):
    for batch in made:
        time.sleep(pause)

alone = {
    "statistics": lambda: data.statistics(), "load": lambda: data.load(), "where": lambda: data.where("max(x) > 0"),
    "counts": lambda: data.value_counts("x"), "batches": lambda: batches(),
}
if case == "slow":  # a rank that works, and waits in other lines than the others: right, however long it takes
    if rank == 0:
        batches(0.4)
    else:
        batches()
    print("end")
elif case == "another":
    if rank == 0:
        data.statistics()
    else:
        data.load()
else:
    if rank == 0:
        alone[case]()
    data.split(0.5, 0.5, seed=1, groups="x") if case != "batches" else data.statistics()
"""


@pytest.mark.parametrize(
    ("case", "ranks"),
    [("statistics", 2), ("load", 3), ("counts", 2), ("where", 2), ("batches", 2), ("batches", 3), ("another", 3)],
)
def test_what_one_rank_alone_calls_is_an_error_in_seconds(case: str, ranks: int, path: str) -> None:
    done = run_script(ranks, ALONE, case, path, env={"MATEX_TIMEOUT": "60"}, timeout=100)
    assert done.returncode != 0 and done.seconds < scaled(30)
    if case in ("another", "batches"):
        assert "the ranks wait for one another in different calls" in done.stderr, done.stderr
        assert "this rank is at" in done.stderr and "waits for other ranks, too, at" in done.stderr
    else:
        assert "PartitionError" in done.stderr, done.stderr


def test_ranks_that_are_slow_in_different_lines_go_on(path: str) -> None:
    done = run_script(3, ALONE, "slow", path, timeout=100)
    assert (done.returncode, done.stdout.split()) == (0, ["end"] * 3), done.stderr


def test_a_time_limit_that_is_no_number_is_one_error(path: str) -> None:
    done = run_script(2, SCRIPT, "end", path, env={"MATEX_TIMEOUT": "soon"}, timeout=60)
    assert done.returncode != 0
    assert done.stderr.count("the environment variable MATEX_TIMEOUT is not a number of seconds") == 1
    assert "uncaught error on all 2 ranks" in done.stderr and "found: 'soon'" in done.stderr


@pytest.mark.openmpi
def test_an_error_before_the_first_data_set_ends_the_job_soon(path: str) -> None:
    done = run_script(2, SCRIPT, "raise-before", path, timeout=60)  # an import sets no exception hook
    assert done.returncode != 0
    assert done.stderr.count("ValueError: rank one fails") == 1
    assert "this rank aborts the job, since the error above has ended its program" in done.stderr


@pytest.mark.openmpi
def test_an_error_of_one_rank_ends_the_job_soon(path: str) -> None:
    done = run_script(2, SCRIPT, "raise-in-loop", path, timeout=60)  # long before MATEX_TIMEOUT
    assert done.returncode != 0
    assert done.stderr.count("ValueError: rank one fails") == 1
    assert "---- uncaught error on rank 1 of 2" in done.stderr


def test_a_rank_at_the_end_of_its_program_ends_the_wait(path: str) -> None:
    done = run_script(2, SCRIPT, "leave", path, timeout=60)
    assert done.returncode != 0
    assert "rank 1 has come to the end of its program" in done.stderr or "another rank has left" in done.stderr


def test_ranks_may_end_long_before_one_with_an_open_iterator(path: str) -> None:
    done = _run("held", path, ranks=3)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["0", "1", "2", "end", "end", "end"]


CALLBACK = """
import time
import keras, numpy as np
import matex_data as md

class Slow(keras.callbacks.ModelCheckpoint):  # on rank 0 alone
    def on_epoch_end(self, epoch, logs=None):
        time.sleep(8)

model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
data = md.open_dataset(__import__("sys").argv[1], inputs="x", targets="x").tf_dataset(48)
data = data.map(lambda x, y: (x / 1e4, y[:, :1] / 1e4))
history = md.training.fit(model, data, epochs=1, callbacks=[Slow("/nowhere/{epoch}.keras")], verbose=0)
print("trained", len(history.epoch))
"""


@pytest.mark.slow
def test_a_callback_may_take_longer_than_the_timeout(path: str) -> None:
    done = run_script(2, CALLBACK, path, env={"MATEX_TIMEOUT": "5"}, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained 1") == 2
    assert "busy with its callbacks" in done.stderr


LATE = """
import sys, time
import tensorflow as tf
import matex_data as md
from mpi4py import MPI
from matex_data.mpi import deadlines

deadlines.CHECK_INTERVAL, deadlines.MESSAGE_AFTER = 0.5, 1.5
rank = MPI.COMM_WORLD.rank
md.training.allreduce(tf.zeros(3))
if rank == 1:
    time.sleep(4)  # the late one
md.training.allreduce(tf.zeros(3))
print("end")
"""


def test_a_long_wait_names_the_late_rank_once() -> None:
    done = run_script(3, LATE, timeout=90)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("waiting in")]
    assert "a collective operation" in line
    assert "rank 1 is at" in line
    assert "rank 2" not in line


def test_garbage_collection_during_calls_of_a_buffer_pool() -> None:
    before, pool = gc.get_threshold(), Buffers()
    finished = threading.Event()

    def churn() -> None:
        for count in range(400):
            cycle: list[Any] = [pool.bytes(4096 + count)]
            cycle.append(cycle)  # freed by the garbage collector
        finished.set()

    thread = threading.Thread(target=churn, daemon=True)
    gc.set_threshold(1)
    try:
        thread.start()
        assert finished.wait(20)
    finally:
        gc.set_threshold(*before)


FORKS = """
import multiprocessing, sys
import numpy as np
import matex_data as md

def total(batches):
    return float(sum(batch.sum() for batch in batches))

def child(queue, path, data, batches):
    try:
        own = md.open_dataset(path, inputs="x") if data is None else data
        queue.put([total(own.batches(48)), total(batches or own.batches(48))])
        data is not None and own.statistics("x")
    except Exception as error:
        queue.put(str(error))

if __name__ == "__main__":
    path = sys.argv[1]
    data = md.open_dataset(path, inputs="x")
    batches = data.batches(48)
    iterator = iter(data.batches(48))
    next(iterator)
    rank = md.training.world().rank
    for method, given in (("fork", (data, batches)), ("spawn", (None, None))):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=child, args=(queue, path, *given))
        process.start()
        print(method, rank, *queue.get(timeout=30))
        print(queue.get(timeout=30).splitlines()[0]) if method == "fork" else None
        process.join()
    print("own", rank, total(data.batches(48)))
"""


def test_child_processes_read_without_mpi(path: str) -> None:
    done = run_script(2, FORKS, path, timeout=100)
    assert done.returncode == 0, done.stderr
    values = np.arange(ROWS * 8.0).reshape(-1, 2, 24, 8)
    by_rank = {str(rank): float(values[:, rank].sum()) for rank in (0, 1)}
    lines = [line.split() for line in done.stdout.splitlines()]
    for rank, total in by_rank.items():
        assert ["fork", rank, str(total), str(total)] in lines  # the samples of the rank
        assert ["spawn", rank, str(values.sum()), str(values.sum())] in lines  # all samples
        assert ["own", rank, str(total)] in lines
        assert f"this process has the share of rank {rank} without MPI" in done.stdout
