"""Bytes that all ranks read while a file is indexed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from matex_data import DataError
from matex_data.readers.collective import SingleRank, read_own_ranges


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
