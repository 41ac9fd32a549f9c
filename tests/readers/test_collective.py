"""Bytes that are read once while a file is indexed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from matex_data.readers import collective
from matex_data.readers.collective import KeepingRanks, SingleRank
from matex_data.readers.csv import reader as csv_reader


class _Counting(SingleRank):
    def __init__(self) -> None:
        self.bytes = self.calls = 0

    def read(self, path: str, offset: int, memory: Any) -> None:
        super().read(path, offset, memory)
        self.bytes += len(memory)
        self.calls += 1


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
