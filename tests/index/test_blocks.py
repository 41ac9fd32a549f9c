"""Selected rows grouped by blocks, against plain Python."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from matex_data._types import Integers
from matex_data.index.blocks import Blocks, even_blocks, uneven_blocks
from matex_data.index.model import RowSelection
from matex_data.index.runs import compress, cut

ROWS = 60
sets = st.sets(st.integers(0, ROWS - 1)).map(sorted)


def _rows(numbers: list[int], seed: int) -> RowSelection:
    runs = compress(np.array(numbers, np.int64))
    destination = np.random.default_rng(seed).permutation(len(numbers)) if seed else np.arange(len(numbers))
    return RowSelection(runs.start, runs.start + runs.count, destination)


def _listed(indices: Any) -> list[int]:
    return list(range(indices.start, indices.stop)) if isinstance(indices, slice) else indices.tolist()


def _check(blocks: Blocks, rows: RowSelection, numbers: list[int], borders: list[int]) -> None:
    """Check the rows and the destinations of each block."""
    where = dict(zip(numbers, rows.destination.tolist(), strict=True))
    expected = [[n for n in numbers if a <= n < b] for a, b in pairwise(borders)]
    assert blocks.number.tolist() == [i for i, inside in enumerate(expected) if inside]
    for i, number in enumerate(blocks.number.tolist()):
        assert _listed(blocks.rows(i, borders[number])) == [n - borders[number] for n in expected[number]]
        assert _listed(blocks.destinations(i)) == [where[n] for n in expected[number]]
        assert blocks.count[i] == len(expected[number])


@given(numbers=sets, depth=st.integers(1, ROWS + 5), seed=st.integers(0, 3))
def test_even_blocks(numbers: list[int], depth: int, seed: int) -> None:
    rows = _rows(numbers, seed)
    _check(even_blocks(rows, depth), rows, numbers, list(range(0, ROWS + depth, depth)))


@given(numbers=sets, inner=sets, seed=st.integers(0, 3), data=st.data())
def test_uneven_blocks_and_select(numbers: list[int], inner: list[int], seed: int, data: st.DataObject) -> None:
    rows, borders = _rows(numbers, seed), sorted({0, *inner, ROWS})
    blocks = uneven_blocks(rows, np.array(borders))
    _check(blocks, rows, numbers, borders)
    positions = np.array(sorted(data.draw(st.sets(st.integers(0, max(0, len(blocks.number) - 1))))), np.int64)
    if len(blocks.number):
        selected = blocks.select(positions)
        assert selected.number.tolist() == blocks.number[positions].tolist()
        for new, old in enumerate(positions.tolist()):
            assert _listed(selected.rows(new)) == _listed(blocks.rows(old))
            assert _listed(selected.destinations(new)) == _listed(blocks.destinations(old))


@given(numbers=sets, borders=sets)
def test_cut(numbers: list[int], borders: list[int]) -> None:
    segments = cut(compress(np.array(numbers, np.int64)), np.array(borders, np.int64))
    expected: list[list[int]] = []
    for number in numbers:
        if expected and expected[-1][-1] == number - 1 and number not in borders:
            expected[-1].append(number)
        else:
            expected.append([number])
    starts: Integers = segments.start
    assert [list(range(a, a + n)) for a, n in zip(starts.tolist(), segments.count.tolist(), strict=True)] == expected
