"""Censuses of up to 10,000 simulated ranks: what they find, how many messages they take, and how long they last."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from matex_data.mpi.activity import RankState
from matex_data.mpi.census import ANSWER_TIME, FAN_OUT, FRESH, Census, RankStates, Sent, Tree
from tests.support.machine_speed import scaled

ROUND = 0.1  # seconds between two looks of a rank for messages


class Network:
    """Simulated ranks that look for messages every ``ROUND`` seconds, each at its own time.

    Parameters
    ----------
    states : by rank, what it does; all others wait.
    silent : ranks that do not look.
    """

    def __init__(self, size: int, states: dict[int, tuple[RankState, str]], silent: Iterable[int] = ()) -> None:
        self.size, self.states, self.silent = size, states, set(silent)
        self.ranks = [Census(rank, size, lambda rank=rank: self._state(rank)) for rank in range(size)]  # type: ignore[misc]
        self.messages = 0
        self.handled = [0] * size
        self.now = 100.0
        self._inbox: dict[int, list[tuple[int, Sent]]] = defaultdict(list)
        self._order = random.Random(size).sample(range(size), size)

    def _state(self, rank: int) -> tuple[RankState, str]:
        return self.states.get(rank, (RankState.WAITING, f"line {rank}"))

    def run(self, askers: Iterable[int], limit: float = 60.0) -> dict[int, tuple[float, RankStates]]:
        """Let ranks ask; return when and with what result the census ends for each of them."""
        begin, waiting = self.now, set(askers)
        for rank in waiting:
            self.ranks[rank].ask(rank, self.now)
        found: dict[int, tuple[float, RankStates]] = {}
        while waiting and self.now < begin + limit:
            for position, rank in enumerate(self._order):
                if rank not in self.silent:
                    self._look(rank, self.now + ROUND * position / self.size)
            self.now += ROUND
            for rank in list(waiting):
                summary = self.ranks[rank].result(begin)
                if summary is not None:
                    waiting.discard(rank)
                    found[rank] = self.now - begin, summary
        return found

    def _look(self, rank: int, now: float) -> None:
        census = self.ranks[rank]
        if rank not in self._inbox and not census._asking:
            return  # nothing is due
        for source, (_, answer) in self._inbox.pop(rank, ()):
            if answer is None:
                census.ask(source, now)
            else:
                census.receive(source, answer, now)
            self.handled[rank] += 1
        for receiver, answer in census.tick(now):
            self.messages += 1
            self._inbox[receiver].append((rank, (receiver, answer)))


@pytest.mark.parametrize("size", [1, 2, 33, 34, 1000, 10_000])
def test_every_rank_is_below_one_other(size: int) -> None:
    tree = Tree(size)
    assert sorted(child for rank in range(size) for child in tree.below(rank)) == list(range(1, size))
    assert all(tree.above(child) == rank for rank in range(size) for child in tree.below(rank))
    assert tree.depth(size - 1) <= 3


@given(st.integers(2, 5000), st.data())
def test_a_way_leads_along_neighbours_who_connect_all_ranks(size: int, data: st.DataObject) -> None:
    tree, rank = Tree(size), data.draw(st.integers(0, size - 1))
    destination = data.draw(st.integers(0, size - 1).filter(lambda other: other != rank))
    neighbours = tree.neighbours(rank)
    assert sum(tree.behind(rank, neighbour) for neighbour in neighbours) == size - 1
    steps = 0
    while rank != destination:
        onwards = tree.towards(rank, destination)
        assert onwards in tree.neighbours(rank)
        patience = tree.patience(rank, onwards)
        behind = [other for other in tree.neighbours(onwards) if other != rank]
        assert all(tree.patience(onwards, other) <= patience - ANSWER_TIME for other in behind)
        rank, steps = onwards, steps + 1
    assert steps <= 2 * tree.depth(size - 1)


@pytest.mark.parametrize("size", [2, 3, 8, 64, 10_000])
def test_all_ranks_that_wait_learn_who_is_busy_and_who_has_left(size: int) -> None:
    last = size - 1
    network = Network(size, {0: (RankState.BUSY, "model.save()"), last: (RankState.LEFT, "")})
    found = network.run(range(1, size - 1) or [last])
    assert len(found) == max(1, size - 2)
    for seconds, summary in found.values():
        assert summary.ranks(RankState.BUSY) == {0: "model.save()"}
        assert summary.ranks(RankState.LEFT) == {last: ""}
        assert summary.count(RankState.WAITING) == size - 2 and sum(summary.counts.values()) == size
        assert list(summary.ranks(RankState.WAITING)) == list(range(1, last))[:5]
        assert seconds < scaled(1.5)  # after the 5 seconds of ``CHECK_INTERVAL``
    assert network.messages <= 4 * size
    assert max(network.handled) <= 4 * (FAN_OUT + 1)


def test_one_rank_asks_for_half_of_the_messages() -> None:
    network = Network(10_000, {})
    network.run([7777])
    assert network.messages == 2 * 9_999


def test_wishes_of_the_next_seconds_use_what_is_known() -> None:
    network = Network(1000, {})
    network.run(range(0, 1000, 2))
    network.now += FRESH / 4
    before = network.messages
    assert len(network.run(range(1, 1000, 2))) == 500
    assert network.messages - before <= 2 * 500


@pytest.mark.parametrize("silent", [[1], [1, 33], [4], [40], [999], [1, 2, 3, 500]])
def test_ranks_behind_a_silent_one_count_as_silent(silent: list[int]) -> None:
    tree, network = Tree(1000), Network(1000, {998: (RankState.LEFT, "")}, silent)

    def is_reached(rank: int) -> bool:
        return rank not in silent and (rank == 0 or is_reached(tree.above(rank)))

    asking = [rank for rank in range(1000) if is_reached(rank)]
    found = network.run(asking)
    assert len(found) == len(asking)
    for seconds, summary in found.values():
        assert summary.count(RankState.SILENT) == 1000 - len(asking)
        assert summary.count(RankState.LEFT) + summary.count(RankState.WAITING) == len(asking)
        assert set(summary.ranks(RankState.SILENT)) <= set(silent)
        assert seconds < scaled(ANSWER_TIME * 5 + 1.5)


def test_silent_ranks_in_two_branches_do_not_make_the_answers_of_each_other_old() -> None:
    network = Network(2000, {}, silent=[40, 1999])  # answers take longer than they are fresh
    for asking in ([3], [1], range(3, 30)):
        found = network.run(asking)
        assert len(found) == len(list(asking))
        assert all(set(summary.ranks(RankState.SILENT)) == {40, 1999} for _, summary in found.values())


def test_a_rank_that_falls_silent_while_it_is_asked_does_not_end_in_a_hang() -> None:
    network = Network(1000, {})
    network.ranks[3].ask(3, network.now)
    for rank in (3, 0):
        network._look(rank, network.now)
    network.silent.add(1)
    (_, summary) = network.run([3])[3]
    assert summary.ranks(RankState.SILENT) == {1: ""} and summary.count(RankState.SILENT) == 33


def test_a_late_answer_of_a_silent_rank_counts_nobody_twice() -> None:
    network = Network(1000, {}, silent=[1])
    network.run(range(2, 20))
    network.silent.clear()
    network.now += 3
    (_, summary) = network.run([5])[5]
    assert summary.counts == {RankState.WAITING: 1000}


def test_an_answer_is_as_old_as_its_oldest_share() -> None:
    network = Network(3, {})
    network.run([1])
    network.states[2] = (RankState.LEFT, "")
    network.now += FRESH + 0.5
    (_, summary) = network.run([1])[1]
    assert summary.count(RankState.LEFT) == 1


def test_summaries_keep_the_lowest_ranks() -> None:
    single = [RankStates.of(rank, RankState.RUNNING, f"line {rank}") for rank in (9, 3, 7, 1, 8, 2, 6)]
    whole = sum(single, RankStates())
    assert whole == sum(reversed(single), RankStates())
    assert list(whole.ranks(RankState.RUNNING)) == [1, 2, 3, 6, 7] and whole.count(RankState.RUNNING) == 7
