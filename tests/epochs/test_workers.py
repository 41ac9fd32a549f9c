"""Epochs of forked workers: each pass has the next order, with all samples once, as without workers."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from ctypes import Array
from multiprocessing import context
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from matex_data import PartitionError, open_dataset
from matex_data.epochs.batches import Batches
from matex_data.epochs.workers import WorkerEpochs
from tests.support.frameworks import needs
from tests.support.launch import run_script
from tests.support.ranks import Pool

SAMPLES, BATCH = 240, 12


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("workers") / "numbers.npy"
    np.save(path, np.arange(SAMPLES))
    return path


def _expected(path: Path, epochs: int) -> list[list[list[int]]]:
    """Return the batches of each epoch without workers."""
    batches = open_dataset(path).batches(BATCH, shuffle=True, seed=1)
    return [[batch["data"].tolist() for batch in batches] for _ in range(epochs)]


def _work(batches: Batches, info: Any, passes: int, results: Any) -> None:
    """Behave as a worker of a ``DataLoader``, which asks ``torch.utils.data`` what it is."""
    sys.modules["torch.utils.data"].get_worker_info = lambda: info  # type: ignore[attr-defined]
    for _ in range(passes):
        try:
            results.put((info.id, [batch["data"].tolist() for batch in batches][info.id :: info.num_workers]))
        except PartitionError as error:
            results.put((info.id, str(error)))


def _pass(batches: Batches, seed: int, workers: int = 2, passes: int = 1) -> list[Any]:
    """Fork workers as a ``DataLoader`` does for each pass, and return what each of them yields."""
    context = multiprocessing.get_context("fork")
    found = []
    gate = context.Event()
    results = context.SimpleQueue()

    def run(info: Any) -> None:
        gate.wait(30)
        _work(batches, info, passes, results)

    infos = [SimpleNamespace(id=i, num_workers=workers, seed=seed + i) for i in range(workers)]
    processes = [context.Process(target=run, args=(info,)) for info in infos]
    for process in processes:
        process.start()
    gate.set()  # a loader asks for batches when all workers are forked
    found = [results.get() for _ in range(workers * passes)]
    for process in processes:
        process.join(30)
    return [shares for _, shares in sorted(found, key=lambda pair: pair[0])]


@pytest.fixture
def torch_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.data", SimpleNamespace(get_worker_info=lambda: None))  # type: ignore[arg-type]


def test_workers_forked_for_each_pass_begin_the_next_epoch(numbers: Path, torch_data: None) -> None:
    expected = _expected(numbers, 3)
    batches = open_dataset(numbers).batches(BATCH, shuffle=True, seed=1)
    for epoch in (0, 1, 2):
        first, second = _pass(batches, seed=100 * epoch)
        assert [first, second] == [expected[epoch][::2], expected[epoch][1::2]]
    batches.begin_at(1)
    assert _pass(batches, seed=7)[0] == expected[1][::2]


def test_workers_that_stay_count_on(numbers: Path, torch_data: None) -> None:
    expected = _expected(numbers, 3)
    batches = open_dataset(numbers).batches(BATCH, shuffle=True, seed=1)
    assert _pass(batches, seed=0, workers=1, passes=2) == expected[:2]
    assert _pass(batches, seed=9, workers=1) == expected[2:]


def test_a_pass_that_only_one_worker_began_counts_for_all(numbers: Path, torch_data: None) -> None:
    expected = _expected(numbers, 2)
    batches = open_dataset(numbers).batches(BATCH, shuffle=True, seed=1)
    _pass(batches, seed=0, workers=1)
    assert _pass(batches, seed=5) == [expected[1][::2], expected[1][1::2]]


def test_a_worker_that_reads_before_all_are_forked_is_an_error(numbers: Path, torch_data: None) -> None:
    batches = open_dataset(numbers).batches(BATCH, shuffle=True, seed=1)
    _pass(batches, seed=4, workers=1)
    _, second = _pass(batches, seed=4)
    assert "which epoch to begin" in second and "def __iter__" in second


SCRIPT = """
import itertools, json, sys
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
import matex_data as md

class Batches(IterableDataset):
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        worker = get_worker_info()
        for batch in itertools.islice(self.batches, worker.id, None, worker.num_workers):
            yield batch["data"].tolist()

data = md.open_dataset(sys.argv[1])
for persistent in (False, True):
    batches = Batches(data.batches(12, shuffle=True, seed=1))
    loader = DataLoader(batches, batch_size=None, num_workers=2, persistent_workers=persistent)
    next(iter(loader))  # a look at the first batch is a pass
    epochs = [sorted(list(loader)) for _ in range(2)]
    print(json.dumps(epochs), flush=True)
"""


@needs("torch")
def test_a_data_loader(numbers: Path) -> None:
    done = run_script(1, SCRIPT, str(numbers), timeout=120)
    assert done.returncode == 0, done.stderr
    expected = [sorted(batches) for batches in _expected(numbers, 3)]
    fresh, persistent = map(json.loads, done.stdout.splitlines())
    assert fresh == expected[1:]
    assert persistent == expected[1:]


def test_the_first_process_to_start_gets_the_memory_of_the_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {kind: reduce for kind, reduce in ForkingPickler._extra_reducers.items() if not issubclass(kind, Array)}
    monkeypatch.setattr(ForkingPickler, "_extra_reducers", known)
    monkeypatch.setattr(
        context._tls, "spawning_popen", SimpleNamespace(duplicate_for_child=int, DupFd=int), raising=False
    )
    assert ForkingPickler.dumps(WorkerEpochs())


def _pass_that_a_child_continues(comm: MPI.Intracomm, path: str) -> str:
    """Return how a forked process ends that takes what is left of a pass of its parent, all of it in memory."""
    batches = iter(open_dataset(path, comm=comm).batches(10))
    next(batches)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            end = f"{len([*batches])} batches"
        except PartitionError as error:
            end = error.problem
        os.write(writing, end.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    comm.Barrier()
    with os.fdopen(reading) as pipe:
        return pipe.read()


@pytest.mark.rank_counts(1, 2)
def test_a_forked_process_is_told_that_it_cannot_continue_a_pass(pool: Pool, numbers: Path) -> None:
    told = "this process was forked in the middle of an epoch, which only its parent process can continue"
    assert pool.run(_pass_that_a_child_continues, str(numbers), timeout=30) == [told] * pool.size
