"""Threads of their own read: the storage's latency is hidden, and what waits to be decoded is bounded."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI
from PIL import Image

import matex_data as md
from matex_data import machine
from matex_data.codecs.pipeline import Pipeline
from matex_data.errors import DataError
from matex_data.io import files
from matex_data.readers.images.folders import files as image_files
from matex_data.reading import execute, plan, pool

ROWS, WIDTH = 4096, 256


@pytest.fixture(params=[1, 2])
def decoding_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Set the number of threads that decode."""
    monkeypatch.setenv("MATEX_THREADS", str(request.param))
    pool.decoders.cache_clear()
    yield request.param
    pool.decoders.cache_clear()


class _Slow:
    """Function that counts how often it runs at a time, and runs only when it has once run more than ``few`` times.

    A call waits for the others for ten seconds at most: on a machine that pauses, too, they meet.
    """

    def __init__(self, function: Any, few: int) -> None:
        self._function, self._few, self._change = function, few, threading.Condition()
        self.calls = self.running = self.most = 0

    def __call__(self, *arguments: Any) -> Any:
        with self._change:
            self.calls += 1
            self.running += 1
            self.most = max(self.most, self.running)
            self._change.notify_all()
            self._change.wait_for(lambda: self.most > self._few, 10)
            self.running -= 1
        return self._function(*arguments)


def _write(path: Path, **options: Any) -> np.ndarray[Any, Any]:
    x = np.random.default_rng(0).integers(0, 50, (ROWS, WIDTH)).astype("f4")
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=x, **options)
    return x


@pytest.mark.parametrize("shuffle", [True, False])
def test_small_files_are_read_in_groups_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoding_threads: int, shuffle: bool
) -> None:
    groups: list[int] = []

    def counted(tasks: Any, most: int) -> Iterator[Any]:
        for group in split(tasks, most):
            groups.append(len(group))
            assert len(group) == 1 or sum(task.total for _, task in group) <= execute.GROUP_BYTES
            yield group

    for number in range(200):
        with h5py.File(tmp_path / f"{number:03d}.h5", "w") as file:
            file["x"] = np.arange(4.0)[:, None] + np.full(5000, 4 * number)
            file.create_dataset("z", data=np.arange(4.0) + 4 * number, chunks=(2,), compression="gzip")
    split, slow = execute._groups, _Slow(files._OpenFile.read, decoding_threads)
    monkeypatch.setattr(execute, "_groups", counted)
    monkeypatch.setattr(files._OpenFile, "read", lambda opened, task: slow(opened, task))
    data = md.open_dataset(tmp_path, comm=MPI.COMM_SELF)
    batches = list(data.batches(400, shuffle=shuffle, seed=1))
    for batch in batches:
        np.testing.assert_array_equal(batch["x"], np.repeat(batch["z"][:, None], 5000, axis=1))
    assert sorted(np.concatenate([batch["z"] for batch in batches]).tolist()) == list(range(800))
    assert sum(groups) == slow.calls and max(groups) > 1
    assert decoding_threads < slow.most <= machine.reading_threads()


@pytest.mark.parametrize("options", [{}, {"chunks": (16, WIDTH), "compression": "gzip"}], ids=["rows", "chunks"])
def test_reads_wait_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoding_threads: int, options: dict[str, Any]
) -> None:
    x = _write(tmp_path / "x.h5", **options)
    slow = _Slow(files._OpenFile.read, decoding_threads)
    monkeypatch.setattr(files._OpenFile, "read", lambda opened, task: slow(opened, task))
    monkeypatch.setattr(files._OpenFile, "has_cached", lambda opened, offset: False)
    data = md.open_dataset(tmp_path / "x.h5", comm=MPI.COMM_SELF, inputs="x", block_bytes=16 << 10)
    batches = list(data.batches(64, shuffle=True, seed=1))
    assert sorted(row.tobytes() for batch in batches for row in batch) == sorted(row.tobytes() for row in x)
    assert decoding_threads < slow.most <= machine.reading_threads()


@pytest.mark.parametrize("options", [{}, {"chunks": (16, WIDTH), "compression": "gzip"}], ids=["rows", "chunks"])
def test_what_is_in_the_page_cache_is_read_by_the_threads_that_decode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoding_threads: int, options: dict[str, Any]
) -> None:
    x = _write(tmp_path / "x.h5", **options)
    opened, read = files._OpenFile(str(tmp_path / "x.h5")), files._OpenFile.read
    if not opened.has_cached(np.array([0])):
        pytest.skip("this file system does not tell what is in the page cache")
    threads: list[str] = []

    def noted(file: Any, task: Any) -> int:
        threads.append(threading.current_thread().name.rpartition("_")[0])
        return read(file, task)

    monkeypatch.setattr(files._OpenFile, "read", noted)
    data = md.open_dataset(tmp_path / "x.h5", comm=MPI.COMM_SELF, inputs="x", window_bytes=64 << 10)
    order = [row.tobytes() for batch in data.batches(64, shuffle=True, seed=1) for row in batch]
    assert sorted(order) == sorted(row.tobytes() for row in x)
    assert threads.count("matex-decode") > len(threads) // 2
    monkeypatch.setattr(files._OpenFile, "has_cached", lambda file, offset: False)
    threads.clear()
    assert [row.tobytes() for batch in data.batches(64, shuffle=True, seed=1) for row in batch] == order
    assert set(threads) == {"matex-storage"}


def test_images_wait_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoding_threads: int) -> None:
    for number in range(160):
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(tmp_path / f"{number:03}.png")
    data = md.open_dataset(tmp_path, comm=MPI.COMM_SELF, inputs="image")
    slow = _Slow(image_files.read_file, decoding_threads)
    monkeypatch.setattr(image_files, "read_file", slow)
    batches = list(data.batches(80, shuffle=True, seed=1))
    assert sorted(int(image[0, 0, 0]) for batch in batches for image in batch) == list(range(160))
    assert decoding_threads < slow.most <= machine.reading_threads() and slow.calls == 160


def test_bytes_that_wait_to_be_decoded_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding is slower than reading: no more tasks have memory than there are threads that read."""
    monkeypatch.setenv("MATEX_READ_THREADS", "3")
    pool.readers.cache_clear()
    _write(tmp_path / "x.h5", chunks=(4, WIDTH), compression="gzip")
    waiting, most, lock = [0], [0], threading.Lock()
    allocate, decode = plan.ReadPlan.allocate, Pipeline.decode

    def allocated(self: Any, task: Any) -> Any:
        with lock:
            waiting[0] += 1
            most[0] = max(most[0], waiting[0])
        complete = task.complete

        def completed(scratch: Any) -> None:
            complete(scratch)
            with lock:
                waiting[0] -= 1

        object.__setattr__(task, "complete", completed)
        return allocate(self, task)

    def slow(*arguments: Any) -> Any:
        time.sleep(0.0005)
        return decode(*arguments)

    monkeypatch.setattr(plan.ReadPlan, "allocate", allocated)
    monkeypatch.setattr(Pipeline, "decode", slow)
    try:
        data = md.open_dataset(tmp_path / "x.h5", comm=MPI.COMM_SELF, inputs="x")
        assert len(list(data.batches(64, shuffle=True, seed=1))) == ROWS // 64
    finally:
        pool.readers.cache_clear()
    assert 1 < most[0] <= 3 and waiting == [0]


def test_other_files_open_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that several threads need is opened once; a file that cannot be opened is tried again."""
    paths = [str(tmp_path / f"{number}.bin") for number in range(8)]
    for path in paths[:-1]:
        Path(path).write_bytes(b"x")
    slow = _Slow(files._OpenFile, 1)
    monkeypatch.setattr(files, "_OpenFile", slow)
    opened = files.Files(files.Communicator(), paths, "independent")

    def take(number: int) -> Any:
        return opened._open.made(number, lambda: opened._open_now(number))

    futures = [pool.submit(take, number, pool=pool.readers()) for number in range(7) for _ in range(3)]
    assert len({future.result() for future in futures}) == 7
    assert slow.calls == 7 and slow.most > 1
    for _ in range(2):
        with pytest.raises(DataError, match="the file cannot be read"):
            take(7)
    Path(paths[7]).write_bytes(b"x")
    assert take(7) is take(7)


def test_the_threads_are_those_of_the_process(tmp_path: Path) -> None:
    """A forked process has pools of its own, at once: those of its parent do not exist in it."""
    _write(tmp_path / "x.h5", chunks=(16, WIDTH), compression="gzip")
    data = md.open_dataset(tmp_path / "x.h5", comm=MPI.COMM_SELF, inputs="x")
    batches = data.batches(64, shuffle=True, seed=1)
    next(iter(batches))
    child = os.fork()
    if child == 0:
        done = len(list(data.batches(64, shuffle=True, seed=1))) == ROWS // 64
        os._exit(0 if done else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
