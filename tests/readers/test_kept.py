"""Decoded files that a process keeps: bounded in bytes, whatever threads ask for them."""

from __future__ import annotations

import io
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from mpi4py import MPI

from matex_data import open_dataset
from matex_data.index.library import OpenFiles
from matex_data.lru import LeastRecentlyUsed
from matex_data.readers import kept


def test_files_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    files = LeastRecentlyUsed(200)
    monkeypatch.setattr(kept, "kept", files)
    for name in "abcab":
        assert kept.kept_file(name, lambda: np.zeros(12)).nbytes == 96
    assert files.used == 192
    assert len(kept.kept_file("texts", lambda: np.array([b"x" * 300, b""], object))) == 2
    assert files.used > 300  # the last one stays whatever its size, and no other
    assert files.get("b") is None


def test_an_error_is_not_kept() -> None:
    outcomes = iter([OSError("no such device"), np.zeros(2)])

    def decode() -> np.ndarray:
        outcome = next(outcomes)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    for expected in (OSError, np.ndarray):
        try:
            result: object = kept.kept_file(decode, decode)
        except OSError as error:
            result = error
        assert isinstance(result, expected)


def test_threads_share_two_files(monkeypatch: pytest.MonkeyPatch) -> None:
    files = LeastRecentlyUsed(2 * 80)
    monkeypatch.setattr(kept, "kept", files)

    def take(number: int) -> bool:
        key = number % 5
        return bool((kept.kept_file(key, lambda: np.full(10, key)) == key).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(take, range(4000)))
    assert files.used == 160


def test_a_file_that_two_threads_need_is_decoded_once() -> None:
    decoded, both = list[int](), Barrier(2)

    def decode() -> np.ndarray:
        decoded.append(1)
        time.sleep(0.05)
        return np.zeros(2)

    def take() -> int:
        both.wait(10)
        return kept.kept_file("of two threads", decode).size

    with ThreadPoolExecutor(2) as pool:
        assert [one.result() for one in [pool.submit(take) for _ in range(2)]] == [2, 2]
    assert decoded == [1]


def test_open_files_are_bounded_and_not_those_of_the_parent() -> None:
    files = OpenFiles[io.BytesIO](2)
    opened = [files.get(key, io.BytesIO) for key in (0, 1, 0, 2)]
    assert opened[0] is opened[2] and [file.closed for file in opened] == [False, True, False, False]
    child = os.fork()
    if child == 0:
        os._exit(int(files.get(0, io.BytesIO) is opened[0]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert files.get(0, io.BytesIO) is opened[0]


def test_compressed_arrays_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "kept", LeastRecentlyUsed(3 << 20))
    for number in range(12):
        np.savez_compressed(tmp_path / f"{number:02}.npz", x=np.full((1 << 17,), number, "f8"))
    data = open_dataset(str(tmp_path), comm=MPI.COMM_SELF)
    assert data.load()["x"].sum() == (1 << 17) * sum(range(12))
    assert 0 < kept.kept.used <= 3 << 20
