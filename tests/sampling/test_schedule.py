"""Assignment of samples to steps and ranks, against plain Python lists."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from matex_data import open_dataset
from matex_data.errors import PartitionError
from matex_data.index.model import ranges
from matex_data.index.runs import Chosen, Runs, compress, cut, merge
from matex_data.sampling.schedule import Schedule, check_batch_size, check_ranks, rank_range
from matex_data.sampling.sizing import choose_block_bytes, choose_block_rows, choose_lanes, make_schedule
from matex_data.sampling.split import split

BATCHES = (12, 24, 60)
RANKS = (1, 2, 3, 4, 6, 12)


def _numbers(runs: Runs) -> list[int]:
    return [
        n
        for start, count in zip(runs.start.tolist(), runs.count.tolist(), strict=True)
        for n in range(start, start + count)
    ]


@st.composite
def _runs(draw: st.DrawFn) -> Runs:
    gaps = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), min_size=1, max_size=12))
    start, count, end = [], [], 0
    for gap, length in gaps:
        start.append(end + gap)
        count.append(length)
        end += gap + length
    return Runs(np.array(start), np.array(count))


@st.composite
def _schedules(draw: st.DrawFn) -> Schedule:
    runs = draw(_runs())
    borders = np.arange(0, 1000, draw(st.integers(1, 40)))
    batch = draw(st.sampled_from(BATCHES))
    seed = draw(st.none() | st.integers(0, 2**32 - 1))
    lanes = choose_lanes(batch, draw(st.integers(1, 80))) if seed is not None else 1
    remainder = draw(st.sampled_from(["drop", "pad", "keep"]))
    segments = cut(runs, borders)
    _, blocks = np.unique(np.searchsorted(borders, segments.start, side="right"), return_inverse=True)
    return Schedule(segments, batch, lanes, draw(st.integers(1, 6)), seed, blocks, remainder)


def _steps(schedule: Schedule, epoch: int, rank: int, size: int, group: int = 1) -> list[list[int]]:
    """Return the samples of each step of a rank, -1 for padding."""
    steps = []
    read = group * schedule.window_steps
    for begin in range(0, schedule.steps, read):
        window = schedule.epoch(epoch).window(begin, min(begin + read, schedule.steps), rank, size)
        numbers = _numbers(window.runs)
        assert numbers == sorted(set(numbers))
        rows = np.full(window.rows, -1)
        rows[window.destination] = numbers
        assert len(set(window.destination.tolist())) == len(window.destination)
        steps += (
            [subset.tolist() for subset in np.split(rows, np.cumsum(window.sizes)[:-1])] if len(window.sizes) else []
        )
    return steps


@given(_schedules(), st.integers(0, 5))
def test_every_sample_once_and_equal_batches_on_any_number_of_ranks(schedule: Schedule, epoch: int) -> None:
    everything = _numbers(schedule.segments)
    alone = [set(step) - {-1} for step in _steps(schedule, epoch, 0, 1)]
    seen = [n for step in alone for n in step]
    assert len(seen) == len(set(seen))
    dropped = len(everything) % schedule.batch_size if schedule.remainder == "drop" else 0
    assert len(seen) == len(everything) - dropped and set(seen) <= set(everything)
    for size in RANKS[1:]:
        by_rank = [_steps(schedule, epoch, rank, size, group=size) for rank in range(size)]
        assert {len(steps) for steps in by_rank} == {schedule.steps}
        for step, by_step in zip(alone, zip(*by_rank, strict=True), strict=True):
            joined = [n for rows in by_step for n in rows if n >= 0]
            assert len(joined) == len(set(joined)) and set(joined) == step
        for by_step in list(zip(*by_rank, strict=True))[: schedule.full_steps]:
            assert {len(rows) for rows in by_step} == {schedule.batch_size // size}


@given(_schedules(), st.integers(0, 5), st.sampled_from(RANKS), st.integers(1, 3))
def test_the_ranks_own_each_sample_of_a_window_once_and_whole_blocks(
    schedule: Schedule, epoch: int, size: int, group: int
) -> None:
    order, read = schedule.epoch(epoch), group * schedule.window_steps
    owner_of_block: dict[int, int] = {}
    for begin in range(0, schedule.steps, read):
        end = min(begin + read, schedule.steps)
        needed = [_numbers(order.window(begin, end, rank, size).runs) for rank in range(size)]
        owned = [_numbers(order.owned(begin, end, rank, size)) for rank in range(size)]
        assert sorted(n for rows in owned for n in rows) == sorted(n for rows in needed for n in rows)
        for rank, rows in enumerate(owned):
            assert rows == sorted(rows)
            assert order.owners(np.array(rows, np.int64), size).tolist() == [rank] * len(rows)
            segment = np.searchsorted(schedule.segments.start, rows, side="right") - 1
            for block in set(schedule.blocks[segment].tolist()):
                assert owner_of_block.setdefault(block, rank) == rank


def test_the_ranks_own_chosen_samples() -> None:
    mask = np.random.default_rng(0).random(4000) < 0.4
    chosen = Chosen.of(mask)
    schedule = make_schedule(
        chosen, np.arange(0, 4000, 100), 48, 1000, 400_000, seed=2, remainder="drop", least_window_bytes=0
    )
    order, step = schedule.epoch(1), schedule.window_steps
    seen: list[int] = []
    for begin in range(0, schedule.steps, step):
        owned = [_numbers(order.owned(begin, min(begin + step, schedule.steps), rank, 3)) for rank in range(3)]
        needed = [_numbers(order.window(begin, min(begin + step, schedule.steps), rank, 3).runs) for rank in range(3)]
        assert sorted(n for rows in owned for n in rows) == sorted(n for rows in needed for n in rows)
        for rank, rows in enumerate(owned):
            assert order.owners(np.array(rows, np.int64), 3).tolist() == [rank] * len(rows)
        seen += [n for rows in owned for n in rows]
    assert mask[seen].all() and len(set(seen)) == len(seen) == schedule.steps * 48


@pytest.mark.parametrize("size", [3, 7, 64, 100])
def test_the_blocks_of_a_window_are_owned_evenly(size: int) -> None:
    segments = Runs(np.arange(0, 64_000, 50), np.full(1280, 50))
    schedule = Schedule(segments, 6400, 64, 1, 3, np.arange(1280))
    order = schedule.epoch(2)
    for step in range(schedule.steps):
        blocks = [
            len(set((_numbers(order.owned(step, step + 1, rank, size)) // np.int64(50)).tolist()))
            for rank in range(size)
        ]
        assert max(blocks) - min(blocks) <= 2, step  # of some 128 blocks, or 192 where the borders do not meet


@pytest.mark.parametrize(("lanes", "size"), [(40, 10_000), (400, 10_000), (480, 256), (64, 96), (3, 64)])
def test_a_rank_needs_blocks_of_few_others_which_are_its_neighbours(lanes: int, size: int) -> None:
    batch_size = 2 * np.lcm(lanes, size)
    total = 8 * batch_size
    rows = batch_size // lanes  # a window of two steps has two blocks of a lane
    segments = Runs(np.arange(0, total, rows), np.full(total // rows, rows))
    order = Schedule(segments, batch_size, lanes, 2, 3, np.arange(total // rows)).epoch(2)
    distance = 2 * max(size // lanes, size // int(np.gcd(lanes, size)), 1)
    for rank in (0, size // 3, size - 1):
        owners = np.unique(order.owners(np.array(_numbers(order.window(2, 4, rank, size).runs)), size))
        others = owners[owners != rank]
        assert len(others) <= 4 * max(1, -(-lanes // size) + 1)
        assert not len(others) or np.abs(others - rank).max() <= distance


@given(_schedules())
def test_file_order_without_a_seed(schedule: Schedule) -> None:
    ordered = replace(schedule, lanes=1, seed=None, remainder="keep")
    for size in RANKS:
        by_rank = [_steps(ordered, 0, rank, size) for rank in range(size)]
        steps = [[n for rows in by_step for n in rows] for by_step in zip(*by_rank, strict=True)]
        assert [n for step in steps for n in step] == _numbers(schedule.segments)


@given(_runs(), st.lists(st.integers(0, 400), max_size=20))
def test_cut_splits_runs_at_borders(runs: Runs, borders: list[int]) -> None:
    segments = cut(runs, np.array(sorted(set(borders)), np.int64))
    assert _numbers(segments) == _numbers(runs)
    for start, count in zip(segments.start.tolist(), segments.count.tolist(), strict=True):
        assert count > 0 and not any(start < border < start + count for border in borders)


@given(_runs(), st.data())
def test_slice(runs: Runs, data: st.DataObject) -> None:
    numbers = _numbers(runs)
    low = data.draw(st.integers(0, len(numbers)))
    high = data.draw(st.integers(low, len(numbers)))
    assert _numbers(runs.slice(np.array([low]), np.array([high - low]))) == numbers[low:high]


@given(_runs())
def test_merge_and_compress_keep_the_numbers(runs: Runs) -> None:
    numbers = _numbers(runs)
    for shorter in (merge(runs), compress(np.array(numbers))):
        assert _numbers(shorter) == numbers
        assert all(a + n < b for a, n, b in zip(shorter.start, shorter.count, shorter.start[1:], strict=False))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=10))
def test_ranges(pairs: list[tuple[int, int]]) -> None:
    start, count = (np.array([p[i] for p in pairs], np.int64) for i in (0, 1))
    assert ranges(start, count).tolist() == [n for a, c in pairs for n in range(a, a + c)]


@given(st.integers(0, 10_000), st.integers(1, 50))
def test_rank_ranges_are_contiguous_and_even(total: int, size: int) -> None:
    blocks = [rank_range(total, rank, size) for rank in range(size)]
    assert [n for a, b in blocks for n in (a, b)] == [0, *(n for a, _ in blocks[1:] for n in (a, a)), total]
    assert max(b - a for a, b in blocks) - min(b - a for a, b in blocks) <= 1


@given(_runs(), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.none() | st.integers(0, 99))
def test_split_is_disjoint_and_covers(runs: Runs, weights: list[int], seed: int | None) -> None:
    fractions = tuple(w / sum(weights) for w in weights)
    subsets = split(runs, fractions, seed)
    assert sorted(n for subset in subsets for n in _numbers(subset)) == _numbers(runs)
    for subset, fraction in zip(subsets, fractions, strict=True):
        assert abs(subset.total - fraction * runs.total) <= 1
        assert _numbers(subset) == sorted(_numbers(subset))


def test_split_depends_on_the_seed() -> None:
    runs = Runs(np.array([0]), np.array([1000]))
    first, again, other = (_numbers(split(runs, (0.5, 0.5), seed)[0]) for seed in (1, 1, 2))
    assert first == again != other
    assert _numbers(split(runs, (0.5, 0.5), None)[0]) == list(range(500))


@pytest.mark.parametrize("fractions", [(), (0.5,), (0.7, 0.7), (1.5, -0.5)])
def test_split_fractions_must_sum_to_one(fractions: tuple[float, ...]) -> None:
    with pytest.raises(PartitionError, match="sum to 1"):
        split(Runs(np.array([0]), np.array([10])), fractions, None)


def test_one_rank_reads_each_block() -> None:
    """Check a random half of the samples: only blocks at the borders of ranks are read twice."""
    half = split(Runs(np.array([0]), np.array([4000])), (0.5, 0.5), 3)[0]
    schedule = make_schedule(half, np.arange(0, 4000, 16), 60, 50_000, 64 << 20, seed=1, remainder="drop")
    by_rank = [{n // 16 for step in _steps(schedule, 0, rank, 4) for n in step} for rank in range(4)]
    assert sum(map(len, by_rank)) <= len({n // 16 for n in _numbers(half)}) + 3


def test_every_epoch_has_its_own_order() -> None:
    schedule = make_schedule(
        Runs(np.array([0]), np.array([600])), np.arange(0, 600, 10), 60, 100, 1 << 20, seed=1, remainder="drop"
    )
    orders = [tuple(n for step in _steps(schedule, epoch, 0, 1) for n in step) for epoch in range(5)]
    assert len(set(orders)) == 5


def test_batches_cover_the_whole_data() -> None:
    schedule = make_schedule(
        Runs(np.array([0]), np.array([60_000])),
        np.arange(0, 60_000, 16),
        60,
        50_000,
        64 << 20,
        seed=1,
        remainder="drop",
    )
    spread = [np.std(step) for step in _steps(schedule, 0, 0, 1)]
    assert np.mean(spread) > 0.9 * 60_000 / np.sqrt(12)


@given(st.integers(1, 5000), st.integers(1, 300))
def test_lanes_divide_the_batch(batch: int, limit: int) -> None:
    lanes = choose_lanes(batch, limit)
    assert batch % lanes == 0 and lanes <= limit


def test_batch_size_must_be_divisible_by_ranks() -> None:
    check_ranks(48, 3)
    with pytest.raises(PartitionError, match="batch_size=48 or 51"):
        check_ranks(50, 3)


@pytest.mark.parametrize("size", [32.5, 32.0, "32", None, 0, np.int8(-4)])
def test_batch_size_must_be_a_number_of_samples(size: Any) -> None:
    assert type(check_batch_size(np.uint8(32))) is int
    with pytest.raises(PartitionError, match="batch_size= an integer of 1 or more"):
        check_batch_size(size)


@pytest.mark.parametrize("window_bytes", [None, 1000])
def test_batch_sizes_of_numpy_and_of_no_samples(window_bytes: int | None) -> None:
    data = open_dataset({"x": np.zeros((100, 1000))}, comm=MPI.COMM_SELF, window_bytes=window_bytes)
    assert len(data.batches(np.uint8(20), shuffle=True, seed=1)) == 5
    assert data.shuffle_quality(np.uint8(20)) == data.shuffle_quality(20)
    for use in (data.batches, data.shuffle_quality, partial(data.read_plan, ranks=1)):
        with pytest.raises(PartitionError, match="batch_size= an integer of 1 or more"):
            use(0)


def test_blocks_follow_the_chunks_of_the_largest_field() -> None:
    image, label = 48_000, 8
    assert choose_block_rows(np.array([16, 1024]), np.array([image, label]), 10_000, 1 << 18) == 16
    assert choose_block_rows(np.array([16, 64]), np.array([1000, 8]), 1_000_000, 1 << 18) % 64 == 0
    assert choose_block_rows(np.array([1]), np.array([112]), 5_000_000, 1 << 16) == (1 << 16) // 112
    assert choose_block_rows(np.array([1]), np.array([100]), 1797, choose_block_bytes(64, 128 << 20, 179_700)) == 1


@pytest.mark.parametrize(("batch", "block_bytes"), [(1, 128), (256, 128), (512, 64), (1 << 20, 64)])
def test_blocks_are_smaller_the_larger_the_batch(batch: int, block_bytes: int) -> None:
    assert choose_block_bytes(batch, 128 << 20, 1 << 40) == block_bytes << 10
