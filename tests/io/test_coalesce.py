"""Coalesced reads: every requested byte reaches its destination once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from matex_data.index.model import ranges as ranges_of
from matex_data.io import coalesce
from matex_data.io.coalesce import OnComplete, PendingRead, Ranges, plan_tasks


def _pending_read(rows: list[tuple[int, int, int]], done: OnComplete | None = None) -> PendingRead:
    """Return a read of rows of offset, length and address."""
    return PendingRead(*(np.array([row[i] for row in rows], np.int64) for i in range(3)), done)


def _bytes(ranges: Ranges) -> dict[int, int]:
    """Return the file position of every byte of memory."""
    rows = zip(ranges.address.tolist(), ranges.offset.tolist(), ranges.nbytes.tolist(), strict=True)
    return {address + i: offset + i for address, offset, count in rows for i in range(count)}


def _positions(reads: PendingRead) -> list[int]:
    """Return the file positions of the requested bytes, in order."""
    rows = zip(reads.offset.tolist(), reads.nbytes.tolist(), strict=True)
    return [offset + i for offset, count in rows for i in range(count)]


_requests = st.lists(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), min_size=1, max_size=5), max_size=6)


@given(_requests, st.booleans(), st.integers(4, 40), st.integers(2, 40))
def test_every_byte_reaches_its_destination_once(
    requests: list[list[tuple[int, int]]], scratch: bool, decoded_bytes: int, most: int
) -> None:
    address, destinations, reads, done = 0, [], [], []
    for number, rows in enumerate(requests):
        lengths = [count for _, count in rows]
        destinations.append((np.cumsum([address, *lengths]) + np.arange(len(rows) + 1))[:-1])  # a byte between any two
        address += sum(lengths) + len(rows)
        one = _pending_read([(*row, 0) for row in rows], lambda data, number=number: done.append((number, data)))
        reads.append(replace(one, address=None if scratch else destinations[-1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coalesce, "DECODED_BYTES", (decoded_bytes, decoded_bytes))
        patch.setattr(coalesce, "MOST_BYTES", most)
        result = plan_tasks(reads)
    memory: dict[int, int] = {}
    for each in result:
        read: dict[int, int] = {}
        for ranges in each.reads:
            assert ranges.total < 2 * most
            begins = set(ranges.first.tolist())
            for i, (end, start) in enumerate(zip(ranges.offset + ranges.nbytes, ranges.offset[1:], strict=False)):
                assert (i + 1 in begins) == (end != start)
            read |= _bytes(ranges)
        assert not memory.keys() & read.keys() - _gaps()
        memory |= {} if scratch else read
        before = len(done)
        each.complete(np.arange(each.scratch))  # each byte of the scratch memory is its address
        for number, data in done[before:]:
            direct = ranges_of(destinations[number], reads[number].nbytes).tolist()
            assert [read[i] for i in (data.tolist() if scratch else direct)] == _positions(reads[number])
    assert sorted(number for number, _ in done) == list(range(len(reads)))


def _gaps() -> set[int]:
    """Return the addresses that receive the bytes of gaps."""
    return set(range(coalesce._DISCARDED.ctypes.data, coalesce._DISCARDED.ctypes.data + coalesce.GAP_BYTES))


def test_adjacent_ranges_are_merged() -> None:
    ranges = _only(plan_tasks([_pending_read([(10, 5, 100), (15, 5, 105), (20, 5, 200)])]))
    assert ranges.offset.tolist() == [10, 20] and ranges.nbytes.tolist() == [10, 5]


def test_large_reads_without_decoding_are_split() -> None:
    reads = _pending_read([(0, coalesce.TASK_BYTES * 5 // 2, 1 << 30)])
    result = plan_tasks([reads])
    assert [each.nbytes for each in result] == [
        coalesce.TASK_BYTES,
        coalesce.TASK_BYTES,
        coalesce.TASK_BYTES // 2,
    ]


def test_a_small_gap_is_read_and_discarded() -> None:
    far = 2 * coalesce.GAP_BYTES
    ranges = _only(plan_tasks([_pending_read([(0, 1000, 5000), (1010, 1000, 6000), (far, 1000, 7000)])]))
    assert ranges.nbytes.tolist() == [1000, 10, 1000, 1000]
    assert [ranges.address.tolist()[i] for i in (0, 2, 3)] == [5000, 6000, 7000]
    assert len(ranges.first) == 2
    ranges = _only(plan_tasks([_pending_read([(0, 100, 5000), (110, 100, 6000)])]))
    assert ranges.nbytes.tolist() == [100, 100]  # the gap would be a large part of it


def test_gaps_of_a_small_field_are_limited_by_the_bytes_of_all_fields() -> None:
    images = _pending_read([(1 << 30, 10_000_000, 1 << 30)])
    labels = replace(_pending_read([(i * 10_100, 100, 0) for i in range(20)], print), address=None)
    (_, task) = plan_tasks([images, labels])
    gaps = task.reads[0].nbytes[task.reads[0].nbytes > 100]
    assert gaps.tolist() == [10_000] * 10  # a hundredth of the images
    assert task.count == 20 - len(gaps)
    assert task.scratch >= 2000 + gaps.max()
    (alone,) = plan_tasks([labels])
    assert alone.count == 20


def test_the_smallest_gaps_are_read_first() -> None:
    ends = [0, 30, 10, 20, 15]  # gaps behind ranges of 1000
    begins = np.cumsum([0, *(1000 + gap for gap in ends[1:])]).tolist()
    ranges = _only(plan_tasks([_pending_read([(begin, 1000, 10_000 * i) for i, begin in enumerate(begins)])]))
    assert ranges.nbytes.tolist() == [1000, 1000, 10, 1000, 20, 1000, 15, 1000]


def _only(result: list[coalesce.ReadTask]) -> Ranges:
    (each,) = result
    (ranges,) = each.reads
    return ranges


def test_no_reads_are_no_tasks() -> None:
    assert plan_tasks([]) == []
    assert plan_tasks([_pending_read([])]) == []


@pytest.mark.parametrize(("megabytes", "workers", "count"), [(4, 2, 2), (3, 8, 3), (48, 2, 6), (1, 1, 1)])
def test_reads_to_decode_become_tasks_of_one_to_eight_megabytes(megabytes: int, workers: int, count: int) -> None:
    quarter = 1 << 18
    reads = [replace(_pending_read([(i * quarter, quarter, 0)], print), address=None) for i in range(4 * megabytes)]
    result = plan_tasks(reads, workers)
    assert len(result) == count
    assert sum(each.nbytes for each in result) == megabytes << 20
