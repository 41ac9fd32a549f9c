"""Byte ranges become few large reads, and every byte goes where it was wanted."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from matex_data import coalesce
from matex_data.coalesce import Ranges, calls


def _ranges(rows: list[tuple[int, int, int]]) -> Ranges:
    return Ranges(*(np.array([row[i] for row in rows], np.int64) for i in range(3)))


def _bytes(ranges: Ranges) -> dict[int, int]:
    """File position of every byte of memory."""
    rows = zip(ranges.address.tolist(), ranges.offset.tolist(), ranges.nbytes.tolist(), strict=True)
    return {address + i: offset + i for address, offset, count in rows for i in range(count)}


@st.composite
def _wanted(draw: st.DrawFn) -> list[Ranges]:
    address, result = 0, []
    for _ in range(draw(st.integers(1, 6))):
        rows = []
        for _ in range(draw(st.integers(1, 5))):
            count = draw(st.integers(1, 12))
            rows.append((draw(st.integers(0, 60)), count, address))
            address += count + draw(st.integers(0, 2))
        result.append(_ranges(rows))
    return result


@given(_wanted(), st.integers(4, 40), st.integers(2, 40))
def test_every_byte_is_read_once_to_its_place(wanted: list[Ranges], together: int, most: int) -> None:
    before = coalesce.DECODED_BYTES, coalesce.MOST_BYTES
    coalesce.DECODED_BYTES, coalesce.MOST_BYTES = together, most
    try:
        done: list[int] = []
        result = calls([(ranges, lambda i=i: done.append(i)) for i, ranges in enumerate(wanted)])
    finally:
        coalesce.DECODED_BYTES, coalesce.MOST_BYTES = before
    expected = {at: position for ranges in wanted for at, position in _bytes(ranges).items()}
    read: dict[int, int] = {}
    for call in result:
        for ranges in call.reads:
            assert ranges.total < 2 * most
            begins = set(ranges.first.tolist())
            for i, (end, start) in enumerate(zip(ranges.offset + ranges.nbytes, ranges.offset[1:], strict=False)):
                assert (i + 1 in begins) == (end != start)
            assert not read.keys() & _bytes(ranges).keys() & expected.keys()
            read |= _bytes(ranges)
        for then in call.then:
            then()
        for i in done:
            assert _bytes(wanted[i]).keys() <= read.keys()
    nowhere = coalesce._NOWHERE.ctypes.data  # small gaps are read to there
    read = {at: position for at, position in read.items() if not 0 <= at - nowhere < coalesce.GAP_BYTES}
    assert read == expected
    assert sorted(done) == list(range(len(wanted)))


def test_neighbours_in_file_and_memory_become_one() -> None:
    ranges = _only(calls([(_ranges([(10, 5, 100), (15, 5, 105), (20, 5, 200)]), None)]))
    assert ranges.offset.tolist() == [10, 20] and ranges.nbytes.tolist() == [10, 5]


def test_large_reads_that_need_no_decoding_are_shared_out() -> None:
    wanted = _ranges([(0, coalesce.CALL_BYTES * 5 // 2, 1 << 30)])
    result = calls([(wanted, None)])
    assert [call.nbytes for call in result] == [coalesce.CALL_BYTES, coalesce.CALL_BYTES, coalesce.CALL_BYTES // 2]


def test_a_small_gap_is_read_to_nowhere() -> None:
    ranges = _only(calls([(_ranges([(0, 1000, 5000), (1010, 1000, 6000), (9000, 1000, 7000)]), None)]))
    assert ranges.nbytes.tolist() == [1000, 10, 1000, 1000]
    assert [ranges.address.tolist()[i] for i in (0, 2, 3)] == [5000, 6000, 7000]
    assert len(ranges.first) == 2
    ranges = _only(calls([(_ranges([(0, 100, 5000), (110, 100, 6000)]), None)]))
    assert ranges.nbytes.tolist() == [100, 100]  # the gap would be a large part of it


def _only(result: list[coalesce.Call]) -> Ranges:
    (call,) = result
    (ranges,) = call.reads
    return ranges


def test_nothing_wanted_is_no_call() -> None:
    assert calls([]) == []
    assert calls([(_ranges([]), None)]) == []
