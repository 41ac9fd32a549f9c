"""Rows that only a library can read: few calls for scattered rows, and errors of the rows that are wanted alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from matex_data._types import Array, Integers
from matex_data.errors import DecodeError
from matex_data.index.cache import ChunkCache
from matex_data.index.library import LibraryRows
from matex_data.index.runs import compress

ROWS, BLOCK = 1000, 250
BAD = 123


@dataclass(frozen=True)
class Texts(LibraryRows):
    """Texts, of which one is damaged."""

    block_rows: int = BLOCK
    rows: int = ROWS
    calls: list[tuple[int, int]] = field(default_factory=list)

    def read(self, start: int, stop: int) -> Array:
        self.calls.append((start, stop))
        if start <= BAD < stop:
            raise DecodeError("the text is damaged", row=BAD)
        return np.array([b"%d" % row for row in range(start, stop)], object)


def _read(texts: Texts, rows: Integers) -> list[bytes]:
    order = np.random.default_rng(0).permutation(len(rows))
    out = np.empty(len(rows), object)
    for request in texts.requests(compress(rows).selection(order), out, ChunkCache(0)):
        request.on_complete(np.empty(0, np.uint8))
    found: list[bytes] = out[order].tolist()
    return found


@pytest.mark.parametrize(
    ("rows", "calls"),
    [
        (np.arange(130, ROWS, 2), [(130, 249), (250, 499), (500, 749), (750, 999)]),
        (np.array([130, 131, 249, 250, 251, 600]), [(130, 252), (600, 601)]),
        (np.array([260, 499, 500, 749]), [(260, 261), (499, 501), (749, 750)]),
        (np.array([250, 449, 500, 740]), [(250, 450), (500, 501), (740, 741)]),
        (np.arange(0), []),
    ],
)
def test_scattered_rows_of_a_block_are_read_at_once_unless_few_are_wanted(
    rows: Integers, calls: list[tuple[int, int]]
) -> None:
    texts = Texts()
    assert _read(texts, rows) == [b"%d" % row for row in rows]
    assert texts.calls == calls


def test_rows_that_lie_in_no_block_are_read_alone() -> None:
    texts = Texts(block_rows=1)
    assert _read(texts, np.array([1, 2, 4])) == [b"1", b"2", b"4"]
    assert texts.calls == [(1, 3), (4, 5)]


def test_a_damaged_row_is_an_error_where_it_is_wanted() -> None:
    rows = np.delete(np.arange(0, 200), BAD)
    assert _read(Texts(), rows) == [b"%d" % row for row in rows]
    with pytest.raises(DecodeError, match="row 123"):
        _read(Texts(), np.array([121, BAD, 125]))
