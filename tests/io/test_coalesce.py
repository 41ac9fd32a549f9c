"""Coalesced reads: every requested byte reaches its destination once."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from matex_data.index.layout import OnComplete, ReadRequest
from matex_data.index.model import ranges as ranges_of
from matex_data.io import coalesce
from matex_data.io.coalesce import ReadTask, divide_tasks, plan_tasks

_MEMORY = np.empty(1, np.uint8)
"""Addresses of these tests are relative to it; no bytes are read."""


def _request(rows: list[tuple[int, int, int]], done: OnComplete | None = None) -> ReadRequest:
    """Return a request for rows of offset, length and address."""
    offset, nbytes, address = (np.array([row[i] for row in rows], np.int64) for i in range(3))
    return ReadRequest(offset, nbytes, _MEMORY, address, done)


def _planned(requests: list[ReadRequest], *workers: int | None) -> list[ReadTask]:
    """Return the tasks of one file."""
    return plan_tasks({0: requests}, *workers)[0]


def _addresses(task: ReadTask) -> list[int]:
    return (task.address - (0 if task.scratch else _MEMORY.ctypes.data)).tolist()


def _bytes(task: ReadTask) -> dict[int, int]:
    """Return the file position of every byte of memory."""
    rows = zip(_addresses(task), task.offset.tolist(), task.nbytes.tolist(), strict=True)
    return {address + i: offset + i for address, offset, count in rows for i in range(count)}


def _positions(request: ReadRequest) -> list[int]:
    """Return the file positions of the requested bytes, in order."""
    rows = zip(request.offset.tolist(), request.nbytes.tolist(), strict=True)
    return [offset + i for offset, count in rows for i in range(count)]


_requests = st.lists(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), min_size=1, max_size=5), max_size=6)


@example([[(0, 12)]], True, 40, 2)
@example([[(0, 12)]], False, 40, 2)
@given(_requests, st.booleans(), st.integers(4, 40), st.integers(2, 40))
def test_every_byte_reaches_its_destination_once(
    requests: list[list[tuple[int, int]]], scratch: bool, decoded_bytes: int, most: int
) -> None:
    address, destinations, reads, done = 0, [], [], []
    for number, rows in enumerate(requests):
        lengths = [count for _, count in rows]
        destinations.append((np.cumsum([address, *lengths]) + np.arange(len(rows) + 1))[:-1])  # a byte between any two
        address += sum(lengths) + len(rows)
        one = _request([(*row, 0) for row in rows], lambda data, number=number: done.append((number, data)))
        reads.append(replace(one, target=None) if scratch else replace(one, at=destinations[-1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coalesce, "DECODED_BYTES", (decoded_bytes, decoded_bytes))
        patch.setattr(coalesce, "MOST_BYTES", most)
        result = _planned(reads)
        assert all(each.count for each in result)  # reads MOST_BYTES
    memory: dict[int, int] = {}
    for each in result:
        runs = np.split(each.nbytes, each.first[1:])
        assert max(map(np.sum, runs)) < 2 * most
        begins = set(each.first.tolist())
        for i, (end, start) in enumerate(zip(each.offset + each.nbytes, each.offset[1:], strict=False)):
            assert i + 1 in begins or end == start
        read = _bytes(each)
        assert not memory.keys() & read.keys() - _gaps()
        memory |= {} if scratch else read
        before = len(done)
        each.complete(np.arange(each.scratch))  # each byte of the scratch memory is its address
        for number, data in done[before:]:
            direct = ranges_of(destinations[number], reads[number].nbytes).tolist()
            assert [read[i] for i in (data.tolist() if scratch else direct)] == _positions(reads[number])
    assert sorted(number for number, _ in done) == list(range(len(reads)))


@given(st.lists(_requests, max_size=3), st.booleans())
def test_each_of_several_files_is_planned_as_by_itself(files: list[list[list[tuple[int, int]]]], scratch: bool) -> None:
    def request(rows: list[tuple[int, int]]) -> ReadRequest:
        ends = np.cumsum([count + 1 for _, count in rows]).tolist()
        one = _request([(begin, count, end) for (begin, count), end in zip(rows, ends, strict=True)], print)
        return replace(one, target=None) if scratch else one

    requests = {number: [request(rows) for rows in of_file] for number, of_file in enumerate(files)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coalesce, "GAP_FRACTION", 0.3)
        result = plan_tasks(requests, 4)
        assert result.keys() == requests.keys()
        for number, tasks in result.items():
            alone = _planned(requests[number], 4)
            assert [(_bytes(one), one.scratch, len(one.callbacks)) for one in tasks] == [
                (_bytes(one), one.scratch, len(one.callbacks)) for one in alone
            ]


def _gaps() -> set[int]:
    """Return the addresses that receive the bytes of gaps."""
    begin = coalesce._DISCARDED.ctypes.data - _MEMORY.ctypes.data
    return set(range(begin, begin + coalesce.GAP_BYTES))


def test_adjacent_ranges_are_merged() -> None:
    ranges = _only(_planned([_request([(10, 5, 100), (15, 5, 105), (20, 5, 200)])]))
    assert ranges.offset.tolist() == [10, 20] and ranges.nbytes.tolist() == [10, 5]


def test_large_reads_to_final_destinations_are_split() -> None:
    largest = coalesce.DIRECT_BYTES[1]
    reads = _request([(0, largest * 5 // 2, 1 << 30)])
    assert [each.total for each in _planned([reads])] == [largest, largest, largest // 2]


@pytest.mark.parametrize("copying", [None, 2])
def test_each_worker_gets_a_task_of_many_short_runs(copying: int | None) -> None:
    run, gap = 300_000, 100_000
    reads = _request([(i * (run + gap), run, (1 << 30) + 2 * i * run) for i in range(64)])
    planned = _planned([reads], 16, copying)
    assert copying is None or len(planned) == copying
    result = divide_tasks(planned, 16)
    assert 14 <= len(result) <= 18 and sum(each.count for each in result) == 64  # no run is cut
    assert max(each.total for each in result) < 2 * 64 * run // 16


@pytest.mark.parametrize(("failing", "copying"), [(False, None), (True, None), (False, 2), (True, 2)])
def test_the_last_read_of_a_request_calls_back(failing: bool, copying: int | None) -> None:
    def call(_: object) -> None:
        done.append(1)
        if failing:
            raise ValueError("of the callback")

    done: list[int] = []
    run = coalesce.RUN_BYTES
    request = _request([(2 * i * run, run, (1 << 30) + 2 * i * run) for i in range(8)], call)
    result = divide_tasks(_planned([request], 4, copying), 4)
    assert len(result) == 4
    for each in result[:-1]:
        each.complete(np.empty(0, np.uint8))
    assert not done
    with pytest.raises(ValueError, match="of the callback") if failing else nullcontext():
        result[-1].complete(np.empty(0, np.uint8))
    assert done == [1]


def test_a_small_gap_is_read_and_discarded() -> None:
    far = 2 * coalesce.GAP_BYTES
    ranges = _only(_planned([_request([(0, 1000, 5000), (1010, 1000, 6000), (far, 1000, 7000)])]))
    assert ranges.nbytes.tolist() == [1000, 10, 1000, 1000]
    assert [_addresses(ranges)[i] for i in (0, 2, 3)] == [5000, 6000, 7000]
    assert len(ranges.first) == 2
    ranges = _only(_planned([_request([(0, 100, 5000), (110, 100, 6000)])]))
    assert ranges.nbytes.tolist() == [100, 100]  # the gap would be a large part of it


def test_gaps_of_a_small_field_are_limited_by_the_bytes_of_all_fields() -> None:
    images = _request([(1 << 30, 10_000_000, 1 << 30)])
    labels = replace(_request([(i * 10_100, 100, 0) for i in range(20)], print), target=None)
    (_, task) = _planned([images, labels])
    gaps = task.nbytes[task.nbytes > 100]
    assert gaps.tolist() == [10_000] * 10  # a hundredth of the images
    assert task.count == 20 - len(gaps)
    assert task.scratch >= 2000 + gaps.max()
    (alone,) = _planned([labels])
    assert alone.count == 20


def test_the_smallest_gaps_are_read_first() -> None:
    ends = [0, 30, 10, 20, 15]  # gaps behind ranges of 1000
    begins = np.cumsum([0, *(1000 + gap for gap in ends[1:])]).tolist()
    ranges = _only(_planned([_request([(begin, 1000, 10_000 * i) for i, begin in enumerate(begins)])]))
    assert ranges.nbytes.tolist() == [1000, 1000, 10, 1000, 20, 1000, 15, 1000]


def _only(result: list[ReadTask]) -> ReadTask:
    (each,) = result
    return each


def test_no_reads_are_no_tasks() -> None:
    assert _planned([]) == []
    assert _planned([_request([])]) == []


@pytest.mark.parametrize(("megabytes", "workers", "count"), [(4, 2, 2), (3, 8, 6), (48, 2, 6), (1, 16, 4), (1, 1, 1)])
def test_reads_to_decode_become_tasks_of_limited_size(megabytes: int, workers: int, count: int) -> None:
    quarter = 1 << 18
    reads = [replace(_request([(i * quarter, quarter, 0)], print), target=None) for i in range(4 * megabytes)]
    result = _planned(reads, workers)
    assert len(result) == count
    assert sum(each.total for each in result) == megabytes << 20
