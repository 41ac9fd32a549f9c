"""Bytes that all ranks read while a file is indexed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from matex_data import DataError
from matex_data.readers import collective
from matex_data.readers.collective import KeepingRanks, SingleRank, read_own_ranges
from matex_data.readers.csv import reader as csv_reader


class _Counting(SingleRank):
    def __init__(self) -> None:
        self.bytes = self.calls = 0

    def read(self, path: str, offset: int, memory: Any) -> None:
        super().read(path, offset, memory)
        self.bytes += len(memory)
        self.calls += 1


def test_reads_are_entered_whatever_fails(tmp_path: Path) -> None:
    """After an error a rank enters the reads that are left, without bytes, so that no other rank waits for it."""
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(200)))
    inner, taken = _Counting(), list[int]()

    def take(i: int, data: Any) -> None:
        taken.append(i)
        if i == 1:
            raise ValueError(f"{len(data)} bytes")

    with pytest.raises(ValueError, match="20 bytes"):
        read_own_ranges(inner, str(path), [(0, 30), (50, 20), (80, 60), (150, 10)], take)
    assert (taken, inner.calls, inner.bytes) == ([0, 1], 4, 50)
    with pytest.raises(DataError, match="shorter"):
        read_own_ranges(inner, str(path), [(190, 30), (0, 5)], take)
    assert (taken, inner.calls) == ([0, 1], 5)  # the one that failed is not counted


def _read(ranks: KeepingRanks, path: Path, offset: int, count: int) -> bytes:
    memory = np.empty(count, np.uint8)
    ranks.read(str(path), offset, memory)
    return memory.tobytes()


def test_bytes_are_those_of_the_file_and_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other, content = tmp_path / "a.txt", tmp_path / "b.txt", bytes(range(200))
    path.write_bytes(content)
    other.write_bytes(content[::-1])
    monkeypatch.setattr(collective, "KEPT_BYTES", 150)
    inner = _Counting()
    ranks = KeepingRanks(inner)
    for offset, count, read in (
        (0, 60, 60),
        (60, 40, 40),
        (50, 50, 0),
        (20, 0, 0),
        (90, 30, 20),
        (110, 80, 70),
        (0, 100, 0),
    ):
        before = inner.bytes
        assert _read(ranks, path, offset, count) == content[offset : offset + count]
        assert inner.bytes - before == read, (offset, count)
    assert inner.calls == 7  # each is collective, also without bytes
    assert _read(ranks, other, 0, 60) == content[::-1][:60]


def test_a_table_is_read_once_to_open_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.csv"
    np.savetxt(path, np.random.default_rng(0).random((20_000, 4)), "%.6f", ",", header="a,b,c,d", comments="")
    monkeypatch.setattr(csv_reader, "SMALL_BYTES", 0)
    inner = _Counting()
    index = csv_reader.index_collectively([str(path)], None, inner)
    assert len(index) == 20_000
    assert inner.bytes <= 1.01 * path.stat().st_size
