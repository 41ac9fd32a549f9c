"""Censuses of up to 10,000 simulated ranks: what they find, how many messages they take, and how long they last."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable

import pytest

from matex_data.mpi.activity import State
from matex_data.mpi.census import ANSWER_TIME, Census, Message, Summary, Tree, levels, longest
from tests.support.machine_speed import scaled

ROUND = 0.1  # seconds between two looks of a rank for messages


class Network:
    """Simulated ranks that look for messages every ``ROUND`` seconds, each at its own time.

    Parameters
    ----------
    states : by rank, what it does; all others wait.
    silent : ranks that do not look.
    """

    def __init__(self, size: int, states: dict[int, tuple[State, str]], silent: Iterable[int] = ()) -> None:
        self.size, self.states, self.silent = size, states, set(silent)
        self.ranks = [Census(rank, size, lambda rank=rank: self._state(rank)) for rank in range(size)]  # type: ignore[misc]
        self.messages = 0
        self.handled = [0] * size
        self.now = 0.0
        self._inbox: dict[int, list[tuple[int, Message]]] = defaultdict(list)
        self._order = random.Random(size).sample(range(size), size)

    def _state(self, rank: int) -> tuple[State, str]:
        return self.states.get(rank, (State.WAITING, f"line {rank}"))

    def run(self, askers: Iterable[int], root: int = 0) -> dict[int, tuple[float, Summary]]:
        """Let ranks ask; return when and with what result the census ends for each of them."""
        begin, waiting = self.now, set(askers)
        for rank in waiting:
            self.ranks[rank].ask(root, self.now)
        found: dict[int, tuple[float, Summary]] = {}
        while waiting and self.now < begin + 2 * longest(self.size):
            for position, rank in enumerate(self._order):
                if rank not in self.silent:
                    self._look(rank, self.now + ROUND * position / self.size)
            self.now += ROUND
            for rank in list(waiting):
                summary = self.ranks[rank].result(root, self.now)
                if summary is not None:
                    waiting.discard(rank)
                    found[rank] = self.now - begin, summary
        return found

    def _look(self, rank: int, now: float) -> None:
        census = self.ranks[rank]
        for source, message in self._inbox.pop(rank, ()):
            census.receive(source, message, now)
            self.handled[rank] += 1
        for receiver, message in census.tick(now):
            self.messages += 1
            self._inbox[receiver].append((rank, message))


@pytest.mark.parametrize(("size", "root"), [(1, 0), (2, 1), (33, 0), (34, 2), (1000, 2), (10_000, 0)])
def test_every_rank_is_below_the_root_once(size: int, root: int) -> None:
    tree, depths = Tree(root, size), {root: 0}
    for rank in (order := [root]):
        for below in tree.below(rank):
            assert tree.above(below) == rank and below not in depths
            depths[below] = depths[rank] + 1
            order.append(below)
    assert len(depths) == size
    assert max(depths.values()) == levels(size) <= 3


@pytest.mark.parametrize("size", [2, 3, 8, 64, 10_000])
def test_all_ranks_that_wait_learn_who_is_busy_and_who_has_left(size: int) -> None:
    last = size - 1
    network = Network(size, {0: (State.BUSY, "model.save()"), last: (State.LEFT, "")})
    found = network.run(range(1, size - 1) or [last])
    assert len(found) == max(1, size - 2)
    for seconds, summary in found.values():
        assert summary.ranks(State.BUSY) == {0: "model.save()"}
        assert summary.ranks(State.LEFT) == {last: ""}
        assert summary.count(State.WAITING) == size - 2 and summary.size == size
        assert list(summary.ranks(State.WAITING)) == list(range(1, last))[:5]
        assert seconds < scaled(1.5)  # after the 5 seconds of ``CHECK_INTERVAL``
    assert network.messages < 4.2 * size
    assert max(network.handled) < 4 * 33 + 1


def test_one_rank_asks_for_half_of_the_messages() -> None:
    network = Network(10_000, {})
    network.run([7777])
    assert network.messages < 2.1 * 10_000


def test_wishes_of_the_next_seconds_take_no_further_census() -> None:
    network = Network(1000, {})
    network.run(range(0, 1000, 2))
    before = network.messages
    assert len(network.run(range(1, 1000, 2))) == 500
    assert network.messages - before <= 2 * 500 + 2 * 1000 // 32


@pytest.mark.parametrize("silent", [[1], [1, 33], [4], [40], [999], [1, 2, 3, 500]])
def test_ranks_below_a_silent_one_are_found(silent: list[int]) -> None:
    network = Network(1000, {998: (State.LEFT, "")}, silent)
    asking = [rank for rank in range(1000) if rank not in silent and Tree(0, 1000).above(rank or 1) not in silent]
    found = network.run(asking)
    assert len(found) == len(asking)
    for seconds, summary in found.values():
        assert summary.ranks(State.SILENT) == dict.fromkeys(silent, "")
        assert summary.count(State.WAITING) == 999 - len(silent) and summary.ranks(State.LEFT) == {998: ""}
        assert seconds < scaled(ANSWER_TIME * (1 + len(silent)) + 1.5)


def test_a_silent_root_ends_the_census_of_another_root() -> None:
    network = Network(100, {5: (State.BUSY, "fit()")}, silent=[0])
    assert network.run(range(1, 100)) == {}
    found = network.run(range(1, 100), root=1)
    assert len(found) == 99
    for _, summary in found.values():
        assert summary.ranks(State.SILENT) == {0: ""}
        assert summary.ranks(State.BUSY) == {5: "fit()"}


def test_a_rank_that_falls_silent_after_its_report_does_not_end_the_job_in_a_hang() -> None:
    network = Network(1000, {})
    network.ranks[3].ask(0, 0.0)
    for _ in range(3):  # the root has queried rank 1, which has reported, but those below it have not
        for rank in (3, 0, 1):
            network._look(rank, network.now)
    network.silent.add(1)
    (seconds, summary) = network.run([3])[3]
    assert seconds <= longest(1000) + 1
    assert summary.count(State.SILENT) == 32 and summary.size == 1000


def test_a_late_report_of_a_silent_rank_counts_nobody_twice() -> None:
    network = Network(1000, {}, silent=[1])
    network.run(range(2, 20))
    network.silent.clear()
    network.now += 3
    (_, summary) = network.run([5])[5]
    assert summary.counts == {State.WAITING: 1000}


def test_summaries_keep_the_lowest_ranks() -> None:
    single = [Summary.of(rank, State.RUNNING, f"line {rank}") for rank in (9, 3, 7, 1, 8, 2, 6)]
    whole = sum(single, Summary())
    assert whole == sum(reversed(single), Summary())
    assert list(whole.ranks(State.RUNNING)) == [1, 2, 3, 6, 7] and whole.count(State.RUNNING) == 7
